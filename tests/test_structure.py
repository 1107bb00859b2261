"""Rooms and floors, drawn from the imports: what may import what. The contracts in pyproject.toml forbid the rest."""

import subprocess
import sys
import tomllib
from collections import defaultdict
from graphlib import TopologicalSorter

import grimp
import pytest

from experiments.store.files import ROOT

MOST_FLOORS = 9


@pytest.fixture(scope="module")
def imports():
    """{module: modules that it imports}"""
    graph = grimp.build_graph("cdgrab", "experiments", "scripts", cache_dir=None)
    return {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}


@pytest.fixture(scope="module")
def rooms(imports):
    """{room: rooms that it imports}; a room is a package or module directly inside one of the three packages."""
    room = lambda module: ".".join(module.split(".")[:2])  # noqa: E731
    found = defaultdict(set)
    for module, imported in imports.items():
        found[room(module)] |= {room(other) for other in imported} - {room(module)}
    return dict(found)


def test_nothing_imports_in_a_circle(imports, rooms):
    for graph in (imports, rooms):
        TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_the_house_has_at_most_nine_floors(rooms):
    floor = {}
    for room in TopologicalSorter(rooms).static_order():
        floor[room] = 1 + max((floor[below] for below in rooms[room]), default=0)
    assert floor["cdgrab.errors"] == 1 < max(floor.values()) <= MOST_FLOORS, floor


def test_reports_know_nothing_of_the_suite_but_the_store(rooms):
    assert {room for room in rooms["experiments.report"] if room.startswith("experiments.")} == {"experiments.store"}


BREACHES = {  # a line added to a module breaks the contract of that name
    "one arrow: scripts, experiments, cdgrab": ("cdgrab/errors.py", "import experiments.early"),
    "floors of the library": ("cdgrab/streams.py", "import cdgrab.sorters"),
    "floors of the suite": ("experiments/data/sources.py", "import experiments.tasks.base"),
    "no circle inside a room": ("cdgrab/sorters/base.py", "import cdgrab.sorters.coordinated"),
    "the library needs nothing of the extra suite": ("cdgrab/herding.py", "import pandas"),
    "only the runtime talks to other processes": ("experiments/training/loop.py", "import torch.distributed"),
    "other people's loops and ours do not know each other": ("experiments/training/steps.py", "import cdgrab.dropin"),
    "reports read files and nothing else": ("experiments/report/tables.py", "import experiments.tasks"),
}


def test_every_rule_is_noticed_when_it_is_broken(tmp_path):
    for name in ("cdgrab", "experiments", "scripts", "pyproject.toml"):
        subprocess.run(["cp", "-r", str(ROOT / name), str(tmp_path / name)], check=True)
    for file, line in BREACHES.values():
        with open(tmp_path / file, "a") as module:
            module.write(f"{line}\n")
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()"]
    checked = subprocess.run([*command, "--no-cache"], cwd=tmp_path, capture_output=True, text=True)
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    assert [contract["name"] for contract in contracts] == list(BREACHES)
    assert checked.returncode == 1 and checked.stdout.count(" BROKEN\n") == len(contracts), checked.stdout
    assert "No cycles are allowed in cdgrab.sorters." in checked.stdout  # not only between rooms
