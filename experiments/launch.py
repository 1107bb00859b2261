"""Runs and sweeps of runs, each through torchrun.

    python -m experiments.launch -m experiment=fig3a_lr_hmda                     # all runs of a figure
    python -m experiments.launch -m experiment=fig3a_lr_hmda seed=0 nproc=4      # one seed, on four processes
    python -m experiments.launch task=lr_hmda sorter=cd_grab,d_rr -m             # a sweep of one's own

Complete runs are not repeated, interrupted ones go on where they stopped.
"""

from __future__ import annotations

import sys

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from cdgrab.config import CONFIGS, check_choices, known_names
from cdgrab.errors import CdgrabError
from scripts.launcher import launch

REFUSED = 2
statuses: list[int] = []


@hydra.main(config_path=str(CONFIGS), config_name="config", version_base="1.3")
def launch_one(_: DictConfig) -> None:
    """Hydra expands the sweep; each run composes its own configuration from the overrides, once, for all ranks."""
    statuses.append(launch(list(HydraConfig.get().overrides.task)))
    if statuses[-1] == REFUSED:
        raise SystemExit(REFUSED)  # the other runs of a sweep would be refused for the same reason


def main() -> int:
    """Exit status: that of the first run that failed. A diverged run does not stop a sweep, a refused one does."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(f"{__doc__}\n{known_names()}")
        return 0
    try:
        check_choices([argument for argument in sys.argv[1:] if not argument.startswith("-")])
    except CdgrabError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    launch_one()
    return next((status for status in statuses if status), 0)


if __name__ == "__main__":
    sys.exit(main())
