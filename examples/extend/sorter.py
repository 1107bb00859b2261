"""A sorter of one's own: units whose gradients were long in the last epoch come first in the next.

    python examples/extend/sorter.py task=lr_hmda data=embedded epochs=3

A class with `next_order`, and `look` because it looks at gradients, and a name in SORTERS. What it keeps in attributes
is saved with a run; `per_worker` names what is divided between processes with the workers. CDGRAB_EXTEND makes the
sorter known to every command, for instance to the study of all sorters:

    make study-sorters SORTERS=d_rr,cd_grab,longest_first CDGRAB_EXTEND=examples/extend/sorter.py
"""

import sys

sys.path += [f"{sys.path[0]}/../.."] if __name__ == "__main__" else []  # the root of the clone

import torch
from torch import Tensor

from cdgrab.sorters import SORTERS, Sorter


class LongestFirst(Sorter):
    label = "Longest first"  # in figures and tables
    options = ("initial",)  # of the base class: what the first order is
    per_worker = ("norms",)  # has a row for each worker that this process hosts

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
    from experiments.launch import main

    sys.exit(main(["sorter=longest_first", *sys.argv[1:]], extension=__file__))
