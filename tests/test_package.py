"""What would be uploaded to a package index; and what builds and tests it elsewhere: container and workflows."""

import contextlib
import json
import re
import tarfile
from email.parser import Parser
from zipfile import ZipFile

import pytest
import yaml
from hatchling import build

import cdgrab
from experiments.store.files import ROOT
from scripts.package_readme import LINK, PICTURE, for_an_index


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """A folder with wheel and source distribution."""
    folder = tmp_path_factory.mktemp("package")
    with contextlib.chdir(ROOT):
        build.build_wheel(str(folder))
        build.build_sdist(str(folder))
    return folder


def only(folder, pattern):
    (path,) = folder.glob(pattern)
    return path


def contents(wheel):
    with ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_an_index_would_take_both_files(package):
    check = pytest.importorskip("twine.commands.check").check
    assert not check([str(package / "*")], strict=True)  # it returns whether something failed


def test_the_wheel_is_the_library_and_says_what_it_is(package):
    files = contents(only(package, "*.whl"))
    library = {path.relative_to(ROOT).as_posix() for path in (ROOT / "cdgrab").rglob("*.py")} | {"cdgrab/py.typed"}
    assert {name for name in files if ".dist-info/" not in name} == library
    metadata = Parser().parsestr(next(data for name, data in files.items() if name.endswith("METADATA")).decode())
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert metadata["Author"] == citation["authors"][0]["name"]
    assert metadata["Version"] == cdgrab.__version__ == citation["version"]
    assert f"## {metadata['Version']}" in (ROOT / "CHANGELOG.md").read_text()
    assert metadata["License-Expression"] == citation["license"] and any("LICENSE" in name for name in files)
    needed = {one.partition(">")[0] for one in metadata.get_all("Requires-Dist") if "extra" not in one}
    assert needed == {"torch", "numpy"} and {"fast", "suite", "test"} <= set(metadata.get_all("Provides-Extra"))


def test_the_source_distribution_gives_the_same_wheel(package, tmp_path):
    with tarfile.open(only(package, "*.tar.gz")) as archive:
        archive.extractall(tmp_path, filter="data")
    with contextlib.chdir(only(tmp_path, "cdgrab-*")):
        build.build_wheel(str(tmp_path))
    assert contents(only(tmp_path, "*.whl")) == contents(only(package, "*.whl"))


def test_the_readme_of_an_index_has_no_paths_of_the_repository():
    readme = (ROOT / "README.md").read_text()
    links, pictures = LINK.findall(readme), PICTURE.findall(readme)
    assert len(links) > 20 and len(pictures) == 2
    without = for_an_index(readme, "1.2")
    assert not LINK.search(without) and "![" not in without and "this/clone" not in without
    assert all(text in without for text, *_ in links)
    address = "https://example.org/somebody/cdgrab"
    absolute = for_an_index(readme, "1.2", f"{address}/")
    assert not LINK.search(absolute) and not PICTURE.search(absolute)
    assert all(f"![{text}]({address}/raw/v1.2/{path})" in absolute for text, path, _ in pictures)
    assert all(f"]({address}/blob/v1.2/{path}{anchor})" in absolute for _, path, anchor in links)


def test_container_and_workflows_run_targets_that_exist():
    """No engine to run them here: their commands are those of the README, which other tests run."""
    targets = re.findall(r"^([a-z-]+%?):", (ROOT / "Makefile").read_text(), re.M)
    (entry,) = re.findall(r"^ENTRYPOINT (.*)$", (ROOT / "Dockerfile").read_text(), re.M)
    (command,) = re.findall(r"^CMD (.*)$", (ROOT / "Dockerfile").read_text(), re.M)
    commands = [" ".join(json.loads(entry) + json.loads(command))]
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        for job in yaml.safe_load(path.read_text())["jobs"].values():
            commands += [step["run"] for step in job["steps"] if "run" in step]
    assert {"make reproduce-lr-hmda test", "make test", "make docs", "make package"} <= set(commands)
    goals = [goal for command in commands for goal in command.removeprefix("make ").split()]
    assert all(goal in targets or f"{goal.partition('-')[0]}-%" in targets for goal in goals)
