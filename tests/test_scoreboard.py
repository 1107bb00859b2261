"""results/PAPER.md: numbers computed once more from the files with plain numpy, and verdicts on made-up runs."""

import json
import re
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
from synthetic_runs import write_run

from experiments.report import curve_claims, measures, scoreboard
from experiments.report.claims import FIGURES
from experiments.report.judging import Claim, Evidence, judged
from experiments.report.names import BASELINE, OURS
from experiments.report.runs import Group
from experiments.report.statistics import against, sign_p
from experiments.report.study_claims import EMBEDDING, EXDYNA, ONLINE, Studied, is_about_published_rules, with_lines
from experiments.store.files import RESULTS
from experiments.studies.verdicts import beside_all_seeds, judge

PAIR, NOWHERE = (OURS, BASELINE), Evidence("made up", "", "–")
HMDA = RESULTS / "runs" / "lr_hmda" / "fig3a_lr_hmda" / "NJ-2017"


def values(sorter, metric):
    """[seeds, epochs], from the files themselves."""
    runs = sorted(HMDA.glob(f"{sorter}-s*/metrics.jsonl"))
    return np.array([[json.loads(line)[metric] for line in run.read_text().splitlines()] for run in runs])


def test_figure_3a_is_what_its_files_say(monkeypatch):
    from scipy.stats import ttest_1samp

    monkeypatch.setattr(curve_claims, "FIGURES", FIGURES[:1])
    runs = {"fig3a_lr_hmda": [Group(HMDA)]}
    nothing, *rows = judged(curve_claims.better(runs))
    assert (nothing.where, nothing.verdict) == ("Figure 3a, on its own data", "not possible here")
    for row, metric in zip(rows, ("train_loss", "test_accuracy"), strict=True):
        ours, theirs = (values(sorter, metric)[:, 25:].mean(1) for sorter in PAIR)
        test = ttest_1samp(ours - theirs, 0)
        ends = [f"{number:.3g}".replace("-", "−") for number in (np.mean(ours - theirs), *test.confidence_interval())]
        p = f"= {test.pvalue:.2g}" if test.pvalue >= 1e-4 else "< 1e-4"
        assert row.ours.startswith("{} [{}, {}], p {}; last epoch ".format(*ends, p))
        assert (row.verdict, row.seeds) == ("reproduced", f"{len(ours)}")
    (smoother,) = judged(curve_claims.smoother(runs))
    ours, theirs = (np.diff(values(sorter, "train_loss")[:, 25:]).std(1, ddof=1) for sorter in PAIR)
    assert smoother.ours.startswith(f"{np.exp(np.log(theirs / ours).mean()):.3g} [")


def test_what_pretraining_brings_is_what_the_files_of_sst2_say():
    runs = RESULTS / "runs" / "glue" / "table1_glue"
    best = {
        source: [
            max(json.loads(line)["val_accuracy"] for line in path.read_text().splitlines())
            for path in sorted((runs / source).glob("d_rr-s*/metrics.jsonl"))
        ]
        for source in ("GLUE", "GLUE,encoder=random_gpt2")
    }
    rows = judged(curve_claims.pretraining({"table1_glue": [Group(runs / source) for source in best]}))
    new, gains = best["GLUE,encoder=random_gpt2"], np.subtract(*best.values())
    assert rows[1].ours.startswith(f"{gains.mean():.3g} [".replace("-", "−")) and rows[1].seeds == str(len(gains))
    assert rows[1].ours.endswith(f"{np.mean(new):.2f} ± {np.std(new, ddof=1):.2f} %")
    assert not list(curve_claims.pretraining({"table1_glue": [Group(runs / "GLUE")]}))


@pytest.mark.parametrize(
    ("values", "others", "verdict", "reason"),
    [
        ([-1.0, -1.1, -1.2], 0, "reproduced", ""),
        ([1.0, 1.1, 1.2], 0, "contradicted", ""),
        ([-1.0, 0.9, -1.1], 0, "cannot decide", "the interval includes 0"),
        ([-1.0, -1.1], 0, "cannot decide", "2 seeds"),
        ([-1.0, -1.4, -1.8], 0, "reproduced", ""),  # t = 1.4 √3 / 0.4 = 6.06, p = 0.026
        ([-1.0, -1.4, -1.8], 1, "cannot decide", "p = 0.052 by Holm"),  # twice that
        ([-0.1, 0.1, 0.05], 0, "contradicted", "equal, within the margin"),  # 0.017 ± 0.26
        ([-0.1, 0.1, 0.1], 0, "cannot decide", "the interval includes 0"),  # 0.033 ± 0.29
    ],
)
def test_verdicts(values, others, verdict, reason):
    claims = [
        Claim("here", "less", "family", some, NOWHERE, 3, margin=0.3) for some in ([values] + [values[:]] * others)
    ]
    row = judged(claims)[0]
    assert (row.verdict, row.reason, row.seeds) == (verdict, reason, "3" if len(values) == 3 else "2 of 3")


def test_epochs_are_counted_to_the_same_seeds_last_loss(tmp_path, monkeypatch):
    for seed in range(3):
        write_run(tmp_path / "x", "cd_grab", "CD-GraB", seed, [5.0, 3.0 + seed, 2.5, 2.0])
        write_run(tmp_path / "x", "d_rr", "D-RR", seed, [6.0, 5.0, 3.5, 3.5 - seed])  # last: 3.5, 2.5, 1.5
    assert measures.sooner(Group(tmp_path / "x"), PAIR).to_dict() == {
        0: 2 - 3,
        1: 3 - 4,
        2: 5 - 4,
    }  # 2 never reaches it
    monkeypatch.setattr(curve_claims, "FIGURES", FIGURES[:1])
    for path in (tmp_path / "x").glob("*/manifest.json"):  # so that nobody knows what an epoch takes
        path.write_text(json.dumps(json.loads(path.read_text()) | {"replicas": 3}))
    epochs, seconds = judged(curve_claims.sooner({"fig3a_lr_hmda": [Group(tmp_path / "x")]}))
    assert epochs.ours.startswith("−0.333 (epochs), p = 1 of the signs; not reached on 1 seed; ")
    assert (epochs.verdict, epochs.reason) == ("cannot decide", "so on 2 of 3 seeds")
    assert (seconds.where, seconds.verdict, seconds.ours) == ("Figure 3a, seconds", "cannot decide", "–")
    assert seconds.reason == "none of these runs had its machine for itself" and seconds.seeds == "0 of 10"


def test_commands_name_what_was_changed(tmp_path):
    folder = tmp_path / "fig3c_mlp_m4" / "M4-weekly,epochs=2,batch=16"
    for seed in range(3):
        write_run(folder, "d_rr", "D-RR", seed, [1.0, 0.5], task="mlp_m4")
    changed = "epochs=2 task.batch=16 'seed=range(0,3)'"
    command = f"python -m experiments.launch -m experiment=fig3c_mlp_m4 size=paper {changed}"
    assert curve_claims.command(Group(folder)) == command
    folder = tmp_path / "fig3c_mlp_m4" / "M4-weekly"
    for seed in range(3):
        write_run(folder, "d_rr", "D-RR", seed, [1.0], task="mlp_m4")
    write_run(folder, "cd_grab,initial=identity", "CD-GraB", 0, [1.0], task="mlp_m4")
    alone = "python -m experiments.launch -m experiment=fig3c_mlp_m4 size=paper replicas=1 'seed=range(0,3)'"
    assert curve_claims.command(Group(folder), timed=True) == alone
    option = "size=paper sorter=cd_grab sorter.initial=identity 'seed=range(0,1)'"
    assert curve_claims.command(Group(folder), ("cd_grab,initial=identity", "d_rr")) == (
        f"make reproduce-mlp-m4 SIZE=paper SEEDS=3 && python -m experiments.launch -m experiment=fig3c_mlp_m4 {option}"
    )


def test_an_undecided_line_of_a_study_has_its_unit_and_its_reason():
    line = judge("rates", [-1.0, 0.5, 1.0], "in doublings", least=0.0)
    row = scoreboard._answer(
        Studied("here", "larger", "made_up", ("rates",)), scoreboard.Study({"rates": line}, "", ""), "rates"
    )
    assert row.ours == f"rates: {line.measured} (in doublings); wanted ≥ 0"
    assert re.fullmatch(r"the interval includes the limit; about \d+ values would decide", row.reason)


def test_a_line_of_a_study_has_its_first_answer_and_the_numbers_of_all_seeds():
    few, all_of_them = judge("rates", [1.0, 1.1, 1.2], least=0.0), judge("rates", [1.0, 1.1, 1.2, -0.5, -2], least=0.0)
    line = beside_all_seeds(replace(few, seeds=3), replace(all_of_them, seeds=5))
    claim, study = Studied("here", "larger", "made_up", ("rates",)), scoreboard.Study({"rates": line}, "", "")
    row = scoreboard._answer(claim, study, "rates")
    assert (row.verdict, row.seeds) == ("reproduced", "5") and row.ours.startswith(f"rates: {all_of_them.measured}")
    assert row.reason == "decided with 3 seeds; with all of them undecided"


def test_a_line_of_a_study_may_have_a_figure_of_its_own():
    study = scoreboard.Study({"rates": judge("rates", [1.0, 1.1], least=0.0)}, "study_made_up-quick", "")
    figures = [
        scoreboard._answer(Studied("here", "larger", "made_up", (), figure=which), study, "rates").evidence.figure
        for which in ("", "real")
    ]
    assert figures == ["study_made_up-quick", "study_made_up_real-quick"]


def test_welch_against_published_moments_and_the_sign_test():
    """Two samples given as such: scipy's interval from both equals ours from one and the other's moments."""
    from scipy.stats import binomtest, ttest_ind

    ours, theirs = np.array([1.0, 2.0, 4.0, 4.5]), np.array([3.0, 3.5, 5.0])
    gap = against(ours, theirs.mean(), theirs.std(ddof=1), 3)
    assert (gap.low, gap.high) == pytest.approx(tuple(ttest_ind(ours, theirs, equal_var=False).confidence_interval()))
    assert str(against(ours, 1.0, np.nan, 3)) == "1.88"
    for positive in range(11):
        signs = [1.0] * positive + [-2.0] * (10 - positive) + [0.0]  # which says nothing
        assert sign_p(signs) == pytest.approx(binomtest(positive, 10).pvalue)


def test_without_runs_the_page_still_names_the_figures(monkeypatch):
    for module in (curve_claims, scoreboard):
        monkeypatch.setattr(module, "FIGURES", (FIGURES[3], FIGURES[-1]))
    monkeypatch.setattr(curve_claims, "TRENDS", ())
    monkeypatch.setattr(curve_claims, "TIMED", ())
    monkeypatch.setattr(curve_claims, "evidence", lambda experiment: [])
    page = scoreboard.page({})
    assert "Figure 3c" in page and "Table 1, SST-2" in page and "no runs" in page
    assert "the study rates has no line" in page and "## Levels" not in page


def test_all_claims_are_answered():
    """A line of a study that was renamed would leave a claim without an answer."""
    assert "has no line" not in (RESULTS / "PAPER.md").read_text()


@pytest.mark.parametrize(("majority", "verdict"), [(50.0, "reproduced"), (79.5, "cannot decide")])
def test_a_claim_of_no_more_than_no_worse(tmp_path, monkeypatch, majority, verdict):
    """SST-2: the paper has no gain, and −0.1 points are within the half point that is allowed; but a model that only
    knows the commoner class shows nothing."""
    monkeypatch.setattr(curve_claims, "FIGURES", FIGURES[-1:])
    monkeypatch.setattr(measures, "majority", lambda group: majority)
    settings = {"columns": "task.dataset", "task.dataset": "SST-2"}
    for seed in range(3):
        for sorter, best in ((OURS, 80.0 + seed / 50), (BASELINE, 80.1)):
            metrics = {"val_accuracy": {1: 50.0, 2: best}}
            write_run(tmp_path / "GLUE", sorter, sorter, seed, [1.0, 1.0], metrics=metrics, **settings)
    runs = defaultdict(list, table1_glue=[Group(tmp_path / "GLUE")])
    (row,) = [row for row in judged(curve_claims.better(runs)) if row.where.startswith("Table 1, SST-2")]
    assert row.verdict == verdict and "best epoch −0.03; at most 0.5 worse" in row.says
    assert f"80.02 and 80.10 %, the commoner class has {majority:.2f} %" in row.ours


def test_claims_about_exdyna_are_about_its_published_rules_or_about_ours():
    """Each line is in one of them, and none says that our rules are the published ones."""
    published = [line for claim in with_lines(EXDYNA, is_about_published_rules) for line in claim.lines]
    ours = [
        line for claim in with_lines(EXDYNA, lambda line: not is_about_published_rules(line)) for line in claim.lines
    ]
    assert sorted(published + ours) == sorted(line for claim in EXDYNA for line in claim.lines)
    assert all("ExDyna" in line and "published" not in line for line in ours if not line.startswith(EMBEDDING))
    alone = {line for line in published if "as published" not in line}
    assert {line.partition(":")[0] for line in alone} == {
        "Top-k",
        "LeNet-CIFAR-10, Top-k",
        "LSTM-WikiText-2, Top-k",
        "the paper's threshold",
        "the paper rule loads workers more evenly than the static one",
        "LeNet-CIFAR-10",  # the paper's rule loads workers more evenly
    }
    says = {claim.says for claim in with_lines(EXDYNA, lambda line: not is_about_published_rules(line))}
    assert ONLINE not in says, "its own rule is not ours"
