"""Table 1: the best epoch of every seed, and the paper's settings."""

import json

from glue_cases import packaged_sentences

from experiments.report import figures_glue
from experiments.report.runs import Group, Sweep
from experiments.training.config import compose

ROWS_OF_A_RUN = {"all": 9, "validation": 4, "largest_class": 1}


def write_run(folder, dataset, sorter, seed, accuracies, mismatched=None):
    run = folder / f"{sorter}-s{seed}"
    run.mkdir(parents=True)
    lines = [
        {"epoch": e, "train_loss": 1.0 / e, "val_accuracy": accuracy, "seconds": 1.0}
        | ({"val_accuracy_mm": mismatched[e - 1]} if mismatched else {})
        for e, accuracy in enumerate(accuracies, 1)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    science = {"workers": 32, "task.batch": 32, "task.lr": 5e-4, "task.dataset": dataset, "task.encoder": "frozen"}
    manifest = {
        **{
            "status": "finished",
            "sorter": sorter,
            "sorter_label": sorter,
            "seed": seed,
            "commit": "abc",
            "size": "quick",
        },
        "config": {"columns": "task.dataset"},
        "science": science | {"task.encoder_name": "some-encoder"},
        "data": {"embedded": False, "papers_own": True, "description": f"GLUE {dataset}", "rows": ROWS_OF_A_RUN},
    }
    (run / "manifest.json").write_text(json.dumps(manifest))


def test_the_table_takes_the_best_epoch_of_every_seed(tmp_path):
    folders = [tmp_path / "table1_glue" / f"GLUE-quick,dataset={name}" for name in ("RTE", "MNLI")]
    for seed in (0, 1, 2):
        write_run(folders[0], "RTE", "cd_grab", seed, [50.0, 60.0 + seed, 55.0])
        write_run(folders[0], "RTE", "d_rr", seed, [59.0, 58.0, 57.0])
        write_run(folders[1], "MNLI", "cd_grab", seed, [70.0, 71.0], [80.0, 60.0 + seed])
        write_run(folders[1], "MNLI", "d_rr", seed, [72.0, 71.0], [79.0, 60.0])
    sweep = Sweep("task.dataset", "GLUE-quick", tuple(map(Group, folders)))
    text = figures_glue.summary(sweep)
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()[2:5]]
    assert cells == [
        [
            *("MNLI", "71.00 ± 0.00", "72.00 ± 0.00", "-1.00 ± 0.00", "0 of 3 seeds", "50.00"),
            *("65.91 ± 0.46", "65.42 ± 0.36", "+0.49"),
        ],
        [
            *("MNLI-mm", "80.00 ± 0.00", "79.00 ± 0.00", "+1.00 ± 0.00", "3 of 3 seeds", "50.00"),
            *("64.36 ± 2.03", "63.93 ± 1.63", "+0.43"),
        ],
        ["RTE", "61.00 ± 1.00", "59.00 ± 0.00", "+2.00 ± 1.00", "3 of 3 seeds", "25.00", "–", "–", "–"],
    ]
    assert "GLUE RTE, 9 rows · size quick" in text and "linear head on frozen some-encoder" in text
    drawn = figures_glue.figure(sweep, "title")
    accuracies = drawn.axes[0].get_lines()[0]
    assert list(accuracies.get_ydata()) == [71.0, 80.0, 61.0] and len(drawn.axes) == 3 + 3
    assert "CD-GraB, paper" not in [text.get_text() for text in drawn.axes[0].get_legend().get_texts()]


@packaged_sentences
def test_the_experiment_has_the_papers_settings():
    config = compose(["experiment=table1_glue", "data=embedded", "size=paper"]).config
    assert (config.epochs, config.task.batch, config.task.encoder, config.seeds.paper) == (10, 32, "tiny_gpt2", 5)
    assert (config.task.optimiser, config.task.lr, config.task.weight_decay) == ("adamw", 5e-4, 1e-4)
    assert config.task.schedule.kind == "linear" and config.task.pretrained_by == "cd_grab"
