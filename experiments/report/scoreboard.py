"""results/PAPER.md: every claim of the papers beside what came of it here, computed from results/ and nothing else."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from experiments.report import bench_claims, curve_claims, figures_link
from experiments.report.claims import FIGURES, FROM_THEIR_WEIGHTS, NEGLIGIBLE, Figure
from experiments.report.curve_claims import Runs
from experiments.report.judging import CONTRADICTED, IMPOSSIBLE, REPRODUCED, UNDECIDED, VERDICTS, Evidence, Row, judged
from experiments.report.names import PUBLISHED_SORTERS, metric_label
from experiments.report.published import half_bands, published
from experiments.report.runs import Group
from experiments.report.statistics import SAME_LOSS, against
from experiments.report.study_claims import EXDYNA, FIGURE_10, THEORY, Studied, is_about_published_rules, with_lines
from experiments.report.tables import ends, mean_std, papers_end
from experiments.report.text import markdown, narrow, plural
from experiments.store.files import RESULTS

ANSWERS = {"holds": REPRODUCED, "fails": CONTRADICTED, "equal": CONTRADICTED, "undecided": UNDECIDED}  # of studies
SPEED = Row(
    "speed",
    "training is faster than with other sparsifiers, on a cluster of GPUs",
    IMPOSSIBLE,
    "there is one GPU, and no network to spare",
)
HEAD = f"""# The papers, and what came of them

Every claim with a number in the paper on [CD-GraB](https://arxiv.org/abs/2302.00845), figures, tables and sentences,
and what the paper on [ExDyna](https://arxiv.org/abs/2402.13781) states, beside ours. `make report` computes this page
from `results/` and nothing else: published numbers from `paper/`, ours from `runs/`, `studies/` and `bench/`.

The rules, here and everywhere:

- A curve is judged by its mean over the last half of the epochs; the last epoch stands beside it. Studies use
  the mean alone.
- Figure 9 is measured in some epochs only: the last half are 60, 80 and 100 (replay), 75 and 100 (equation 8).
- Differences are paired by seed: the same data, split and starting weights, only the order differs.
- ± is the sample's standard deviation over seeds. The paper's is the population's, and is converted.
- Intervals are 95 % ones, by Student's t. A study that looks several times while it adds seeds has wider ones: 97.5 %
  with two looks (sparsification; what orders gain in compression), 98.3 % with three (herding), 98.75 % with four.
  Its claims keep the answer of the first look that decides them, whose numbers are in [STUDIES.md](STUDIES.md);
  numbers here are those of all seeds that there are by now. Below three seeds there is neither ±, nor an interval,
  nor a p value.
- p values are two-sided, and adjusted (Holm) for all tests of one kind, metric and rival in one figure. Where a claim
  has a limit (at most 0.5 points worse, at most {NEGLIGIBLE:g} times as long), p is about that limit, not about 0 or 1.
- Seconds count only of runs that had their machine for themselves: one run at a time, on a GPU or a CPU, and not
  trained together with others. Such runs are few; where there are none, claims about seconds cannot be decided.
- Epochs to a loss are counted, not interpolated; a loss that is not reached counts as one epoch more than there are.
  How late such a run is nobody knows, so that where there is one, only signs count: a sign test, and no interval.
  Figure 3b needs this. Its curves are flat in the last half of the epochs: a run of CD-GraB that ends a little lower
  than D-RR's is there 20 to 30 epochs sooner, one that ends a little higher is never there, and counts as one epoch
  late. So losses can be equal on average, and the mean of the epochs far below 0: the one says how low, the other how
  soon, and neither that CD-GraB is better.
- Scatter is the standard deviation of the change from one epoch to the next, over the last half of the epochs. It is
  that of single runs here, but that of means over seeds in the paper: its direction can be compared, its size cannot.
- **reproduced**, **contradicted**: the adjusted p is at most 0.05, and the mean lies on the paper's side or on the
  other. Claims that a study answers: its line in [STUDIES.md](STUDIES.md) holds or fails. Claims about costs: both
  quartiles are on one side (ExDyna's speed: the interval over models). **cannot decide**: anything else.
  **not possible here**: what it takes is missing. Where a study finds sorters equal, within its margin, a claim that
  one is better is contradicted, that it is no worse reproduced. So it is with the train loss of figures, whose margin
  is that of the studies, {SAME_LOSS:g} % of the rival's, and with epochs to a loss that are the same on every seed.
- A verdict is about the claim, mostly who is better. Whether our level is the published one is another question: see
  [levels](#levels).
- What is said of ExDyna is judged with its published rules and with ours, which are the default here, where both were
  measured. Rows with ours say whether what the paper promises can be had, not whether its own rules keep the promise.
- "Negligible" overhead is read as at most {NEGLIGIBLE:g} times D-RR's, in seconds or bytes.

Figure 1 of CD-GraB's paper is a drawing; of Figures 2, 5 and 7 no numbers were at hand.

The table counts rows, which are more than the paper has claims: a claim has a row for each metric and worker count or
rate. Rows that name a changed setting (`batch=16`) are variants, not the paper's settings. Some settings are in two
figures: Figure 9 shows the runs of Figure 4, and 64 workers at a rate of 0.001 are in Figures 4 and 12.
"""
LEVELS = """\
Where data and settings are the paper's, in pretraining too (so not Table 1): means over the last half of the
epochs and, in brackets, last epochs. The interval of the difference is Welch's. Of the paper's seeds no more is known
than the bands of single epochs; a mean over epochs scatters at most as much as these do on average, so that it is
rather too wide.

"""


@dataclass(frozen=True)
class Study:
    """The lines of one study, by claim, and what they come from."""

    lines: Mapping[str, object]  # with answer, measured, threshold, seeds, note and latest
    figure: str
    data: str


def page(studies: Mapping[str, Study]) -> str:
    """The whole page; `studies`: those that are finished, by name."""
    runs = curve_claims.finished()
    sections = {
        "CD-GraB: figures and tables": [
            *judged(curve_claims.better(runs)),
            *judged(curve_claims.pretraining(runs)),
            *_answered(FIGURE_10, studies),
            *bench_claims.memory(),
        ],
        "CD-GraB: converges sooner than random reshuffling": judged(curve_claims.sooner(runs)),
        "CD-GraB: is smoother than random reshuffling": judged(curve_claims.smoother(runs)),
        "CD-GraB: workers, rates and overhead": [
            *judged(curve_claims.trends(runs)),
            *_answered(THEORY, studies),
            *judged(curve_claims.slower(runs)),
            *bench_claims.overhead(),
            *bench_claims.traffic(),
        ],
        "ExDyna: the published rules": [
            *_answered(with_lines(EXDYNA, is_about_published_rules), studies),
            SPEED,
            *bench_claims.speed(figures_link.PUBLISHED),
        ],
        "ExDyna: with our rules": [
            *_answered(with_lines(EXDYNA, lambda line: not is_about_published_rules(line)), studies),
            *bench_claims.speed(figures_link.EXDYNA),
        ],
    }
    tables = {title: markdown([row.cells(_drawn) for row in rows]) for title, rows in sections.items() if rows}
    if compared := list(levels(runs)):
        tables["Levels"] = LEVELS + markdown(compared)
    parts = [HEAD, _overview(sections) + "\n", *(f"## {title}\n\n{table}\n" for title, table in tables.items())]
    return narrow("\n".join(parts)) + "\n"


def lines_without_runs() -> Iterator[str]:
    """Those of the page that are quick to compute: its head, and what benchmarks say."""
    yield from HEAD.splitlines()
    speeds = [bench_claims.speed(method) for method in (figures_link.PUBLISHED, figures_link.EXDYNA)]
    rows = (bench_claims.memory(), bench_claims.overhead(), bench_claims.traffic(), *speeds)
    cells = [row.cells(_drawn) for some in rows for row in some]
    yield from narrow(markdown(cells)).splitlines()[2:]


def _overview(sections: Mapping[str, list[Row]]) -> str:
    """How many rows have which verdict."""
    counts = {title: Counter(row.verdict for row in rows) for title, rows in sections.items()}
    counts["all"] = sum(counts.values(), Counter())
    return markdown([{"": title} | {v: str(some[v]) for v in VERDICTS} for title, some in counts.items()])


def _drawn(figure: str) -> bool:
    return bool(figure) and (RESULTS / "figures" / f"{figure}.png").exists()


def _answered(claims: Iterable[Studied], studies: Mapping[str, Study]) -> Iterator[Row]:
    for claim in claims:
        study = studies.get(claim.study)
        for line in claim.lines:
            if study is None or line not in study.lines:
                yield Row(claim.where, claim.says, UNDECIDED, f"the study {claim.study} has no line “{line}”")
            else:
                yield _answer(claim, study, line)


def _answer(claim: Studied, study: Study, line: str) -> Row:
    """The verdict is the first one that was decided; the numbers are those of all seeds."""
    first = study.lines[line]
    found = first.latest or first
    verdict = REPRODUCED if claim.no_worse and first.answer == "equal" else ANSWERS[first.answer]
    about, missing = _parts(found.note)
    reason = "equal, within the margin" if first.answer == "equal" else ""
    if verdict == UNDECIDED:
        alone = missing.endswith("claims")  # decided by itself
        reason = missing if alone else f"the interval includes the limit; {missing}" if missing else about
    if found.answer != first.answer:
        reason = f"decided with {plural(first.seeds, 'seed')}; with all of them {found.answer}"
    command = f"make study-{claim.study.replace('_', '-')} SIZE=paper"
    first_figure = f"study_{claim.study}"
    figure = study.figure.replace(first_figure, "_".join(filter(None, (first_figure, claim.figure))), 1)
    evidence = Evidence(claim.data or study.data, figure, command)
    ours = f"{line}: {found.measured}{f' ({about})' * bool(about)}; wanted {found.threshold}"
    return Row(claim.where, claim.says, verdict, reason, ours, str(found.seeds or "–"), evidence)


def _parts(note: str) -> tuple[str, str]:
    """What is measured, and why it is not decided: how many values would do it, or how many claims there are."""
    missing = [part for part in note.split("; ") if part.endswith(("decide", "claims"))]
    return "; ".join(part for part in note.split("; ") if part not in missing), "".join(missing)


def levels(runs: Runs) -> Iterator[dict[str, str]]:
    """Our mean beside the paper's, sorter by sorter."""
    done = set()
    for figure in (*FIGURES, FROM_THEIR_WEIGHTS):
        for group in curve_claims.groups_of(runs, figure):
            for metric in (metric for metric in figure.metrics if metric in group.metrics and group.like_the_paper):
                if (figure.name, group.source, metric) not in done:
                    done.add((figure.name, group.source, metric))
                    yield from _levels(figure, group, metric)


def _levels(figure: Figure, group: Group, metric: str) -> Iterator[dict[str, str]]:
    (first, of), *others = ends(metric).items()
    for series, curve in published(figure.experiment, metric, column=group.column).items():
        sorter = PUBLISHED_SORTERS[series]
        if sorter in group.sorters:
            ours, theirs = of(group, sorter, metric), papers_end(curve, first)
            spread = half_bands(curve) * math.sqrt(figure.papers_seeds / (figure.papers_seeds - 1))
            band = f" ± {spread:.2g}" if math.isfinite(spread) else ""
            yield {
                "where": f"{curve_claims.title(figure, group)}, {metric_label(metric)}",
                "sorter": group.label(sorter),
                "seeds": str(len(ours)),
                "ours": mean_std(ours) + "".join(f" ({last(group, sorter, metric).mean():.6g})" for _, last in others),
                "the paper's": f"{theirs:.6g}{band}"
                + "".join(f" ({papers_end(curve, when):.6g})" for when, _ in others),
                "ours − the paper's": str(against(ours, theirs, spread, figure.papers_seeds)),
            }
