"""A sorter of one's own: units whose gradients were long in the last epoch come first in the next.

    python examples/extend/sorter.py task=lr_hmda data=embedded epochs=3

A class with `next_order`, and `look` because it looks at gradients, and a name in SORTERS. What it keeps in attributes
is saved with a run and divided between processes by itself: here `norms`, whose first dimension is the workers hosted
by this process. `import sorter` elsewhere makes the name known there, for instance to `experiments.study`.
"""

import sys

import torch
from torch import Tensor

from cdgrab.sorters import SORTERS, Sorter


class LongestFirst(Sorter):
    label = "Longest first"  # in figures and tables
    options = ("initial",)  # of the base class: what the first order is

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.norms = torch.zeros(self.local_workers, self.units, dtype=torch.float64)

    def look(self, gradients: Tensor) -> None:
        """Gradients [local workers, k, dim] of the next k units of this epoch's order."""
        self.norms[:, self.position : self.position + gradients.shape[1]] = gradients.double().norm(dim=2)

    def next_order(self, epoch: int) -> Tensor:
        """[local workers, units]"""
        if epoch == 0:
            return self.first_order()
        return self.current.gather(1, self.norms.argsort(dim=1, descending=True, stable=True))


SORTERS["longest_first"] = LongestFirst

if __name__ == "__main__":
    from experiments.train import main

    sys.exit(main(["sorter=longest_first", *sys.argv[1:]]))
