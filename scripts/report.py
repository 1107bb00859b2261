"""One table of everything under results/runs but trials, CD-GraB against D-RR: results/REPORT.md (`make report`)."""

from __future__ import annotations

import sys

from experiments.early import exit_status
from experiments.report import readme, tables
from experiments.report.published import PUBLISHED
from experiments.report.runs import Group
from experiments.report.text import markdown
from experiments.store.files import RESULTS, ROOT


def main() -> int:
    return exit_status(write)


def write() -> int:
    rows = []
    for experiment in PUBLISHED:
        folders = sorted((RESULTS / "runs").glob(f"*/{experiment}/*/"))
        found = [group for group in map(Group, folders) if group.manifests and not group.trial]
        rows += tables.comparison(experiment, found)
    if not rows:
        print(f"error: no finished runs of CD-GraB and D-RR under {RESULTS / 'runs'}", file=sys.stderr)
        return 1
    page = ROOT / "README.md"
    page.write_text(readme.filled(page.read_text()))
    path = RESULTS / "REPORT.md"
    path.write_text(f"# CD-GraB against D-RR\n\n{tables.HEADNOTE}\n\n{markdown(rows)}\n")
    print(path.read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
