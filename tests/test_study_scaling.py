"""The study of scaling: verdicts of made-up runs and times."""

import pandas as pd
from synthetic_studies import answers, made_up

from experiments.studies import scaling


def measured(time=lambda workers: 1.2, traffic=1.0, growth=0.5, ours=0.0, loss=lambda workers: 0.9):
    """`time` and `loss` of CD-GraB beside D-RR's, by workers; `growth` of ID-GraB's bound, and `ours`."""
    bound = {"d_rr": 0.0, "id_grab_pair": growth, "cd_grab": ours}
    table, settings = made_up(
        "scaling",
        lambda key: loss(key["workers"]) if key["sorter"] == "cd_grab" else 1.0,
        herding_per_step=lambda key: 5 * key["workers"] ** bound[key["sorter"]],
    )
    rows = []
    for key in (part.key for part in scaling.parts(settings) if part.alone):
        sent = 0 if key["processes"] == 1 else 100
        for epoch in range(8):
            seconds = {"d_rr_seconds": 1.0, "cd_grab_seconds": time(key["workers"]) + 0.01 * epoch}
            rows.append(key | {"epoch": epoch, "d_rr_bytes": sent, "cd_grab_bytes": traffic * sent} | seconds)
    return scaling.verdicts(pd.concat([table, pd.DataFrame(rows)], ignore_index=True), settings)


def failed(**more):
    """The claims that fail, without task and batch."""
    return {claim.partition(": ")[2] for claim, answer in answers(measured(**more)).items() if answer == "fails"}


def test_everything_holds():
    assert set(answers(measured()).values()) == {"holds"}


def test_times_and_bytes_and_bounds_of_others_can_fail():
    assert failed(time=lambda workers: 2.0, traffic=3.0, growth=-0.5) == {
        "CD-GraB's epochs take at most 1.5 times D-RR's, on one process",
        "CD-GraB's epochs take at most 1.5 times D-RR's, on 2 to 8 processes",
        "the bound of ID-GraB (PairBal) grows faster with the workers",
        "CD-GraB sends as much as D-RR",
    }


def test_one_worker_count_is_enough_to_fail():
    lower = "CD-GraB ends lower than D-RR at every worker count"
    assert failed(loss=lambda workers: 1.02 if workers == 16 else 0.9) == {lower}
    lines = measured(loss=lambda workers: 1.02 if workers == 16 else 0.9)
    assert {v.note for v in lines if v.claim.endswith(lower)} == {
        "difference in % of D-RR's train loss where it decides, 16 workers"
    }
    slow = "CD-GraB's epochs take at most 1.5 times D-RR's, on one process"
    assert slow in failed(time=lambda workers: 1.7 if workers == 4 else 1.2)


def test_growing_bounds_and_times_fail():
    assert "CD-GraB's herding bound does not grow with the workers" in failed(ours=0.2)
    stays = "the ratio of times does not grow with the workers, on one process"
    assert failed(time=lambda workers: 0.5 * workers**0.2) == {stays}


def test_bytes_are_counted_for_one_unit_and_for_several():
    lines = [verdict for verdict in measured(traffic=2.0) if "sends as much" in verdict.claim]
    assert len(lines) == 4 and {(v.answer, v.measured) for v in lines} == {("fails", "2, counted")}
