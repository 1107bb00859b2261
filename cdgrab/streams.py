"""Random streams, spawned from one seed.

Every random choice is a pure function of (seed, purpose, key), where the key is for instance (worker, epoch). Streams
with different purposes or keys are independent, resuming a run needs no stored generator state, and the outcome cannot
depend on how many processes host the workers or in which order they draw.
"""

from __future__ import annotations

import numpy as np
import torch

# The number of a purpose is part of the stream: never renumber, only append.
PURPOSES = {"split": 0, "partition": 1, "parameters": 2, "order": 3, "walk": 4, "sketch": 5, "study": 6, "report": 7}


def stream(seed: int, purpose: str, *key: int) -> np.random.Generator:
    """The generator of one purpose and key; calling it twice gives the same numbers twice."""
    return np.random.default_rng(np.random.SeedSequence(entropy=seed, spawn_key=(PURPOSES[purpose], *key)))


def permutation(size: int, seed: int, purpose: str, *key: int) -> torch.Tensor:
    """A uniformly random permutation of 0 … size−1 as a LongTensor."""
    return torch.from_numpy(stream(seed, purpose, *key).permutation(size))


def symmetric_uniform(size: int, seed: int, purpose: str, *key: int) -> torch.Tensor:
    """Independent draws from Unif[−1, 1), float64."""
    return torch.from_numpy(stream(seed, purpose, *key).uniform(-1.0, 1.0, size))
