"""What is written agrees with results/, and the check finds what does not."""

import re

import pytest

from experiments.report import readme
from experiments.store.files import ROOT
from scripts import check_results


@pytest.fixture(scope="module")
def page():
    return (ROOT / "README.md").read_text()


@pytest.mark.parametrize("name", readme.TABLES)
def test_every_number_in_a_table_of_the_readme_counts(page, name, monkeypatch):
    computed = readme.TABLES[name]()
    monkeypatch.setattr(readme, "TABLES", {other: lambda: computed for other in readme.TABLES})
    (table,) = (found for found in readme.MARKED.finditer(page) if found[2] == name)
    page = table[0]
    assert not list(check_results.differences("README.md", page, readme.filled(page), "make report"))
    digits = list(re.compile(r"\d").finditer(page, page.index("\n")))
    assert len(digits) > 20
    for digit in digits:
        changed = page[: digit.start()] + str((int(digit[0]) + 1) % 10) + page[digit.end() :]
        (complaint,) = check_results.differences("README.md", changed, readme.filled(changed), "make report")
        assert complaint.startswith("README.md does not agree with results/")
