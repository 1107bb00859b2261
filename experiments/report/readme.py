"""Tables of README.md that are computed from results/, each between `<!-- results: name -->` and `<!-- end -->`."""

from __future__ import annotations

import re
from collections.abc import Callable

from cdgrab.errors import CdgrabError
from experiments.report import costs

TABLES: dict[str, Callable[[], str]] = {"costs": costs.table}
MARKED = re.compile(r"^( *)<!-- results: (\S+) -->$.*?^ *<!-- end -->$", re.M | re.S)


def filled(page: str) -> str:
    """The page with its tables computed anew."""
    return MARKED.sub(_block, page)


def _block(found: re.Match) -> str:
    indent, name = found.groups()
    if name not in TABLES:
        raise CdgrabError(f"README.md wants the results {name!r}; there are {', '.join(TABLES)}")
    lines = [f"<!-- results: {name} -->", *map(_narrow, TABLES[name]().splitlines()), "<!-- end -->"]
    return "\n".join(indent + line for line in lines)


def _narrow(line: str) -> str:
    """A table's line without padding, which long cells make very wide."""
    return re.sub(r"-{2,}", "---", re.sub(r" +\|", " |", line))
