"""What is disturbed: runs of the suite, sweeps whose runs train together, scripts with the drop-in sampler."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from experiments import launch, train
from experiments.store import checkpoint
from experiments.training.config import compose
from scripts.soak import script
from scripts.soak.processes import Command, Forks, Processes

TASKS = {  # settings that make an epoch short, and epochs that take a second or two together
    "lr_hmda": (["task.limit=180"], 20),
    "mlp_m4": (["task.limit=84"], 8),
    "cifar10": (["task.limit=84"], 8),
    "lstm_wiki2": (["task.limit=9", "task.chunk_length=8", "task.test_chunks=2", "task.hidden=4"], 3),
    "gpt2_wiki103": (["task.limit=36"], 3),
    "glue": (["task.limit=120"], 8),
}
SORTERS = ["cd_grab", "cd_grab", "grab", "id_grab_pair", "id_grab_bal", "kh", "d_rr", "flip_flop", "riffle"]
SPARSIFIERS = ["dense", "dense", "exdyna", "topk", "deft", "micro", "cltk", "sidco"]
COMMON = ["size=smoke", "data=embedded", "task.batch=12", "timeout=20"]  # seconds; a busy machine needs as many
SAME_DIGITS = 1e-9  # runs that train together may do so in other groups after a kill, and then round differently
TIMES = ("seconds", "phases", "replicas", "metrics")  # what differs from run to run; a checkpoint's size of metrics


@dataclass(frozen=True)
class Victim:
    words: str
    work: Callable[[Path], int]  # what every process does; returns its exit status. Of a command: its arguments
    processes: int = 1
    command: bool = False
    begun: str = "**/manifest.json"  # written anew when training begins
    outcome: Callable[[Path], object] = lambda folder: outcomes(folder)
    rounding: float = 0.0
    ours: bool = True  # a script's end is its own affair: it may fail in any way

    def start(self, folder: Path, clock: random.Random | None = None) -> Processes:
        return Command(self.work(folder)) if self.command else Forks(partial(self.work, folder), self.processes, clock)


def run(generator: random.Random, processes: int = 1) -> Victim:
    settings = _settings(generator, processes)
    settings += [f"sorter={generator.choice(SORTERS)}", f"seed={generator.randrange(9)}"]
    return Victim(" ".join(settings), partial(_train, settings), processes)


def on_processes(generator: random.Random) -> Victim:
    return run(generator, generator.choice((2, 2, 3, 4)))


def launched(generator: random.Random) -> Victim:
    """By the launcher, which starts processes again that were killed."""
    settings, processes = _settings(generator), 2
    settings += [f"sorter={generator.choice(SORTERS)}", f"nproc={processes}", "restarts=99"]
    return Victim(" ".join(settings), partial(_arguments, settings), processes, command=True)


def together(generator: random.Random) -> Victim:
    sorters, seeds = generator.sample(sorted(set(SORTERS)), 2), generator.sample(range(9), 2)
    swept = [f"sorter={','.join(sorters)}", f"seed={','.join(map(str, seeds))}", "task.dtype=float64"]
    settings = ["-m", *_settings(generator), *swept]
    return Victim(" ".join(settings), partial(_launch, settings), rounding=SAME_DIGITS)


def of_a_script(generator: random.Random, wrapper: str) -> Victim:
    processes = 1 if wrapper == "alone" else generator.choice((2, 2, 3, 4))
    options = {"wrapper": wrapper, "sorter": generator.choice(SORTERS), "seed": generator.randrange(9)}
    options |= {"every": generator.choice((1, 3, 10)), "ahead": generator.random() < 0.3}
    if wrapper == "DDP" and generator.random() < 0.5:
        options |= {"sparsifier": generator.choice(SPARSIFIERS), "density": 0.1}
    words = " ".join(map(str, options.values()))
    work, outcome = partial(_script, options), lambda folder: torch.load(folder / script.DONE, weights_only=True)
    return Victim(f"script {words}", work, processes, begun=script.CHECKPOINT, outcome=outcome, ours=False)


VICTIMS = {  # how each is drawn, and its share
    "run": (run, 0.27),
    "run on several processes": (on_processes, 0.2),
    "runs that train together": (together, 0.14),
    "run of the launcher": (launched, 0.03),
    "script": (partial(of_a_script, wrapper="alone"), 0.08),
    "script with DDP": (partial(of_a_script, wrapper="DDP"), 0.14),
    "script with FSDP2": (partial(of_a_script, wrapper="FSDP2"), 0.14),
}


def warm_up() -> None:
    """What every start would do again."""
    for task, (more, _) in TASKS.items():
        compose([f"task={task}", *COMMON, *more])


def _settings(generator: random.Random, processes: int = 1) -> list[str]:
    task, sparsifier = generator.choice(list(TASKS)), generator.choice(SPARSIFIERS)
    more, epochs = TASKS[task]
    sparse = [] if sparsifier == "dense" else [f"sparsifier={sparsifier}", "sparsifier.density=0.05"]
    settings = [f"task={task}", *COMMON, f"workers={3 if processes == 3 else 4}", *more, *sparse]
    often = f"checkpoint.every_steps={generator.choice((1, 5, 20))}"
    return [*settings, f"epochs={epochs}", often, f"compile={generator.choice(('off', 'off', 'auto'))}"]


def _train(settings: list[str], folder: Path) -> int:
    return train.main([*settings, f"run_dir={folder}", "resume=true"])


def _launch(settings: list[str], folder: Path) -> int:
    return launch.main([*settings, f"run_dir={folder}/${{sorter.name}}-${{seed}}"])


def _arguments(settings: list[str], folder: Path) -> list[str]:
    return ["-m", "experiments.launch", *settings, f"run_dir={folder}"]


def _script(options: dict, folder: Path) -> int:
    return script.train(folder, **options)


def outcomes(folder: Path) -> list[tuple]:
    """What must be equal, of every run in the folder: its name, metrics and checkpoint, all without times."""
    runs = sorted(path.parent for path in folder.rglob("manifest.json"))
    return [(run.relative_to(folder).name, *_outcome(run)) for run in runs]


def _outcome(folder: Path) -> tuple:
    text = (folder / "metrics.jsonl").read_text()
    *lines, saved = map(_without_times, [*map(json.loads, text.splitlines()), checkpoint.load(folder)])
    return lines, text.endswith("\n"), saved


def _without_times(content: dict) -> dict:
    return {key: value for key, value in content.items() if key not in TIMES}
