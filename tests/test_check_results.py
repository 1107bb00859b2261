"""What is written agrees with results/, and the check finds what does not."""

import json
import re

import pytest

from experiments.report import pages, quoted
from experiments.report.runs import Group
from experiments.store.files import RESULTS, ROOT
from scripts import check_results


@pytest.mark.parametrize("name", pages.TABLES)
def test_every_number_in_a_table_of_a_page_counts(name, monkeypatch):
    computed = pages.TABLES[name]()
    monkeypatch.setattr(pages, "TABLES", {other: lambda: computed for other in pages.TABLES})
    tables = [found for path in pages.files() for found in pages.MARKED.finditer(path.read_text()) if found[2] == name]
    page = tables[0][0]
    assert not list(check_results.differences("a page", page, pages.filled(page), "make report"))
    digits = list(re.compile(r"\d").finditer(page, page.index("\n")))
    assert len(digits) > 20
    for digit in digits:
        changed = page[: digit.start()] + str((int(digit[0]) + 1) % 10) + page[digit.end() :]
        (complaint,) = check_results.differences("a page", changed, pages.filled(changed), "make report")
        assert complaint.startswith("a page does not agree with results/")


def test_what_is_written_agrees_with_the_results():
    assert list(check_results.quick()) == []


def test_a_scoreboard_of_other_benchmarks_or_rules_is_found(tmp_path, monkeypatch):
    page = (RESULTS / "PAPER.md").read_text()
    monkeypatch.setattr(check_results, "RESULTS", tmp_path)
    for right, wrong in (("--size full", "---size full"), ("counted, not interpolated", "interpolated")):
        assert right in page
        (tmp_path / "PAPER.md").write_text(page.replace(right, wrong))
        complaints = list(check_results.scoreboard_in_part())
        assert complaints and all(right in complaint for complaint in complaints)


def test_results_of_code_that_was_not_committed_are_found(tmp_path, monkeypatch):
    assert not list(check_results.commits())
    monkeypatch.setattr(check_results, "RESULTS", tmp_path)
    clean = {"commit": "1234567890"}
    made = {
        "runs/a/b/c": {"commit": None},
        "runs/a/b/d": clean,
        "studies/e": clean | {"earlier": [{"commit": "12345678+"}]},
    }
    for folder, manifest in made.items():
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "manifest.json").write_text(json.dumps(manifest))
    found = [re.search(r"/(.*)/manifest.json: its commit is (.*);", complaint) for complaint in check_results.commits()]
    assert [complaint.groups() for complaint in found] == [("runs/a/b/c", "unknown"), ("studies/e", "12345678+")]


def test_a_notebook_of_other_runs_is_found(monkeypatch):
    monkeypatch.setattr(Group, "caption", lambda group: "5 seeds more")
    monkeypatch.setattr(check_results, "choices", lambda group: ["herding"])
    complaints = list(check_results.captions())
    assert any(
        some.startswith("notebooks/fig3a_lr_hmda.ipynb (`make figures`) is of other runs") for some in complaints
    )
    assert not any("fig4" in some or "herding" in some for some in complaints)  # sweeps have captions of their own


def test_a_number_in_prose_that_no_table_has_is_found():
    page = (ROOT / "docs" / "results.md").read_text()
    section = (passage for passage in quoted.passages(page) if passage.startswith("## Figure 3a"))
    number = next(number for passage in section for number in quoted.NUMBER.findall(passage))
    changed = page.replace(
        number, f"{float(number) + 10 ** -len(number.partition('.')[2]):.{len(number.partition('.')[2])}f}"
    )
    (complaint,) = check_results.prose("results.md", changed)
    assert complaint.startswith("results.md, “## Figure 3a")


@pytest.mark.parametrize(
    ("prose", "missing"),
    [
        ("it ends at 0.123 ± 0.005, 45.7 % lower, p = 0.020", []),
        ("0.457", ["0.457"]),
        ("it ends at 0.124", ["0.124"]),
        ("12 % more, −1,234.5, at 3 epochs <!-- not in the tables: 12 % (of a ratio) -->", []),
        ("12 % more", ["12"]),  # 1.12 may be anything
        ("lower on 4 of\n  5 seeds", []),
        ("lower on 5 of 5 seeds", ["5 of 5 seeds"]),
        ("at a rate of 0.25 <!-- not in the tables: 0.25 (setting 3) -->", []),
        ("<!-- not in the tables: 0.25 -->", ["0.25 (listed, but not there)"]),
    ],
)
def test_numbers_in_prose_are_rounded_numbers_of_tables(prose, missing):
    sources = "| 0.12349 ± 0.00512 | −45.7 | p = 0.02 | 1.12 | 1234.51 | 4 of 5 seeds |"
    assert quoted.missing(prose, sources) == missing


def test_passages_name_their_tables():
    text = (
        "# M\n- M4 (Figure 3c)\n\n\n  and more\n\n- BENCH=dropin\n## `study-rates`\n| Figure 4 | 0.5 |\n\none\n\ntwo\n"
    )
    found = list(quoted.passages(text))
    assert found == ["# M\n- M4 (Figure 3c)\n\n\n  and more", "# M\n- BENCH=dropin", "## `study-rates`\none\n\ntwo"]
    references = [quoted.references(some) for some in found]
    assert [some["notebooks"] for some in references] == [
        ["fig3c_mlp_m4", "fig3c_mlp_m4_4workers"],
        [],
        ["study_rates"],
    ]
    assert [some["benchmarks"] for some in references] == [[], ["dropin"], []]
