"""Collects what the page shows and writes it into one file: results/report/index.html."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections import Counter
from hashlib import sha256
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from experiments.report.page import bench_cards, claims, curves, markup, run_cards, study_cards, tags
from experiments.report.page.card import Card
from experiments.store.files import RESULTS, write_atomically

TEMPLATE = Path(__file__).with_name("template")
PAGE = Path("report") / "index.html"


def write(page: dict[str, object]) -> Path:
    path = RESULTS / PAGE
    path.parent.mkdir(exist_ok=True)
    write_atomically(path, rendered(page))
    return path


def collected() -> dict[str, object]:
    """What the page shows, from PAPER.md, STUDIES.md, runs/, studies/ and bench/ under results/; never trials."""
    paper = (RESULTS / "PAPER.md").read_text()
    found = claims.claims(paper)
    sections = {title: kept for title, some in found.items() if (kept := [one for one in some if not one.small])}
    lines = [claim for some in sections.values() for claim in some]
    groups, benchmarks = list(run_cards.cards()), list(bench_cards.cards())
    studies = list(study_cards.cards((RESULTS / "STUDIES.md").read_text()))
    parts = markup.sections(paper)
    return {
        "sections": sections,
        "total": len(lines),
        "left_out": sum(map(len, found.values())) - len(lines),
        "all": claims.counts(lines),
        "rules": _rules(parts[""]),
        "levels": markup.html(parts.get(claims.LEVELS, "")),
        "groups": groups,
        "studies": studies,
        "benchmarks": benchmarks,
        "smaller": bench_cards.smaller(),
        "lines": lines,
        **_choices([*lines, *groups, *benchmarks], studies),
        "until": max((card.ended[:10] for card in (*groups, *studies, *benchmarks)), default="–"),
    }


def rendered(page: dict[str, object]) -> str:
    """The page as one file that loads nothing else."""
    own = Environment(loader=FileSystemLoader(TEMPLATE), autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    by_figure: dict[str, list[claims.Claim]] = {}
    for claim in page["lines"]:
        by_figure.setdefault(claim.figure, []).append(claim)

    def about(card: Card) -> list[claims.Claim]:
        return [claim for name in (card.name, *(p.name for p in card.pictures)) for claim in by_figure.get(name, ())]

    every = [*page["groups"], *page["studies"], *page["benchmarks"]]
    anchors = {card.name: _anchor(card.name) for card in every}
    anchors |= {picture.name: anchors[card.name] for card in every for picture in card.pictures}
    curves_of = {card.name: _numbers(card) for card in page["groups"]}
    files = {name: Markup((TEMPLATE / file).read_text()) for name, file in FILES.items()}
    return own.get_template("page.html").render(
        **page,
        **files,
        data=Markup(json.dumps(curves_of, separators=(",", ":"), ensure_ascii=False).replace("<", r"\u003c")),
        policy=_policy(files),
        digits=curves.DIGITS,
        kinds={verdict: tags.kind(verdict) for verdict in tags.KINDS},
        anchors=anchors,
        counts=claims.counts,
        counts_of=lambda card: claims.counts(about(card)),
        kinds_of=lambda card: sorted({claim.kind for claim in about(card)}),
        verdicts_of=lambda card: dict(Counter(line["verdict"] for line in card.lines).most_common()),
    )


FILES = {"css": "page.css", "theme": "theme.js", "chart": "chart.js", "script": "page.js"}


def _policy(files: dict[str, str]) -> str:
    """What a browser may do for this page: run its own scripts, and load nothing."""
    scripts = [text.encode() for name, text in files.items() if FILES[name].endswith(".js")]
    known = " ".join(f"'sha256-{b64encode(sha256(script).digest()).decode()}'" for script in scripts)
    return f"default-src 'none'; script-src {known}; style-src 'unsafe-inline'; img-src data:"


def _choices(items: list, studies: list[Card]) -> dict[str, dict[str, str]]:
    lines = [line for study in studies for line in study.lines]
    tasks = {t for item in items for t in item.tasks} | {t for line in lines for t in line["tasks"]}
    sorters = {s for item in items for s in item.sorters} | {s for line in lines for s in line["sorters"]}
    return {
        "task_choices": tags.task_choices(tasks),
        "sorter_choices": tags.sorter_choices(sorters),
        "verdict_choices": tags.CHOICES,
    }


def _rules(head: str) -> Markup:
    """What PAPER.md says before its first table, without its title."""
    return markup.html(head.partition("\n")[2].partition("\n|")[0])


def _numbers(card: Card) -> dict[str, object]:
    return {
        column: {view: [panel.numbers() for panel in panels] for view, panels in views.items()}
        for column, views in card.columns.items()
    }


def _anchor(name: str) -> str:
    return re.sub(r"[^\w.-]+", "-", name)
