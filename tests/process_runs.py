"""The runs that test_processes.py compares between numbers of processes."""

import json
import shutil

from experiments.store import checkpoint
from experiments.store.records import read_manifest

LSTM = ["task=lstm_wiki2", "size=smoke", "task.batch=16", "task.limit=7", "task.hidden=8"]
LSTM += ["task.chunk_length=8", "task.test_chunks=2"]  # rows are long all the same: the vocabulary's are
MOMENTUM = ["task.momentum=0", "sparsifier.momentum_correction=0.9", "sparsifier.warm_up_steps=10"]
# Coordinated, uncoordinated, oblivious, randomised. With these sizes units per worker are odd and the last step short.
CASES = {
    "cd_grab": ["sorter=cd_grab", "workers=4"],
    "cd_grab_small_exchanges": ["sorter=cd_grab", "workers=4", "sorter.buffer_mb=0.02"],
    "cd_grab_walk": ["sorter=cd_grab", "workers=8", "sorter.rule=walk"],
    "id_grab_bal": ["sorter=id_grab_bal", "workers=4"],
    "kh": ["sorter=kh", "workers=4"],
    "d_rr": ["sorter=d_rr", "workers=8"],
    "d_rr_float32": ["sorter=d_rr", "workers=4", "task.dtype=float32"],
    "sparse": ["sorter=cd_grab", "workers=4", "sparsifier=exdyna", "sparsifier.density=0.1", *MOMENTUM],
    "sparse_fits": ["sorter=d_rr", "workers=8", "sparsifier=sidco", "sparsifier.density=0.1"],
    "long_rows_sparse": [*LSTM, "workers=4", "sparsifier=exdyna"],
    "long_rows": [*LSTM, "workers=4"],  # gradients divided by coordinates; on 4 processes on the way to their mean
    "long_rows_units": ["task=cifar10", "task.limit=64", "task.dtype=float64", "workers=8"],  # several units a step
}
EPOCHS = 3
PROCESSES = (2, 4)
# One of each kind is enough; of a sparse one, what is begun on 4 and finished on fewer.
ON_FOUR = ("cd_grab", "kh", "long_rows", "long_rows_sparse", "long_rows_units")
COMPARED = [(name, processes) for processes in PROCESSES for name in (CASES if processes == 2 else ON_FOUR)]

TRAFFIC = ("2/1/40000", "2/4/40000", "4/1/19")  # what the benchmark of that name counts at size smoke


def wanted(folder, processes):
    """Every case, some of them on 4 processes; sparse is also started on 4, and finished on 2 and (a copy) on 1."""

    def settings(name, directory):
        # two run traced, and on one process in eager mode: that, too, changes nothing, and they start much sooner
        how = "compile=auto" if processes == 2 and name in ("cd_grab", "long_rows_units") else "compile=off"
        small = ["data=embedded", f"epochs={EPOCHS}", "task.batch=64", "task.limit=204"]
        return [*small, *CASES[name], how, f"run_dir={directory}"]

    cases = ON_FOUR if processes == 4 else CASES
    runs = [settings(name, folder / f"{name}-{processes}") for name in cases]
    if processes == 4:
        return [*runs, [*settings("sparse", folder / "halfway"), "epochs=2"]]
    if processes == 2:
        _forget_the_epoch_count(folder / "halfway")
        shutil.copytree(folder / "halfway", folder / "halfway-alone")
    return [*runs, [*settings("sparse", folder / {2: "halfway", 1: "halfway-alone"}[processes]), "resume=true"]]


def _forget_the_epoch_count(run):
    """As if the run had been asked for all epochs and been killed after two."""
    manifest = read_manifest(run)
    manifest["science"]["epochs"] = EPOCHS
    (run / "manifest.json").write_text(json.dumps(manifest))
    saved = checkpoint.load(run)
    saved["science"]["epochs"] = EPOCHS
    checkpoint.save(run, saved)
