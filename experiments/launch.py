"""Runs and sweeps of runs. A run on several processes goes through torchrun.

    python -m experiments.launch -m experiment=fig3a_lr_hmda                     # all runs of a figure
    python -m experiments.launch -m experiment=fig3a_lr_hmda seed=0 nproc=4      # one seed, on four processes
    python -m experiments.launch task=lr_hmda sorter=cd_grab,d_rr -m jobs=2      # your own sweep, two at a time
    python -m experiments.launch -m experiment=fig3a_lr_hmda hydra/launcher=submitit_slurm    # each run a job of Slurm

Complete runs are not repeated; interrupted ones continue where they stopped.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from experiments import early, screen  # before the imports that take seconds

if __name__ == "__main__":
    early.listen()
    screen.begin()

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig

from cdgrab.checks import count
from cdgrab.errors import CdgrabError
from experiments.training.composition import CONFIGS, check_choices, compose_config, known_names, one_line
from experiments.training.extensions import extend_with
from experiments.training.launcher import Prepared, launch, launch_all, prepare
from experiments.training.session import exit_status

SWEEP = {"-m", "--multirun"}
# Overrides that name code to be run: a logger's handlers are classes, too.
CODE = re.compile(r"[+~]*hydra([./]callbacks\b|\.(job|hydra)_logging\b|\b.*_target_)", re.DOTALL)


def main(arguments: list[str] | None = None, extension: str | None = None) -> int:
    """Exit status: that of the first run that failed. A signal ends the process.

    extension: a file that every process loads, beside those of CDGRAB_EXTEND."""
    if extension:
        extend_with(extension)
    arguments = sys.argv[1:] if arguments is None else arguments
    if {"-h", "--help"} & set(arguments):
        print(f"{__doc__}\n{known_names()}")
        return 0
    return exit_status(lambda: _main(arguments))


def _main(arguments: list[str]) -> int:
    overrides = [argument for argument in arguments if not argument.startswith("-")]
    flags = set(arguments) - set(overrides)
    check_choices(overrides)
    if code := next(filter(CODE.match, overrides), None):
        raise CdgrabError(f"{code.partition('=')[0]} names code to be run; name files with your own in CDGRAB_EXTEND")
    if flags - SWEEP or any(re.match(r"[+~]*hydra\b", override) for override in overrides):
        wanted, jobs = through_hydra(arguments)
    else:
        wanted, jobs = expanded(overrides, sweep=bool(flags))
    count("jobs", jobs, 1)
    with screen.doing("checking the settings"):
        runs = _in_folders_of_their_own([prepare(overrides) for overrides in wanted])  # refused before anything starts
    if jobs > 1 and len(runs) > 1:
        from experiments.training.jobs import launch_at_once

        statuses = launch_at_once(runs, jobs)
    else:
        statuses = launch_all(runs)
    return next((status for status in statuses if status), 0)


def _in_folders_of_their_own(runs: list[Prepared]) -> list[Prepared]:
    """A run that is named twice is carried out once; different ones in the same folder are refused."""
    by_folder: dict[Path, Prepared] = {}
    for prepared in runs:
        run, first = prepared.run, by_folder.setdefault(prepared.run.directory, prepared).run
        if run.science != first.science:
            raise CdgrabError(f"different runs would share {run.directory}; name in run_dir what they differ in")
    return list(by_folder.values())


def expanded(overrides: list[str], sweep: bool) -> tuple[list[list[str]], int]:
    """The overrides of every run, and how many processes share them. As with Hydra's own sweeper, a sweep is the
    product of all settings with several values, on the command line and in the experiment's `hydra.sweeper.params`."""
    try:
        if not sweep:
            return [overrides], compose_config(overrides).jobs
        parser = OverridesParser.create()
        parsed = parser.parse_overrides(overrides)
        config = compose_config([o.input_line for o in parsed if not o.is_sweep_override()], hydras_own=True)
        params = config.hydra.sweeper.params or {}
        swept = parser.parse_overrides([*(f"{key}={values}" for key, values in params.items()), *overrides])
        return BasicSweeper.split_arguments(swept, None)[0], config.jobs
    except HydraException as error:
        raise CdgrabError(one_line(error)) from error


def through_hydra(arguments: list[str]) -> tuple[list[list[str]], int]:
    """The same by Hydra itself, which takes longer: needed for its own settings or flags. A launcher that sends jobs
    elsewhere calls `collect` there, which then carries out the run at once."""
    import hydra

    wanted, jobs = [], 1

    @hydra.main(config_path=str(CONFIGS), config_name="config", version_base="1.3")
    def collect(config: DictConfig) -> None:
        nonlocal jobs
        jobs = config.jobs
        overrides = list(HydraConfig.get().overrides.task)
        if "submitit" in HydraConfig.get().launcher._target_:
            if status := launch([prepare(overrides)])[0]:
                raise SystemExit(status)
        else:
            wanted.append(overrides)

    with _command_line(arguments), _refusals_in_one_sentence(arguments):
        collect()
    return wanted, jobs


@contextlib.contextmanager
def _command_line(arguments: list[str]) -> Iterator[None]:
    """Put the arguments where Hydra reads them."""
    before, sys.argv = sys.argv, [sys.argv[0], *arguments]
    try:
        yield
    finally:
        sys.argv = before


@contextlib.contextmanager
def _refusals_in_one_sentence(arguments: list[str]) -> Iterator[None]:
    """What Hydra refuses in several lines becomes one sentence. With submitit, Hydra's output is passed through."""
    if any("submitit" in argument for argument in arguments):
        yield
        return
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            yield
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        lines = [line.strip() for line in printed.getvalue().strip().splitlines()]
        lines = lines[-1:] if any(line.startswith("Traceback") for line in lines) else lines
        raise CdgrabError("; ".join(line for line in lines if line and "HYDRA_FULL_ERROR" not in line)) from None
    print(printed.getvalue(), end="", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
