"""CD-GraB: coordinated distributed gradient balancing. The library; the suite is `experiments`."""

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
