"""What the study `sparsification` says: its verdicts and tables."""

from __future__ import annotations

import numpy as np
from omegaconf import DictConfig

from experiments.report.kinds import DataFrame, Series
from experiments.report.names import BASELINE, LOSS, sorter_label
from experiments.report.names import OURS as BALANCED
from experiments.report.statistics import estimate
from experiments.report.text import markdown
from experiments.studies import sparsifiers
from experiments.studies.paired import select
from experiments.studies.sparsifiers import DENSE, OURS, TOPK, TRAINED_DENSITY, method_label, task_label
from experiments.studies.verdicts import Verdict, judge_mean

LAST = 20  # iterations over which a settled value is taken
WARM_UP, WINDOW = 100, 50  # iterations after which the density must hold; over which its mean is taken at 0.001
CLOSE, FAR = 0.1, 0.3  # relative errors of the density
CHEAPER = 8  # times that selecting should be with ExDyna
SAME_DENSITY = 0.15  # relative difference of densities that still counts as the same
LONG_SETTLED = 20  # iterations that a density has to stay close to have settled


def verdicts(table: DataFrame, settings: DictConfig) -> list[Verdict]:
    lines = []
    for density in settings.densities:
        for workers in settings.held_workers:
            rows = select(table, measure="held", method=OURS, workers=workers, target=density)
            lines += _holds(rows, density, workers)
    lines += [*_build_up(table, settings), *_balance(table, settings), *_settles(table, settings)]
    for workers in settings.timed_workers:
        lines += _cheaper(table, workers, settings)
    lines += [_fewer_bytes(table, settings), *_sparse_verdicts(table)]
    for task in select(table, measure="training")["task"].unique():
        lines += _converges(select(table, measure="training", task=task), task, settings)
    return lines


def settled_mean(rows: DataFrame, column: str) -> Series:
    """Over the last iterations, one per seed."""
    last = rows[rows["iteration"] > rows["iteration"].max() - LAST]
    return last.groupby("seed")[column].mean()


def settling_time(rows: DataFrame, after: int, until: int) -> Series:
    """Iterations until the density stays close for a while, one per seed; the whole time where it never does."""

    def first(ratios: list[float]) -> int:
        near = [abs(ratio - 1) <= CLOSE for ratio in ratios]
        starts = (t for t in range(len(near) - LONG_SETTLED + 1) if all(near[t : t + LONG_SETTLED]))
        return next(starts, len(near))

    rows = rows[(rows["iteration"] >= after) & (rows["iteration"] < until)].sort_values("iteration")
    return rows.groupby("seed")["ratio"].agg(lambda ratios: first(ratios.tolist()))


def ends(rows: DataFrame) -> Series:
    """The last loss, one per seed."""
    return select(rows, epoch=rows["epoch"].max()).set_index("seed")[LOSS]


def _holds(rows: DataFrame, density: float, workers: int) -> list[Verdict]:
    """The density of ExDyna with its default options, and how evenly the workers are loaded."""
    length = int(rows["iteration"].max()) + 1
    start = min(WARM_UP, length // 2)
    later = rows[rows["iteration"] >= start]
    error, seed = (later["ratio"] - 1).abs(), later["seed"]
    where, note = f"ExDyna, density {density:g}, {workers} workers", f"iterations {start} to {length}"

    def within(limit: float, least: float) -> Verdict:
        words = f"{where}: iterations within ±{limit:.0%} of the target"
        return judge_mean(words, (error <= limit).groupby(seed).mean(), note, least=least)

    if density >= 0.01:
        lines = [within(CLOSE, 0.95)]
    else:
        windows = later.groupby(["seed", (later["iteration"] - start) // WINDOW])["ratio"].mean()
        worst = (windows - 1).abs().groupby("seed").max()
        words = f"{where}: error of the mean density of {WINDOW} iterations, where it is largest"
        lines = [judge_mean(words, worst, note, most=CLOSE), within(FAR, 0.9)]
    words = f"{where}: imbalance, by which padding lengthens what is sent"
    return [*lines, judge_mean(words, later["imbalance"].groupby(seed).mean(), note, most=0.2)]


def _build_up(table: DataFrame, settings: DictConfig) -> list[Verdict]:
    most, density = max(settings.crowds), settings.densities[0]

    def with_most(method: str, **limits: float) -> Verdict:
        rows = select(table, measure="build-up", method=method, workers=most, target=density)
        words = f"{method_label(method)}: actual density / target with {most} workers"
        return judge_mean(words, settled_mean(rows, "ratio"), **limits)

    return [with_most(OURS, most=1.1), with_most(TOPK, least=2.0)]


def _balance(table: DataFrame, settings: DictConfig) -> list[Verdict]:
    """Each rule against the one before, seed by seed: imbalances of different layouts of layers differ by factors."""

    def rule_of(method: str) -> str:
        return method.partition("rule=")[2] or "balanced"

    lines = []
    for rule, before in zip(sparsifiers.RULES[1:], sparsifiers.RULES[:-1], strict=True):
        rows = [select(table, measure="imbalance", method=method) for method in (rule, before)]
        less, more = (settled_mean(some, "imbalance") for some in rows)
        words = f"the {rule_of(rule)} rule loads workers more evenly than the {rule_of(before)} one"
        note = f"mean imbalance {less.mean():.2f} and {more.mean():.2f}, {settings.workers} workers, {len(less)} seeds"
        ratio = np.log((less / more).astype(float))
        lines.append(judge_mean(f"{words}: log ratio of the imbalance", ratio, note, most=0.0))
    return lines


def _settles(table: DataFrame, settings: DictConfig) -> list[Verdict]:
    drop, lines = settings.settling // 3, []
    for when, after, until in (("at the start", 0, drop), ("after a tenfold drop", drop, settings.settling)):
        length = until - after
        counted, proportional, paper = (
            settling_time(select(table, measure="settling", method=method), after, until)
            for method in sparsifiers.THRESHOLDS[:3]
        )
        words = f"threshold by counting: iterations to ±{CLOSE:.0%} {when}"
        lines.append(judge_mean(words, counted, most=LAST))
        note = f"iterations: {_spelt(proportional, length)} − {_spelt(paper, length)}"
        if (paper >= length).any():
            note += "; what never settled counts as all of them, so that the difference is at least this"
        unless = "neither settles" if (proportional >= length).all() and (paper >= length).all() else ""
        words = f"the proportional rule settles sooner than the paper's {when}"
        lines.append(judge_mean(words, proportional - paper, note, unless, most=0.0))
    return lines


def _spelt(times: Series, length: int) -> str:
    """37, or how many of the seeds never came to an end."""
    never = int((times >= length).sum())
    if never == len(times):
        return f"never within {length}"
    return f"{times.mean():.0f}" + f" (never within {length} on {never} of {len(times)} seeds)" * bool(never)


def _cheaper(table: DataFrame, workers: int, settings: DictConfig) -> list[Verdict]:
    """On the mean, and for the slowest: the exchange waits for everybody."""
    rows, lines = select(table, measure="time", workers=workers), []
    longest = rows.set_index("timed")["longest"][OURS]
    notes = {
        "selection": f"{settings.timed_dim:,} coordinates, mean over workers",
        "slowest": f"ExDyna's longest partition is {longest.mean():.2f} of the mean one",
    }
    for column, whose in (("selection", "a worker"), ("slowest", "the slowest worker")):
        times = rows.pivot(index="seed", columns="timed", values=column)
        words = f"selecting: Top-k's time / ExDyna's for {whose} of {workers}, one core"
        lines.append(judge_mean(words, times[TOPK] / times[OURS], notes[column], least=CHEAPER))
    return lines


def _fewer_bytes(table: DataFrame, settings: DictConfig) -> Verdict:
    workers, density = settings.workers, settings.densities[0]
    rows = select(table, measure="build-up", workers=workers, target=density)
    ours, dense = (settled_mean(select(rows, method=method), "bytes") for method in (OURS, DENSE))
    words = f"ExDyna's bytes / dense ones with {workers} workers at density {density:g}"
    note = "workers gather k indices of four bytes, which costs half of summing k values: 1.5 · density, and padding"
    return judge_mean(words, ours / dense, note, most=1.7 * density)


def _sparse_verdicts(table: DataFrame) -> list[Verdict]:
    """An embedding layer: a worker's gradient is zero but for a few rows."""
    rows = select(table, measure="sparse model")
    ours, dense, forgetful = (select(rows, method=method) for method in (OURS, DENSE, sparsifiers.FORGETFUL))
    what = f"sparse model ({ours['nonzero'].mean():.1%} of a worker's gradient is not zero)"
    density = ours.groupby("seed")["density"].mean() / ours["target"].iloc[0]
    forgot = f"{what}: without error feedback the loss ends higher than with it, ratio"
    return [
        judge_mean(f"{what}: ExDyna's loss / dense loss", ends(ours) / ends(dense), most=1.05),
        judge_mean(f"{what}: density / target", density, least=0.9, most=1.1),
        judge_mean(forgot, ends(forgetful) / ends(ours), least=1.0),
    ]


def _converges(rows: DataFrame, task: str, settings: DictConfig) -> list[Verdict]:
    def loss(method: str, sorter: str = BALANCED) -> Series:
        return ends(select(rows, method=method, sorter=sorter))

    def actual(method: str, sorter: str = BALANCED) -> float:
        return select(rows, method=method, sorter=sorter)["density"].mean()

    name, lines = task_label(task), []
    for sorter in settings.sorters:
        words = f"{name}, {sorter_label(sorter)}: train loss with ExDyna / dense at density {TRAINED_DENSITY:g}"
        note = f"actual density {actual(OURS, sorter):.4f}"
        lines.append(judge_mean(words, loss(OURS, sorter) / loss(DENSE, sorter), note, most=1.05))
    done = rows["method"].unique()
    for method in [method for method in settings.trained[2:] if method in done]:
        note = f"actual densities {actual(OURS):.4f} and {actual(method):.4f}"
        apart = abs(actual(method) / actual(OURS) - 1) > SAME_DENSITY
        notes = {"unless": f"not at the same density: {note}"} if apart else {"note": note}
        words = f"{name}: train loss with ExDyna / {method_label(method)}"
        lines.append(judge_mean(words, loss(OURS) / loss(method), **notes, most=1.0))
    if {BASELINE, BALANCED} <= set(settings.sorters):
        lines.append(_adds_up(name, {m: 100 * (1 - loss(m, BALANCED) / loss(m, BASELINE)) for m in (DENSE, OURS)}))
    return lines


def _adds_up(name: str, gains: dict[str, Series]) -> Verdict:
    """gains: by how many per cent CD-GraB ends lower than D-RR, by method."""
    dense = estimate(gains[DENSE])
    unless = "" if dense.low > 0 else "dense training shows no gain of CD-GraB over D-RR in so few epochs"
    note = f"difference in points; {gains[OURS].mean():.2f} % of the train loss with ExDyna, {dense.mean:.2f} % without"
    words = f"{name}: CD-GraB's gain over D-RR is as large with ExDyna as without"
    return judge_mean(words, gains[OURS] - gains[DENSE], note, unless, least=-0.5)


# -- tables -----------------------------------------------------------------------------------------------------------


def training_table(table: DataFrame) -> str:
    """Where every run ends, in Markdown."""
    rows = []
    for key, some in select(table, measure="training").groupby(["task", "method", "sorter"], sort=False):
        task, method, sorter = key
        dense = method == DENSE
        rows.append(
            {"task": task_label(task), "method": method_label(method), "sorter": sorter_label(sorter)}
            | {"train loss": str(estimate(ends(some)))}
            | {"actual density": "1" if dense else f"{some['density'].mean():.4f}"}
            | {"imbalance": "–" if dense else f"{some['imbalance'].mean():.2f}"}
        )
    return markdown(rows)


def ablation_table(table: DataFrame) -> str:
    """The sparse model with parts of ExDyna switched off, in Markdown."""
    rows = []
    for method in sparsifiers.ABLATED:
        some = select(table, measure="sparse model", method=method)
        row = {"method": method_label(method), "loss": str(estimate(ends(some)))}
        rows.append(row | {name: f"{some[name].mean():.4f}" for name in ("density", "imbalance")})
    return markdown(rows)


def time_table(table: DataFrame) -> str:
    """Milliseconds that workers take to select, in Markdown."""
    rows = []
    for (method, workers), some in select(table, measure="time").groupby(["timed", "workers"], sort=False):
        times = {"mean over workers (ms)": "selection", "slowest worker (ms)": "slowest"}
        cells = {title: f"{1000 * some[column].mean():.2f}" for title, column in times.items()}
        rows.append({"method": method_label(method), "workers": str(workers)} | cells)
    return markdown(rows)
