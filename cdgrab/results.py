"""Reading results/: runs, grouped by experiment and data source, and the paper's published curves."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pandas as pd

from .config import ROOT
from .errors import CdgrabError
from .runlog import read_manifest, read_metrics

RESULTS = ROOT / "results"


@dataclass(frozen=True)
class Group:
    """Runs of one experiment on one data source with the same settings: results/runs/<task>/<experiment>/<source>."""

    directory: Path

    @property
    def name(self) -> str:
        """Used for files: fig3a_lr_hmda-NJ-2017."""
        return f"{self.directory.parent.name}-{self.directory.name}"

    @cached_property
    def manifests(self) -> list[dict]:
        """Of the finished runs, by sorter and seed."""
        found = [read_manifest(path.parent) | {"path": path.parent} for path in self.directory.glob("*/manifest.json")]
        return sorted((m for m in found if m["status"] == "finished"), key=lambda m: (self._variant(m), m["seed"]))

    @cached_property
    def metrics(self) -> pd.DataFrame:
        """One row per sorter, seed and epoch; `elapsed` is the training time since the start."""
        tables = []
        for manifest in self.manifests:
            table = pd.DataFrame(read_metrics(manifest["path"] / "metrics.jsonl"))
            table["elapsed"] = table["seconds"].cumsum()
            tables.append(table.assign(sorter=self._variant(manifest), seed=manifest["seed"]))
        return pd.concat(tables, ignore_index=True)

    @property
    def sorters(self) -> list[str]:
        return list(dict.fromkeys(self._variant(m) for m in self.manifests))

    def label(self, sorter: str) -> str:
        manifest = next(m for m in self.manifests if self._variant(m) == sorter)
        return manifest["sorter_label"] + sorter.removeprefix(manifest["sorter"]).replace(",", ", ")

    def curve(self, sorter: str, metric: str) -> pd.DataFrame:
        """Mean, std (over seeds, as numpy has it) and mean elapsed seconds by epoch."""
        by_epoch = self.metrics[self.metrics["sorter"] == sorter].groupby("epoch")
        spread = by_epoch[metric].std(ddof=0)
        return pd.DataFrame({"mean": by_epoch[metric].mean(), "std": spread, "elapsed": by_epoch["elapsed"].mean()})

    def final(self, sorter: str, metric: str) -> pd.Series:
        """The last epoch's value of every seed."""
        rows = self.metrics[self.metrics["sorter"] == sorter]
        return rows[rows["epoch"] == rows["epoch"].max()].set_index("seed")[metric].sort_index()

    @property
    def papers_own_data(self) -> bool:
        """All of the paper's data: a part of it (quick and smoke sizes) does not count."""
        return all(m["data"]["papers_own"] and not m["science"].get("task.limit") for m in self.manifests)

    def caption(self) -> str:
        """Data source, settings, seeds and commit in one line."""
        first = self.manifests[0]
        seeds = {sorter: sum(self._variant(m) == sorter for m in self.manifests) for sorter in self.sorters}
        count = (
            str(min(seeds.values()))
            if len(set(seeds.values())) == 1
            else f"{min(seeds.values())}–{max(seeds.values())}"
        )
        commits = ", ".join(sorted({m["commit"] or "unknown" for m in self.manifests}))
        config = first["science"]
        size = first.get("size", "paper")
        size = "" if size == "paper" else f", size {size}"
        return (
            f"{'EMBEDDED DATA: ' if first['data']['embedded'] else ''}{first['data']['description']}, "
            f"{first['data']['rows']['all']:,} rows · {config['workers']} workers, batch {config['task.batch']}, "
            f"lr {config['task.lr']:g}{size} · {count} seed{'s' * (count != '1')}, mean ± std · commit {commits}"
        )

    @staticmethod
    def _variant(manifest: dict) -> str:
        return manifest["path"].name.rpartition("-s")[0]


def groups(experiment: str) -> list[Group]:
    """All groups of an experiment that have finished runs; only the one named by CDGRAB_GROUP when that is set."""
    only = os.environ.get("CDGRAB_GROUP")
    runs = RESULTS / "runs"
    folders = [Path(only)] if only else sorted(runs.glob(f"*/{experiment}/*/"))
    found = [group for group in map(Group, folders) if group.manifests]
    if not found:
        raise CdgrabError(f"no finished runs of {experiment} under {runs}; `make` lists the commands that make them")
    return found


def published(figure: str, metric: str, axis: str = "epoch") -> dict[str, pd.DataFrame]:
    """The paper's curves by series name: x (epoch or seconds), mean, std. Empty where nothing was published."""
    paper = pd.read_csv(RESULTS / "paper" / "fig3_published.csv")
    paper = paper[(paper["figure"] == figure) & (paper["metric"] == metric) & (paper["axis"] == axis)]
    tables = [paper]
    notebook = RESULTS / "paper" / f"{figure.partition('_')[2]}_{axis}.csv"
    if notebook.exists():  # for series that the PDF's graphics did not give
        table = pd.read_csv(notebook).dropna(subset="mean")
        panel = {"test_accuracy": "test_acc"}.get(metric, metric)
        tables.append(table[(table["panel"] == panel) & ~table["series"].isin(paper["series"])])
    both = pd.concat(tables, ignore_index=True)
    return {series: rows[["x", "mean", "std"]].reset_index(drop=True) for series, rows in both.groupby("series")}
