"""Training over links with a delay: the benchmark `link` over others, of 1 Gbit/s. Its rows stand by themselves, with a
manifest of their own: they may be from another day and another version.

Where the kernel has no `netem`, a process delays what is sent (`delay_line`), and takes part of the cores from those
that train. So the shortest delay is next to none: what its rows have beyond those of a link without is the process
itself. Rows also have the seconds of a processor that it takes per step, and the round trip that was found between two
hosts when nothing else was sent.
"""

from __future__ import annotations

from collections.abc import Iterator

from scripts.bench import link

LINKS = {"smoke": ((1.0, 1.0),), "quick": ((1.0, 1.0),), "full": ((1.0, 0.001), (1.0, 0.1), (1.0, 1.0))}
describe = link.describe


def measure(device: str, size: str) -> Iterator[dict]:
    yield from link.over(LINKS[size], device, size)
