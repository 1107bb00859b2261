"""The report page: its numbers are those of the files, it loads nothing, and it works in a browser."""

import json
import re
from base64 import b64encode
from dataclasses import replace
from hashlib import sha256
from html.parser import HTMLParser

import numpy as np
import pytest
from synthetic_runs import write_run

from experiments.report import runs
from experiments.report.page import bench_cards, build, card, claims, markup, pictures, run_cards, study_cards, tags
from experiments.store.files import RESULTS

SHOWN = ("lr_hmda", "mlp_m4", "glue")  # tasks: one column, the paper's curves, several columns


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """All results, but the runs of some tasks only, to be quick; and a trial, which the page must not show."""
    folder = tmp_path_factory.mktemp("results")
    for name in ("PAPER.md", "STUDIES.md", "figures", "studies", "paper"):
        (folder / name).symlink_to(RESULTS / name)
    (folder / "runs").mkdir()
    for task in SHOWN:
        (folder / "runs" / task).symlink_to(RESULTS / "runs" / task)
    for size in ("smoke", "quick"):
        write_run(
            folder / "runs" / "lstm_wiki2" / "fig3b_lstm_wiki2" / f"{size}-trial", "d_rr", "D-RR", 0, [1.0], size=size
        )
    with pytest.MonkeyPatch.context() as patch:
        for module in (runs, bench_cards, build, card, pictures, run_cards, study_cards):
            patch.setattr(module, "RESULTS", folder)
        yield folder


@pytest.fixture(scope="module")
def page(results):
    return build.collected()


@pytest.fixture(scope="module")
def file(page, results):
    path = build.write(page)
    assert path == results / "report" / "index.html"
    return path


def test_every_line_of_the_scoreboard_is_there_but_those_of_small_benchmarks(page):
    lines = [line for line in (RESULTS / "PAPER.md").read_text().splitlines() if re.match(r"\|.*\| \*\*", line)]
    small = [line for line in lines if re.search(r"--size (smoke|quick)", line)]
    assert (page["total"], page["left_out"]) == (len(lines) - len(small), len(small))
    counted = {verdict: sum(f"| **{verdict}**" in line for line in set(lines) - set(small)) for verdict in page["all"]}
    assert page["all"] == counted


def test_curves_are_means_over_the_seeds_of_the_files(page):
    (hmda,) = [some for some in page["groups"] if some.name == "fig3a_lr_hmda-NJ-2017"]
    (views,) = hmda.columns.values()
    for metric, panel in zip(("train_loss", "test_accuracy"), views["by epoch"], strict=True):
        for line in panel.lines:
            files = sorted((RESULTS / "runs/lr_hmda/fig3a_lr_hmda/NJ-2017").glob(f"{line.sorter}-s*/metrics.jsonl"))
            values = np.array([[json.loads(row)[metric] for row in file.read_text().splitlines()] for file in files])
            np.testing.assert_allclose(line.mean, values.mean(0), rtol=1e-6)
            np.testing.assert_allclose(
                np.subtract(line.high, line.low) / 2, values.std(0, ddof=1), atol=1e-6 * values.max()
            )
            assert line.x == list(range(1, values.shape[1] + 1))
    less = {line.label: line for line in views["less D-RR’s"][0].lines}
    means = {line.sorter: np.array(line.mean) for line in views["by epoch"][0].lines}
    np.testing.assert_allclose(less["CD-GraB"].mean, means["cd_grab"] - means["d_rr"], atol=2e-7)
    assert "CD-GraB, paper, on its own data" in less


def test_the_papers_curves_are_beside_ours_on_its_data_only(page):
    papers = {
        figure.name: [line for views in figure.columns.values() for panel in views["by epoch"] for line in panel.lines]
        for figure in page["groups"]
    }
    papers = {name: [line for line in lines if line.paper] for name, lines in papers.items()}
    assert not papers["fig3a_lr_hmda-NJ-2017"] and len(papers["fig3c_mlp_m4-M4-weekly"]) == 4
    (best,) = [line for line in papers["table1_glue-GLUE"] if line.sorter == "cd_grab"]
    assert (best.mean, best.label) == ([82.65], "CD-GraB, paper, best epoch")


def test_all_studies_and_figures_are_there_and_no_trials(page, file):
    text = (RESULTS / "STUDIES.md").read_text()
    assert sum(len(study.lines) for study in page["studies"]) == len(re.findall(r"^\|.*\| \*\*", text, re.M))
    assert not [some for some in page["groups"] if "lstm_wiki2" in some.tasks]  # there are trials of it only
    names = {some.name for some in page["groups"]} | {
        p.name for c in (*page["studies"], *page["benchmarks"]) for p in c.pictures
    }
    small = [name.replace(" on ", "-") for name in page["smaller"]]
    drawn = [
        p.stem for p in (RESULTS / "figures").glob("*.png") if not any(p.stem.endswith(f"_{name}") for name in small)
    ]
    other = [name for name in drawn if name not in names]
    assert not [name for name in other if any(task in name for task in SHOWN) or name.startswith(("study", "overhead"))]
    for one in (*page["groups"], *page["studies"], *page["benchmarks"]):
        assert one.facts["commit"] and one.facts["machine"] and one.ended


class Loads(HTMLParser):
    """What a page would load."""

    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attributes):
        wanted = ("src", "srcset", "data", "poster") + (("href",) if tag == "link" else ())
        self.found += [value for name, value in attributes if name in wanted]


def test_it_loads_nothing_and_is_small(file):
    text, parser = file.read_text(), Loads()
    parser.feed(text)
    assert parser.found and all(value.startswith("data:") for value in parser.found)
    style = text[text.index("<style>") : text.index("</style>")]
    assert "@import" not in style and "url(" not in style and not re.search(r"\b(fetch|XMLHttpRequest|import)\(", text)
    assert file.stat().st_size < 15e6


HOSTILE = "<!--<script>alert(1)</script>\" onload=alert(1) '<img src=x onerror=alert(1)>"


class Tags(HTMLParser):
    """The names of a page's elements and of their attributes, and the texts of its scripts."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.attributes, self.scripts = set(), set(), []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.elements.add(tag)
        self.attributes |= {name for name, _ in attributes}

    def handle_data(self, data):
        if self.cdata_elem == "script":
            self.scripts.append(data)


def test_names_settings_and_tables_cannot_become_part_of_the_page(page):
    """Whatever a manifest says; and a browser may run nothing but the page's own scripts."""
    ours = page["groups"][0]
    panels = [
        replace(p, lines=[replace(line, label=HOSTILE, sorter=HOSTILE) for line in p.lines])
        for p in next(iter(next(iter(ours.columns.values())).values()))
    ]
    theirs = replace(
        ours, name=HOSTILE, title=HOSTILE, tasks=[HOSTILE], sorters=[HOSTILE], facts={HOSTILE: HOSTILE},
        command=HOSTILE, about=markup.html(f"{HOSTILE}\n\n- {HOSTILE}\n\n# {HOSTILE}\n\n`{HOSTILE}`"),
        tables=markup.table([HOSTILE], [[HOSTILE]]), columns={HOSTILE: {HOSTILE: panels}},
    )  # fmt: skip
    empty = page | {"sections": {}, "studies": [], "benchmarks": [], "lines": [], "smaller": [HOSTILE]}
    empty["task_choices"] = {HOSTILE: HOSTILE}
    text = build.rendered(empty | {"groups": [theirs]})
    found, usual = Tags(text), Tags(build.rendered(empty | {"groups": [ours]}))
    assert found.elements <= usual.elements | {"ul", "li", "code"} and found.attributes <= usual.attributes
    numbers, usual_numbers = (next(s for s in tags.scripts if s.startswith("{")) for tags in (found, usual))
    assert "<" not in numbers and list(json.loads(numbers)) == [HOSTILE]
    assert [s for s in found.scripts if s != numbers] == [s for s in usual.scripts if s != usual_numbers]
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)[1].replace("&#39;", "'")
    hashes = {b64encode(sha256(s.encode()).digest()).decode() for s in found.scripts if s != numbers}
    assert set(re.findall(r"'sha256-([^']*)'", policy)) == hashes and policy.startswith(
        "default-src 'none'; script-src"
    )


def test_links_lead_to_files_and_sites_only():
    assert 'href="../javascript:alert' in markup.inline("[x](javascript:alert(1))")
    assert markup.inline('[x](http://a"onclick="b?c&d)') == '<a href="http://a&quot;onclick=&quot;b?c&amp;d">x</a>'


def test_markdown():
    text = "- one **two**\n  `<b>`\n- [x](y.md) & *z*\n\n| a | b |\n|---|---|\n| 1 | **2**: 3 |\n"
    assert markup.html(text).startswith(
        "<ul><li>one <strong>two</strong> <code>&lt;b&gt;</code></li>"
        '<li><a href="../y.md">x</a> &amp; <em>z</em></li></ul>'
    )
    assert markup.rows(text) == [{"a": "1", "b": "**2**: 3"}]
    assert list(markup.sections("0\n## a\n1\n## a\n2\n")) == ["", "a", "a (2)"]


def test_what_lines_are_about():
    assert tags.sorters("CD-GraB − ID-GraB (PairBal), ExDyna") == ["cd_grab", "id_grab_pair", "exdyna"]
    assert tags.sorters("ID-GraB's advantage") == []
    assert tags.tasks("", "CIFAR-10, several", "HMDA") == ["cifar10"]
    assert tags.tasks("a rate") == [tags.NO_TASK]
    where = claims.Claim("Figure 3a, on its own data", "", "–", "–", "–", "not possible here", "", "", "")
    assert (where.tasks, where.kind) == (["lr_hmda"], "none")


def test_in_a_browser(browser, file, page):
    """One start for all of it: figures, hovering, zooming, filters, keyboard, phones, the console."""
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys
    from selenium.webdriver.support.ui import Select

    def number(expression):
        return browser.execute_script(f"return {expression}")

    browser.get(file.as_uri())
    # every figure is drawn
    assert number("document.querySelectorAll('.curves').length") == len(page["groups"])
    assert number("[...document.querySelectorAll('.curves')].every((c) => c.querySelector('path.mean[d^=M]'))")
    assert number("charts.every((c) => c.element.querySelectorAll('path.mean').length === c.panel.lines.length)")
    assert number("[...document.images].every((i) => i.complete && i.naturalWidth > 100)")
    # the keyboard alone: the first thing is the link to the scoreboard; in a plot, arrows read and plus zooms
    browser.switch_to.active_element.send_keys(Keys.TAB)
    assert browser.switch_to.active_element.get_attribute("class") == "skip"
    assert number("document.querySelectorAll('.plot:not([tabindex=\"0\"]), [onclick], a:not([href])').length") == 0
    plot = browser.find_element(By.CSS_SELECTOR, "[data-curves='fig3a_lr_hmda-NJ-2017'] .plot")
    plot.send_keys(Keys.END)
    shown = plot.find_element(By.CSS_SELECTOR, ".tip").text
    (hmda,) = [some for some in page["groups"] if some.name == "fig3a_lr_hmda-NJ-2017"]
    for line in hmda.columns[""]["by epoch"][0].lines:
        assert f"{float(f'{line.mean[-1]:.6g}')}" in shown
    plot.send_keys("+")
    assert number("charts[0].x[1] - charts[0].x[0]") == pytest.approx(49 * 0.6)
    plot.send_keys("0")
    # the mouse: a rectangle zooms
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", plot)  # not below the filters
    ActionChains(browser).move_to_element(plot).click_and_hold().move_by_offset(80, 60).release().perform()
    assert number("charts[0].x[1] - charts[0].x[0]") < 25
    # columns and views
    glue = browser.find_element(By.CSS_SELECTOR, "[data-curves='table1_glue-GLUE,pretrained_seed=0']")
    buttons = glue.find_elements(By.CSS_SELECTOR, ".tabs button")
    before = glue.find_element(By.CSS_SELECTOR, "path.mean").get_attribute("d")
    browser.execute_script("arguments[0].click()", buttons[0])
    assert glue.find_element(By.CSS_SELECTOR, "path.mean").get_attribute("d") != before
    # filters
    lines = [*page["lines"], *(line for study in page["studies"] for line in study.lines)]
    visible = "[...document.querySelectorAll('.claim')].filter((l) => !l.hidden).length"
    about = lambda line, name: line[name] if isinstance(line, dict) else getattr(line, name)  # noqa: E731
    for name, key, value in (
        ("task", "tasks", "mlp_m4"),
        ("sorter", "sorters", "id_grab_bal"),
        ("verdict", "kind", "bad"),
    ):
        Select(browser.find_element(By.NAME, name)).select_by_value(value)
        wanted = sum(value in about(line, key) if key != "kind" else about(line, key) == value for line in lines)
        assert 0 < number(visible) == wanted < len(lines)
        browser.find_element(By.CSS_SELECTOR, "[type=reset]").click()
        browser.execute_async_script("setTimeout(arguments[0], 20)")
        assert number(visible) == len(lines)
    # a phone, dark: nothing is wider than the screen
    phone = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)
    paper = number("getComputedStyle(document.body).backgroundColor")
    browser.execute_script("document.getElementById('theme').click()")
    assert number("document.documentElement.scrollWidth") <= 390
    assert number("getComputedStyle(document.body).backgroundColor") != paper
    browser.refresh()
    assert number("document.getElementById('scoreboard').offsetHeight") < 2 * 844  # only how many have which verdict
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert browser.get_log("browser") == []
