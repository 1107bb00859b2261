"""Studies as cards, from results/STUDIES.md: questions, verdicts and figures."""

from __future__ import annotations

import re
from collections.abc import Iterator

from markupsafe import Markup

from experiments.report.page import markup, tags
from experiments.report.page.card import Card, commits, hours, machines, saved_table
from experiments.report.page.pictures import pictures
from experiments.store.files import RESULTS
from experiments.store.records import read_manifest


def cards(page: str) -> Iterator[Card]:
    """The sections of STUDIES.md, but those of trials."""
    for heading, text in markup.sections(page).items():
        made = re.search(r"size (\S+) · ", text)
        if heading and made and re.fullmatch(r"paper\b.*", made[1]):
            yield _study(heading.partition(":")[0], heading.partition(": ")[2], text, made[1])


def _study(name: str, title: str, text: str, size: str) -> Card:
    manifest = read_manifest(RESULTS / "studies" / name / size)
    question, _, below = text.partition("\n|")
    caption = next(line for line in below.splitlines() if f"size {size} · " in line)
    about = list(manifest.get("data", {})) or [tags.NO_TASK]
    lines = [_line(row, about) for row in markup.rows(text)]
    suffix = f"-{size}".removeprefix("-paper")
    names = sorted(path.stem for path in (RESULTS / "figures").glob(f"study_{name}*{suffix}.png"))
    names = [one for one in names if re.fullmatch(rf"study_{name}(_[\w.]+)?{re.escape(suffix)}", one)]
    made = [*manifest.get("earlier", ()), manifest]
    return Card(
        f"study_{name}{suffix}",
        title[:1].upper() + title[1:],
        about,
        sorted({sorter for line in lines for sorter in line["sorters"]}),
        {
            "data": " and ".join(some["description"] for some in manifest.get("data", {}).values()) or "made up",
            "seeds": re.search(r"(\d+) seeds?\b", caption)[1],
            "machine": machines(made),
            "computing time": hours(float(re.search(r"(\d+) s · ", caption)[1])),
            "commit": commits(made),
        },
        manifest["ended"],
        f"make study-{name.replace('_', '-')} SIZE=paper",
        markup.html(question),
        Markup("").join(map(saved_table, names)),
        pictures(names, title),
        lines=lines,
    )


def _line(row: dict[str, str], about: list[str]) -> dict[str, object]:
    verdict, tasks = markup.plain(row["verdict"]), tags.tasks(row["claim"])
    return row | {
        "verdict": verdict,
        "kind": tags.kind(verdict),
        "tasks": about if tasks == [tags.NO_TASK] else tasks,
        "sorters": tags.sorters(row["claim"]),
    }
