"""Seconds per epoch of CD-GraB and D-RR, both trained in the same processes, epoch by epoch in turn: see
`experiments.studies.timing`."""

from __future__ import annotations

from collections.abc import Iterator

from experiments.studies.timing import SORTERS, under_torchrun
from experiments.training.config import compose
from scripts.bench.measure import summary

PROCESSES = {"cpu": 4, "cuda": 1}
# by task: the paper's experiment, and what makes the epochs of its files short (embedded data is short)
SHORTER = {
    "lr_hmda": ("fig3a_lr_hmda", {"smoke": "task.train_share=0.01", "quick": "task.train_share=0.05"}),
    "lstm_wiki2": ("fig3b_lstm_wiki2", {"smoke": "task.limit=4", "quick": "task.limit=30", "full": "task.limit=100"}),
    "mlp_m4": ("fig3c_mlp_m4", {"smoke": "task.limit=640", "quick": "task.limit=16384"}),
}
EPOCHS = {"smoke": 2, "quick": 5, "full": 15}
LEAST_SECONDS = {"smoke": 0.0, "quick": 2.0, "full": 20.0}  # of a sorter's epochs together: short ones are repeated
describe = "{task}: D-RR {d_rr_s} s, CD-GraB {cd_grab_s} s, ratio {ratio}; of CPU time {cpu_ratio}".format_map


def measure(device: str, size: str) -> Iterator[dict]:
    for task, (experiment, shorter) in SHORTER.items():
        settings = [f"experiment={experiment}", "size=paper", f"device={device}"]
        if size in shorter and not (compose(settings).source.embedded and task == "lr_hmda"):
            settings.append(shorter[size])
        arguments = (EPOCHS[size], LEAST_SECONDS[size], *settings)
        found = under_torchrun("experiments.studies.timing", PROCESSES[device], arguments)[0]
        yield {"device": device, "task": task, "processes": PROCESSES[device]} | _row(found)


def _row(found: dict) -> dict:
    """Ratios are medians of the ratios of neighbours in time: what slows the machine down slows both."""
    row = {}
    for prefix in ("", "cpu_"):
        seconds = {sorter: [epoch[f"{prefix}seconds"] for epoch in found[sorter]] for sorter in SORTERS}
        ratios = [cd_grab / d_rr for d_rr, cd_grab in zip(*seconds.values(), strict=True)]
        for sorter in SORTERS:
            row |= summary(f"{sorter}_{prefix}s", seconds[sorter])
        row |= summary(f"{prefix}ratio", ratios)
    for sorter in SORTERS:
        phases = {phase: [epoch["phases"][phase] for epoch in found[sorter]] for phase in found[sorter][0]["phases"]}
        row[f"{sorter}_phases"] = {phase: summary("s", values)["s"] for phase, values in phases.items()}
    return row | found["what"] | {"epochs": len(ratios)}
