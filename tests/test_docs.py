"""README and documentation: short enough, linked, and with code that runs."""

import re
import shlex
import subprocess

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from experiments.report import pages
from experiments.store.files import ROOT

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)


def blocks(language):
    return [
        pytest.param(code, id=f"{path.name}-{number}")
        for path in pages.files()
        for number, (its, code) in enumerate(BLOCK.findall(path.read_text()))
        if its == language and "--8<--" not in code  # what is included is run by other tests
    ]


def test_the_readme_is_short_and_all_its_links_lead_somewhere():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 150 and len(text.split()) <= 1500
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
    assert len(links) > 20 and all((ROOT / link).exists() for link in links)


def test_the_website_is_built_without_a_warning(tmp_path):
    """A broken link, a missing figure or a name that the API page does not find is one."""
    build = pytest.importorskip("mkdocs.commands.build")
    from mkdocs.config import load_config

    config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path), strict=True)
    config.plugins.run_event("startup", command="build", dirty=False)
    build.build(config)
    assert "OrderedBatchSampler" in (tmp_path / "api.html").read_text()
    assert len(list((tmp_path / "figures").glob("*.png"))) > 10


@pytest.mark.parametrize("code", blocks("python"))
def test_code_of_the_pages_runs(code):
    exec(compile(code, "a page", "exec"), {})


@pytest.mark.parametrize("code", blocks("diff"))
def test_the_two_lines_train_a_model(code):
    """The lines that stay and those that come, in a script around them."""
    torch.manual_seed(0)
    data, model = torch.randn(96, 3), nn.Linear(3, 1)
    names = {"DataLoader": DataLoader, "dataset": TensorDataset(data, data.sum(1)), "model": model, "epochs": 9}
    names["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1)
    names["loss"] = lambda model, batch: (model(batch[0]).squeeze(1) - batch[1]).square().mean()
    kept = [line[1:] for line in code.splitlines() if not line.startswith("-")]
    exec("\n".join(kept).replace("num_workers=2", "num_workers=0"), names)
    assert names["loss"](model, (data, data.sum(1))).item() < 0.1


def test_commands_of_the_pages_exist():
    targets = subprocess.run(["make", "-pRrq", "help"], cwd=ROOT, capture_output=True, text=True).stdout
    lines = [line for block in blocks("sh") for line in block.values[0].splitlines()]
    commands = [shlex.split(line, comments=True) for line in lines]
    assert len(commands) > 10
    for command in filter(None, commands):
        if command[0] == "make":
            goal = command[1]
            assert re.search(rf"^({goal}|{goal.partition('-')[0]}-%):", targets, re.M), command
        elif command[0] in ("python", "torchrun"):
            module = command[command.index("-m") + 1].replace(".", "/") if "-m" in command else command[1]
            found = [ROOT / module, ROOT / f"{module}.py", ROOT / module / "__main__.py"]
            assert any(path.exists() for path in found), command
        else:
            assert command[0] in ("pip", "source"), command
