"""CD-GraB: coordinated distributed gradient balancing, as a library and a reproduction suite."""

from . import herding
from .errors import CdgrabError
from .sorters import SORTERS, make_sorter

__version__ = "0.1.0"
__all__ = ["SORTERS", "CdgrabError", "herding", "make_sorter"]
