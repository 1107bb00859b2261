"""Sketches keep what signs need, are the same map everywhere, and do not hang on how rows come."""

import pytest
import torch
from sorter_cases import GRADIENT_AWARE, feed, make, make_gradients, run

from cdgrab import CdgrabError, herding, streams
from cdgrab.balance import optional
from cdgrab.balance import sketch as sketches

kinds = pytest.mark.parametrize("kind", ["gaussian", "countsketch"])


@kinds
def test_a_sketch_is_one_linear_map_for_all_workers_and_calls(kind, monkeypatch):
    monkeypatch.setattr(sketches, "CHUNK_ENTRIES", 64)  # the Gaussian map comes in several chunks
    make_one = lambda seed: sketches.make_sketch(kind, 8, 50, seed)  # noqa: E731
    matrix = make_one(3)(torch.eye(50, dtype=torch.float64))
    rows = torch.randn(2, 7, 50, dtype=torch.float64)
    torch.testing.assert_close(make_one(3)(rows), rows @ matrix, rtol=1e-12, atol=1e-12)
    assert not torch.equal(make_one(4)(torch.eye(50, dtype=torch.float64)), matrix)


@kinds
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_rows_sketch_does_not_depend_on_the_rows_beside_it(kind, dtype, monkeypatch):
    monkeypatch.setattr(sketches, "CHUNK_ENTRIES", 2**14)
    rows = torch.randn(3, 20, 700, dtype=dtype, generator=torch.Generator().manual_seed(0))
    sketch = sketches.make_sketch(kind, 50, 700, 3)
    for count in (1, 2, 7):
        assert torch.equal(torch.cat([sketch(some) for some in rows.split(count, 1)], 1), sketch(rows))


@kinds
def test_repeated_gradients_have_ties_in_sketches_too(kind):
    """Fractions that cancel, through several splits: to the last bit, or a tie would fall to either side."""
    gradients = make_gradients("cancelling", 2, 4, 10, 300)
    options = {"workers": 4, "units": 10, "dim": 300, "sketch": kind, "sketch_size": 20}
    expected = run(make("cd_grab", **options), gradients)
    for cuts in ({1}, {3, 4}, set(range(10))):
        assert torch.equal(run(make("cd_grab", **options), gradients, cuts), expected)


@pytest.mark.parametrize("size", [40, 20_000])
def test_count_sketches_come_to_the_same_in_every_way(size, monkeypatch):
    """Compiled, one coordinate after the other, in segments, and in pieces of any length."""
    sketch, rows = sketches.make_sketch("countsketch", size, 1000, 3), torch.randn(6, 1000)
    generator = streams.stream(3, "sketch")
    places, signs = generator.integers(size, size=1000), generator.integers(2, size=1000) * 2 - 1
    expected = torch.zeros(6, size).index_add_(1, torch.from_numpy(places), rows * torch.from_numpy(signs))
    assert torch.equal(sketch(rows), expected)
    monkeypatch.setattr(sketches, "optional", lambda name: None)
    sketch._chunk = 300
    assert torch.equal(sketch(rows), expected)
    monkeypatch.setattr(sketch, "_one_by_one", lambda sums, *some: sums.copy_(sketch._in_segments(sums, *some)))
    in_pieces, start = torch.zeros(6, size), 0
    for piece in rows.split([1, 699, 0, 300], 1):
        sketch.add(in_pieces, start, piece)
        start += piece.shape[1]
    assert torch.equal(in_pieces, expected)


def test_count_sketches_of_a_gpus_kernel_are_those_of_the_cpu(on_gpu, monkeypatch):
    kernel, device = optional("sketched"), on_gpu[1]
    monkeypatch.setattr(kernel, "CHUNK", 70)
    sketch, rows = sketches.make_sketch("countsketch", 40, 200, 3), torch.randn(2, 200, dtype=torch.float64)
    expected = sketch(rows)
    rows[1, [5, 190]] = torch.tensor([torch.nan, torch.inf], dtype=rows.dtype)
    found = torch.zeros(2, 40, dtype=rows.dtype, device=device)
    for start, end in ((0, 30), (30, 200)):
        coordinates = kernel.by_place(sketch._codes[start:end].to(device), 40)
        kernel.add_to_sketches(found, coordinates, rows[:, start:end].to(device))
    assert torch.equal(found[0].cpu(), expected[0])
    assert torch.equal(found[1].cpu(), sketch(rows.nan_to_num(0.0, 0.0, 0.0))[1])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dim, size", [(1000, 40), (1_080_000, 1024), (300, 1024)])
def test_count_sketches_on_a_gpu_are_those_of_the_cpu_every_time(dim, size):
    rows = torch.randn(2, 5, dim)
    sketch = sketches.make_sketch("countsketch", size, dim, 3)
    expected = sketch(rows)
    for _ in range(3):
        assert torch.equal(sketches.make_sketch("countsketch", size, dim, 3)(rows.cuda()).cpu(), expected)


@kinds
def test_sketches_keep_inner_products_on_average(kind):
    """Unbiased, with a standard deviation of about sqrt(2 / size) for unit vectors."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.nn.functional.normalize(torch.randn(2, 300, generator=generator, dtype=torch.float64), dim=1)
    exact = float(rows[0] @ rows[1])
    size, draws = 64, 400
    errors = []
    for seed in range(draws):
        a, b = sketches.make_sketch(kind, size, 300, seed)(rows)
        errors.append(float(a @ b) - exact)
    errors = torch.tensor(errors)
    assert abs(float(errors.mean())) < 4 * float(errors.std()) / draws**0.5
    assert 0.5 / size**0.5 < float(errors.std()) < 2.0 / size**0.5


@kinds
def test_sketched_balancing_still_lowers_the_herding_bound(kind):
    vectors = torch.randn(4, 256, 200, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    bounds = {}
    for name, options in {"none": {}, kind: {"sketch": kind, "sketch_size": 100}}.items():
        sorter = make("cd_grab", workers=4, units=256, dim=200, **options)
        order = sorter.order(0)
        first = herding.parallel_herding_bound(vectors, order)
        for epoch in range(1, 7):
            feed(sorter, vectors.gather(1, order[:, :, None].expand(-1, -1, 200)))
            order = sorter.order(epoch)
        bounds[name] = herding.parallel_herding_bound(vectors, order)
    assert bounds["none"] < bounds[kind] < 0.9 * first


@pytest.mark.parametrize("name", GRADIENT_AWARE)
def test_every_sorter_takes_a_sketch_and_resumes_with_it(name):
    options = {"units": 9, "dim": 40, "sketch": "countsketch", "sketch_size": 6}
    gradients = make_gradients("random", 3, 3, 9, 40)
    expected = run(make(name, **options), gradients)
    assert not torch.equal(expected, run(make(name, **options | {"sketch": "none"}), gradients))
    sorter = make(name, **options)
    sorter.order(0)
    sorter.observe(range(5), gradients[0][:, :5])
    resumed = make(name, **options)
    resumed.load_state_dict(sorter.state_dict())
    feed(resumed, gradients[0], start=5)
    assert torch.equal(resumed.order(1), expected[1])
    with pytest.raises(CdgrabError, match="sketch"):
        make(name, **options | {"sketch": "gaussian"}).load_state_dict(sorter.state_dict())
