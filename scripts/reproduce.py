"""Reproduce one of the paper's experiments: all runs, then the figure, then a table.

    python -m scripts.reproduce lr-hmda                          # `make reproduce-lr-hmda`
    python -m scripts.reproduce lr-hmda --seeds 2 --epochs 10 --nproc 4 --data embedded

Runs that are already complete are not repeated; interrupted ones go on. Task names are taken in any case.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

from cdgrab.config import ROOT, compose
from cdgrab.errors import CdgrabError
from cdgrab.results import RESULTS, Group
from scripts.notebook import execute

# task -> experiments (each a yaml under configs/experiment and a notebook of the same name)
EXPERIMENTS = {
    "lr-hmda": ("fig3a_lr_hmda",),
    "lstm-wiki2": ("fig3b_lstm_wiki2",),
    "mlp-m4": ("fig3c_mlp_m4",),
    "gpt2-wiki103": ("fig11_gpt2_wiki103",),
}


def main() -> int:
    arguments = _parse()
    task = arguments.task.lower().replace("_", "-")
    if task not in EXPERIMENTS:
        print(f"error: unknown task {arguments.task!r}; the tasks are {', '.join(EXPERIMENTS)}", file=sys.stderr)
        return 2
    overrides = [
        f"{key}={getattr(arguments, key)}"
        for key in ("epochs", "workers", "nproc", "data", "size")
        if getattr(arguments, key)
    ]
    for experiment in EXPERIMENTS[task]:
        try:
            status = reproduce(experiment, overrides, arguments.seeds)
        except CdgrabError as error:
            print(f"error: {error}", file=sys.stderr)
            status = 2
        if status:
            return status
    return 0


def reproduce(experiment: str, overrides: list[str], seeds: int | None) -> int:
    """Runs, notebook and table of one experiment. Returns the exit status."""
    run = compose([f"experiment={experiment}", *overrides])
    group = Group(run.directory.parent)
    sweep = f"seed=range(0,{seeds or run.config.seeds[run.config.size]})"
    command = [sys.executable, "-m", "experiments.launch", "-m", f"experiment={experiment}", *overrides, sweep]
    status = subprocess.run(command, cwd=ROOT).returncode
    if status:
        return status
    os.environ["CDGRAB_GROUP"] = str(group.directory.resolve())
    notebook = execute(experiment)
    print()
    print((RESULTS / "figures" / f"{group.name}.md").read_text())
    for path in (RESULTS / "figures" / f"{group.name}.png", notebook):
        print(path.relative_to(ROOT))
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", help=f"one of {', '.join(EXPERIMENTS)}")
    parser.add_argument("--seeds", type=_positive, help="how many seeds (default: the experiment's for the size)")
    parser.add_argument("--epochs", type=_positive, help="how many epochs (default: the paper's)")
    parser.add_argument("--workers", type=_positive, help="how many logical workers (default: the paper's)")
    parser.add_argument("--nproc", help="processes that host the workers (default: auto)")
    parser.add_argument("--size", help="smoke, quick (default) or paper: the task's presets of that name")
    parser.add_argument("--data", help="auto or embedded (default: auto)")
    return parser.parse_args()


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
