"""The study of practice: what its scripts train on, in which batches; its cells, verdicts and rates."""

from collections import Counter
from dataclasses import replace
from itertools import islice, pairwise, product
from zlib import crc32

import numpy as np
import pandas as pd
import pytest
import torch
from omegaconf import OmegaConf
from synthetic_studies import answers

from cdgrab import SORTERS, CdgrabError
from experiments.store import records
from experiments.store.files import ROOT
from experiments.studies import practice, practice_figures
from experiments.studies.base import carry_out, compose_study
from experiments.studies.practice_data import SHIFT, Examples, augmented
from experiments.studies.practice_models import Gpt
from experiments.studies.practice_training import NEIGHBOURS, Reformed, batches, share_of_rate
from experiments.studies.verdicts import beyond_chance
from experiments.tasks import make_task
from experiments.training.config import compose
from scripts.check_results import code_cells, computed


@pytest.mark.parametrize("task", ["cifar10", "lr_hmda"])
def test_examples_are_those_of_the_suite(task):
    """The same split by the seed, and normalised in the same way."""
    run = compose([f"task={task}", "data=embedded", "seed=3", "task.limit=30", "task.dtype=float32"])
    expected = make_task(run.config, run.source, torch.device("cpu"))
    found = Examples(run.source, {"task": task, "examples": 30, "valid": None}, 3, torch.device("cpu"))
    for part, theirs in (("train", "train"), ("valid", "test")):
        inputs, labels = expected.fetch(theirs, torch.arange(20))
        torch.testing.assert_close(found.fetch(part, torch.arange(20)), (inputs, labels.long()))
    assert (found.size("train"), found.size("valid")) == (30, expected.test_units)


def test_augmented_pictures_are_shifted_and_mirrored():
    torch.manual_seed(0)
    pictures = torch.rand(40, 3, 6, 6)
    found = Counter()
    for picture, changed in zip(pictures, augmented(pictures), strict=True):
        padded = torch.nn.functional.pad(picture, (SHIFT,) * 4)
        for down, right, mirrored in product(range(2 * SHIFT + 1), range(2 * SHIFT + 1), (False, True)):
            shifted = padded[:, down : down + 6, right : right + 6]
            if torch.equal(shifted.flip(-1) if mirrored else shifted, changed):
                found[mirrored, down, right] += 1
    assert found.total() == 40 and len(found) > 25 and 10 < sum(found[key] for key in found if key[0]) < 30


def test_a_gpt_does_not_look_ahead():
    model = Gpt(words=11, context=8, width=8, layers=2, heads=2, dropout=0.0)
    words = torch.randint(11, (3, 6))
    changed = torch.cat([words[:, :4], (words[:, 4:] + 1) % 11], dim=1)
    before, after = model(words), model(changed)
    torch.testing.assert_close(before[:, :4], after[:, :4])
    assert before.shape == (3, 6, 11) and not torch.allclose(before[:, 4:], after[:, 4:])
    with torch.no_grad():  # which PyTorch computes in another way
        torch.testing.assert_close(model.eval()(words), before)


def epochs(arm, model, examples=22, size=2, number=3):
    """The batches of some epochs, in each of which every example is used once, and has a gradient."""
    loop, found = batches(arm, examples, size, seed=1, model=model), []
    for _ in range(number):
        found.append([])
        for batch in loop:
            found[-1].append(frozenset(map(int, batch)))
            model(torch.eye(examples)[torch.as_tensor(batch)]).square().mean().backward()
            model.zero_grad()
        assert sorted(example for batch in found[-1] for example in batch) == list(range(examples))
    return loop, found


@pytest.mark.filterwarnings("error")
def test_batches_are_fresh_or_fixed_or_reformed():
    found = {arm: epochs(arm, torch.nn.Linear(22, 3))[1] for arm in practice.ARMS}
    for arm in ("fixed", "batch", "coin", "rotated"):
        assert len({frozenset(epoch) for epoch in found[arm]}) == 1 and found[arm][0] != found[arm][1] != found[arm][2]
    for arm in ("shuffle", "example", "reformed"):
        assert len({frozenset(epoch) for epoch in found[arm]}) == 3


def test_coins_move_batches_as_pair_balancing_does():
    """One of each pair goes to the front, the other to the back; both nearer to the ends the earlier they were."""
    _, (first, second, third) = epochs("coin", torch.nn.Linear(22, 3))
    for before, after in ((first, second), (second, third)):
        ends = [{after[pair], after[len(after) - 1 - pair]} for pair in range(len(before) // 2)]
        assert ends == [set(before[2 * pair : 2 * pair + 2]) for pair in range(len(before) // 2)]
    fronts = [first.index(batch) % 2 for batch in second[: len(second) // 2]]
    assert 0 < sum(fronts) < len(fronts)  # by chance one or the other


def test_rotated_orders_are_those_of_pair_balancing_from_another_place_on():
    starts = set()
    for before, after in pairwise(epochs("rotated", torch.nn.Linear(22, 3), number=5)[1]):
        turned = [after[start:] + after[:start] for start in range(len(after))]
        pairs = [set(before[2 * pair : 2 * pair + 2]) for pair in range(len(before) // 2)]
        fits = [all({one[k], one[-1 - k]} == pair for k, pair in enumerate(pairs)) for one in turned]
        assert sum(fits) == 1
        starts.add(fits.index(True))
    assert len(starts) > 1 and "rotated" not in SORTERS


def test_reformed_batches_exchange_examples_with_their_neighbours_only():
    model = torch.nn.Linear(22, 3)
    loop, _ = epochs("reformed", model)
    assert isinstance(loop, Reformed) and len(loop) == 11 and loop._sampler.sorter.position == 11
    before = loop._examples.clone()
    reformed = [frozenset(map(int, batch)) for batch in loop]
    order = loop._sampler.sorter.order(3)[0].tolist()
    for start in range(0, 11, NEIGHBOURS):
        slots = [number for unit in order[start : start + NEIGHBOURS] for number in loop._sampler._own[unit][0]]
        assert frozenset().union(*reformed[start : start + NEIGHBOURS]) == {int(before[slot]) for slot in slots}


def test_rates_decay_after_a_warm_up():
    for schedule in ("linear", "cosine"):
        shares = [share_of_rate(schedule, 100, step) for step in range(101)]
        assert all(a < b for a, b in pairwise(shares[:5])) and all(a > b for a, b in pairwise(shares[5:]))
        assert max(shares) > 0.9 and shares[-1] == 0 and share_of_rate("constant", 100, 70) == 1
    assert share_of_rate("linear", 100, 40) == pytest.approx(0.6)
    assert share_of_rate("cosine", 100, 25) == pytest.approx(0.5 + 0.5**1.5)


# -- cells and verdicts -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small():
    return compose_study(["study=practice", "size=smoke", "data=embedded"])


@pytest.fixture
def settings(small):
    """With five seeds of every cell."""
    return with_seeds(small.at(5).settings)


def with_seeds(settings, **own):
    """With these seeds of some cells, and no more than the study's of the others."""
    changed = OmegaConf.to_container(settings)
    for name, cell in changed["cells"].items():
        cell.pop("seeds", None)
        cell |= {"seeds": own[name]} if name in own else {}
    return OmegaConf.create(changed)


def test_all_of_it_with_cells_left_out_and_added_and_rates_chosen_anew(small, monkeypatch, tmp_path):
    """Of a study that was interrupted the whole cells can be finished, and nothing is lost."""
    study, totals = replace(small, directory=tmp_path / "smoke-embedded"), []

    def interrupted(results, total):
        yield from islice(results, total - 1)
        raise KeyboardInterrupt

    def counted(results, total):
        totals.append(total)
        return results

    cells = [part.key["cell"] for part in study.parts()]
    with pytest.raises(KeyboardInterrupt):
        carry_out(study, interrupted)
    lines = sorted(map(str, study.lines()))
    smaller = replace(study, settings=OmegaConf.merge(study.settings))
    smaller.settings.cells = {name: own for name, own in study.settings.cells.items() if name != "mlp"}
    carry_out(smaller, counted)
    assert totals == [0] and smaller.complete() and sorted(map(str, study.lines())) == lines and cells[-1] == "mlp"
    assert set(smaller.table["cell"]) == {"lenet_augmented"} and "mlp" not in smaller.manifest()["settings"]["cells"]
    assert smaller.manifest()["left_out"]["mlp"] == study.settings.cells.mlp
    carry_out(study, counted)
    assert totals == [0, 1] and "mlp" in study.manifest()["settings"]["cells"]
    carry_out(smaller, counted)
    assert totals == [0, 1] and "mlp" in study.manifest()["settings"]["cells"]  # nothing to do: nothing is left out
    fewer = records.read_manifest(study.directory)
    del fewer["settings"]["cells"]["mlp"]
    records.write_manifest(study.directory / records.MANIFEST, fewer)
    carry_out(study, counted)
    assert totals == [0, 1, 0] and "mlp" in study.manifest()["settings"]["cells"]  # its results were there
    _say_all(study, monkeypatch, tmp_path)
    monkeypatch.setattr(practice, "train", lambda *case: {"epoch": [1]})
    monkeypatch.setattr(practice, "cost", lambda *case: {"round": [1]})
    monkeypatch.setattr(practice, "verdicts", lambda table, settings: [])
    carry_out(replace(study, settings=OmegaConf.merge(study.settings, {"chosen": {"mlp": 0.5}})), counted)
    assert totals == [0, 1, 0, cells.count("mlp") - 1]  # not the pilot
    more = replace(study, settings=OmegaConf.merge(study.settings))
    more.settings.cells.mlp.arms = [*study.settings.cells.mlp.arms, "coin"]
    carry_out(more, counted)
    assert totals[4:] == [1] and "coin" in study.manifest()["settings"]["cells"]["mlp"]["arms"]
    fewer = replace(more, settings=OmegaConf.merge(more.settings))
    fewer.settings.cells.lenet_augmented.arms = ["shuffle", "fixed"]
    for less in (study, fewer):  # an arm that was judged is not dropped, even one that all cells have
        with pytest.raises(CdgrabError, match="holds results with other cells"):
            carry_out(less)


def _say_all(study, monkeypatch, tmp_path):
    """Verdicts, figure, and what the notebook says."""
    assert sum("MLP, HMDA: " in verdict.claim for verdict in study.verdicts()) == 12
    assert study.table[study.table["kind"] == "trained"]["score"].between(0, 100).all()
    figure = practice_figures.gains(study)
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == [
        "LeNet, CIFAR-10: augmented",
        "MLP, HMDA",
    ]
    monkeypatch.setenv("CDGRAB_STUDY", str(study.directory))
    monkeypatch.setenv("CDGRAB_FIGURES", str(tmp_path / "figures"))
    told = computed(code_cells(ROOT / "notebooks" / "study_practice.ipynb"))
    for words in (
        "| CD-GraB's reformed batches ",
        "80,642",
        ", example ",
        "cannot tell yet (1) |",
        "only shows that it runs",
    ):
        assert words in told
    assert (tmp_path / "figures" / "study_practice-smoke-embedded.md").stat().st_size > 500


def made_up_table(settings, loss, score=lambda cell, arm: 50.0, ratio=1.05):
    rows = []
    for key in (part.key for part in practice.parts(settings)):
        noise = 1e-3 * np.random.default_rng(crc32(str(key).encode())).normal()
        chosen = {"epoch": 1, "examples": 9, "dim": 5}
        if key["kind"] == "pilot":
            rows.append(key | chosen | {"score": 60 - abs(np.log(key["rate"] / settings.chosen[key["cell"]]))})
        elif key["kind"] == "cost":
            times = ({"plain_us": 100.0, "ours_us": 100 * ratio + 0.1 * round_} for round_ in range(8))
            rows += [key | {"floats_per_parameter": 3.0} | both for both in times]
        else:
            where = key["cell"], key["arm"]
            value = loss(*where) + noise + 0.01 * key["seed"]  # seeds differ more than arms
            rows.append(key | chosen | {"train_loss": value, "train_score": 1.0, "score": score(*where) + noise})
    return pd.DataFrame(rows)


def test_gains_losses_and_what_does_not_matter_are_told_apart(settings):
    levels = {"shuffle": 1.0, "fixed": 1.05, "batch": 0.9, "example": 1.001, "reformed": 0.95}
    table = made_up_table(settings, lambda cell, arm: levels[arm], lambda cell, arm: 50 + (arm == "batch"))
    found = answers(practice.verdicts(table, settings))
    label = "LeNet, CIFAR-10: augmented"
    assert found[f"{label}: fixed batches at random beat fresh batches in train loss"] == "fails"
    assert found[f"{label}: CD-GraB's batches beat fresh batches in train loss"] == "holds"
    assert found[f"{label}: CD-GraB's batches beat fresh batches in validation score"] == "holds"
    assert found["MLP, HMDA: CD-GraB's examples beat fresh batches in train loss"] == "equal"
    assert found["MLP, HMDA: CD-GraB's examples beat fixed batches at random in train loss"] == "holds"
    assert found["MLP, HMDA: CD-GraB's examples beat fresh batches in validation score"] == "equal"
    assert found["MLP, HMDA: a step with ordered batches takes at most 1.1 times as long"] == "holds"
    assert found["MLP, HMDA: the rate is the best of those tried with shuffle=True"] == "holds"
    rows = practice_figures.summary_table(table, settings).splitlines()[2:]
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows]
    assert [(row[0], row[1], row[6], row[7]) for row in rows] == [
        ("MLP, HMDA", "batches", "helps", "1.05 ×"),
        ("MLP, HMDA", 'examples (`unit="example"`)', "makes no difference", "1.05 ×"),
        (label, "batches", "helps", "–"),
    ]
    assert rows[0][2].startswith("+9.9 % [") and rows[0][4].startswith("+1 points [")
    other = answers(practice.verdicts(table, OmegaConf.merge(settings, {"chosen": {"mlp": 0.3}})))
    assert other["MLP, HMDA: the rate is the best of those tried with shuffle=True"] == "fails"


def test_one_of_many_comparisons_may_differ_by_chance(settings):
    """Its own interval excludes zero, but not after the adjustment."""
    table = made_up_table(settings, lambda cell, arm: 1.0)
    wobble = {0: 0.0, 1: 1.0, 2: -1.0, 3: 0.5, 4: -0.5}
    here = (table["kind"] == "trained") & (table["cell"] == "mlp") & (table["arm"] == "batch")
    table.loc[here, "train_loss"] = [0.98 + 0.01 * s + 0.015 * wobble[s] for s in table.loc[here, "seed"]]
    claim = "MLP, HMDA: CD-GraB's batches beat fresh batches in train loss"
    assert answers(practice.verdicts(table, settings))[claim] == "holds"
    found = {verdict.claim: verdict for _, verdict in practice.judged(practice.ends(table), settings)}
    assert found[claim].answer == "undecided" and found[claim].note.endswith("not among 14 claims")
    assert answers(beyond_chance(practice.verdicts(table, settings)))[claim] == "undecided"


def test_a_cell_may_have_more_seeds_and_pays_for_every_look(settings):
    from scipy import stats

    more = with_seeds(settings, mlp=[5, 10])
    seeds = {name: set() for name in more.cells}
    for part in practice.parts(more):
        seeds[part.key["cell"]] |= {part.key["seed"]} if part.key["kind"] == "trained" else set()
    assert {name: some for name, some in seeds.items() if some} == {
        "mlp": set(range(10)),
        "lenet_augmented": set(range(5)),
    }
    table = made_up_table(more, lambda cell, arm: 0.9 if arm == "batch" else 1.0)
    claim = "MLP, HMDA: CD-GraB's batches beat fresh batches in train loss"
    found = {verdict.claim: verdict for verdict in practice.verdicts(table, more)}[claim]
    gain = practice.compared(practice.ends(table), more, "mlp", "batch", "shuffle", practice.LOSS)
    half = stats.t.ppf(1 - 0.05 / 2 / 2, 9) * gain.gains.std() / 10**0.5  # half of the 5 % for each look
    assert (gain.gain.low, gain.gain.high) == pytest.approx((gain.gains.mean() - half, gain.gains.mean() + half))
    assert found.seeds == 10 and found.answer == "holds" and found.measured == str(gain.gain)
    assert found.p == pytest.approx(2 * stats.ttest_1samp(gain.gains, 0).pvalue, rel=1e-6)
    rows = [row.split("|") for row in practice_figures.summary_table(table, more).splitlines()]
    assert [row[6].strip() for row in rows if "MLP, HMDA" in row[1]] == ["10", "10"]
    few = OmegaConf.merge(more, {"seeds": 1})  # whoever wants few of the study has few of all
    assert {part.key["seed"] for part in practice.parts(few) if part.key["kind"] == "trained"} == {0}


def test_seeds_are_added_to_a_cell_and_looks_are_not_forgotten(small, monkeypatch, tmp_path):
    monkeypatch.setattr(practice, "train", lambda *case: {"epoch": [1], "train_loss": [1.0], "dim": 1})
    monkeypatch.setattr(practice, "cost", lambda *case: {"round": [1]})
    monkeypatch.setattr(practice, "verdicts", lambda table, settings: [])
    before = replace(small, directory=tmp_path / "smoke-embedded", settings=with_seeds(small.settings))
    carry_out(before)
    done = [line for line in before.lines() if line["kind"] == "trained" and line["cell"] == "mlp"]
    more = replace(before, settings=with_seeds(small.settings, mlp=[1, 3]))
    carry_out(more)
    found = [line for line in more.lines() if line["kind"] == "trained" and line["cell"] == "mlp"]
    assert len(found) == 3 * len(done) and all(line in found for line in done) and more.complete()
    assert "1 to 3 seeds" in more.caption() and "· 1 seed ·" in before.at(1).caption()
    for forgetful in (before.settings, with_seeds(small.settings, mlp=3)):
        with pytest.raises(CdgrabError, match="holds results with other cells"):
            carry_out(replace(more, settings=forgetful))


def test_pilots_do_not_count_and_are_made_with_shuffling_only(settings):
    settings.tried.lenet = [0.1, 0.2]
    parts = list(practice.parts(settings))
    kinds, pilots = [part.key["kind"] for part in parts], [part.key for part in parts if part.key["kind"] == "pilot"]
    assert kinds == sorted(kinds, key=["pilot", "trained", "cost"].index) and len(pilots) == 3
    assert {key["arm"] for key in pilots} == {"shuffle"} and {key["seed"] for key in pilots} == {1000}
    assert {part.key["seed"] for part in parts if part.key["kind"] == "trained"} == set(range(5))
    assert all(part.alone == (kind == "cost") for part, kind in zip(parts, kinds, strict=True))
