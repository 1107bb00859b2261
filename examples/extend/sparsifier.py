"""A sparsifier of one's own, Random-k: in every step all workers send the same random coordinates.

    python examples/extend/sparsifier.py task=lr_hmda data=embedded epochs=3 sparsifier.density=0.1

A class with `select`, and a name in SPARSIFIERS. Residuals, the exchange, statistics and checkpoints come with the base
class; so do `self.target`, the number of coordinates that `density` asks for, and `self.iteration`.
"""

import sys

sys.path += [f"{sys.path[0]}/../.."] if __name__ == "__main__" else []  # the root of the clone

import torch
from torch import Tensor

from cdgrab.sparsify import SPARSIFIERS, Sparsifier


class RandomK(Sparsifier):
    label = "Random-k"

    def select(self, accumulated: Tensor) -> list[Tensor]:
        """The coordinates that each of this process's workers sends; accumulated [local workers, dim]."""
        draws = torch.Generator().manual_seed(self.iteration)
        chosen = torch.randperm(self.dim, generator=draws)[: self.target]
        return [chosen.to(accumulated.device)] * len(accumulated)


SPARSIFIERS["random_k"] = RandomK

if __name__ == "__main__":
    from experiments.launch import main

    sys.exit(main(["sparsifier=random_k", *sys.argv[1:]], extension=__file__))
