"""Reading results/runs: groups of runs of one experiment on one data source, and sweeps of such groups."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from cdgrab.errors import CdgrabError
from experiments.report.kinds import DataFrame, Series
from experiments.report.manifests import alone, caption, pretrained_by, short, variant, without
from experiments.report.names import kind, sorter_label
from experiments.report.text import FEWEST_SEEDS
from experiments.store.files import RESULTS
from experiments.store.records import METRICS, read_manifest, read_metrics

# may differ from the paper's when its curves are drawn
HARMLESS = {"name", "epochs", "initial_weights", "herding_every", "herding_replays"}
PAPERS_PRETRAINED = "fig11_gpt2_wiki103/WikiText-103"  # the folder of runs whose models the paper's GLUE starts from


class Runs:
    """Finished runs that are shown together, with their `manifests`."""

    def caption(self) -> str:
        """Data source, size, settings, seeds and commit in one line."""
        return caption(self.manifests)


@dataclass(frozen=True)
class Group(Runs):
    """Runs of one experiment on one data source with the same settings: results/runs/<task>/<experiment>/<source>."""

    directory: Path
    only_alone: bool = False

    @property
    def name(self) -> str:
        """Used for files: fig3a_lr_hmda-NJ-2017."""
        return f"{self.directory.parent.name}-{self.source}"

    @property
    def source(self) -> str:
        """Data source, size and changed settings, as in the folder's name: NJ-2017,epochs=10."""
        return self.directory.name

    @cached_property
    def manifests(self) -> list[dict]:
        """Of the finished runs, by sorter and seed."""
        found = [read_manifest(path.parent) | {"path": path.parent} for path in self.directory.glob("*/manifest.json")]
        finished = [m for m in found if m.get("status") == "finished" and (alone(m) or not self.only_alone)]
        return sorted(finished, key=lambda m: (variant(m), m["seed"]))

    @cached_property
    def metrics(self) -> DataFrame:
        """One row per sorter, seed and epoch; `elapsed` is the training time since the start."""
        import pandas as pd

        rows = []
        for manifest in self.manifests:
            path = manifest["path"] / METRICS
            lines = read_metrics(path)
            if len(lines) != (epochs := manifest["science"].get("epochs", len(lines))):
                raise CdgrabError(f"{path} is damaged: it has {len(lines)} of {epochs} epochs; run this run again")
            run = {"sorter": variant(manifest), "seed": manifest["seed"]}
            rows += [line | run for line in lines]
        table = pd.DataFrame(rows)
        return table.assign(elapsed=table.groupby(["sorter", "seed"])["seconds"].cumsum())

    @property
    def sorters(self) -> list[str]:
        return list(dict.fromkeys(variant(m) for m in self.manifests))

    def label(self, sorter: str) -> str:
        if kind(sorter) == "riffle":  # the published code's order; figures must say so
            return sorter_label(sorter, "riffle (no balancing)")
        manifest = next(m for m in self.manifests if variant(m) == sorter)
        return sorter_label(sorter, manifest["sorter_label"])

    def curve(self, sorter: str, metric: str, seeds: set[int] | None = None) -> DataFrame:
        """Mean, std over all or these seeds (0 where they are too few) and mean elapsed seconds by epoch; only epochs
        that have the metric."""
        rows = self._measured(sorter, metric)
        by_epoch = (rows if seeds is None else rows[rows["seed"].isin(seeds)]).groupby("epoch")
        mean, std = by_epoch[metric].mean(), by_epoch[metric].std()
        std = std.where(by_epoch[metric].count() >= FEWEST_SEEDS, 0.0)
        return mean.to_frame("mean").assign(std=std, elapsed=by_epoch["elapsed"].mean())

    def on_the_same_seeds(self, pair: tuple[str, str], metric: str) -> list[Series]:
        """Two sorters' mean curves over the seeds that both have: levels differ more by seed than by sorter."""
        seeds = set.intersection(*({m["seed"] for m in self.manifests if variant(m) == sorter} for sorter in pair))
        return [self.curve(sorter, metric, seeds)["mean"] for sorter in pair]

    def differences(self, sorter: str, baseline: str, metric: str) -> DataFrame:
        """sorter − baseline by epoch (rows) and seed (columns), of the seeds and epochs that both have."""
        first, second = (
            self._measured(name, metric).pivot(index="epoch", columns="seed", values=metric)
            for name in (sorter, baseline)
        )
        return (first - second).dropna(axis="columns", how="all").dropna()

    def final(self, sorter: str, metric: str) -> Series:
        """The last epoch's value of every seed."""
        rows = self._measured(sorter, metric)
        return rows[rows["epoch"] == rows["epoch"].max()].set_index("seed")[metric].sort_index()

    def last_half(self, sorter: str, metric: str) -> Series:
        """The mean over the last half of the epochs, of every seed: single epochs scatter more than sorters differ."""
        rows = self._measured(sorter, metric)
        return rows[rows["epoch"] > rows["epoch"].max() / 2].groupby("seed")[metric].mean()

    def best(self, sorter: str, metric: str) -> Series:
        """The highest value of every seed."""
        return self._measured(sorter, metric).groupby("seed")[metric].max()

    @property
    def column(self) -> str | float | None:
        """This group's value of the setting in `columns`. Embedded sentences do not count as a dataset of GLUE."""
        if self.columns == "task.dataset" and self.manifests[0]["data"]["embedded"]:
            return "embedded"
        return self.setting(self.columns)

    def setting(self, name: str) -> str | float | None:
        """The value of a setting, which is the same for all runs of a group, except sorter and seed."""
        return self.manifests[0]["science"].get(name)

    @property
    def like_the_paper(self) -> bool:
        """Whether these runs have all of the paper's data and its settings (but perhaps fewer epochs), so that levels
        may be compared.

        The folder's name tells which settings differ from the experiment's, which are the paper's. A model that is
        fine-tuned must come from runs with all of the paper's data, settings and epochs.
        """
        linear = any(m["science"].get("task.schedule.kind") == "linear" for m in self.manifests)  # ends with the epochs
        harmless = HARMLESS - ({"epochs"} if linear else set())
        own = all(m["data"]["papers_own"] and m.get("size", "paper") == "paper" for m in self.manifests)
        started = {name for m in self.manifests for name in pretrained_by(m)}
        return own and self._changed <= harmless | {short(self.columns)} and started <= {PAPERS_PRETRAINED}

    @property
    def on_the_papers_data(self) -> bool:
        """Whether its curves may be drawn beside these: captions name settings that differ."""
        own = all(m["data"]["papers_own"] for m in self.manifests)
        return own and not self.trial and "limit" not in self._changed

    @property
    def _changed(self) -> set[str]:
        return {part.partition("=")[0] for part in self.source.split(",")[1:]}

    def as_compared(self, metrics: tuple[str, ...]) -> tuple[str, ...]:
        """Beside the paper's curves or differences, perplexities are computed as in the published code."""
        return tuple(m if self.trial or not m.endswith("_ppl") else f"{m}_authors" for m in metrics)

    @cached_property
    def alone(self) -> Group:
        """Those of its runs whose seconds are meaningful: they had the machine for themselves. Of runs that trained
        together only the group's time is known."""
        return Group(self.directory, only_alone=True)

    @property
    def trial(self) -> bool:
        """Whether these runs are no evidence: small ones, and those on embedded data."""
        return any(m["data"]["embedded"] or m.get("size", "paper") != "paper" for m in self.manifests)

    @property
    def columns(self) -> str:
        """The setting whose values are the columns of this experiment's figure; empty: it has one column."""
        return self.manifests[0].get("config", {}).get("columns") or ""

    def _measured(self, sorter: str, metric: str) -> DataFrame:
        table, columns = self.metrics, ["seed", "epoch", "elapsed"]
        if metric not in table:
            return table.loc[:-1, columns].assign(**{metric: 0.0})
        return table.loc[table["sorter"] == sorter, [*columns, metric]].dropna(subset=metric)


@dataclass(frozen=True)
class Sweep(Runs):
    """Groups that differ in one setting only: the columns of one figure."""

    setting: str
    source: str  # as of a group, without the setting
    groups: tuple[Group, ...]  # by the setting's value

    @property
    def manifests(self) -> list[dict]:
        return [manifest for group in self.groups for manifest in group.manifests]


def groups(experiment: str) -> list[Group]:
    """Groups of an experiment that have finished runs: all but trials, or the one that CDGRAB_GROUP names."""
    only = _only(experiment)
    return _finished(experiment, [only] if only else _folders(experiment), trials=bool(only))


def evidence(experiment: str) -> list[Group]:
    """All groups of finished runs that are no trials; perhaps none."""
    return [group for group in map(Group, _folders(experiment)) if group.manifests and not group.trial]


def sweeps(experiment: str, setting: str, metric: str | None = None) -> list[Sweep]:
    """Groups that agree in all but `setting`, and log `metric` if one is named: all but trials, or the sweep of
    CDGRAB_GROUP."""
    only = _only(experiment)
    wanted = without(only.name, setting) if only else None
    sources: dict[str, list[Group]] = {}
    for group in _finished(experiment, _folders(experiment), metric, trials=bool(only)):
        sources.setdefault(without(group.source, setting), []).append(group)
    if wanted is not None and wanted not in sources:
        raise _nothing(f"{experiment} in {only}")
    return [
        Sweep(setting, source, tuple(sorted(members, key=lambda group: group.setting(setting))))
        for source, members in sources.items()
        if wanted in (None, source)
    ]


def _only(experiment: str) -> Path | None:
    """The folder that CDGRAB_GROUP names, which must be one of this experiment's."""
    if not (named := os.environ.get("CDGRAB_GROUP")):
        return None
    if Path(named).parent.name != experiment:
        raise CdgrabError(f"CDGRAB_GROUP={named} is no folder with runs of {experiment}")
    return Path(named)


def _folders(experiment: str) -> list[Path]:
    return sorted((RESULTS / "runs").glob(f"*/{experiment}/*/"))


def _finished(experiment: str, folders: list[Path], metric: str | None = None, trials: bool = False) -> list[Group]:
    found = [group for group in map(Group, folders) if group.manifests and (trials or not group.trial)]
    found = [group for group in found if metric is None or metric in group.metrics]
    if not found:
        what = f" with {metric}" if metric else ""
        raise _nothing(f"{experiment}{what} under {RESULTS / 'runs'}")
    return found


def _nothing(what: str) -> CdgrabError:
    return CdgrabError(f"no finished runs of {what}; `make` lists the commands that make them")
