"""Runs that are stopped or killed anywhere and go on: metrics and orders are those of a run that never was."""

import os
import signal
import time
from itertools import count, cycle, pairwise

import pytest
import torch
from interrupted import SMALL, Log, fit
from torch.utils._pytree import tree_leaves

from cdgrab.errors import CdgrabError, Stopped, warn
from cdgrab.runtime.group import WorkerGroup
from experiments.tasks import make_task
from experiments.training import signals, snapshot
from experiments.training.config import compose
from experiments.training.loop import alone

CASES = {
    "cd_grab": ["task=lr_hmda", "task.limit=200", "epochs=2", "sorter=cd_grab"],
    "id_grab_bal": ["task=lr_hmda", "task.limit=200", "epochs=2", "sorter=id_grab_bal"],
    "kh": ["task=lr_hmda", "task.limit=200", "epochs=2", "sorter=kh"],
    "a state that is handed on": [
        *("task=lstm_wiki2", "epochs=2", "task.limit=9", "task.chunk_length=8", "task.test_chunks=2", "task.hidden=4"),
    ],
    "residuals": [
        "task=mlp_m4",
        "epochs=2",
        "task.batch=8",
        "task.limit=80",
        "sparsifier=exdyna",
        "sparsifier.density=0.05",
    ],
    "herding": ["task=cifar10", "epochs=2", "task.batch=8", "task.limit=80", "task.herding_every=1"],
    "a replay": ["task=lr_hmda", "task.limit=203", "epochs=3", "task.herding_replays=[1, 3]"],
}


def trainer(settings, folder):
    run = compose([*SMALL, *settings, f"run_dir={folder}"])
    folder.mkdir(exist_ok=True)
    made = alone(run, make_task(run.config, run.source, torch.device("cpu")), WorkerGroup(4), torch.device("cpu"))
    if saved := snapshot.load(run, WorkerGroup(4), warn):
        made.load_state_dicts([saved])
    return made


STOPS = [(False, 2), (True, 4), (False, 9)]  # at which question; at the end of an epoch all but one are in evaluations


def asked(made, at_end, times):
    """Stops when it is asked for so many times, counted at the ends of epochs or before them."""
    calls = count(1)
    return lambda: signal.SIGTERM * ((made.position == made.units) == at_end and next(calls) == times)


@pytest.mark.parametrize("case", CASES)
def test_a_run_that_is_stopped_again_and_again_is_the_same_run(case, tmp_path, monkeypatch):
    """In the middle of blocks, in evaluations, and with blocks of other lengths after each stop: pairs of units are
    torn apart too."""
    monkeypatch.setattr(signals, "PATIENCE", 0)  # ask after every step
    settings = CASES[case]
    whole, pieces = Log(), Log()
    fit(trainer(settings, tmp_path / "whole"), whole)
    places = []
    for every, (at_end, asks) in zip(cycle(("3", "5", "null", "4")), cycle(STOPS), strict=False):
        going_on = trainer([*settings, f"checkpoint.every_steps={every}"], tmp_path / "pieces")
        try:
            fit(going_on, pieces, asked(going_on, at_end, asks))
            break
        except Stopped as stop:
            assert stop.number == signal.SIGTERM and "stopped after" in str(stop)
            places.append(going_on.position)
    assert pieces.lines == whole.lines and any(0 < place < going_on.units for place in places)
    assert max(places) == going_on.units or case in ("herding", "a replay")


def test_a_trainer_goes_on_from_the_state_of_another_without_any_file(tmp_path):
    settings, whole = [*CASES["cd_grab"], "checkpoint.every_steps=3", "sparsifier=exdyna"], Log()
    stopped, other = trainer(settings, tmp_path / "one"), trainer(settings, tmp_path / "other")
    fit(trainer(settings, tmp_path / "whole"), whole)
    with pytest.raises(Stopped):
        fit(stopped, Log(), lambda: signal.SIGTERM * (stopped.epochs_done == 1 and stopped.position > 0))
    (state,), rest = stopped.state_dicts(), Log()
    tensors = lambda: [leaf for leaf in tree_leaves(other.state_dicts()) if isinstance(leaf, torch.Tensor)]  # noqa: E731
    before = tensors()
    wrongs = [{"position": -1}, {"epochs_done": 4}, {"parameters": torch.zeros(3)}, {"optimiser": []}]
    wrongs += [{"first_parameters": 3}, {"sparsified": None}, {"seconds": {}}, {"replay": 3}]
    for wrong in wrongs:
        with pytest.raises((TypeError, CdgrabError), match="not the state|not the running sums|the clock"):
            other.load_state_dicts([state | wrong])
        torch.testing.assert_close(tensors(), before, rtol=0, atol=0)  # a refused state changes nothing
    assert not other.position
    other.load_state_dicts([state])
    assert other.epochs_done == 1 and 0 < other.position < other.units
    fit(other, rest)
    assert rest.lines == whole.lines[1:]


@pytest.mark.parametrize("number", signals.STATUS, ids=lambda number: number.name)
@pytest.mark.parametrize("split", ["train", "test"])
def test_a_signal_ends_an_evaluation_at_once(split, number, tmp_path, monkeypatch):
    """Amid a worker, and also the last one; it is then begun anew."""
    whole, pieces, made = Log(), Log(), trainer(CASES["cd_grab"], tmp_path / "pieces")
    fit(trainer(CASES["cd_grab"], tmp_path / "whole"), whole)
    measure, calls = type(made.task).totals, []

    def slowly(task, part, *inputs):
        calls.append(part)
        if calls.count(split) == 4:
            os.kill(os.getpid(), number)
            time.sleep(60)
        return measure(task, part, *inputs)

    monkeypatch.setattr(type(made.task), "totals", slowly)
    with signals.listening() as stop, pytest.raises(Stopped) as stopped:
        fit(made, pieces, stop)
    assert stopped.value.number == number and time.monotonic() - stop._since < 30
    monkeypatch.undo()
    fit(trainer(CASES["cd_grab"], tmp_path / "pieces"), pieces)
    assert pieces.lines == whole.lines


@pytest.mark.parametrize("pace", [1e-4, 0.07, 0.4, 30.0])
def test_a_signal_is_heard_soon_and_asked_for_rarely(pace, monkeypatch):
    """However long steps take, and if they become slower."""
    clock, asks = [0.0], []
    monkeypatch.setattr(signals.time, "monotonic", lambda: clock[0])
    agreement = signals.Agreement(lambda: asks.append(clock[0]) or 0, WorkerGroup(1))
    for step in range(200_000 if pace < 1e-3 else 200):
        clock[0] += pace * (1 + step % 2)
        agreement.steps += 1
        if agreement.steps >= agreement.wanted:
            agreement.after_steps()
    gaps = [after - before for before, after in pairwise(asks)]
    assert gaps and max(gaps) <= max(2 * signals.PATIENCE, 2 * pace) + 1e-9
    assert len(asks) <= max(clock[0] / signals.PATIENCE * 2, 200)


def test_checkpoints_on_the_way_change_nothing(tmp_path):
    logs = []
    for name, every in (("none", "null"), ("some", "5")):
        logs.append(Log())
        fit(trainer([*CASES["cd_grab"], f"checkpoint.every_steps={every}"], tmp_path / name), logs[-1])
    assert logs[0].lines == logs[1].lines
