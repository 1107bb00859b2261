"""The study `compression`: its runs and bytes by hand, its verdicts on made-up results, and some of it, tiny."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from omegaconf import OmegaConf

from cdgrab.errors import CdgrabError
from experiments.store import files
from experiments.studies import base, compression_figures
from experiments.studies.changes import differs
from experiments.studies.compression import BOTH, CORRECTED, UNMASKED, cells, run_of, runs, verdicts, with_bytes
from experiments.studies.compression import parts as trainings
from experiments.studies.sparsifiers import PUBLISHED
from experiments.training.config import compose

METHODS = ("ExDyna", "ExDyna as published")
SMOKE = ["study=compression", "size=smoke", "data=embedded"]


@pytest.fixture(scope="module")
def study():
    return base.compose_study(["study=compression", "size=paper", "data=embedded"])


@pytest.mark.parametrize("name", ["lstm_16_thousandth", "resnet18_16"])
def test_momentum_is_applied_once_and_what_does_not_see_it_is_scaled(study, name):
    """Every run is one that can be composed."""
    settings = study.settings
    usual = compose(run_of(settings, name, "dense", "d_rr")).config
    for method, sorter in runs(settings, name):
        config = compose(run_of(settings, name, method, sorter)).config
        corrected, calm = "momentum_correction" in method, ",momentum=0" in method
        assert config.task.momentum == (0 if corrected or calm else 0.9)
        assert config.task.lr == pytest.approx(usual.task.lr * (10 if calm else 1) * (0.5 if "rate" in method else 1))
        for setting in ("weight_decay", "clip"):
            before, now = usual.task.get(setting), config.task.get(setting)
            assert now == (pytest.approx(10 * before) if corrected and before else before)
        assert config.workers == settings.cells[name].workers and config.sorter.name == sorter
        assert config.sparsifier.get("density") == settings.cells[name].get("density")
        if "density" in settings.cells[name]:
            warm = settings.models[settings.cells[name].model].warm_up_steps
            assert config.sparsifier.warm_up_steps == (warm if "warm_up" in method else 0)


def test_bytes_add_up_over_epochs():
    sizes = {"workers": 4, "parameters": 1000, "steps_per_epoch": 5}
    sparse = [{"train_loss": 2.0}, *({"train_loss": 1.0, "sparsifier": {"bytes": b}} | sizes for b in (10, 30))]
    assert with_bytes(sparse)["sent"] == [0, 50, 200]
    assert with_bytes([{"train_loss": 2.0}, {"train_loss": 1.0} | sizes])["sent"] == [0, 5 * 2 * 3 * 4000 // 4]


def test_cells_are_picked_out_without_another_folder(study):
    some = base.compose_study([*SMOKE, "study.only=[lenet_16,lenet_16_tenth]"])
    assert cells(some.settings) == ["lenet_16", "lenet_16_tenth"] and "only" not in some.settings
    assert some.directory == base.compose_study(SMOKE).directory
    assert cells(study.settings)[:3] == ["lenet_8", "lenet_8_hundredth", "lenet_8_thousandth"]
    with pytest.raises(CdgrabError, match="unknown cell 'lenet_32'; the cells are lenet_8, "):
        base.compose_study([*SMOKE, "study.only=[lenet_32]"])
    del some.settings.cells["lenet_16"]
    with pytest.raises(CdgrabError, match="lenet_16_tenth needs one without density: of lenet with 16 workers"):
        some.parts()


def test_results_are_kept_where_methods_and_models_are_added_and_refused_otherwise(study, monkeypatch):
    stored = OmegaConf.to_container(study.settings)
    stored["cells"] = {name: stored["cells"][name] for name in ("lenet_8", "lenet_8_hundredth", "resnet18_8_tenth")}

    def differing(**changes):
        settings = OmegaConf.to_container(OmegaConf.merge(study.settings, changes))
        return [key for key in stored if differs(key, stored, settings)]

    assert differing() == []
    assert differing(cells={"resnet18_8_tenth": {"methods": "few"}}) == []
    assert differing(models={"lstm": {"lr": 1.0}}) == []  # of which there are no results
    assert differing(models={"resnet18": {"seeds": [3, 5]}}) == differing(order_seeds={"lenet": [5, 20, 40]}) == []
    assert differing(order_seeds={"lenet": 20}) == ["order_seeds"]
    for change in ({"lr": 1.0}, {"seeds": 5}):  # that somebody has looked before is not forgotten
        assert differing(models={"resnet18": change}) == ["models"]
    assert differing(cells={"resnet18_8_tenth": {"methods": "peers"}}) == ["cells"]
    assert differing(cells={"lenet_8_hundredth": {"methods": "few"}}) == ["cells"]  # it had more
    manifest = {"settings": stored | {"cells": {"lenet_8": stored["cells"]["lenet_8"]}}, "left_out": stored["cells"]}
    monkeypatch.setattr(base.Study, "manifest", lambda self: manifest)
    base._refuse_other_settings(study)
    for setting in ("models.resnet18.lr=1", "cells.resnet18_8_tenth.density=0.2"):  # of a cell that was left out
        changed = base.compose_study(["study=compression", "size=paper", "data=embedded", f"study.{setting}"])
        with pytest.raises(CdgrabError, match=f"holds results with other {setting.split('.')[0]}"):
            base._refuse_other_settings(changed)


def made_up(settings, **losses):
    """Results of LeNet with 8 workers: these last losses by method, 1 where none is named; CD-GraB's are 10 % lower."""
    rows = []
    for part in trainings(settings):
        method, sorter, seed = (part.key[name] for name in ("method", "sorter", "seed"))
        last = losses.get(method, 1.0) * (0.9 if sorter == "cd_grab" else 1.0) * (1 + 0.02 * np.sin(seed))
        key = dict(part.key) | {"density": 0.02 if method in ("topk", PUBLISHED) else 0.0105}
        key["imbalance"] = 0.1 + 0.001 * seed
        rows += [key | {"epoch": e, "train_loss": 4.0 if e < 15 else last + 1e-4 * seed} for e in range(31)]
    return pd.DataFrame(rows)


def test_what_momentum_does_is_told_from_what_sparsification_does(study):
    settings = study.settings.copy()
    settings.cells = {name: settings.cells[name] for name in ("lenet_8", "lenet_8_hundredth")}

    def judged(**losses):
        found = {v.claim: v for v in verdicts(made_up(settings, **losses), settings)}
        return found, [v.answer for claim, v in found.items() if "leaves at most half" in claim]

    found, answers = judged(**{"exdyna": 1.4, CORRECTED: 1.05, UNMASKED: 1.4, "exdyna,momentum=0": 1.3, BOTH: 1.0})
    topk = found["LeNet-CIFAR-10, 8 workers, density 0.01: ExDyna ends lower than Top-k"]
    assert topk.answer == "undecided" and "at other densities: 0.0105 and 0.02" in topk.note
    assert answers == ["holds", "fails", "fails", "holds"]  # an eighth is left, all of it, three quarters, nothing
    where = "LeNet-CIFAR-10, 8 workers"
    assert found[f"{where}: dense training has learnt, last loss / first"].answer == "holds"
    assert found[f"{where}, density 0.01: train loss with ExDyna / dense"].answer == "fails"
    both = found[f"{where}, density 0.01: ExDyna, momentum correction, warm-up ends lower than ExDyna"]
    assert both.answer == "holds" and both.p < 1e-4 and both.seeds == 5
    assert found[f"{where}, density 0.01: four fifths of CD-GraB's gain are left with ExDyna"].answer == "holds"
    held = [
        found[f"{where}, density 0.01, {method}: relative error of an epoch's mean density, mean over the epochs"]
        for method in METHODS
    ]
    assert [(v.answer, v.measured[:4]) for v in held] == [("holds", "0.05"), ("fails", "1 [1")]
    for changed in ("without momentum", "without momentum and at half the rate"):  # 1.3 and 1 times the dense loss
        alike = found[f"{where}, density 0.01: train loss with ExDyna / dense, both {changed}"]
        assert alike.answer == ("fails" if changed == "without momentum" else "holds")
    even = [found[f"{where}, density 0.01, {method}: imbalance, mean over the epochs"].answer for method in METHODS]
    assert even == ["holds", "holds"]
    _, answers = judged()
    assert answers == ["undecided"] * 4  # nothing is lost: there is nothing to explain


def test_cells_with_few_methods_and_densities_are_judged_and_told_by_what_they_have(study):
    settings = study.settings.copy()
    chosen = ("lenet_8", "lenet_8_hundredth", "lenet_8_tenth", "lstm_8", "lstm_8_hundredth")
    settings.cells = {name: settings.cells[name] for name in chosen}
    table = made_up(settings, exdyna=1.4).assign(sent=1e6)
    claims = [v.claim for v in verdicts(table, settings)]
    of = {name: {claim.split(": ", 1)[1] for claim in claims if claim.startswith(name)} for name in ("LeNet", "LSTM")}
    assert of["LSTM"] < of["LeNet"] and "ExDyna ends lower than Top-k" in of["LSTM"]
    missing = of["LeNet"] - of["LSTM"]
    assert all(any(words in claim for words in ("warm-up", "half the rate", "not masked")) for claim in missing)
    rows = [line.split("|")[1:-1] for line in compression_figures.summary_table(table, settings).splitlines()]
    assert [name.strip() for name in rows[0][2:]] == ["whole gradients", "density 0.1", "density 0.01"]
    filled = {(row[0].strip(), row[1].strip()): [bool(cell.strip()) for cell in row[2:]] for row in rows[2:]}
    assert filled["LeNet-CIFAR-10, 8 workers", "ExDyna"] == [False, True, True]
    assert filled["LSTM-WikiText-2, 8 workers", "ExDyna"] == [False, False, True]
    assert filled["LSTM-WikiText-2, 8 workers", "PowerSGD"] == [True, False, False]
    assert ("LSTM-WikiText-2, 8 workers", "ExDyna, half the rate") not in filled


def test_a_large_model_has_neither_remedies_nor_orders(study):
    settings = study.settings.copy()
    settings.cells = {name: settings.cells[name] for name in ("resnet18_8", "resnet18_8_hundredth")}
    assert {sorter for name in settings.cells for _, sorter in runs(settings, name)} == {"d_rr"}
    assert len(list(trainings(settings))) == 3 * (3 + 6)  # seeds, and methods of both cells
    claims = [v.claim.split(": ", 1)[1] for v in verdicts(made_up(settings, exdyna=1.4), settings)]
    assert "train loss with PowerSGD / dense" in claims and "ExDyna ends lower than Top-k" in claims
    assert not any(words in claim for claim in claims for words in ("CD-GraB", "momentum", "rank 4"))


def test_a_second_look_widens_intervals_of_its_model_alone(study):
    settings = study.settings.copy()
    settings.cells = {
        name: settings.cells[name] for name in ("lenet_8", "lenet_8_hundredth", "resnet18_8_hundredth", "resnet18_8")
    }
    settings.models.resnet18.seeds = 5
    table = made_up(settings, exdyna=1.4)
    once = {v.claim: v for v in verdicts(table, settings)}
    settings.models.resnet18.seeds = [3, 5]
    for claim, verdict in ((v.claim, v) for v in verdicts(table, settings)):
        assert verdict.seeds == (20 if "CD-GraB" in claim else 5)
        if claim.startswith("ResNet"):
            assert np.isnan(verdict.p) or verdict.p == pytest.approx(min(1, 2 * once[claim].p))
        else:
            assert verdict == once[claim]


def test_orders_have_more_seeds_and_nothing_else_sees_them(study):
    settings = study.settings.copy()
    settings.cells = {name: settings.cells[name] for name in ("lenet_8", "lenet_8_hundredth", "lstm_8")}
    counted = Counter((p.key["cell"], p.key["method"], p.key["sorter"]) for p in trainings(settings))
    for (cell, method, sorter), seeds in counted.items():
        assert seeds == (20 if cell != "lstm_8" and method in ("dense", "exdyna") else 5)
        assert (sorter == "d_rr") or (method in ("dense", "exdyna"))
    table = made_up(settings, exdyna=1.4)
    few = {v.claim: v for v in verdicts(table, OmegaConf.merge(settings, {"order_seeds": {"lenet": 5}}))}
    worse = (table["sorter"] == "cd_grab") & (table["method"] == "exdyna") & (table["seed"] >= 5)
    table.loc[worse, "train_loss"] *= 1.5  # 10 % lower on 5 seeds, 35 % higher on 15
    changed = {claim: v for claim, v in ((v.claim, v) for v in verdicts(table, settings)) if v != few[claim]}
    where = "LeNet-CIFAR-10, 8 workers"
    gains = [f"{where}: CD-GraB ends lower than D-RR, dense"]
    gains += [f"{where}, density 0.01: CD-GraB ends lower than D-RR, with ExDyna"]
    gains += [f"{where}, density 0.01: four fifths of CD-GraB's gain are left with ExDyna"]
    assert list(changed) == gains
    assert [few[claim].answer for claim in gains] == ["holds"] * 3
    assert [changed[claim].answer for claim in gains] == ["holds", "fails", "fails"]
    table = table.assign(sent=1e6)
    told = [compression_figures.end_table(table[table["seed"] < most], settings) for most in (5, 20)]
    assert told[0] == told[1]
    settings.seeds = 2
    assert {p.key["seed"] for p in trainings(settings)} == {0, 1}


def rows_of(table, study):
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table(study).splitlines()[2:]]


def test_what_orders_gain_is_drawn_by_density(study, monkeypatch):
    some = replace(study, settings=study.settings.copy())
    chosen = ("lenet_8", "lenet_8_thousandth", "lenet_8_tenth", "lstm_8", "resnet18_8")
    some.settings.cells = {name: study.settings.cells[name] for name in chosen}
    monkeypatch.setattr(base.Study, "table", made_up(some.settings, exdyna=1.4))
    monkeypatch.setattr(base.Study, "caption", lambda self, seeds: f"{seeds} seeds")
    figure = compression_figures.orders(some)
    assert [panel.get_title() for panel in figure.axes] == ["LeNet-CIFAR-10, 8 workers", "LSTM-WikiText-2, 8 workers"]
    ticks = [[label.get_text() for label in panel.get_xticklabels()] for panel in figure.axes]
    assert ticks == [["dense", "0.1", "0.001"], ["dense"]]
    dots = [line.get_ydata() for line in figure.axes[0].lines if line.get_marker() == "."]
    assert [len(values) for values in dots] == [20] * 3
    np.testing.assert_allclose([values.mean() for values in dots], 10, atol=0.1)
    answers = {v.claim: v for v in verdicts(some.table, some.settings)}
    monkeypatch.setattr(compression_figures, "verdicts", lambda study: answers.values())
    lenet, lstm = rows_of(compression_figures.order_table, some)
    assert lenet[:2] == ["LeNet-CIFAR-10, 8 workers", "20"]
    assert lstm == ["LSTM-WikiText-2, 8 workers", "5", lstm[2], "", ""]
    for cell in lenet[2:]:
        assert float(cell.split()[0]) == pytest.approx(10, abs=0.1) and cell.endswith("] %, holds")
    ours, published = rows_of(compression_figures.density_table, some)
    assert [row[1] for row in (ours, published)] == ["ExDyna", "ExDyna as published"]
    assert ours[2:] == [
        "89 %, fails; imbalance 0.102, holds",
        "9.5e+02 %, fails; imbalance 0.102, holds",
    ]  # it is 0.0105
    remedies = rows_of(compression_figures.remedy_table, some)
    assert [row[1:3] for row in (remedies[0], remedies[-1])] == [
        ["ExDyna", "dense"],
        ["ExDyna, no momentum, half the rate", "dense, half the rate"],
    ]
    assert len(remedies) == 7 and {row[0] for row in remedies} == {"LeNet-CIFAR-10, 8 workers"}
    assert [row[3].split()[0] for row in remedies] == ["1.4", *["1"] * 6] and remedies[0][3].endswith("], fails")
    assert not any(row[3].count(",") > 1 for row in remedies if row[1].endswith("rate") and row[2] == "dense")
    del some.settings.cells["lenet_8_thousandth"], some.settings.cells["lenet_8_tenth"]
    assert compression_figures.remedy_table(some) == ""
    assert any(
        "(5 of LSTM-WikiText-2)" in words.get_text() and "20 seeds" in words.get_text() for words in figure.texts
    )


def test_a_run_that_diverged_decides_nothing(study):
    settings = study.settings.copy()
    settings.cells = {name: settings.cells[name] for name in ("lenet_8", "lenet_8_hundredth")}
    table = made_up(settings, exdyna=1.4)
    diverged = (table["method"] == "exdyna,momentum=0") & (table["epoch"] > 20)
    answers = [v.answer for v in verdicts(table[~diverged], settings) if "training without momentum" in v.claim]
    assert answers == ["undecided"]


def test_some_of_it(monkeypatch, tmp_path):
    monkeypatch.setattr(files, "RESULTS", tmp_path)
    few = ["study.only=[lenet_8,lenet_8_hundredth]", "study.models.lenet.limit=64", "study.models.lenet.epochs=1"]
    few += ["study.ordered=[]", "study.controls=[dense,powersgd]", f"study.sparse=[exdyna,'{BOTH}']"]
    study = base.compose_study([*SMOKE, *few])
    base.carry_out(study)
    sent = study.table.groupby("method")["sent"].max()
    assert sent["dense"] > 5 * sent["powersgd"] > sent["exdyna"] > 0 and sent[BOTH] > sent["exdyna"]
    assert len(study.verdicts()) == 7
    figure = compression_figures.curves(study, 0.01)
    model = "LeNet-CIFAR-10, 8 workers"
    assert [panel.get_title() for panel in figure.axes[::2]] == [model, f"{model}: what might help"]
    drawn = [{line.get_label() for line in panel.lines} for panel in figure.axes[::2]]
    assert drawn == [{"dense", "PowerSGD", "ExDyna"}, {"dense", "ExDyna", "ExDyna, momentum correction, warm-up"}]
    assert "ExDyna, momentum correction, warm-up" in compression_figures.end_table(study.table, study.settings)
