"""Run folders with known numbers, for the tests of figures and tables."""

import json


def write_run(folder, sorter, label, seed, losses, papers_own=False, status="finished", size="paper", **changes):
    """`changes`: other settings, the figure's columns, more metrics (name -> value by epoch), the task, the folder of
    runs whose models it started from."""
    run = folder / f"{sorter}-s{seed}"
    run.mkdir(parents=True)
    more, started_from = changes.pop("metrics", {}), changes.pop("started_from", None)
    lines = [
        {"epoch": e, "train_loss": loss, "test_accuracy": 80.0 + seed, "seconds": 2.0}
        | {name: values[e] for name, values in more.items() if e in values}
        for e, loss in enumerate(losses, 1)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    manifest = {
        "status": status,
        "sorter": sorter.partition(",")[0],
        "sorter_label": label,
        "seed": seed,
        "task": changes.pop("task", "made_up"),
        "size": size,
        "commit": "abc123",
        "config": {"columns": changes.pop("columns", None)},
        "science": {"epochs": len(losses), "workers": 4, "task.batch": 16, "task.lr": 0.005} | changes,
        "data": {"embedded": False, "papers_own": papers_own, "description": "made up", "rows": {"all": 1234}},
    }
    if started_from:
        manifest["data"]["checksums"] = {f"checkpoint {started_from}/{sorter}-s{seed}": "0123"}
    (run / "manifest.json").write_text(json.dumps(manifest))


def cells_of(text):
    """Of a table in Markdown, by row."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
