"""CD-GraB, coordinated distributed gradient balancing: orders of training examples that are better than random ones.

In a training script, alone or with DistributedDataParallel or fully_shard:

    sampler = cdgrab.OrderedBatchSampler(dataset, batch_size=32, sorter="cd_grab", seed=0)
    loader = DataLoader(dataset, batch_sampler=sampler)      # no batch_size, shuffle or sampler beside it
    sampler.attach(model)                                    # last: the model is on its device, and wrapped

Then train as ever: one backward pass per batch. help(cdgrab.OrderedBatchSampler) has the rest.

    OrderedBatchSampler              orders for anybody's training script
    make_sorter, SORTERS             orders for a training loop that computes gradients of single units itself
    make_sparsifier, SPARSIFIERS     sparse gradients; sparsify.ddp_hook sends them with DistributedDataParallel
    herding                          how well an order balances vectors
    CdgrabError                      raised for bad input, with a sentence that says what to do
"""

from cdgrab import herding, sparsify
from cdgrab.dropin import OrderedBatchSampler
from cdgrab.errors import CdgrabError
from cdgrab.sorters import SORTERS, make_sorter
from cdgrab.sparsify import SPARSIFIERS, make_sparsifier

__version__ = "0.1.0"
__all__ = [
    "SORTERS",
    "SPARSIFIERS",
    "CdgrabError",
    "OrderedBatchSampler",
    "herding",
    "make_sorter",
    "make_sparsifier",
    "sparsify",
]
