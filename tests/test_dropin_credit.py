"""Loops of many kinds in which every gradient names its batch: none may be credited to another one."""

import queue
import threading
import warnings
from collections import deque
from itertools import chain, count, islice

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader

from cdgrab import OrderedBatchSampler
from cdgrab.errors import CdgrabError

BATCH = 2
AHEAD = st.integers(0, 9)  # batches that a loader reads ahead, as loader processes do
FETCHED = st.integers(0, 3)  # batches that the loop itself fetches ahead
DAMAGES = ({"more": 1}, {"held": -1}, {"certain": 1}, {"late": [1, 2]}, {"examples": torch.full((1, 1, 2), -1)})


class Training:
    """Every gradient is 1 where the examples of its batch are, and every one that the sorter is told is checked."""

    def __init__(self, batches, unit="batch", accumulate=1, sorter="cd_grab", state=None):
        short = accumulate == 1 and batches > 1  # the last batch
        self.examples, self.accumulate = batches * accumulate * BATCH - short, accumulate
        self.model = nn.Linear(self.examples, 1, bias=False).double()
        self.sampler = OrderedBatchSampler(
            range(self.examples), BATCH, sorter=sorter, unit=unit, accumulation_steps=accumulate
        )
        if state:
            self.sampler.load_state_dict(state)
        self.sampler.attach(self.model)
        self.used, self.told = [], []  # batches that had a backward pass; epochs of the gradients that count
        told = self.sampler.sorter
        observe, observe_parts = told.observe, told.observe_parts
        told.observe = lambda at, some, **more: (self.check(some[0]), observe(at, some, **more))
        told.observe_parts = lambda parts: (self.check(parts.vector()[None]), observe_parts(parts))

    def check(self, gradients):
        sorter, own = self.sampler.sorter, self.sampler._own
        order = sorter.order(sorter.epoch)[0].tolist()
        for position, gradient in enumerate(gradients, sorter.position):
            unit = own[order[position]]
            named = [int(unit)] if self.sampler.unit == "example" else list(chain.from_iterable(unit))
            if gradient.any():  # otherwise it was skipped
                assert gradient.nonzero().flatten().tolist() == sorted(named)
            self.told.append(sorter.epoch)

    def step(self, batch):
        self.used.append(batch)
        self.model(torch.eye(self.examples, dtype=torch.float64)[batch]).mean().backward()


def loader(source, ahead):
    """Asks for batches as a DataLoader does with so many index lists on their way to its processes: for one more
    whenever it delivers one, in vain after the last."""
    asked = deque()
    for _ in range(ahead):
        asked.extend(islice(source, 1))
    while True:
        asked.extend(islice(source, 1))
        if not asked:
            return
        yield asked.popleft()


def fetched(source, ahead):
    """A loop that holds so many batches besides the one it works on."""
    held = deque(islice(source, ahead))
    for batch in source:
        held.append(batch)
        yield held.popleft()
    yield from held


def together(source, number):
    """Asks for so many batches before the first of them is used, as Hugging Face's Trainer does for those of a unit."""
    while some := list(islice(source, number)):
        yield from some


def repeated(sampler):
    while True:
        yield from iter(sampler)


def steps(training, batches, number=None):
    for batch in islice(batches, number):
        training.step(batch)


@given(st.data(), st.integers(1, 6), AHEAD, FETCHED, st.sampled_from(["batch", "example"]), st.sampled_from([1, 2, 3]))
def test_epochs_one_by_one_left_early_or_only_looked_at(data, batches, ahead, fetch, unit, accumulate):
    training = Training(batches, unit, accumulate if unit == "batch" else 1)
    length, at_once = len(training.sampler), data.draw(st.sampled_from([1, 2, 4, training.accumulate]))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "a batch had no backward")
        for _ in range(4):
            what = data.draw(st.sampled_from(["train", "train", "leave early", "evaluate", "look"]))
            epoch = together(fetched(loader(iter(training.sampler), ahead), fetch), at_once)
            if what in ("train", "leave early"):
                stop = length if what == "train" else data.draw(st.integers(0, length // accumulate)) * accumulate
                steps(training, epoch, stop)
            else:
                list(islice(epoch, length if what == "evaluate" else 1))
    used = len(training.used) // training.accumulate if unit == "batch" else sum(map(len, training.used))
    assert len(training.told) == used


@given(st.data(), st.integers(1, 6), AHEAD, FETCHED, st.booleans(), st.sampled_from([1, 2]))
def test_batches_of_the_next_epoch_fetched_before_the_last_gradients(data, batches, ahead, fetch, timm, accumulate):
    """A loop that fetches ahead over the ends of epochs, like nanoGPT's, or a loader that does, like timm's."""
    whole, state, used = Training(batches, accumulate=accumulate), None, []
    length = len(whole.sampler)
    fetch = min(fetch, length - 1)

    def endless(training):
        if timm:
            return fetched(loader(repeated(training.sampler), ahead), fetch)
        return fetched(chain.from_iterable(loader(iter(training.sampler), ahead) for _ in count()), fetch)

    once = data.draw(st.integers(0, 2 * batches))
    again = once + data.draw(st.integers(0, 4))  # some batches of the epoch before may still be to be used
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "a batch had no backward")
        steps(whole, endless(whole), 3 * length)
        for stop in (once * accumulate, min(again * accumulate, 3 * length), 3 * length):
            training = Training(batches, accumulate=accumulate, state=state)
            steps(training, endless(training), stop - len(used))
            state, used = training.sampler.state_dict(), used + training.used
    assert used == whole.used
    for first in range(0, 3 * length, length):  # every batch once in every epoch
        assert sorted(chain(*whole.used[first : first + length])) == list(range(whole.examples))
    late = ahead + fetch if timm else fetch
    assert len(whole.told) == 3 * max(0, (length - late) // accumulate)  # all count but the late ones


@given(st.integers(2, 8), AHEAD, FETCHED)
def test_fetching_ahead_that_begins_anew_in_every_epoch(batches, ahead, fetch):
    """As timm's PrefetchLoader does, around a loader that reads on into the next epoch."""
    training = Training(batches)
    length, source = len(training.sampler), loader(repeated(training.sampler), ahead)
    with warnings.catch_warnings():
        warnings.simplefilter("error" if ahead + fetch < length else "ignore")
        for _ in range(4):
            steps(training, fetched(islice(source, length), fetch))
    told = [training.told.count(epoch) for epoch in range(3)]
    assert told == told[:1] * 3 and told[0] >= length - ahead - fetch * (ahead > 0)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_state_with_damaged_batches_is_refused(damage):
    training = Training(3)
    steps(training, fetched(repeated(training.sampler), 2), 2)
    state = training.sampler.state_dict()
    assert state["fetched"]["late"] == [2]
    with pytest.raises(CdgrabError, match="damaged"):
        Training(3, state=state | {"fetched": state["fetched"] | damage})


def test_a_state_of_an_earlier_version_is_loaded():
    """It knew how far the loop and its loader were ahead, and no more."""
    before, after = Training(6), []
    steps(before, fetched(repeated(before.sampler), 2), 5)
    state = before.sampler.state_dict()
    late, examples = (state["fetched"][name] for name in ("late", "examples"))
    for fetched_then in (state["fetched"], {"ahead": 2, "late": late, "examples": examples}):
        training = Training(6, state=state | {"fetched": fetched_then})
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            steps(training, fetched(repeated(training.sampler), 2), 7)
        after.append((training.used, training.told))
    assert after[0] == after[1] and late


def test_a_state_that_is_saved_with_late_batches_by_a_loop_that_fetches_none_ahead_is_loaded():
    """As where a training goes on with fewer loader processes."""
    before = Training(8)
    steps(before, fetched(repeated(before.sampler), 3), 6)
    state = before.sampler.state_dict()
    assert state["fetched"]["held"] == 3 and len(state["fetched"]["late"]) == 2
    between = Training(8, state=state)
    steps(between, iter(between.sampler), 1)
    state = between.sampler.state_dict()
    assert state["fetched"]["held"] == 0 and len(state["fetched"]["late"]) == 1
    after = Training(8, state=state)
    steps(after, iter(after.sampler))
    first_epoch = before.used + between.used + after.used[:1]
    assert sorted(chain(*first_epoch)) == list(range(before.examples))


@settings(max_examples=15)
@given(st.data(), st.integers(2, 6), AHEAD, st.integers(0, 1), st.booleans())
def test_batches_that_are_left_out(data, batches, ahead, fetch, told):
    """Left out without a word, some gradients do not count, but only in the same epoch."""
    training = Training(batches)
    with warnings.catch_warnings():
        warnings.simplefilter("error" if told else "ignore")
        for epoch in range(4):
            left_out = data.draw(st.sets(st.integers(epoch == 0, batches - 1))) if epoch < 3 else ()
            for index, batch in enumerate(fetched(loader(iter(training.sampler), ahead), fetch)):
                if index not in left_out:
                    training.step(batch)
                elif told:
                    training.sampler.skip()
    assert training.told[-batches:] == [training.sampler.sorter.epoch] * batches
    assert not told or len(training.told) == 4 * batches


LEFT_OUT = "at the end of the epoch {} batch(es)? had no backward pass"


@pytest.mark.parametrize("first", [1, 3])
@pytest.mark.parametrize("every_epoch", [True, False])
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_left_out_before_anything_else_are_asked_about(first, every_epoch, workers):
    """They look like batches that are fetched ahead, and so do the gradients of all others."""
    training = Extra(9)
    source = DataLoader(range(training.examples), batch_sampler=training.sampler, num_workers=workers)
    with pytest.warns(UserWarning, match=LEFT_OUT.format(first)) as told:
        for epoch in range(3):
            for index, batch in enumerate(source):
                if index >= first or (epoch and not every_epoch):
                    training.step(batch.tolist())
    assert training.wrong and len([one for one in told if "wrong batches" in str(one.message)]) == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_left_out_after_a_state_was_loaded_are_noticed(workers):
    """A script that goes on by itself where it was, as does the sampler. Nothing of what is left then counts, so that
    the next iteration is for that."""
    before, start = Training(12), 5
    steps(before, iter(before.sampler), start)
    state = before.sampler.state_dict()
    training = Training(12, state=state)
    source = DataLoader(range(training.examples), batch_sampler=training.sampler, num_workers=workers)
    with pytest.warns(UserWarning, match="a batch had no backward pass, so it is uncertain"):
        for epoch in range(3):
            for index, batch in enumerate(source):
                if index >= start or epoch:
                    training.step(batch.tolist())
    assert training.told == [0] * 7 + [1] * 12


@pytest.mark.parametrize("how", ["between the passes", "by a generator"])
def test_nobody_is_asked_about_batches_that_are_certainly_fetched_ahead(how):
    """As nanoGPT does it, or where whoever reads one epoch reads the next, too."""
    training = Training(7)
    source = iter(training.sampler)
    batches = (batch for _ in range(3) for batch in iter(training.sampler)) if how == "by a generator" else None

    def following():
        nonlocal source
        if batches:
            return next(batches, None)
        if (batch := next(source, None)) is None:
            source = iter(training.sampler)
            batch = next(source)
        return batch

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        batch = following()
        for _ in range(21):
            if batches:
                batch, now = following(), batch
                training.step(now)
            else:
                training.used.append(batch)
                loss = training.model(torch.eye(training.examples, dtype=torch.float64)[batch]).mean()
                batch = following()
                loss.backward()
    assert training.told == [0] * 6 + [1] * 6 + [2] * 6 + [2] * bool(batches)


@pytest.mark.parametrize("step", range(6, 11))
def test_a_look_amid_an_epoch_is_refused_before_it_spoils_anything(step):
    """Also where the loader's processes have been given the last batches already."""
    training = Training(12)
    source = DataLoader(range(training.examples), batch_sampler=training.sampler, num_workers=2)
    with pytest.raises(CdgrabError, match="give every loader a sampler of its own"):
        for index, batch in enumerate(source):
            training.step(batch.tolist())
            if index == step:
                next(iter(source))
    assert len(training.told) == step + 1


def test_a_look_after_the_last_batch_spoils_nothing():
    training = Training(5)
    source = DataLoader(range(training.examples), batch_sampler=training.sampler)
    for _ in range(3):
        for index, batch in enumerate(source):
            training.step(batch.tolist())
            if index == 4:
                next(iter(source))
    assert training.told == [0] * 5 + [1] * 5 + [2] * 5


class Repeating:
    """timm's _RepeatSampler."""

    def __init__(self, sampler):
        self.sampler = sampler

    def __iter__(self):
        return repeated(self.sampler)

    def __len__(self):
        return len(self.sampler)


def in_a_thread(source):
    """Read by a thread, as far ahead as it happens to get."""
    read = queue.Queue(2)
    threading.Thread(target=lambda: [read.put(batch) for batch in chain(source, [None])], daemon=True).start()
    return iter(read.get, None)


def test_loader_processes_and_threads():
    training = Training(8)
    endless = iter(DataLoader(range(training.examples), batch_sampler=Repeating(training.sampler), num_workers=1))
    steps(training, (batch.tolist() for batch in endless), 24)
    assert training.told == [epoch for epoch in range(3) for _ in range(6)]  # 2 are on their way to the process
    training = Training(8)
    for _ in range(2):
        steps(training, in_a_thread(training.sampler))
    steps(training, in_a_thread(chain(training.sampler, training.sampler)))
    assert training.told[:16] == [0] * 8 + [1] * 8
    training = Training(8)
    source = DataLoader(range(training.examples), batch_sampler=training.sampler, num_workers=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):  # the first batches are asked for when the iterator is made, in the main thread
            steps(training, (batch.tolist() for batch in in_a_thread(iter(source))))
    assert training.told == [0] * 8 + [1] * 8 + [2] * 8


@settings(max_examples=15, deadline=None)
@given(batches=st.integers(3, 7), ahead=st.integers(1, 2), lengths=st.lists(st.integers(2, 7), min_size=4, max_size=5))
def test_batches_that_are_kept_when_an_epoch_is_left_early(batches, ahead, lengths):
    training, held = Training(batches), deque()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for length in lengths:
            source = iter(DataLoader(range(training.examples), batch_sampler=training.sampler))
            for _ in range(length):
                held.extend(islice(source, ahead + 1 - len(held)))
                if held:
                    training.step(held.popleft())
    assert training.told


class Extra(Training):
    """With passes that belong to no batch. Gradients that are credited to another batch are counted."""

    wrong = 0

    def check(self, gradients):
        try:
            super().check(gradients)
        except AssertionError:
            self.wrong += 1

    def train(self, epochs, extra, first):
        """extra: the numbers of the steps at which there is one; first: before that of the batch. Returns whether a
        pass was refused."""
        steps = count()
        try:
            for batch in chain.from_iterable(epochs):
                passes = [lambda: self.step(batch), *[self.extra_pass] * (next(steps) in extra)]  # noqa: B023
                for each in reversed(passes) if first else passes:
                    each()
        except CdgrabError as error:
            assert str(error).startswith("more backward passes than") and "paused" in str(error)
            return True
        return False

    def extra_pass(self):
        self.model(torch.ones(3, self.examples, dtype=torch.float64)).mean().backward()


@settings(max_examples=12, deadline=None)
@given(st.data(), st.integers(3, 9), st.sampled_from([0, 2, 2, 2]), st.integers(1, 2), st.booleans())
def test_an_extra_pass_with_a_loader_is_refused_when_the_loop_asks_again(data, batches, workers, prefetch, early):
    """Where it does not, in an epoch that is left early, one gradient is wrong."""
    lengths = [data.draw(st.integers(1, batches - 1)) if early else batches for _ in range(3)]
    extra = data.draw(st.sets(st.integers(0, sum(lengths) - 1), max_size=3))
    options = {"num_workers": workers}
    options |= {"prefetch_factor": prefetch, "persistent_workers": True} if workers else {}
    training = Extra(batches)
    source = DataLoader(range(training.examples), batch_sampler=training.sampler, **options)
    epochs = ((batch.tolist() for batch in islice(source, length)) for length in lengths)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of epochs that are left early
        refused = training.train(epochs, extra, first=False)
    ends = {sum(lengths[: i + 1]) - 1 for i in range(3)} if early and workers else set()
    assert refused == bool(extra - ends)
    assert training.wrong <= len(extra & ends) + refused


@given(
    st.data(), st.integers(5, 12), st.integers(0, 4), FETCHED, st.sampled_from(["one by one", "on and on", "timm"]),
    st.booleans(), st.sampled_from([1, 2, 3]), st.booleans(),
)  # fmt: skip
def test_extra_passes_spoil_no_more_gradients_than_are_fetched_ahead(
    data, batches, ahead, fetch, kind, first, accumulate, at_once
):
    """In all kinds of loops, but among the last batches of an epoch, after which they ask for no more of it."""
    length, held = batches * accumulate, fetch + ahead + 2 * accumulate + 1
    possible = [step for step in range(2 * length) if step % length < length - held]
    assume(possible)
    extra = data.draw(st.sets(st.sampled_from(possible), min_size=1, max_size=3))
    training = Extra(batches, accumulate=accumulate)

    def one():
        return loader(iter(training.sampler), ahead)

    epochs = {
        "one by one": lambda: (fetched(one(), fetch) for _ in range(5)),
        "on and on": lambda: [fetched(chain.from_iterable(one() for _ in count()), fetch)],
        "timm": lambda: [fetched(loader(repeated(training.sampler), ahead), fetch)],
    }[kind]()
    epochs = (together(epoch, accumulate) for epoch in epochs) if at_once else epochs
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        refused = training.train((islice(epoch, 5 * length) for epoch in epochs), extra, first)
    assert refused and training.wrong <= (held - 1) // accumulate + 1
