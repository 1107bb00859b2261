"""What the study `sparsification` says: its verdicts and tables."""

from __future__ import annotations

import numpy as np
import pandas as pd
from omegaconf import DictConfig

from experiments.report.tables import markdown
from experiments.studies.sparsifiers import (
    ABLATED,
    DENSE,
    FORGETFUL,
    OURS,
    RULES,
    TASK_NAMES,
    THRESHOLDS,
    TOPK,
    TRAINED_DENSITY,
    label,
)
from experiments.studies.style import label as sorter_label
from experiments.studies.verdicts import Claim, Verdict, estimate, judge

LAST = 20  # iterations over which a settled value is taken
WARM_UP, WINDOW = 100, 50  # iterations after which the density must hold; over which its mean is taken at 0.001
CLOSE, FAR = 0.1, 0.3  # relative errors of the density
CHEAPER = 8  # times that selecting should be with ExDyna
SAME_DENSITY = 0.15  # relative difference of densities that still counts as the same
LONG_SETTLED = 20  # iterations that a density has to stay close to have settled
BASELINE, BALANCED = "d_rr", "cd_grab"


def verdicts(table: pd.DataFrame, settings: DictConfig) -> list[Verdict]:
    lines = []
    for density in settings.densities:
        for workers in settings.held_workers:
            lines += _holds(measured(table, "held", OURS, workers, density), density, workers)
    lines += [*_build_up(table, settings), *_balance(table, settings), *_settles(table, settings)]
    for workers in settings.timed_workers:
        lines += _cheaper(table, workers, settings)
    lines += [_fewer_bytes(table, settings), *_sparse_verdicts(table)]
    for task in training(table)["task"].unique():
        lines += _converges(table, task, settings)
    return lines


def measured(
    table: pd.DataFrame, measure: str, method: str = "", workers: int | None = None, density: float | None = None
) -> pd.DataFrame:
    rows = table[(table["measure"] == measure) & ((table["method"] == method) | (method == ""))]
    rows = rows if workers is None else rows[rows["workers"] == workers]
    return rows if density is None else rows[rows["target"] == density]


def training(table: pd.DataFrame) -> pd.DataFrame:
    return measured(table, "training")


def _holds(rows: pd.DataFrame, density: float, workers: int) -> list[Verdict]:
    """The density of ExDyna with its default options, and how evenly the workers are loaded."""
    length = int(rows["iteration"].max()) + 1
    start = min(WARM_UP, length // 2)
    later = rows[rows["iteration"] >= start]
    error, seed = (later["ratio"] - 1).abs(), later["seed"]
    where = f"ExDyna, density {density:g}, {workers} workers"
    note = f"iterations {start} to {length}"
    lines = []
    if density >= 0.01:
        claim = Claim(f"{where}: iterations within ±{CLOSE:.0%} of the target", least=0.95)
        lines.append(judge(claim, estimate((error <= CLOSE).groupby(seed).mean()), note))
    else:
        windows = later.groupby(["seed", (later["iteration"] - start) // WINDOW])["ratio"].mean()
        worst = (windows - 1).abs().groupby("seed").max()
        words = f"{where}: error of the mean density of {WINDOW} iterations, where it is largest"
        lines.append(judge(Claim(words, most=CLOSE), estimate(worst), note))
        claim = Claim(f"{where}: iterations within ±{FAR:.0%} of the target", least=0.9)
        lines.append(judge(claim, estimate((error <= FAR).groupby(seed).mean()), note))
    claim = Claim(f"{where}: imbalance, by which padding lengthens what is sent", most=0.2)
    return [*lines, judge(claim, estimate(later["imbalance"].groupby(seed).mean()), note)]


def settled_mean(rows: pd.DataFrame, column: str) -> pd.Series:
    """Over the last iterations, one per seed."""
    last = rows[rows["iteration"] > rows["iteration"].max() - LAST]
    return last.groupby("seed")[column].mean()


def _build_up(table: pd.DataFrame, settings: DictConfig) -> list[Verdict]:
    most, density = max(settings.crowds), settings.densities[0]

    def at_most(method: str, **limits: float) -> Verdict:
        rows = measured(table, "build-up", method, most, density)
        words = f"{label(method)}: actual density / target with {most} workers"
        return judge(Claim(words, **limits), estimate(settled_mean(rows, "ratio")))

    return [at_most(OURS, most=1.1), at_most(TOPK, least=2.0)]


def _balance(table: pd.DataFrame, settings: DictConfig) -> list[Verdict]:
    """Each rule against the one before, seed by seed: imbalances of different layouts of layers differ by factors."""
    lines = []
    for rule, before in zip(RULES[1:], RULES[:-1], strict=True):
        less, more = (settled_mean(measured(table, "imbalance", method), "imbalance") for method in (rule, before))
        words = (
            f"the {_rule(rule)} rule loads workers more evenly than the {_rule(before)} one: log ratio of the imbalance"
        )
        note = f"mean imbalance {less.mean():.2f} and {more.mean():.2f}, {settings.workers} workers, {len(less)} seeds"
        lines.append(judge(Claim(words, most=0.0), estimate(np.log((less / more).astype(float))), note))
    return lines


def _rule(method: str) -> str:
    return method.partition("rule=")[2] or "balanced"


def settling_time(rows: pd.DataFrame, after: int, until: int) -> pd.Series:
    """Iterations until the density stays close for a while, one per seed; the whole time where it never does."""

    def first(ratios: list[float]) -> int:
        near = [abs(ratio - 1) <= CLOSE for ratio in ratios]
        starts = (t for t in range(len(near) - LONG_SETTLED + 1) if all(near[t : t + LONG_SETTLED]))
        return next(starts, len(near))

    rows = rows[(rows["iteration"] >= after) & (rows["iteration"] < until)].sort_values("iteration")
    return rows.groupby("seed")["ratio"].agg(lambda ratios: first(ratios.tolist()))


def _settles(table: pd.DataFrame, settings: DictConfig) -> list[Verdict]:
    counted, proportional, paper, _ = THRESHOLDS
    drop, lines = settings.settling // 3, []
    for when, after, until in (("at the start", 0, drop), ("after a tenfold drop", drop, settings.settling)):
        times = {m: settling_time(measured(table, "settling", m), after, until) for m in (counted, proportional, paper)}
        claim = Claim(f"threshold by counting: iterations to ±{CLOSE:.0%} {when}", most=LAST)
        lines.append(judge(claim, estimate(times[counted])))
        claim = Claim(f"the proportional rule settles sooner than the paper's {when}", most=0.0)
        length = until - after
        note = f"iterations: {_spelt(times[proportional], length)} − {_spelt(times[paper], length)}"
        if (times[paper] >= length).any():
            note += "; what never settled counts as all of them, so that the difference is at least this"
        unless = "neither settles" if (pd.concat([times[proportional], times[paper]]) >= length).all() else ""
        lines.append(judge(claim, estimate(times[proportional] - times[paper]), note, unless))
    return lines


def _spelt(times: pd.Series, length: int) -> str:
    """37, or how many of the seeds never came to an end."""
    never = int((times >= length).sum())
    if never == len(times):
        return f"never within {length}"
    return f"{times.mean():.0f}" + f" (never within {length} on {never} of {len(times)} seeds)" * bool(never)


def _cheaper(table: pd.DataFrame, workers: int, settings: DictConfig) -> list[Verdict]:
    """On the mean, and for the slowest: the exchange waits for everybody."""
    rows, lines = measured(table, "time", workers=workers), []
    longest = rows.set_index("timed")["longest"][OURS]
    notes = {
        "selection": f"{settings.timed_dim:,} coordinates, mean over workers",
        "slowest": f"ExDyna's longest partition is {longest.mean():.2f} of the mean one",
    }
    for column, whose in (("selection", "a worker"), ("slowest", "the slowest worker")):
        times = rows.pivot(index="seed", columns="timed", values=column)
        claim = Claim(f"selecting: Top-k's time / ExDyna's for {whose} of {workers}, one core", least=CHEAPER)
        lines.append(judge(claim, estimate(times[TOPK] / times[OURS]), notes[column]))
    return lines


def _fewer_bytes(table: pd.DataFrame, settings: DictConfig) -> Verdict:
    workers, density = settings.workers, settings.densities[0]
    ours, dense = (
        settled_mean(measured(table, "build-up", method, workers, density), "bytes") for method in (OURS, DENSE)
    )
    claim = Claim(f"ExDyna's bytes / dense ones with {workers} workers at density {density:g}", most=1.7 * density)
    note = "workers gather k indices of four bytes, which costs half of summing k values: 1.5 · density, and padding"
    return judge(claim, estimate(ours / dense), note)


def _ends(rows: pd.DataFrame) -> pd.Series:
    """The last loss, one per seed."""
    return rows[rows["epoch"] == rows["epoch"].max()].set_index("seed")["train_loss"]


def _sparse_verdicts(table: pd.DataFrame) -> list[Verdict]:
    """An embedding layer: a worker's gradient is zero but for a few rows."""
    ends = {method: _ends(measured(table, "sparse model", method)) for method in ABLATED}
    rows = measured(table, "sparse model", OURS)
    what = f"sparse model ({rows['nonzero'].mean():.1%} of a worker's gradient is not zero)"
    lines = [judge(Claim(f"{what}: ExDyna's loss / dense loss", most=1.05), estimate(ends[OURS] / ends[DENSE]))]
    claim = Claim(f"{what}: density / target", 0.9, 1.1)
    lines.append(judge(claim, estimate(rows.groupby("seed")["density"].mean() / rows["target"].iloc[0])))
    claim = Claim(f"{what}: without error feedback the loss ends higher than with it, ratio", least=1.0)
    return [*lines, judge(claim, estimate(ends[FORGETFUL] / ends[OURS]))]


def runs(table: pd.DataFrame, task: str, method: str, sorter: str) -> pd.DataFrame:
    rows = measured(table, "training", method)
    return rows[(rows["task"] == task) & (rows["sorter"] == sorter)]


def _converges(table: pd.DataFrame, task: str, settings: DictConfig) -> list[Verdict]:
    def ends(method: str, sorter: str = BALANCED) -> pd.Series:
        return _ends(runs(table, task, method, sorter))

    def actual(method: str) -> float:
        return runs(table, task, method, BALANCED)["density"].mean()

    name, lines = TASK_NAMES[task], []
    for sorter in settings.sorters:
        words = f"{name}, {sorter_label(sorter)}: train loss with ExDyna / dense at density {TRAINED_DENSITY:g}"
        note = f"actual density {runs(table, task, OURS, sorter)['density'].mean():.4f}"
        lines.append(judge(Claim(words, most=1.05), estimate(ends(OURS, sorter) / ends(DENSE, sorter)), note))
    done = training(table)[training(table)["task"] == task]["method"].unique()
    for method in [method for method in settings.trained[2:] if method in done]:
        apart = abs(actual(method) / actual(OURS) - 1)
        note = f"actual densities {actual(OURS):.4f} and {actual(method):.4f}"
        unless = f"not at the same density: {note}" if apart > SAME_DENSITY else ""
        claim = Claim(f"{name}: train loss with ExDyna / {label(method)}", most=1.0)
        lines.append(judge(claim, estimate(ends(OURS) / ends(method)), "" if unless else note, unless))
    if {BASELINE, BALANCED} <= set(settings.sorters):
        lines.append(_adds_up(name, {m: 100 * (1 - ends(m, BALANCED) / ends(m, BASELINE)) for m in (DENSE, OURS)}))
    return lines


def _adds_up(name: str, gains: dict[str, pd.Series]) -> Verdict:
    """gains: by how many per cent CD-GraB ends lower than D-RR, by method."""
    claim = Claim(f"{name}: CD-GraB's gain over D-RR is as large with ExDyna as without", least=-0.5)
    dense = estimate(gains[DENSE])
    unless = "" if dense.low > 0 else "dense training shows no gain of CD-GraB over D-RR in so few epochs"
    note = f"difference in points; {gains[OURS].mean():.2f} % of the train loss with ExDyna, {dense.mean:.2f} % without"
    return judge(claim, estimate(gains[OURS] - gains[DENSE]), note, unless)


# -- tables -----------------------------------------------------------------------------------------------------------


def training_table(table: pd.DataFrame) -> str:
    """Where every run ends, in Markdown."""
    rows = []
    for (task, method, sorter), some in training(table).groupby(["task", "method", "sorter"], sort=False):
        rows.append(
            {
                "task": TASK_NAMES[task],
                "method": label(method),
                "sorter": sorter_label(sorter),
                "train loss": str(estimate(_ends(some))),
                "actual density": "1" if method == DENSE else f"{some['density'].mean():.4f}",
                "imbalance": "–" if method == DENSE else f"{some['imbalance'].mean():.2f}",
            }
        )
    return markdown(rows)


def ablation_table(table: pd.DataFrame) -> str:
    """The sparse model with parts of ExDyna switched off, in Markdown."""
    rows = []
    for method in ABLATED:
        some = measured(table, "sparse model", method)
        row = {"method": label(method), "loss": str(estimate(_ends(some)))}
        rows.append(row | {name: f"{some[name].mean():.4f}" for name in ("density", "imbalance")})
    return markdown(rows)


def time_table(table: pd.DataFrame) -> str:
    """Milliseconds that workers take to select, in Markdown."""
    rows = []
    for (method, workers), some in measured(table, "time").groupby(["timed", "workers"], sort=False):
        times = {"mean over workers (ms)": "selection", "slowest worker (ms)": "slowest"}
        cells = {title: f"{1000 * some[column].mean():.2f}" for title, column in times.items()}
        rows.append({"method": label(method), "workers": str(workers)} | cells)
    return markdown(rows)
