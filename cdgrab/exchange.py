"""The mean gradient over all workers: the same bits for every number of processes that is a power of two.

Gradients are summed in a fixed tree over the workers. A process sums its own workers, a branch of the tree; then the
processes' sums meet. Large ones meet coordinate by coordinate: each process gets its share of the coordinates from all
(an all-to-all), sums that, and the shares are gathered, at the traffic of an all-reduce. When every process contributes
the gradient of one unit, what it receives on the way is all that coordinated ordering needs: `Mean.shares`.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from .gradients import GradientFunction
from .workers import GATHERED_BYTES, WorkerGroup


def tree_sum(rows: Tensor) -> Tensor:
    """The sum over the first dimension, by halves, quarters, … as long as the number of rows can be halved."""
    branches = len(rows) & -len(rows)  # the largest power of two that divides it
    leaves = rows.unflatten(0, (branches, -1))
    sums = leaves[:, 0]
    for leaf in range(1, leaves.shape[1]):
        sums = sums + leaves[:, leaf]
    while len(sums) > 1:
        sums = sums[0::2] + sums[1::2]
    return sums[0]


def summed(compute: GradientFunction, workers: int | None) -> Callable[..., tuple[Tensor, ...]]:
    """`compute` with the workers' mean gradients [workers, dim] replaced by their sum [dim], or mean over `workers`."""

    def function(*inputs: Tensor) -> tuple[Tensor, ...]:
        unit_gradients, worker_means, *rest = compute(*inputs)
        total = tree_sum(worker_means)
        return unit_gradients, total if workers is None else total / workers, *rest

    return function


class Mean:
    """The mean gradient [dim] from every process's sum over its workers [dim]."""

    def __init__(self, group: WorkerGroup, dim: int, element_size: int) -> None:
        self.group, self.dim = group, dim
        self.divided = group.world_size > 1 and dim * element_size * group.world_size > GATHERED_BYTES
        self.shares: Tensor | None = None  # [processes, width], this process's coordinates of the last sums

    def __call__(self, local_sum: Tensor) -> Tensor:
        group = self.group
        if not self.divided:
            return tree_sum(group.gather(local_sum[None])) / group.workers
        self.shares = group.shard(local_sum)
        return group.unshard(tree_sum(self.shares) / group.workers, self.dim)
