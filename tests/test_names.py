"""What nobody has listed still gets a readable name and a colour of its own; sorters that somebody adds take part."""

import pytest
from synthetic_studies import made_up, settings_of

from cdgrab.errors import CdgrabError
from cdgrab.sorters import SORTERS
from cdgrab.sorters.oblivious import ShuffleOnce
from experiments.report import names
from experiments.studies import sorters
from experiments.studies.base import Study


def test_names_that_are_listed():
    assert [names.metric_label(m) for m in ("train_loss", "val_loss", "test_loss", "epoch", "test_smape")] == [
        *("full train loss", "validation loss", "test loss", "epoch", "test SMAPE")
    ]
    assert (names.task_name("lr_hmda"), names.column_title("workers", 64)) == ("LR-HMDA", "64 workers")
    assert names.sorter_label("d_rr,shared=True", "D-RR") == "D-RR, shared order"
    assert set(SORTERS) <= set(names.COLOURS)


def test_names_that_are_not_listed():
    assert names.metric_label("val_bleu") == "validation bleu" and names.task_name("my_task") == "my task"
    assert names.sorter_label("my_sorter,width=3") == "my sorter, width=3"
    assert names.column_title("task.dataset", "RTE") == "RTE"
    assert names.higher_is_better("val_bleu") and not names.higher_is_better("val_ppl")
    colours = {names.sorter_colour(f"mine_{n}") for n in range(40)}
    assert colours == set(names.OTHER_COLOURS) and not colours & set(names.COLOURS.values())
    assert names.sorter_colour("mine,width=3") == names.sorter_colour("mine")


class Mine(ShuffleOnce):
    label = ""


@pytest.fixture
def with_mine(monkeypatch):
    """The study's runs with d_rr, cd_grab and a sorter that nobody knows."""
    monkeypatch.setitem(SORTERS, "mine", Mine)
    settings = settings_of("sorters").copy()
    settings.sorters = ["d_rr", "mine", "mine,width=3"]
    levels = {"d_rr": 1.0, "mine": 0.9, "mine,width=3": 1.1}
    metrics = {"test_accuracy": lambda key: 80.0, "test_smape": lambda key: 9.0}
    return made_up("sorters", lambda key: levels[key["sorter"]], settings=settings, **metrics)


def test_a_sorter_that_somebody_adds_has_verdicts_a_row_and_a_place_in_the_figure(with_mine, tmp_path, monkeypatch):
    table, settings = with_mine
    found = {verdict.claim: verdict.answer for verdict in sorters.verdicts(table, settings)}
    assert found["LR-HMDA: mine ends lower than D-RR"] == "holds"
    assert found["MLP-M4: mine, width=3 ends lower than D-RR"] == "fails" and len(found) == 4
    assert "| mine " in sorters.sorter_table(table, settings)
    study = Study(settings, "smoke", tmp_path)
    monkeypatch.setattr(Study, "table", table)
    monkeypatch.setattr(Study, "caption", lambda study: "")
    panel = sorters.differences(study).axes[0]
    assert [label.get_text() for label in panel.get_yticklabels()] == ["mine", "mine, width=3"]
    assert names.sorter_colour("mine") in {line.get_color() for line in panel.get_lines()}


def test_the_baseline_must_take_part():
    settings = settings_of("sorters").copy()
    settings.sorters = ["cd_grab"]
    with pytest.raises(CdgrabError, match="study.sorters must name d_rr"):
        list(sorters.parts(settings))
