"""README and documentation: short enough, linked, and with code that runs."""

import html
import re

import page_commands
import pytest
import torch
from test_examples import ALONE, ON_TWO_PROCESSES
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from experiments.report import pages
from experiments.store.files import ROOT

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)
COMMAND = re.compile(r"`((?:make|python|torchrun|pip) [^`…<|[]*(?:'[^`]*')?)`")


def blocks(language):
    return [
        pytest.param(code, id=f"{path.name}-{number}")
        for path in pages.files()
        for number, (its, code) in enumerate(BLOCK.findall(path.read_text()))
        if its == language
    ]


def recipes(page):
    """That the website shows there."""
    return pytest.importorskip("scripts.docs_hooks").RECIPE.findall(page.read_text())


def test_the_readme_is_short_and_all_its_links_lead_somewhere():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 150 and len(text.split()) <= 1500
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
    assert len(links) > 20 and all((ROOT / link).exists() for link in links)


@pytest.fixture(scope="module")
def website(tmp_path_factory):
    """A broken link, a missing figure or a name that the API page does not find fails it."""
    build = pytest.importorskip("mkdocs.commands.build")
    from mkdocs.config import load_config

    folder = tmp_path_factory.mktemp("website")
    config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder), strict=True)
    config.plugins.run_event("startup", command="build", dirty=False)
    build.build(config)
    return folder


def test_the_website_has_all_that_pages_refer_to(website):
    assert "OrderedBatchSampler" in (website / "api.html").read_text()
    assert len(list((website / "figures").glob("*.png"))) > 10
    assert "__index" in (website / "search" / "search_index.js").read_text()  # to search from the disk
    for name in ("start", "recipes"):  # the website shows the code to which the pages lead
        linked = recipes(ROOT / "docs" / f"{name}.md")
        shown = html.unescape(re.sub(r"<[^>]*>", "", (website / f"{name}.html").read_text()))
        assert linked and all((ROOT / recipe).read_text().strip() in shown for recipe in linked)
    assert "https://" not in "".join(re.findall(r"<(?:script|link|img)[^>]*>", (website / "start.html").read_text()))


def test_the_website_can_be_searched_when_it_was_opened_from_the_disk(website, browser):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import WebDriverWait

    browser.get((website / "index.html").as_uri())
    browser.execute_script("document.getElementById('__search').click()")
    browser.find_element(By.CSS_SELECTOR, ".md-search__input").send_keys("accumulation")
    found = WebDriverWait(browser, 60).until(
        lambda _: browser.find_elements(By.CSS_SELECTOR, ".md-search-result__link")
    )
    assert any("dropin.html" in link.get_attribute("href") for link in found)
    assert browser.get_log("browser") == []


def test_recipes_of_the_pages_are_those_that_tests_run():
    shown = {recipe for path in pages.files() for recipe in recipes(path)}
    assert shown == {f"examples/{name}.py" for name in (*ALONE, *ON_TWO_PROCESSES, "resumable")}


def test_what_the_readme_repeats_is_the_same_there():
    readme, start, guide = ((ROOT / name).read_text() for name in ("README.md", "docs/start.md", "docs/dropin.md"))
    for language, code in BLOCK.findall(readme):
        assert code.rstrip() in (guide if language == "diff" else start)


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


def commands():
    """Of blocks, line by line, and of sentences; `make data-<task>`, `make bench [SIZE=…]` and the like are patterns,
    and so is a FOLDER."""
    for path in (*pages.files(), ROOT / "CONTRIBUTING.md"):
        text = path.read_text()
        for language, code in BLOCK.findall(text):
            lines = (line.partition("#")[0].strip() for line in code.splitlines() if language == "sh")
            yield from filter(None, lines)
        yield from (" ".join(found.split()) for found in COMMAND.findall(BLOCK.sub("", text)) if "FOLDER" not in found)


def test_commands_of_the_pages_are_understood_by_the_programs_they_start(monkeypatch):
    monkeypatch.delenv("CDGRAB_DATA", raising=False)
    found = set(commands())
    assert len(found) > 40 and {command.split()[0] for command in found} == {"make", "python", "torchrun", "pip"}
    for command in sorted(found):
        page_commands.carry_out(command)


@pytest.mark.parametrize(
    "misspelt",
    [
        "make reproduce-lr-hdma",
        "make reprot",
        "make reproduce-lr-hmda SEED=2",
        "make reproduce-lr-hmda SEEDS=two",
        "make study-sorters SIZE=smoke SORTERS=d_rr,longest_frist CDGRAB_EXTEND=examples/extend/sorter.py",
        "make study-sorters SIZE=smoke CDGRAB_EXTENDS=examples/extend/sorter.py",
        "make data-imagenet",
        "make bench BENCH=dropout",
        "python -m experiments.launch -m experiment=fig3a_lr_hdma",
        "python -m experiments.launch -m experiment=fig3a_lr_hmda worker=2,4",
        "python -m experiments.lunch -m experiment=fig3a_lr_hmda",
        "python -m scripts.reproduce lr-hmda --seeds 2 --worker-count 4",
        "python examples/extend/sorter.py task=lr_hmda epoch=3",
        "python examples/extend/sorters.py task=lr_hmda",
        "python examples/plane.py",
        "torchrun --processes=4 -m experiments.train task=lr_hmda",
        "torchrun --nproc_per_node=4 -m experiments.train task=lr_hmda task.lr=fast",
        "pip install '/path/to/this/clone[fsat]'",
        "pip instal /path/to/this/clone",
        "cmake",
    ],
)
def test_a_misspelt_command_is_noticed(misspelt, monkeypatch):
    monkeypatch.delenv("CDGRAB_DATA", raising=False)
    with pytest.raises(page_commands.Refused):
        page_commands.carry_out(misspelt)
