"""Which units a worker owns when the workers' data differ: shares of classes are drawn from a Dirichlet distribution
(Hsu, Qi, Brown 2019, arXiv 1909.06335), but all workers get equally many units."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from cdgrab import streams
from cdgrab.sparsify.partitions import whole_numbers


def label_skewed(labels: Tensor, workers: int, units: int, alpha: float, permutation: Tensor, seed: int) -> Tensor:
    """LongTensor [workers, units], no unit twice: every worker gets its own mix of classes.

    The mix that a worker asks for is drawn from a Dirichlet distribution, whose mean is the mix of all data and whose
    concentration is alpha × classes (alpha per class if classes are equally frequent). With a large alpha every worker
    gets the mix of all data, with a small one few classes. Within a class, `permutation` decides who gets which units.
    """
    classes, sizes = np.unique(labels.numpy(), return_counts=True)
    wanted = dirichlet(alpha * sizes / sizes.mean(), workers, streams.stream(seed, "partition", 1))
    counts = class_counts(wanted, sizes, units)
    by_class = [permutation[labels[permutation] == label] for label in classes.tolist()]
    columns = np.vstack([counts, sizes - counts.sum(0)]).T.tolist()  # the last row: units that no worker gets
    dealt = [of_one.split(column) for of_one, column in zip(by_class, columns, strict=True)]
    place = torch.empty_like(permutation)
    place[permutation] = torch.arange(len(permutation))
    owned = [torch.cat([of_one[worker] for of_one in dealt]) for worker in range(workers)]
    return torch.stack([mine[place[mine].argsort()] for mine in owned])  # classes mixed as in the permutation


def dirichlet(concentrations: np.ndarray, rows: int, draws: np.random.Generator) -> np.ndarray:
    """[rows, classes], every row one draw. Works also for concentrations so small that gamma variables underflow.

    Computed in logarithms, with gamma(a) = gamma(a + 1) · uniform^(1/a).
    """
    shape = (rows, len(concentrations))
    logarithms = np.log(draws.gamma(concentrations + 1, size=shape)) + np.log(draws.random(shape)) / concentrations
    return np.exp(logarithms - np.logaddexp.reduce(logarithms, axis=1, keepdims=True))


def class_counts(wanted: np.ndarray, sizes: np.ndarray, units: int) -> np.ndarray:
    """How many units of each class a worker gets, [workers, classes]: rows sum to `units`, columns to at most `sizes`.

    wanted [workers, classes] are shares. If the workers ask for more of a class than there is, it is divided in
    proportion to what they ask for; workers that got too few choose again among the remaining classes.
    """
    counts = np.zeros(wanted.shape, dtype=np.int64)
    while (open_units := units - counts.sum(1)).any():
        left = sizes - counts.sum(0)
        shares = np.where(left > 0, wanted, 0.0)
        hopeless = shares.sum(1) <= 0  # its classes are used up: it takes any that remain
        shares[hopeless] = left
        asked = np.stack([apportion(row, total) for row, total in zip(shares, open_units, strict=True)])
        for label in np.flatnonzero(asked.sum(0) > left):
            asked[:, label] = apportion(asked[:, label], left[label])
        counts += asked
    return counts


def class_shares(owned: Tensor, labels: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """The actual mix of classes of each worker, [workers, classes], and the mix of all data, [classes]."""
    classes, overall = np.unique(labels.numpy(), return_counts=True)
    counts = (labels[owned].numpy()[..., None] == classes).sum(1)
    return counts / owned.shape[1], overall / len(labels)


def apportion(shares: np.ndarray, total: int) -> np.ndarray:
    """`total` divided into whole numbers in proportion to `shares`, by largest remainders."""
    return whole_numbers(total * shares / shares.sum() if total else np.zeros(len(shares)), total)
