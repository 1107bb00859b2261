"""A card of the report page: something with a heading, facts about how it was made, and what it shows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from markupsafe import Markup

from experiments.report.page import markup
from experiments.report.page.curves import Panel
from experiments.report.page.pictures import Picture
from experiments.report.text import plural
from experiments.store.files import RESULTS


@dataclass(frozen=True)
class Card:
    name: str
    title: str
    tasks: list[str]
    sorters: list[str]
    facts: dict[str, str]
    ended: str  # when the newest of its results did
    command: str = ""
    about: Markup = Markup("")
    tables: Markup = Markup("")
    pictures: list[Picture] = field(default_factory=list)
    columns: dict[str, dict[str, list[Panel]]] = field(default_factory=dict)  # panels by column and view
    lines: list[dict[str, object]] = field(default_factory=list)  # verdicts of a study


def saved_table(name: str) -> Markup:
    """The table that was saved beside a figure."""
    path = RESULTS / "figures" / f"{name}.md"
    return markup.html(path.read_text()) if path.exists() else Markup("")


def machines(manifests: Iterable[dict]) -> str:
    return "; ".join(dict.fromkeys(map(_machine, manifests)))


def commits(manifests: Iterable[dict]) -> str:
    return ", ".join(dict.fromkeys(manifest.get("commit") or "unknown" for manifest in manifests))


def hours(seconds: float) -> str:
    return f"{seconds / 3600:.2g} h" if seconds >= 360 else f"{seconds / 60:.2g} min"


def _machine(manifest: dict) -> str:
    device, host = manifest.get("device", "cpu"), manifest.get("host", {})
    if device != "cpu":
        return device
    return f"{host['cpu']}, {plural(host['cores'], 'core')}" if host else "unknown"
