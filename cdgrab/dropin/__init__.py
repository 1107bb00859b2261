"""Better example orders in anybody's training script: see `OrderedBatchSampler`."""

from cdgrab.dropin.sampler import OrderedBatchSampler

__all__ = ["OrderedBatchSampler"]
