"""Better example orders in anybody's training script: see `OrderedBatchSampler`."""

from .sampler import OrderedBatchSampler

__all__ = ["OrderedBatchSampler"]
