"""Reproduce the paper's experiments of one task, or of all: the runs, then the figures, then a table.

    python -m scripts.reproduce lr-hmda                          # `make reproduce-lr-hmda`
    python -m scripts.reproduce lr-hmda --seeds 2 --epochs 10 --nproc 4 --data embedded
    python -m scripts.reproduce all --size smoke                 # ends with one table of all tasks

Runs that are already complete are not repeated; interrupted ones go on. Task names are taken in any case.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys

from experiments import early, screen  # before the imports that take seconds

if __name__ == "__main__":
    early.listen()
    screen.begin()

from omegaconf import DictConfig

from cdgrab.errors import CdgrabError, DivergedError
from experiments import launch
from experiments.report import tables as report
from experiments.report import text
from experiments.report.manifests import without
from experiments.report.notebook import execute
from experiments.report.runs import Group, groups, sweeps
from experiments.store.files import ROOT, home
from experiments.tasks import locate_data
from experiments.training.composition import compose_config
from experiments.training.config import Run, compose
from scripts.arguments import Parser, positive

# task -> experiments (each a yaml under configs/experiment and a notebook of the same name)
EXPERIMENTS = {
    "lr-hmda": ("fig3a_lr_hmda",),
    "lstm-wiki2": ("fig3b_lstm_wiki2",),
    "mlp-m4": ("fig3c_mlp_m4", "fig3c_mlp_m4_4workers"),
    "cifar10": ("fig4_cifar10_workers", "fig9_cifar10_herding", "fig6_cifar10_centralised", "fig12_cifar10_lr"),
    "gpt2-wiki103": ("fig11_gpt2_wiki103",),
    "glue": ("table1_glue",),
}


def main(command_line: list[str] | None = None) -> int:
    arguments = _parse(command_line)
    given = vars(arguments)
    task, seeds = given.pop("task").lower().replace("_", "-"), given.pop("seeds")
    overrides = [f"{key}={value}" for key, value in given.items() if value]
    if task == "all":
        return reproduce_all(overrides, seeds)
    if task in EXPERIMENTS:
        return reproduce_task(task, overrides, seeds)
    early.say(f"unknown task {task!r}; the tasks are {', '.join(EXPERIMENTS)}, all")
    return CdgrabError.status


def reproduce_all(overrides: list[str], seeds: int | None) -> int:
    """Every task in turn, then one table of what came out. A task that fails is named; the others are not lost."""
    rows, failed = [], {}
    for task in EXPERIMENTS:
        print(f"\n=== {task}", flush=True)
        status = reproduce_task(task, overrides, seeds, rows)
        if status >= 128:  # interrupted: the person wants it to end
            return status
        if status:
            failed[task] = status
    table = f"{report.HEADNOTE}\n\n{report.markdown(rows)}\n" if rows else "no task finished\n"
    table += "".join(f"\nfailed: {task} (exit status {status})\n" for task, status in failed.items())
    page = home(trial=True) / "figures" / "all.md"
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(table)
    text.show(f"\n{table}")
    print(page.relative_to(ROOT))
    return next(iter(failed.values()), 0)


def reproduce_task(task: str, overrides: list[str], seeds: int | None, rows: list[dict] | None = None) -> int:
    """All experiments of a task; the exit status of the first that failed. `rows` collects the table of all tasks."""
    statuses = []
    for experiment in EXPERIMENTS[task]:
        try:
            statuses.append(reproduce(experiment, overrides, seeds, rows))
        except (CdgrabError, OSError) as error:
            early.say(str(error))
            statuses.append(CdgrabError.status)
        if statuses[-1] not in (0, DivergedError.status):
            break
    return next((status for status in statuses if status), 0)


def reproduce(experiment: str, overrides: list[str], seeds: int | None, rows: list[dict] | None = None) -> int:
    """Runs, notebook and table of one experiment. A diverged run is left out of the figure and reported at the end."""
    columns = _columns_with_files(experiment, overrides)
    run = compose([f"experiment={experiment}", *overrides, *columns[:1]])
    config = run.config
    if not config.sweeps[config.size]:
        print(f"{experiment}: nothing at size {config.size}")
        return 0
    sweep = [f"{config.columns}={','.join(column.partition('=')[2] for column in columns)}"] if columns else []
    status = _launch(experiment, config, [*overrides, *sweep], seeds)
    if status not in (0, DivergedError.status):
        return status
    figures = home(trial=run.size != "paper" or run.source.embedded) / "figures"
    os.environ["CDGRAB_GROUP"] = str(run.directory.parent.resolve())
    with screen.doing("drawing the figure"):
        notebook = execute(experiment, CDGRAB_FIGURES=str(figures))
    name = f"{experiment}-{without(run.directory.parent.name, config.columns)}"
    print()
    text.show((figures / f"{name}.md").read_text())
    for path in (figures / f"{name}.png", notebook):
        print(path.relative_to(ROOT))
    if rows is not None:
        rows += report.comparison(experiment, _made(run))
    return status


def _launch(experiment: str, config: DictConfig, overrides: list[str], seeds: int | None) -> int:
    """The sweeps of this size, one after the other; what was asked for on the command line wins."""
    if config.name != experiment:
        return 0  # drawn from the runs of another figure
    status, wanted = 0, config.sweeps[config.size]
    for number, sweep in enumerate(wanted, 1):
        changes = [f"{key}={value}" for key, value in sweep.items()]
        if len(wanted) > 1:
            print(f"{experiment}, sweep {number} of {len(wanted)}: {' '.join(changes) or 'as it stands'}", flush=True)
        seed = f"seed=range(0,{seeds or config.seeds[config.size]})"
        with contextlib.chdir(ROOT):
            done = launch.main(["-m", f"experiment={experiment}", *changes, *overrides, seed])
        if done not in (0, DivergedError.status):
            return done
        status = status or done
    return status


def _columns_with_files(experiment: str, overrides: list[str]) -> list[str]:
    """The experiment's `candidates` whose files are there, as overrides; says which are not. None of embedded data."""
    settings = [f"experiment={experiment}", *overrides]
    config = compose_config(settings)
    columns, missing = [], {}
    for value in config.candidates or ():
        column = f"{config.columns}={value}"
        try:
            columns += [] if locate_data(compose_config([*settings, column])).embedded else [column]
        except CdgrabError as error:
            missing[value] = error
    for value, error in missing.items() if columns else ():
        print(f"skipped {value}: {error}")
    return columns


def _made(run: Run) -> list[Group]:
    name, columns = run.config.name, run.config.columns
    return [group for sweep in sweeps(name, columns) for group in sweep.groups] if columns else groups(name)


def _parse(command_line: list[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument("task", help=f"one of {', '.join(EXPERIMENTS)}, or all")
    parser.add_argument("--seeds", type=positive, help="how many seeds (default: the experiment's for the size)")
    parser.add_argument("--epochs", type=positive, help="how many epochs (default: the task's for the size)")
    parser.add_argument("--workers", type=positive, help="how many logical workers (default: the experiment's)")
    parser.add_argument("--nproc", help="processes that host the workers (default: auto, one per GPU or one on a CPU)")
    parser.add_argument("--jobs", type=positive, help="runs at the same time (default: the experiment's, 1 or 2)")
    parser.add_argument("--replicas", help="runs that train together: auto (default), or at most so many")
    parser.add_argument("--data", help="auto or embedded (default: auto)")
    parser.add_argument("--tracker", help="metrics also go to tensorboard, wandb or mlflow (default: none)")
    parser.add_argument("--size", help="smoke, quick (default) or paper: the task's presets of that name")
    return parser.parse_args(command_line)


if __name__ == "__main__":
    sys.exit(main())
