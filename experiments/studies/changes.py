"""Which settings of a study may change without making its results anew: what is added to them, and what none of them
depends on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from omegaconf import DictConfig

from experiments.studies.verdicts import looks_of

ADDED_TO = ("sorters", "references", "controls", "sparse", "few", "plain", "peers")  # lists of what is trained with


def known_cells(manifest: dict) -> dict:
    """The settings of cells that may have results: those carried out, and others that were before."""
    return manifest.get("left_out", {}) | manifest.get("settings", {}).get("cells", {})


def grown(before: dict, now: DictConfig) -> bool:
    """Whether there are cells, arms or methods now that results were not described by, perhaps made by another
    command."""
    cells = before.get("cells", {})
    added = any(set(now.get(key, ())) - set(before.get(key, ())) for key in ADDED_TO)
    return added or any(cells.get(name) != own for name, own in now.get("cells", {}).items())


def differs(key: str, stored: dict, settings: dict) -> bool:
    """Sorters, methods and seeds may be added, and arms and methods to a cell: every part has one, and the parts of the
    others stay what they are. Cells may be left out besides, and chosen rates differ, by which parts are named: results
    of others are kept for later. How many runs train together changes none of them, nor does a model of no cell."""
    before, now = stored[key], settings[key]
    if key == "seeds":
        return not _looks_again(before, now)
    if key == "order_seeds":  # by model
        return not all(_looks_again(looks, now.get(name, 1)) for name, looks in before.items())
    if key == "cells":
        usual = settings.get("usual", {}).get("arms", ())
        both = ((before[name], now[name]) for name in before.keys() & now.keys())
        seeds = stored.get("seeds"), settings.get("seeds")
        return not all(_has_all_of(*each, usual, seeds) and _has_methods(*each, stored, settings) for each in both)
    if key == "models":
        used = {own.get("model") or own.get("base") for own in stored.get("cells", {}).values()}
        return not all(_same_model(before[name], now.get(name, {})) for name in used & before.keys())
    if key in ("chosen", "replicas"):
        return False
    return not set(before) <= set(now) if key in ADDED_TO else before != now


def _looks_again(before: int | Sequence[int], now: int | Sequence[int]) -> bool:
    """Looks that were taken count: forgetting one would make errors more likely."""
    return looks_of(before) == looks_of(now)[: len(looks_of(before))]


def _same_model(before: dict, now: dict) -> bool:
    """But for seeds that were added."""
    looks = "seeds" in before and "seeds" in now and _looks_again(before["seeds"], now["seeds"])
    return before == now or (looks and before | {"seeds": None} == now | {"seeds": None})


def _has_all_of(before: dict, now: dict, usual: Sequence[str], seeds: tuple) -> bool:
    """Whether a cell is the same but for methods, and for arms and seeds that were added; usual, seeds: those of a cell
    that names none, seeds then and now."""
    arms_before, arms = (set(own.get("arms", usual)) for own in (before, now))
    had, has = (own.get("seeds", of_all) for own, of_all in zip((before, now), seeds, strict=True))
    others = dict.fromkeys(("arms", "methods", "seeds"))
    return before | others == now | others and arms_before <= arms and (had == has or _looks_again(had, has))


def _has_methods(before: dict, now: dict, stored: dict, settings: dict) -> bool:
    """Whether a cell has the methods that it had."""
    had, has = (settings_of.get(methods_name(own), ()) for own, settings_of in ((before, stored), (now, settings)))
    return set(had) <= set(has)


def methods_name(own: Mapping) -> str:
    """The setting that lists the methods of a cell."""
    return own.get("methods", "sparse" if "density" in own else "references")
