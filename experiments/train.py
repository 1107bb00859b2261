"""One training run: the torchrun target.

    torchrun --nproc_per_node=4 -m experiments.train task=lr_hmda sorter=cd_grab workers=4 seed=0 task.lr=5e-3
    python -m experiments.train sorter=d_rr epochs=3 data=embedded        # one process hosting all workers

Settings are Hydra overrides (key=value) of configs/config.yaml. The most used:
    task, sorter, sparsifier, size=smoke|quick|paper, workers, seed, epochs, data=auto|embedded, run_dir,
    resume=true|false, device=auto|cpu|cuda, task.lr, task.batch, task.state, sorter.<option>, sparsifier.<option>
"""

from __future__ import annotations

import sys

from experiments import early  # before the imports that take seconds

if __name__ == "__main__":
    early.listen()

from experiments.training import session
from experiments.training.composition import known_names
from experiments.training.config import compose


def main(arguments: list[str] | None = None) -> int:
    """The exit status: 0 done, others as in `session.exit_status`."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if {"-h", "--help"} & set(arguments):
        print(f"{__doc__}\n{known_names()}")
        return 0
    return session.exit_status(lambda: session.carry_out(compose(arguments))[0])


if __name__ == "__main__":
    sys.exit(main())
