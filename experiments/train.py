"""One training run: the torchrun target.

    torchrun --nproc_per_node=4 -m experiments.train task=lr_hmda sorter=cd_grab workers=4 seed=0 task.lr=5e-3
    python -m experiments.train sorter=d_rr epochs=3 data=embedded        # one process hosting all workers

Settings are Hydra overrides (key=value) of configs/config.yaml. The most used:
    task, sorter, sparsifier, size=smoke|quick|paper, workers, seed, epochs, data=auto|embedded, run_dir,
    resume=true|false, device=auto|cpu|cuda, task.lr, task.batch, task.state, sorter.<option>, sparsifier.<option>
"""

from __future__ import annotations

import os
import sys

from experiments import early, screen  # before the imports that take seconds

if __name__ == "__main__":
    early.listen()
    screen.begin()

from experiments.training import session
from experiments.training.composition import known_names
from experiments.training.config import compose
from experiments.training.progress import VARIABLE, Progress, result


def main(arguments: list[str] | None = None) -> int:
    """The exit status: 0 done, others as in `session.exit_status`."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if {"-h", "--help"} & set(arguments):
        print(f"{__doc__}\n{known_names()}")
        return 0
    return session.exit_status(lambda: _main(arguments))


def _main(arguments: list[str]) -> int:
    run = compose(arguments)
    status = session.carry_out(run, progress=Progress.told())[0]
    if not os.environ.get(VARIABLE) and int(os.environ.get("RANK", 0)) == 0:  # else the launcher says it
        print(result(run, str(run.directory)), flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
