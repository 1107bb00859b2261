"""Runs and sweeps of runs, each through torchrun.

    python -m experiments.launch -m experiment=fig3a_lr_hmda                     # all runs of a figure
    python -m experiments.launch -m experiment=fig3a_lr_hmda seed=0 nproc=4      # one seed, on four processes
    python -m experiments.launch task=lr_hmda sorter=cd_grab,d_rr -m jobs=2      # a sweep of one's own, two at a time
    python -m experiments.launch -m experiment=fig3a_lr_hmda hydra/launcher=submitit_slurm    # each run a job of Slurm

Complete runs are not repeated, interrupted ones go on where they stopped.
"""

from __future__ import annotations

import contextlib
import io
import signal
import subprocess
import sys
import time

from experiments import early  # before the imports that take seconds

if __name__ == "__main__":
    early.listen()

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from cdgrab.checks import count
from cdgrab.errors import CdgrabError
from experiments.store.files import ROOT
from experiments.training.config import CONFIGS, check_choices, known_names
from experiments.training.launcher import launch
from experiments.training.signals import STATUS

REFUSED = 2
wanted: list[list[str]] = []  # the overrides of every run
jobs = 1


@hydra.main(config_path=str(CONFIGS), config_name="config", version_base="1.3")
def collect(config: DictConfig) -> None:
    """Hydra expands the sweep; each run composes its own configuration from the overrides, once, for all ranks.

    A launcher that sends jobs elsewhere calls this there: then the run is carried out at once.
    """
    global jobs
    jobs = config.jobs
    overrides = list(HydraConfig.get().overrides.task)
    if "submitit" in HydraConfig.get().launcher._target_:
        if status := launch(overrides):
            raise SystemExit(status)
    else:
        wanted.append(overrides)


def one_after_the_other() -> list[int]:
    """Exit statuses. A diverged run does not stop a sweep; a refused one does: the others would be refused too."""
    statuses = []
    for overrides in wanted:
        statuses.append(launch(overrides))
        if statuses[-1] == REFUSED:
            break
    return statuses


def several_at_once(jobs: int) -> list[int]:
    """Exit statuses; every run is a process of its own, started when one of the `jobs` places is free.

    A signal ends those under way and the sweep with them.
    """
    waiting, running, statuses = list(wanted), [], []
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(STATUS[number]))
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                running.append(
                    subprocess.Popen([sys.executable, "-m", "experiments.launch", *waiting.pop(0)], cwd=ROOT)
                )
            time.sleep(0.1)
            statuses += [run.returncode for run in running if run.poll() is not None]
            running = [run for run in running if run.returncode is None]
            if REFUSED in statuses:
                waiting.clear()
    except BaseException as interruption:
        for run in running:
            run.terminate()
        for run in running:
            run.wait()
        if isinstance(interruption, KeyboardInterrupt):
            raise SystemExit(128 + signal.SIGINT) from None
        raise
    return statuses


def _collect() -> None:
    """What Hydra refuses, in several lines, becomes one sentence. Who sends jobs elsewhere hears all it says."""
    printed = io.StringIO()
    elsewhere = any("submitit" in argument for argument in sys.argv[1:])
    try:
        with contextlib.nullcontext() if elsewhere else contextlib.redirect_stderr(printed):
            collect()
    except SystemExit as stop:
        if elsewhere or stop.code in (0, None):
            raise
        lines = [line.strip() for line in printed.getvalue().splitlines()]
        raise CdgrabError("; ".join(line for line in lines if line and "HYDRA_FULL_ERROR" not in line)) from None
    print(printed.getvalue(), end="", file=sys.stderr)


def main() -> int:
    """Exit status: that of the first run that failed."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(f"{__doc__}\n{known_names()}")
        return 0
    try:
        check_choices([argument for argument in sys.argv[1:] if not argument.startswith("-")])
        _collect()
        early.stop_listening()  # the launcher does from here on
        count("jobs", jobs, 1)
    except CdgrabError as error:
        print(f"error: {error}", file=sys.stderr)
        return REFUSED
    statuses = several_at_once(jobs) if jobs > 1 and len(wanted) > 1 else one_after_the_other()
    return next((status for status in statuses if status), 0)


if __name__ == "__main__":
    sys.exit(main())
