"""MiCRO: ExDyna with equal partitions that never change."""

from __future__ import annotations

from cdgrab.sparsify.exdyna import ExDyna


class MiCRO(ExDyna):
    label = "MiCRO"
    options = tuple(option for option in ExDyna.options if option not in ("rule", "blocks"))

    def __init__(self, *, workers: int, **settings) -> None:
        super().__init__(workers=workers, rule="static", blocks=workers, **settings)
