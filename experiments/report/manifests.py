"""What a run's manifest says: its sorter, its changed settings, its machine; and of several, in one line."""

from __future__ import annotations

import re
from collections import Counter

from experiments.report.names import counted
from experiments.report.text import FEWEST_SEEDS


def caption(manifests: list[dict]) -> str:
    """Data source, size, settings, seeds, machine and commit of runs that are shown together."""
    data, settings = manifests[0]["data"], [m["science"] for m in manifests]

    def all_of(setting: str) -> str:
        return ", ".join(f"{value:g}" for value in sorted({some[setting] for some in settings}))

    runs = Counter((m["path"].parent, variant(m)) for m in manifests).values()
    count = f"{min(runs)}" if len(set(runs)) == 1 else f"{min(runs)}–{max(runs)}"
    sparsifiers = sorted({s["sparsifier.name"] for s in settings if "sparsifier.name" in s})
    rows = f"{data['rows']['all']:,} {counted(manifests[0].get('task'))}"
    workers = "1 worker" if all_of("workers") == "1" else f"{all_of('workers')} workers"
    return (
        f"{'EMBEDDED DATA: ' if data['embedded'] else ''}{data['description']}, {rows} · "
        f"{_size(manifests)} · {workers}, batch {all_of('task.batch')}, lr {all_of('task.lr')}"
        f"{''.join(f', sparsifier {name}' for name in sparsifiers)} · "
        f"{_seeds(count, max(runs))} · {_machine(manifests)} · "
        f"commit {', '.join(sorted({m['commit'] or 'unknown' for m in manifests}))}"
    )


def variant(manifest: dict) -> str:
    """The sorter and its changed options, as in the name of the run's folder."""
    return manifest["path"].name.rpartition("-s")[0]


def alone(manifest: dict) -> bool:
    """Whether a run had its machine for itself. Runs at the same time share a GPU, or a CPU's caches, memory and clock,
    even where each has a core of its own."""
    return manifest.get("replicas", 1) == _jobs(manifest) == 1


def pretrained_by(manifest: dict) -> set[str]:
    """The runs whose model a run started from, as <experiment>/<data source and settings>."""
    names = [name.partition("checkpoint ")[2] for name in manifest["data"].get("checksums", {})]
    return {name.rpartition("/")[0] for name in names if name}


def without(source: str, setting: str | None) -> str:
    """A group's folder name without one of its changed settings."""
    return re.sub(rf",{re.escape(short(setting))}=[^,]*", "", source) if setting else source


def short(setting: str) -> str:
    """A setting's name as in folder names."""
    return setting.removeprefix("task.")


def _size(manifests: list[dict]) -> str:
    """For instance: size paper; size quick; size paper with epochs=8, limit=12800."""
    sizes = sorted({m.get("size", "paper") for m in manifests})
    names = [without(m["path"].parent.name, m.get("config", {}).get("columns")) for m in manifests]
    changed = dict.fromkeys(part for name in names for part in name.split(",")[1:])
    return f"size {', '.join(sizes)}" + (f" with {', '.join(changed)}" if changed else "")


def _seeds(count: str, most: int) -> str:
    return "1 seed" if most == 1 else f"{count} seeds, mean" + " ± std" * (most >= FEWEST_SEEDS)


def _machine(manifests: list[dict]) -> str:
    """The machine, whether runs shared it, and whose times count."""
    devices = sorted({"CPU" if m.get("device", "cpu") == "cpu" else m["device"] for m in manifests})
    most, together = max(map(_jobs, manifests)), max(m.get("replicas", 1) for m in manifests)
    shared = [f"up to {most} runs at a time"] * (most > 1)
    shared += [f"up to {together} runs trained together"] * (together > 1)
    timed = sorted({m["seed"] for m in manifests if alone(m)})
    of_some = f" but those of {_numbered(timed)}, made alone" if timed else ""
    return ", ".join(devices + shared) + f": no times{of_some}" * bool(shared)


def _numbered(seeds: list[int]) -> str:
    """seed 10; seeds 0–4; seeds 1, 3"""
    if len(seeds) > 2 and seeds[-1] - seeds[0] == len(seeds) - 1:
        return f"seeds {seeds[0]}–{seeds[-1]}"
    return f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"


def _jobs(manifest: dict) -> int:
    return manifest.get("config", {}).get("jobs", 1)
