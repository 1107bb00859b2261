"""Checks of settings. Complaints are collected, so that everything wrong is reported at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from omegaconf import DictConfig, ListConfig, OmegaConf

from cdgrab import checks
from cdgrab.errors import CdgrabError

Check = Callable[[str, object], object]  # of a key and its value; raises a CdgrabError


def whole(least: int, most: int = checks.MOST, *, optional: bool = False) -> Check:
    """A whole number; `optional`: or null."""
    return lambda key, value: None if optional and value is None else checks.count(key, value, least, most)


def whole_numbers(least: int) -> Check:
    """A list of whole numbers, which may be empty."""

    def check(key: str, value: object) -> None:
        if not isinstance(value, ListConfig):
            raise CdgrabError(f"{key} must be a list of whole numbers, got {value!r}")
        for one in value:
            checks.count(key, one, least)

    return check


def number(*, optional: bool = False, **limits: float) -> Check:
    """A number within the limits, as for `checks.number`; `optional`: or null."""
    if optional:
        limits["or_else"] = "null or "
    return lambda key, value: None if optional and value is None else checks.number(key, value, **limits)


def one_of(*allowed: object) -> Check:
    return lambda key, value: checks.one_of(key, value, allowed)


flag = one_of(True, False)
limit = whole(1, optional=True)  # at most this many; null: all
share = number(above=0.0, below=1.0)


def text(key: str, value: object) -> None:
    """Text, or null."""
    if value is not None and not isinstance(value, str):
        raise CdgrabError(f"{key} must be text, got {value!r}")


def folder_name(key: str, value: object) -> None:
    """Text that names a folder, and none elsewhere."""
    if not isinstance(value, str) or not value:
        raise CdgrabError(f"{key} must be text, got {value!r}")
    if "/" in value or value in (".", "..") or not value.isprintable():
        raise CdgrabError(f"{key} must be the name of a folder, got {value!r}")


def by_size(key: str, value: object) -> None:
    """A table of what `make reproduce-<task>` does by size; a single run has no use for it."""
    if not isinstance(value, DictConfig):
        raise CdgrabError(f"{key} must be given by size, such as {key}.quick, got {value!r}")


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
