"""The scoreboard of the report page, from results/PAPER.md."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from experiments.report.page import markup, tags

SMALLER = re.compile(r"--size (?!full\b)\w+")
LEVELS = "Levels"


@dataclass(frozen=True)
class Claim:
    """A line of PAPER.md."""

    where: str
    says: str
    ours: str
    seeds: str
    data: str
    verdict: str
    reason: str
    figure: str  # its name under results/figures; empty: none is drawn
    command: str
    subject: str = ""  # whose claim it is, where the line itself may not say

    @property
    def kind(self) -> str:
        return tags.kind(self.verdict)

    @property
    def tasks(self) -> list[str]:
        return tags.tasks(tags.of_figure(self.where), self.ours, self.where, self.data)

    @property
    def sorters(self) -> list[str]:
        return tags.sorters(f"{self.subject} {self.where} {self.says} {self.ours}")

    @property
    def small(self) -> bool:
        """Whether it rests on a benchmark that was measured at less than full size."""
        return bool(SMALLER.search(self.command))


def claims(page: str) -> dict[str, list[Claim]]:
    """All lines by section."""
    found = {title: markup.rows(text) for title, text in markup.sections(page).items()}
    judged = {title: rows for title, rows in found.items() if rows and "verdict" in rows[0]}
    return {title: [_claim(row, title) for row in rows] for title, rows in judged.items()}


def counts(some: list[Claim]) -> dict[str, int]:
    """How many have which verdict, in the order of the page's colours."""
    found = Counter(claim.verdict for claim in some)
    return {verdict: found[verdict] for verdict in tags.KINDS if found[verdict]}


def _claim(row: dict[str, str], title: str) -> Claim:
    verdict, reason = re.fullmatch(r"\*\*(.+?)\*\*(?:: )?(.*)", row["verdict"]).groups()
    figure = re.search(r"\(figures/(.+)\.png\)", row["figure"])
    return Claim(
        row["where"],
        row["the paper says"],
        row["ours [interval]"],
        row["seeds"],
        row["data"],
        verdict,
        reason,
        figure[1].replace("%20", " ") if figure else "",
        row["command"].strip("`").replace("–", ""),
        "CD-GraB" if row["where"].startswith("overhead") else title if title == "ExDyna" else "",
    )
