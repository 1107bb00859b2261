"""CD-GraB: coordinated distributed gradient balancing, as a library and a reproduction suite."""

from . import herding, sparsify
from .dropin import OrderedBatchSampler
from .errors import CdgrabError
from .sorters import SORTERS, make_sorter
from .sparsify import SPARSIFIERS, make_sparsifier

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
