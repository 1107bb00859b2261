"""The mean gradient over all workers: the same bits for every number of processes that is a power of two.

Gradients are summed in a fixed tree over the workers. A process sums its own workers, a branch of the tree; then the
sums of the processes are added. Long ones are divided by coordinates: each process receives its coordinates of all sums
(an all-to-all), adds them, and the results are gathered. That is the traffic of an all-reduce. If every process
contributes the gradient of one unit, what it receives on the way is all that coordinated ordering needs: the shard.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cdgrab.runtime.group import WorkerGroup


def tree_sum(rows: Tensor, out: Tensor | None = None) -> Tensor:
    """The sum over the first dimension, as a binary tree as far as the number of rows can be halved. out: where the
    result goes."""
    branches = len(rows) & -len(rows)  # the largest power of two that divides it
    leaves = rows.unflatten(0, (branches, -1))
    sums = leaves[:, 0]
    for leaf in range(1, leaves.shape[1]):
        sums = sums + leaves[:, leaf]
    while len(sums) > 2:
        sums = sums[0::2] + sums[1::2]
    if len(sums) == 2:
        return torch.add(sums[0], sums[1], out=out)
    return sums[0] if out is None else out.copy_(sums[0])


def mean_of_rows(rows: Tensor, out: Tensor) -> Tensor:
    """The mean over the first dimension of rows [n, dim], by `tree_sum`, written to out [dim]."""
    return tree_sum(rows, out=out).div_(len(rows))


class Averager:
    """The mean gradient over all workers, from every process's sum over its own workers.

    wire: the type in which numbers are sent, if not their own; they are summed in their own type.
    """

    def __init__(self, group: WorkerGroup, dim: int, *, wire: torch.dtype | None = None) -> None:
        self.group, self.dim, self.wire = group, dim, wire

    def average(self, local_sum: Tensor, want_shard: bool = False) -> tuple[Tensor, Tensor | None]:
        """The mean [dim] over all workers; local_sum [dim]: the sum over this process's own. With `want_shard`, if
        coordinates are divided, also this process's coordinates of all processes' sums, [processes, width]; else
        None."""
        group, own, wire = self.group, local_sum.dtype, self.wire or local_sum.dtype
        if not group.divides(self.dim):
            return tree_sum(group.gather(local_sum[None].to(wire)).to(own)) / group.workers, None
        shard = group.shard(local_sum.to(wire)).to(own)
        mean = group.unshard((tree_sum(shard) / group.workers).to(wire), self.dim).to(own)
        return mean, shard if want_shard else None
