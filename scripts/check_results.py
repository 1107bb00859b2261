"""Do notebooks, tables, PAPER.md, STUDIES.md, README.md and docs/ say what results/ says? `make check-results`.

What is computed from results/ is computed again, without drawing, and compared word by word; tests look only at what
is quick. Numbers in the prose of README.md and docs/ must occur in the tables that their passages refer to: see
`experiments.report.quoted`.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from experiments.early import exit_status
from experiments.report import pages, plots, quoted, scoreboard
from experiments.report.claims import FIGURES
from experiments.report.notebook import FOLDER
from experiments.report.runs import groups, sweeps
from experiments.store.files import RESULTS, ROOT
from experiments.studies.collection import collection, stored
from experiments.training.composition import choices
from scripts.report import paper

MANIFESTS = ("runs/**/manifest.json", "studies/**/manifest.json", "bench/*.meta.json")
CLEAN = re.compile(r"[0-9a-f]{7,40}")


def main() -> int:
    return exit_status(check)


def check() -> int:
    found = [*quick(), *collected(), *notebooks()]
    for complaint in found:
        print(complaint, file=sys.stderr)
    return int(bool(found))


def quick() -> Iterator[str]:
    """What takes no long computation."""
    for path in pages.files():
        name, page = path.relative_to(ROOT).as_posix(), path.read_text()
        yield from differences(name, page, pages.filled(page), "make report")
        yield from prose(name, page)
    yield from scoreboard_in_part()
    yield from captions()
    yield from commits()


def scoreboard_in_part() -> Iterator[str]:
    """Lines of PAPER.md that take no runs and no studies to compute."""
    written = (RESULTS / "PAPER.md").read_text().splitlines()
    for line in scoreboard.lines_without_runs():
        if line not in written:
            yield f"results/PAPER.md has no line {line!r} (`make report` makes it anew)"


def commits() -> Iterator[str]:
    """Results whose code nobody can read: made outside a checkout, or with changes that were not committed."""
    for path in [path for where in MANIFESTS for path in sorted(RESULTS.glob(where))]:
        content = json.loads(path.read_text())
        for manifest in content.values() if path.name.endswith(".meta.json") else [content]:
            made = (one["commit"] for one in (*manifest.get("earlier", ()), manifest))
            for commit in dict.fromkeys(commit or "unknown" for commit in made):
                if not CLEAN.fullmatch(commit):
                    yield f"{path.relative_to(RESULTS.parent)}: its commit is {commit}; make it anew from a clean one"


def captions() -> Iterator[str]:
    """Captions name seeds and commits of all runs: they tell whether a notebook or STUDIES.md was made of those that
    are there now. What somebody has run with other settings, and not drawn, is left alone."""
    for figure in {figure.experiment: figure for figure in FIGURES}.values():
        told = shown(code_cells(FOLDER / f"{figure.experiment}.ipynb"))
        found = groups(figure.source)
        if columns := found[0].columns:
            found = sweeps(figure.source, columns)
        for runs in found:
            drawn = (RESULTS / "figures" / f"{figure.experiment}-{runs.source}.png").exists()
            if drawn and runs.caption() not in told:
                yield f"notebooks/{figure.experiment}.ipynb (`make figures`) is of other runs than “{runs.caption()}”"
    page = (RESULTS / "STUDIES.md").read_text()
    for name in choices("study"):
        told = shown(code_cells(FOLDER / f"study_{name}.ipynb"))
        for caption in (study.caption() for study in stored(name) if "," not in study.directory.name):
            if caption not in page or caption not in told:
                yield f"study {name}: its notebook or STUDIES.md (`make figures report`) is of others than “{caption}”"


def collected() -> Iterator[str]:
    yield from differences("results/PAPER.md", (RESULTS / "PAPER.md").read_text(), paper(), "make report")
    yield from differences("results/STUDIES.md", (RESULTS / "STUDIES.md").read_text(), collection(), "make report")


def notebooks() -> Iterator[str]:
    """What notebooks show in words, the tables that they save, and figures that none of them draws."""
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, CDGRAB_FIGURES=folder):
        for path in sorted(FOLDER.glob("*.ipynb")):
            cells = code_cells(path)
            if not any(
                cell["outputs"] for cell in cells
            ):  # of a study without results; `captions` knows those that are
                continue
            yield from differences(f"notebooks/{path.name}", shown(cells), computed(cells), "make figures")
        made, kept = Path(folder), RESULTS / "figures"
        for name in sorted({path.name for some in (made, kept) for path in some.iterdir()}):
            if not (kept / name).exists() or not (made / name).exists():
                yield f"results/figures/{name}: " + ("no notebook makes it" if (kept / name).exists() else "is missing")
            elif name.endswith(".md"):
                texts = ((some / name).read_text() for some in (kept, made))
                yield from differences(f"results/figures/{name}", *texts, "make figures")


def prose(name: str, page: str) -> Iterator[str]:
    """Numbers of passages that refer to results, and are not in these."""
    for passage in quoted.passages(pages.MARKED.sub("", page)):
        sources = "\n".join(_texts(**quoted.references(passage)))
        if sources and (lost := quoted.missing(passage, sources)):
            begin = " ".join(passage.split())[:60]
            yield f"{name}, “{begin} …”: its tables have no {', '.join(lost)}"


def _texts(notebooks: list[str], benchmarks: list[str]) -> Iterator[str]:
    """What notebooks show, lines of PAPER.md about their figures, and rows of benchmarks."""
    paper = (RESULTS / "PAPER.md").read_text().splitlines()
    for name in notebooks:
        yield shown(code_cells(FOLDER / f"{name}.ipynb"))
        yield from (line for line in paper if f"/{name}-" in line or f"/{name}." in line)
    yield from ((RESULTS / "bench" / f"{name}.json").read_text() for name in benchmarks)


def code_cells(path: Path) -> list[dict]:
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


def shown(cells: list[dict]) -> str:
    """The Markdown that a notebook's cells have displayed."""
    outputs = (output.get("data", {}) for cell in cells for output in cell["outputs"])
    return "\n".join("".join(data["text/markdown"]) for data in outputs if "text/markdown" in data)


def computed(cells: list[dict]) -> str:
    """The Markdown that a notebook's cells display now."""
    texts, names = [], {}
    with plots.words_only(), mock.patch("IPython.display.display", lambda shown: texts.append(shown.data)):
        for cell in cells:
            exec("".join(cell["source"]), names)
    return "\n".join(texts)


def differences(name: str, written: str, computed: str, command: str) -> Iterator[str]:
    """One sentence about the first line that is not as computed."""
    both = written.splitlines(), computed.splitlines()
    for number in range(max(map(len, both))):
        old, new = (lines[number].strip() if number < len(lines) else "" for lines in both)
        if old != new:
            yield f"{name} does not agree with results/ (`{command}` makes it anew): {old!r} should be {new!r}"
            return


if __name__ == "__main__":
    sys.exit(main())
