"""Benchmarks of memory: what is counted in which phase, at most, and once where processes share it."""

import json
import mmap
import os
import time
from contextlib import contextmanager, suppress

import torch

from experiments.report import figures_bench
from experiments.studies import timing
from experiments.tasks import make_task
from experiments.training.config import compose
from scripts.bench import dropin, memory


def test_papers_extra_memory():
    extra = figures_bench.papers_mib()["CD-GraB"] - figures_bench.papers_mib()["D-RR"]
    assert extra.round(2).to_dict() == {
        "Optimizer": 0.0,
        "Forward & Backward": 0.0,
        "Communication": 16.51,
        "Dataset Sorter": 4.33,
    }


def test_memory_is_measured(tmp_path, monkeypatch):
    settings = ["task=lstm_wiki2", "size=smoke", "task.limit=4", "workers=1", "device=cpu", "data=embedded"]
    trained = []

    def train_epoch(trainer, order, epoch, **settings):
        trained.append(order)
        return timing.train_epoch(trainer, order, epoch, **settings)

    monkeypatch.setattr(memory, "train_epoch", train_epoch)
    memory.main(str(tmp_path / "found"), *settings, "sorter=cd_grab")
    run = compose(settings)
    model = make_task(run.config, run.source, torch.device("cpu")).model
    found = json.loads((tmp_path / "found0").read_text())
    assert found["dim"] == sum(parameter.numel() for parameter in model.parameters())
    floats, uses = 4 * found["dim"], found["uses"]
    assert uses["model"] == floats < uses["optimiser"] < 5 * floats  # momentum, and what a step needs
    assert uses["gradients"] > floats and uses["ordering"] >= 2 * floats  # the running sum is of 8 bytes
    assert len(trained) == memory.EPOCHS + 1 and all(sorted(order[0].tolist()) == [0, 1, 2, 3] for order in trained)


def test_uses_are_the_most_that_a_phase_needs_beyond_what_is_there(monkeypatch):
    """Allocations as a GPU would count them: [there when a phase ends, the most within it], in bytes."""
    seen = iter([(100, 0), (150, 400), (120, 130), (120, 420), (90, 150)])
    there, most = next(seen)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: there)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: most)
    clock = memory.GpuUses()
    for phase in ("gradients", "optimiser", "gradients", "optimiser"):
        there, most = next(seen)
        clock.lap(phase)
    assert (clock.most["gradients"], clock.most["optimiser"], clock.most["data"]) == (300, 30, 0)


def test_uses_on_a_cpu_are_those_of_tensors_that_come_and_go():
    clock, kept = memory.CpuUses(), []
    for size in (100, 1000):
        passing = torch.empty(size, 1000)
        kept.append(torch.empty(size, 500))
        del passing
        clock.lap("gradients")
        kept[-1].add_(torch.empty(size, 500))
        clock.lap("optimiser")
    most = clock.most
    assert [most[phase] // 1000 for phase in ("gradients", "optimiser", "data")] == [6000, 2000, 0]


def test_peaks_count_what_was_there_and_is_gone():
    room = memory.peak() - memory.resident("VmRSS")
    before = memory.peak()
    watched = dropin.Memory([os.getpid()])
    with mmap.mmap(-1, room + 2**26, flags=mmap.MAP_PRIVATE) as block:  # the allocator may keep memory that was freed
        block[::4096] = b"x" * -(-len(block) // 4096)
        time.sleep(0.1)
    assert 2**26 - 2**22 <= memory.peak() - before <= 2**26 + 2**24
    assert 2**26 - 2**22 <= watched.stop() - room <= 2**26 + 2**24
    assert memory.resident("VmRSS") < memory.peak() - 2**25


@contextmanager
def another(work):
    """A process, and a function with which it is told to do this work; returns when that is done, and fails if it has
    failed. The process stays there."""
    (asked, ask), (told, tell) = os.pipe(), os.pipe()
    if not (process := os.fork()):
        with suppress(BaseException):  # nothing of this test goes on here
            os.close(ask)
            os.read(asked, 1)
            work()
            os.write(tell, b".")
            os.read(asked, 1)
        os._exit(0)
    os.close(tell)

    def do():
        os.write(ask, b".")
        assert os.read(told, 1)

    try:
        yield process, do
    finally:
        os.close(ask)
        os.waitpid(process, 0)
        os.close(told)
        os.close(asked)


def fill(block):
    block[::4096] = b"x" * (len(block) // 4096)


def test_what_processes_share_counts_once():
    block = mmap.mmap(-1, 2**26)
    with another(lambda: fill(block)) as (other, fill_there):
        watched = dropin.Memory([os.getpid(), other])
        fill_there()
        assert sum(block[::4096]) == ord("x") * len(block) // 4096
        assert 2**25 - 2**21 <= watched.stop() <= 2**25 + 2**21


def test_each_process_has_its_own_peak():
    """One after the other."""

    def need():
        with mmap.mmap(-1, 2**26, flags=mmap.MAP_PRIVATE) as block:
            fill(block)
            time.sleep(0.1)

    with another(need) as (other, need_there):
        watched = dropin.Memory([os.getpid(), other])
        need()
        need_there()
        assert 2**26 - 2**21 <= watched.stop() <= 2**26 + 2**21
