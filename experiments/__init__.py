"""The suite. Entry points: `python -m experiments.launch` (runs and sweeps), `torchrun -m experiments.train` (one run)
and `python -m experiments.study` (studies)."""
