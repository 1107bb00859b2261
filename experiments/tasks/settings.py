"""What a setting must be. Checks are collected, so that all that is wrong is said at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from omegaconf import DictConfig, OmegaConf

from cdgrab.checks import MOST, count
from cdgrab.errors import CdgrabError

Check = Callable[[str, object], object]  # of a key and its value; raises a CdgrabError


def whole(least: int, most: int = MOST, *, optional: bool = False) -> Check:
    """A whole number; `optional`: or null."""
    return lambda key, value: None if optional and value is None else count(key, value, least, most)


def number(
    *, at_least: float = -math.inf, above: float = -math.inf, below: float = math.inf, optional: bool = False
) -> Check:
    limits = [
        *([f"at least {at_least:g}"] if at_least > -math.inf else []),
        *([f"above {above:g}"] if above > -math.inf else []),
        *([f"below {below:g}"] if below < math.inf else []),
    ]

    def check(key: str, value: object) -> None:
        if optional and value is None:
            return
        sound = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not sound or not (at_least <= value < below and value > above):
            null = "null or " if optional else ""
            raise CdgrabError(f"{key} must be {null}a number {' and '.join(limits)}, got {value!r}")

    return check


def one_of(*allowed: object) -> Check:
    def check(key: str, value: object) -> None:
        if value not in allowed:
            *names, last = (str(name).lower() if isinstance(name, bool) else str(name) for name in allowed)
            raise CdgrabError(f"{key} must be {', '.join(names)} or {last}, got {value!r}")

    return check


flag = one_of(True, False)


def text(key: str, value: object) -> None:
    """Or null."""
    if value is not None and not isinstance(value, str):
        raise CdgrabError(f"{key} must be text, got {value!r}")


def complaints(config: DictConfig, checks: Mapping[str, Check]) -> dict[str, str]:
    """What is wrong, by key; keys may have dots."""
    found = {}
    for key, check in checks.items():
        try:
            check(key, OmegaConf.select(config, key))
        except CdgrabError as error:
            found[key] = str(error)
    return found


def refuse(wrong: list[str]) -> None:
    """One sentence for all complaints."""
    if wrong:
        raise CdgrabError(wrong[0] if len(wrong) == 1 else f"{len(wrong)} settings are wrong: {'; '.join(wrong)}")
