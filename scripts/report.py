"""What all results say (`make report`): the papers' claims beside ours in results/PAPER.md, the verdicts of studies in
results/STUDIES.md, the tables of README.md and docs/, everything under results/runs but trials in one table,
results/REPORT.md, and all of it on one page to look at closely, results/report/index.html. Sweeps of one's own get
their tables and figures under results/trial/figures."""

from __future__ import annotations

import sys

from experiments import screen  # before the imports that take seconds

if __name__ == "__main__":
    screen.begin()

from cdgrab.errors import CdgrabError
from experiments.early import exit_status
from experiments.report import own, pages, scoreboard, tables
from experiments.report.page import build
from experiments.report.published import PUBLISHED
from experiments.report.runs import Group
from experiments.report.study_claims import STUDIES
from experiments.report.text import markdown, show
from experiments.store.files import RESULTS, ROOT, write_atomically
from experiments.studies.collection import finished, verdicts, write_collection


def main() -> int:
    return exit_status(write)


def write() -> None:
    rows = []
    with screen.doing("reading all runs"):
        for experiment in PUBLISHED:
            folders = sorted((RESULTS / "runs").glob(f"*/{experiment}/*/"))
            found = [group for group in map(Group, folders) if group.manifests and not group.trial]
            rows += tables.comparison(experiment, found)
    if not rows:
        raise CdgrabError(f"no finished runs of CD-GraB and D-RR under {RESULTS / 'runs'}")
    report = f"# CD-GraB against D-RR\n\n{tables.HEADNOTE}\n\n{markdown(rows)}\n"
    write_atomically(RESULTS / "REPORT.md", report)
    with screen.doing("judging every claim"):
        write_atomically(RESULTS / "PAPER.md", paper())
        write_collection()
    with screen.doing("writing the pages"):
        for page in pages.files():
            write_atomically(page, pages.filled(page.read_text()))
        written = [build.write(build.collected()), *own.write()]
    show(report)
    print(*(path.relative_to(ROOT) for path in written), sep="\n")


def paper() -> str:
    """results/PAPER.md as results/ says it now."""
    studies = {}
    for name in STUDIES:
        for study in [study for study in finished(name) if study.size == "paper" and not study.embedded][:1]:
            lines = {verdict.claim: verdict for verdict in verdicts(study)}
            data = " and ".join(source["description"] for source in study.data.values())
            studies[name] = scoreboard.Study(lines, study.figure_name(), data)
    return scoreboard.page(studies)


if __name__ == "__main__":
    sys.exit(main())
