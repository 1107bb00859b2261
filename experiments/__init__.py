"""Entry points: `python -m experiments.launch` (sweeps) and `torchrun -m experiments.train` (one run)."""
