"""One study: its results, its notebook with the figures, its verdicts.

    python -m experiments.study study=herding                       # `make study-herding`
    python -m experiments.study study=rates size=paper study.seeds=5 # `make study-rates SIZE=paper SEEDS=5`

Settings are Hydra overrides (key=value) of configs/study.yaml and configs/study/<name>.yaml: size=smoke|quick|paper,
data=auto|embedded, jobs, study.seeds, study.<setting>. Results go to results/studies/<name>/<size>[-data], the verdicts
of all studies to results/STUDIES.md; those of sizes smoke and quick and of embedded data to the same places under
results/trial. What is complete is not computed again; an interrupted study continues where it stopped.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable

from experiments import screen  # before the imports that take seconds

if __name__ == "__main__":
    screen.begin()

import torch
from tqdm import tqdm

from cdgrab.checks import count
from experiments.early import exit_status
from experiments.report.notebook import execute
from experiments.report.text import show
from experiments.store.files import ROOT, home
from experiments.studies.base import Study, carry_out, compose_study
from experiments.studies.collection import summary, write_collection
from experiments.studies.parts import Part
from experiments.training.composition import choices, compose_config
from experiments.training.memory import keep_freed_memory

MOST_JOBS = 8


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 done, 2 refused (one sentence on stderr), 130 interrupted."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if {"-h", "--help"} & set(arguments):
        print(f"{__doc__}\nstudies: {', '.join(choices('study'))}")
        return 0
    return exit_status(lambda: run(arguments), "interrupted; run the same command again to continue")


def run(overrides: list[str]) -> None:
    keep_freed_memory()
    study = compose_study(overrides)
    screen.show(None)  # there is a bar from now on
    torch.set_num_threads(1)  # gives the same sums on every machine

    def progress(results: Iterable[tuple[Part, dict]], total: int) -> tqdm:
        seconds = 0.1 if sys.stderr.isatty() else 10  # not too many lines in a log
        return tqdm(results, f"study {study.name}", total, unit="part", mininterval=seconds, miniters=1)

    carry_out(study, progress, _jobs(study, overrides))
    figures = home(study.trial) / "figures"
    chosen = {"CDGRAB_STUDY": str(study.directory.resolve()), "CDGRAB_FIGURES": str(figures)}
    with screen.doing("drawing the figures"):
        notebook = execute(f"study_{study.name}", **chosen)
    show(f"\n{summary(study)}")
    for path in (figures / f"{study.figure_name()}.png", notebook, write_collection(study.trial)):
        print(path.relative_to(ROOT))


def _jobs(study: Study, overrides: list[str]) -> int:
    """auto: one process per core if parts are whole training runs; otherwise starting processes would take longer."""
    wanted = compose_config([o for o in overrides if o.partition("=")[0] in ("study", "jobs")], "study").jobs
    if wanted == "auto":
        return min(len(os.sched_getaffinity(0)), MOST_JOBS) if study.data and study.size != "smoke" else 1
    return count("jobs", wanted, 1)


if __name__ == "__main__":
    sys.exit(main())
