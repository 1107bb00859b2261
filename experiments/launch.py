"""Runs and sweeps of runs. A run on several processes goes through torchrun.

    python -m experiments.launch -m experiment=fig3a_lr_hmda                     # all runs of a figure
    python -m experiments.launch -m experiment=fig3a_lr_hmda seed=0 nproc=4      # one seed, on four processes
    python -m experiments.launch task=lr_hmda sorter=cd_grab,d_rr -m jobs=2      # a sweep of one's own, two at a time
    python -m experiments.launch -m experiment=fig3a_lr_hmda hydra/launcher=submitit_slurm    # each run a job of Slurm

Complete runs are not repeated, interrupted ones go on where they stopped.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator

from experiments import early  # before the imports that take seconds

if __name__ == "__main__":
    early.listen()

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from cdgrab.checks import count
from cdgrab.errors import CdgrabError
from experiments.training.config import CONFIGS, check_choices, known_names
from experiments.training.launcher import launch, launch_all
from experiments.training.session import REFUSED


def main(arguments: list[str] | None = None) -> int:
    """Exit status: that of the first run that failed. A signal ends the process."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if {"-h", "--help"} & set(arguments):
        print(f"{__doc__}\n{known_names()}")
        return 0
    try:
        check_choices([argument for argument in arguments if not argument.startswith("-")])
        wanted, jobs = expanded(arguments)
        count("jobs", jobs, 1)
    except CdgrabError as error:
        print(f"error: {error}", file=sys.stderr)
        return REFUSED
    if jobs > 1 and len(wanted) > 1:
        from experiments.training.jobs import launch_at_once

        statuses = launch_at_once(wanted, jobs)
    else:
        statuses = launch_all(wanted)
    return next((status for status in statuses if status), 0)


def expanded(arguments: list[str]) -> tuple[list[list[str]], int]:
    """The overrides of every run of a sweep, as Hydra expands it, and how many of them run at once.

    Each run composes its own configuration from its overrides. A launcher that sends jobs elsewhere calls `collect`
    there: then the run is carried out at once.
    """
    wanted, jobs = [], 1

    @hydra.main(config_path=str(CONFIGS), config_name="config", version_base="1.3")
    def collect(config: DictConfig) -> None:
        nonlocal jobs
        jobs = config.jobs
        overrides = list(HydraConfig.get().overrides.task)
        if "submitit" in HydraConfig.get().launcher._target_:
            if status := launch(overrides):
                raise SystemExit(status)
        else:
            wanted.append(overrides)

    with _command_line(arguments), _refusals_in_one_sentence(arguments):
        collect()
    return wanted, jobs


@contextlib.contextmanager
def _command_line(arguments: list[str]) -> Iterator[None]:
    """Hydra reads its arguments there."""
    before, sys.argv = sys.argv, [sys.argv[0], *arguments]
    try:
        yield
    finally:
        sys.argv = before


@contextlib.contextmanager
def _refusals_in_one_sentence(arguments: list[str]) -> Iterator[None]:
    """What Hydra refuses in several lines becomes one sentence. Where jobs are sent elsewhere, all it says is heard."""
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
        lines = [line.strip() for line in printed.getvalue().splitlines()]
        raise CdgrabError("; ".join(line for line in lines if line and "HYDRA_FULL_ERROR" not in line)) from None
    print(printed.getvalue(), end="", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
