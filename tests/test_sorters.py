"""What `make_sorter` promises to outside scripts: orders equal to the oracle's, whatever the split, dtype or resume."""

from contextlib import contextmanager
from io import BytesIO

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from sorter_cases import ALL, BALANCING, GRADIENT_AWARE, assert_independent, feed, make, make_gradients, oracle, run

from cdgrab import CdgrabError
from cdgrab.runtime.group import WorkerGroup
from scripts.fuzz.gradients import given_back

WIDTH = 7.0
VARIANTS = [(name, {}) for name in ALL]
VARIANTS += [(name, {"rule": "walk", "walk_width": WIDTH}) for name in ("id_grab_bal", "id_grab_pair", "cd_grab")]
VARIANTS += [("d_rr", {"shared": True}), ("cd_grab", {"initial": "identity"}), ("kh", {"epochs": 3, "delta": 0.1})]

GRADIENT_AWARE_VARIANTS = [(name, options) for name, options in VARIANTS if name in GRADIENT_AWARE]

every_sorter = pytest.mark.parametrize("name", ALL)
every_gradient_aware = pytest.mark.parametrize("name", GRADIENT_AWARE)


def each(variants):
    ids = ["-".join([name, *(f"{key}={value}" for key, value in options.items())]) for name, options in variants]
    return pytest.mark.parametrize("name, options", variants, ids=ids)


every_variant, every_gradient_aware_variant = each(VARIANTS), each(GRADIENT_AWARE_VARIANTS)


@st.composite
def problems(draw):
    """Gradients of three epochs and the positions at which the calls to `observe` are cut."""
    kind = draw(st.sampled_from(["random", "repeated", "tied", "zero"]))
    workers, units, dim = draw(st.integers(1, 7)), draw(st.integers(1, 40)), draw(st.integers(1, 20))
    cuts = draw(st.one_of(st.just(range(units)), st.sets(st.integers(1, 39))))
    gradients = make_gradients(kind, 3, workers, units, dim, seed=draw(st.integers(0, 2**32)))
    return gradients.to(draw(st.sampled_from([torch.float64, torch.float32]))), cuts


# -- orders -----------------------------------------------------------------------------------------------------------


@every_gradient_aware
@given(problem=problems())
@example(problem=(make_gradients("random", 3, 7, 39, 19), {1, 2, 5, 20}))
@example(problem=(make_gradients("tied", 3, 7, 40, 2), range(40)))
@example(problem=(make_gradients("random", 2, 1, 1, 1), ()))
def test_orders_equal_the_oracle(name, problem):
    gradients, cuts = problem
    orders = run(make(name, *gradients.shape[1:]), gradients, cuts)
    assert torch.equal(orders, oracle(name, orders[0], gradients))
    assert torch.equal(orders.sort(dim=-1).values, torch.arange(gradients.shape[2]).expand_as(orders))


@pytest.mark.parametrize("name", BALANCING)
@given(problem=problems())
def test_walk_orders_equal_the_oracle(name, problem):
    gradients, cuts = problem
    orders = run(make(name, *gradients.shape[1:], rule="walk", walk_width=WIDTH), gradients, cuts)
    assert torch.equal(orders, oracle(name, orders[0], gradients, walk_width=WIDTH))


def test_kh_spreads_its_confidence_over_the_given_epochs():
    gradients = make_gradients("random", 3, 4, 40, 3)
    orders = run(make("kh", 4, 40, 3, epochs=1000), gradients)
    assert torch.equal(orders, oracle("kh", orders[0], gradients, kh_epochs=1000))


@every_gradient_aware
def test_split_and_memory_layout_do_not_matter_even_when_inner_products_nearly_vanish(name):
    """Multiples of 0.1 give inner products that vanish up to rounding: their sign hangs on the order of summation."""

    def feed_strided(sorter, gradients, cuts):
        sorter.observe(range(gradients.shape[1]), gradients.permute(2, 0, 1).contiguous().permute(1, 2, 0))

    for seed in range(6):
        gradients = 0.1 * make_gradients("tied", 2, 3, 40, 19, seed) / 40
        whole = run(make(name, 3, 40, 19), gradients)
        for cuts in (range(40), range(0, 40, 2), range(0, 40, 3)):
            assert torch.equal(run(make(name, 3, 40, 19), gradients, cuts), whole), f"seed {seed}, cuts {cuts}"
        assert torch.equal(run(make(name, 3, 40, 19), gradients, feed=feed_strided), whole), f"seed {seed}, strided"


@every_gradient_aware
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_orders_like_the_same_numbers_in_float64(name, dtype):
    gradients = make_gradients("tied", 2, 3, 8, 5)
    assert torch.equal(run(make(name), gradients.to(dtype), {3}), run(make(name), gradients))


@every_variant
@pytest.mark.parametrize("units", [1, 2, 9, 10])
def test_every_order_is_a_permutation_of_every_workers_units(name, options, units):
    orders = run(make(name, 3, units, **options), make_gradients("random", 4, 3, units, 5))
    assert orders.dtype == torch.long
    assert torch.equal(orders.sort(dim=-1).values, torch.arange(units).expand(5, 3, units))


@every_gradient_aware_variant
def test_negating_all_gradients_changes_nothing(name, options):
    gradients = make_gradients("random", 3, 3, 21, 5)
    as_given, negated = (run(make(name, units=21, **options), sign * gradients) for sign in (1, -1))
    assert torch.equal(as_given, negated)


@every_gradient_aware
def test_gradients_decide_the_order(name):
    one, other = (run(make(name, units=20), make_gradients("random", 1, 3, 20, 5, seed)) for seed in (0, 1))
    assert torch.equal(one[0], other[0]) and not torch.equal(one[1], other[1])


@pytest.mark.parametrize("units", [8, 9])
def test_riffle_is_even_positions_then_odd_reversed_and_is_what_equal_gradients_give(units):
    gradients = make_gradients("zero", 3, 3, units, 5) + 0.1
    orders = run(make("riffle", units=units), gradients)
    assert torch.equal(orders[1:], torch.cat([orders[:-1, :, ::2], orders[:-1, :, 1::2].flip(-1)], dim=-1))
    for name in ("grab_pair", "cd_grab", "kh"):
        assert torch.equal(run(make(name, units=units), gradients), orders)


def test_flip_flop_reverses_in_odd_epochs_and_reshuffles_in_even_ones():
    orders = run(make("flip_flop", units=50), make_gradients("zero", 3, 3, 50, 5))
    assert torch.equal(orders[1], orders[0].flip(1)) and torch.equal(orders[3], orders[2].flip(1))
    assert not torch.equal(orders[2], orders[0]) and not torch.equal(orders[2], orders[1])


def test_shuffle_once_keeps_its_order():
    orders = run(make("shuffle_once"), make_gradients("zero", 3, 3, 8, 5))
    assert (orders == orders[0]).all()


def test_d_rr_gives_equal_rows_when_shared_and_independent_rows_otherwise():
    zero = make_gradients("zero", 3, 4, 1000, 1)
    shared, own = (run(make("d_rr", 4, 1000, 1, shared=shared), zero) for shared in (True, False))
    assert (shared == shared[:, :1]).all()
    assert_independent(shared[:, 0])
    assert_independent(own.flatten(0, 1))


@pytest.mark.parametrize("name", ["shuffle_once", "riffle", *GRADIENT_AWARE])
def test_initial_identity_starts_in_place(name):
    assert torch.equal(make(name, initial="identity").order(0), torch.arange(8).expand(3, 8))


# -- random streams ---------------------------------------------------------------------------------------------------


@every_sorter
def test_first_orders_differ_by_seed_and_worker_and_nothing_else(name):
    orders = torch.cat([make(name, 4, 500, seed=seed).order(0) for seed in (0, 1, 2**40)])
    assert_independent(orders)
    assert torch.equal(make(name, 7, 500, seed=0).order(0)[:4], orders[:4]), "a worker's order hangs on their number"


@pytest.mark.parametrize("name", ["d_rr", "flip_flop", "id_grab_bal", "id_grab_pair", "kh"])
@pytest.mark.parametrize("options", [{}, {"rule": "walk"}], ids=["plain", "walk"])
def test_a_process_hosting_some_workers_orders_them_like_one_hosting_all(name, options):
    options = options if name.startswith("id") else {}
    gradients = make_gradients("random", 3, 6, 9, 5)
    together = run(make(name, 6, 9, **options), gradients)
    apart = [
        run(make(name, 6, 9, group=WorkerGroup(6, rank, 3), **options), gradients[:, 2 * rank : 2 * rank + 2])
        for rank in range(3)
    ]
    assert torch.equal(torch.cat(apart, dim=1), together)


# -- state ------------------------------------------------------------------------------------------------------------


def through_file(state):
    file = BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@every_variant
@pytest.mark.parametrize("units", [6, 7])
@pytest.mark.parametrize(("keep", "loads"), [(lambda state: state, 2), (through_file, 1)], ids=["memory", "file"])
def test_resuming_at_every_position_changes_nothing(name, options, units, keep, loads):
    gradients = make_gradients("random", 2, 3, units, 5)
    expected = run(make(name, units=units, **options), gradients)
    sorter = make(name, units=units, **options)
    states = [(0, 0, keep(sorter.state_dict()))]  # before the first epoch
    for epoch in range(2):
        sorter.order(epoch)
        for position in range(units):
            states.append((epoch, position, keep(sorter.state_dict())))
            sorter.observe([position], gradients[epoch, :, position : position + 1])
        states.append((epoch, units, keep(sorter.state_dict())))
    assert torch.equal(sorter.order(2), expected[2]), "taking states changed the sorter"
    for epoch, position, state in states:
        for _ in range(loads):  # a state can be loaded again: the first sorter has not written into it
            resumed = make(name, units=units, **options)
            resumed.load_state_dict(state)
            for later in range(epoch, 2):
                assert torch.equal(resumed.order(later), expected[later]), f"resumed at {epoch}, {position}"
                feed(resumed, gradients[later], start=position if later == epoch else 0)
            assert torch.equal(resumed.order(2), expected[2]), f"resumed at {epoch}, {position}"


def test_a_returned_order_is_the_callers_own():
    sorter = make("cd_grab")
    first = sorter.order(0).clone()
    sorter.order(0).fill_(-1)
    assert torch.equal(sorter.order(0), first)


@pytest.mark.parametrize("change", [{"seed": 6}, {"units": 9}, {"initial": "identity"}, {"rule": "walk"}])
def test_a_state_of_another_sorter_is_refused_naming_what_differs(change):
    with refused(*change):
        make("cd_grab", **change).load_state_dict(make("cd_grab").state_dict())


def tampered(sorter, part, name, change):
    """The state of a sorter with one value changed, and the sorter."""
    sorter.order(0)
    sorter.observe(range(3), torch.randn(sorter.workers, 3, sorter.dim))
    state = sorter.state_dict()
    (state[part] if part else state)[name] = change((state[part] if part else state)[name])
    return state


@pytest.mark.parametrize(
    "name, part, value, change",
    [
        ("d_rr", "per_worker", "current", torch.zeros_like),
        ("d_rr", "per_worker", "current", lambda order: order.int()),
        ("d_rr", "", "position", lambda position: 10**9),
        ("d_rr", "", "epoch", float),
        ("cd_grab", "common", "running", lambda running: running[:, :2]),
        ("cd_grab", "common", "running", lambda running: running.long()),
        ("cd_grab", "per_worker", "_signs", torch.zeros_like),
        ("cd_grab", "per_worker", "_unpaired", lambda gradient: gradient[:, :0]),
        ("cd_grab", "", "position", lambda position: position + 1),
        ("id_grab_bal", "per_worker", "fresh_sum", lambda total: total[:, :2]),
        ("id_grab_bal", "per_worker", "stale_mean", lambda mean: mean / 0),
        ("kh", "per_worker", "q", lambda q: q - 1e9),
        ("cd_grab", "common", "running", given_back),
    ],
)
def test_a_tampered_state_is_refused_and_changes_nothing(name, part, value, change):
    state, sorter = tampered(make(name), part, value, change), make(name)
    before = repr(sorter.state_dict())
    with refused("damaged", value if value != "position" else "must be"):
        sorter.load_state_dict(state)
    assert repr(sorter.state_dict()) == before


# -- refusals ---------------------------------------------------------------------------------------------------------


@contextmanager
def refused(*words):
    """One sentence that names all `words`."""
    with pytest.raises(CdgrabError) as caught:
        yield
    message = str(caught.value)
    assert "\n" not in message and all(str(word) in message for word in words), message


@pytest.mark.parametrize("name", ["d_rr", "id_grab_bal", "cd_grab"])
@pytest.mark.parametrize(
    "positions, gradients, word",
    [
        ([1, 2], torch.ones(3, 2, 5).index_fill_(1, torch.tensor(1), torch.nan), "finite"),
        ([1, 2], torch.ones(3, 2, 5).index_fill_(2, torch.tensor(4), -torch.inf), "finite"),
        ([1], torch.ones(3, 1, 5, dtype=torch.long), "floating-point"),
        ([1], torch.ones(2, 1, 5), "shape"),
        ([1], torch.ones(3, 2, 5), "shape"),
        ([1], torch.ones(3, 1, 4), "shape"),
        ([1], torch.ones(3, 5), "shape"),
        ([[1]], torch.ones(3, 1, 5), "positions"),
        ([0], torch.ones(3, 1, 5), "positions"),
        ([2], torch.ones(3, 1, 5), "positions"),
        ([1, 3], torch.ones(3, 2, 5), "positions"),
        (range(1, 9), torch.ones(3, 8, 5), "positions"),
        (torch.tensor([1.5]), torch.ones(3, 1, 5), "positions"),
        ([1], given_back(torch.ones(3, 1, 5)), "in memory"),
        ([1], given_back(torch.ones(3, 1, 5), 8), "in memory"),
        ([1], torch.ones(3, 1, 5, device="meta"), "in memory"),
        ([1], torch.ones(3, 1, 5).to_sparse(), "dense"),
        (torch.ones(1, dtype=torch.int64, device="meta"), torch.ones(3, 1, 5), "positions must be a dense tensor"),
    ],
)
def test_a_refused_observe_changes_nothing(name, positions, gradients, word):
    good = make_gradients("random", 2, 3, 8, 5)
    sorter = make(name)
    sorter.order(0)
    sorter.observe([0], good[0, :, :1])
    with refused(word):
        sorter.observe(positions, gradients)
    feed(sorter, good[0], start=1)
    assert torch.equal(sorter.order(1), run(make(name), good)[1])


@every_gradient_aware
@pytest.mark.parametrize("seen", [0, 1, 7])
def test_the_next_order_is_refused_until_all_units_were_observed(name, seen):
    gradients = make_gradients("random", 1, 3, 8, 5)
    sorter = make(name)
    sorter.order(0)
    sorter.observe(range(seen), gradients[0, :, :seen])
    with refused(f"{8 - seen} of 8"):
        sorter.order(1)
    feed(sorter, gradients[0], start=seen)
    assert torch.equal(sorter.order(1), run(make(name), gradients)[1])


@pytest.mark.parametrize("started, asked", [(0, 1), (0, -1), (1, 2), (2, 0)])
def test_epochs_out_of_sequence_are_refused(started, asked):
    sorter = make("d_rr")
    for epoch in range(started):
        sorter.order(epoch)
    with refused(f"order({started})", f"order({asked})"):
        sorter.order(asked)


def test_observing_before_the_first_order_is_refused():
    with refused("order(0)"):
        make("cd_grab").observe([0], torch.zeros(3, 1, 5))


@pytest.mark.parametrize(
    "name, options, words",
    [
        ("nope", {}, ["nope", *ALL]),
        ("cd_grab", {"colour": 1}, ["colour", "rule", "walk_width", "initial", "buffer_mb", "sketch"]),
        ("riffle", {"rule": "walk"}, ["rule", "initial"]),
        ("kh", {"rule": "greedy"}, ["rule", "epochs", "delta"]),
        *[("cd_grab", {count: bad}, [count]) for count in ("workers", "units", "dim") for bad in (0, -1, 2.0, True)],
        ("cd_grab", {"seed": -1}, ["seed"]),
        *[("cd_grab", *bad) for bad in (({"initial": "sorted"}, ["identity"]), ({"rule": "lazy"}, ["greedy", "walk"]))],
        *[("cd_grab", {"walk_width": bad}, ["walk_width"]) for bad in (0, -1.0, float("nan"))],
        ("kh", {"epochs": 0}, ["epochs", "at least 1"]),
        ("kh", {"delta": 1.0}, ["delta", "above 0 and below 1"]),
        ("cd_grab", {"group": WorkerGroup(4)}, ["4 workers", "3"]),
    ],
)
def test_a_bad_name_count_or_option_is_refused_in_words(name, options, words):
    with refused(*words):
        make(name, **options)
