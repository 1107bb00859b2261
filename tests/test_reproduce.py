"""Commands of the suite from the outside: a small real sweep of every task, refusals, notebooks."""

import base64
import functools
import io
import math
import os
import re
import runpy
import signal
import sys

import nbformat
import numpy as np
import pytest
from conftest import replace_in
from forked import in_checkout
from PIL import Image
from synthetic_runs import cells_of

from cdgrab.errors import CdgrabError
from experiments.early import STATUS
from experiments.report import notebook
from experiments.store.files import ROOT
from experiments.store.records import read_manifest, read_metrics
from scripts.reproduce import EXPERIMENTS

# All tasks, and one that cannot be run; Figure 12 is of the same kind as Figure 4.
SMALL = {
    "lr-hmda": EXPERIMENTS["lr-hmda"],
    "broken": ["fig0_missing"],
    **EXPERIMENTS,
    "cifar10": EXPERIMENTS["cifar10"][:2],
}
OPTIONS = ["--seeds", "1", "--data", "embedded", "--nproc", "1", "--jobs", "1", "--size", "smoke"]
OWN = ("fig3a_lr_hmda", "fig3b_lstm_wiki2", "fig3c_mlp_m4", "fig11_gpt2_wiki103", "table1_glue")
DRAWN = {name: name for name in OWN}  # experiment: the one whose runs it shows; Figure 9 is a metric of Figure 4's
DRAWN |= dict.fromkeys(("fig4_cifar10_workers", "fig9_cifar10_herding"), "fig4_cifar10_workers")


def reproduce_twice():
    from scripts import reproduce  # that of the checkout

    reproduce.execute = functools.cache(reproduce.execute)  # a notebook of runs that are complete already
    if reproduce.main(["LR-HMDA", *OPTIONS]):
        sys.exit("reproducing LR-HMDA failed")
    print("=" * 9, flush=True)
    reproduce.EXPERIMENTS = SMALL
    return reproduce.main(["all", *OPTIONS])


@pytest.fixture(scope="module")
def reproduced(checkout):
    """`make reproduce-LR-HMDA …`, then `make reproduce-all …`, on real small sweeps: the folder and both outputs.
    The LSTM reads little: scores for every word of a vocabulary would take longer than all the other runs. Steps are
    traced in the tests of the tasks, and not here: that, too, takes longer than such runs."""
    little = {"chunk_length: 35 ": "chunk_length: 8 ", "test_chunks: null": "test_chunks: 8"}
    replace_in(checkout / "configs" / "task" / "lstm_wiki2.yaml", little)
    replace_in(checkout / "configs" / "config.yaml", {"compile: auto ": "compile: 'off' "})
    status, printed, errors = in_checkout(checkout, reproduce_twice)
    assert status == 2 and "error: unknown experiment 'fig0_missing'" in errors, errors
    return checkout, *printed.split("=" * 9, 1)


@pytest.mark.parametrize("experiment", DRAWN)
def test_reproduce_leaves_metrics_figure_and_table_of_every_task(reproduced, experiment):
    checkout, first, every = reproduced
    name = f"{experiment}-embedded-smoke"
    for suffix in ("png", "pdf", "md"):
        assert (checkout / "results" / "trial" / "figures" / f"{name}.{suffix}").stat().st_size > 500
    table = (checkout / "results" / "trial" / "figures" / f"{name}.md").read_text()
    assert table in (first if experiment == "fig3a_lr_hmda" else every)
    assert all(said in table for said in ("EMBEDDED DATA", "size smoke", "CD-GraB", "D-RR", "1 seed"))
    executed = nbformat.read(checkout / "results" / "notebooks" / f"{experiment}.ipynb", as_version=4)
    outputs = [output for cell in executed.cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    runs = {path.name: path for path in (checkout / "results" / "runs").glob(f"*/{DRAWN[experiment]}/*/*")}
    assert runs.keys() == {"cd_grab-s0", "d_rr-s0"}
    losses = {}
    for sorter, run in runs.items():
        lines = read_metrics(run / "metrics.jsonl")
        metrics = [key for key in lines[0] if key.startswith(("train_", "test_", "val_"))]
        assert len(lines) == 2 and len(metrics) >= 2 and all(math.isfinite(line[m]) for line in lines for m in metrics)
        losses[sorter] = [line["train_loss"] for line in lines]
        assert read_manifest(run)["status"] == "finished"
        # of logistic regression, two epochs at the paper's rate go up and down
        assert experiment == "fig3a_lr_hmda" or losses[sorter][-1] < losses[sorter][0]
    assert losses["cd_grab-s0"][-1] != losses["d_rr-s0"][-1]
    assert not (checkout / "results" / "figures").exists()


def test_complete_runs_are_not_repeated(reproduced):
    _, first, every = reproduced
    assert first.count("already complete") == 0 and every.count("already complete") == 2
    assert re.search(r"\| CD-GraB +\| 1 ", first)


def test_reproduce_all_goes_on_after_a_failing_task_and_ends_with_one_table(reproduced):
    checkout, _, every = reproduced
    table = (checkout / "results" / "trial" / "figures" / "all.md").read_text()
    assert table in every and "failed: broken (exit status 2)" in table
    rows = cells_of(table)
    assert [row[0] for row in rows[2:]] == [
        *["lr_hmda, 4 workers"] * 4,  # two metrics, each of the last half and of the last epoch
        *["lstm_wiki2, 4 workers"] * 4,
        *["mlp_m4, 32 workers"] * 4,
        *["cifar10, 4 workers"] * 4,
        *["cifar10, 64 workers"] * 4,
        *["cifar10, 4 workers"] * 2,  # the herding bound
        *["cifar10, 64 workers"] * 2,
        *["gpt2_wiki103, 4 workers"] * 4,
        "glue, SST-2",
    ]
    row = dict(zip(rows[0], rows[3], strict=True))
    runs = checkout / "results" / "runs" / "lr_hmda" / "fig3a_lr_hmda" / "embedded-smoke"
    ours, theirs = (read_metrics(runs / f"{s}-s0" / "metrics.jsonl")[-1]["train_loss"] for s in ("cd_grab", "d_rr"))
    assert row["CD-GraB − D-RR"] == f"{ours - theirs:+.3g}" and row["size"] == "smoke"
    assert row["data"].startswith("EMBEDDED: ") and row["paired t-test"] == "too few seeds"


BAD_CALLS = [
    ("scripts.reproduce", ["nonsense"], f"unknown task 'nonsense'; the tasks are {', '.join(EXPERIMENTS)}, all"),
    ("scripts.reproduce", ["lr-hmda", "--workers", "5"], "cannot be split evenly over workers=5"),
    ("scripts.reproduce", ["lr-hmda", "--seeds", "0"], "--seeds: must be a whole number of at least 1, got '0'"),
    ("scripts.reproduce", ["lr-hmda", "--epochs", "0"], "--epochs: must be a whole number of at least 1, got '0'"),
    ("scripts.reproduce", ["glue", "--replicas", "0"], "replicas must be auto or a whole number of at least 1, got 0"),
    ("scripts.get_data", ["nonsense"], "unknown task 'nonsense'"),
    ("scripts.notebook", ["nonsense"], "unknown notebook 'nonsense'; the notebooks are fig11_gpt2_wiki103, "),
    ("experiments.launch", ["-m", "sorter=cd_grab,nonsense"], "unknown sorter 'nonsense'"),
    ("experiments.launch", ["data=embedded", "nproc=3"], "cannot be split evenly over 3 processes"),
    ("experiments.launch", ["nothing=3"], "'nothing'"),
    ("experiments.launch", ["task.lr=["], "no viable alternative at input '['"),
]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # runpy's: a module that another one has imported already
@pytest.mark.parametrize(("module", "arguments", "message"), BAD_CALLS)
def test_bad_calls_of_the_helpers_are_one_sentence(module, arguments, message, monkeypatch, capsys):
    """As `python -m module arguments`."""
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    monkeypatch.delenv("CDGRAB_DATA", raising=False)
    handlers = {number: signal.getsignal(number) for number in STATUS}
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    for number, handler in handlers.items():
        signal.signal(number, handler)
    printed = capsys.readouterr().err
    assert ended.value.code == 2 and printed.startswith("error: ") and message in printed and printed.count("\n") == 1


def test_notebooks_tell_what_they_are_about_and_only_read_results():
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        cells = nbformat.read(path, as_version=4).cells
        told = re.findall(r"^\*\*(.*?)\.\*\* ", cells[0].source, re.M)
        assert told == ["What the paper claims", "What we did", "What came out", "What to try"], path.name
        links = re.findall(r"\]\((\.\.[^)]+)\)", cells[0].source)
        assert all((path.parent / link).exists() for link in links), path.name
        code = "\n".join(cell.source for cell in cells if cell.cell_type == "code")
        imported = set(re.findall(r"^ *(?:from|import) ([\w.]+)", code, re.M))
        assert imported <= {"IPython.display", "experiments.store.bench"} | {
            name for name in imported if name.startswith(("experiments.report", "experiments.studies"))
        }
        assert not re.search(r"\bopen\(|data_root|CDGRAB_DATA|plt\.", code)


def test_large_pictures_of_notebooks_have_few_colours():
    def encoded(side):
        slope = np.linspace(0, 255, side).astype(np.uint8)
        noise = np.random.default_rng(0).integers(0, 20, (side, side), dtype=np.uint8)
        picture, file = np.stack([np.broadcast_to(slope, (side, side)), noise, noise], axis=-1), io.BytesIO()
        Image.fromarray(picture).save(file, "png")
        return picture, {"image/png": base64.b64encode(file.getvalue()).decode(), "text/plain": "<Figure>"}

    _, small = encoded(40)
    assert notebook._with_palette(small) == small and notebook._with_palette({"text/plain": "1"}) == {"text/plain": "1"}
    picture, large = encoded(600)
    found = notebook._with_palette(large)
    assert found["text/plain"] == "<Figure>" and len(found["image/png"]) < 0.6 * len(large["image/png"])
    shown = np.asarray(Image.open(io.BytesIO(base64.b64decode(found["image/png"]))).convert("RGB"))
    assert shown.shape == picture.shape and np.abs(shown.astype(int) - picture).mean() < 6


def test_notebooks_share_this_process_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setattr(notebook, "ROOT", tmp_path)
    monkeypatch.setattr(notebook, "FOLDER", tmp_path)
    sources = {
        "first": ["import os; left = os.getpid()", "print(left, os.environ.get('CDGRAB_GROUP'))"],
        "second": ["import os", "print(os.getpid(), os.environ.get('CDGRAB_GROUP'), 'left' in globals())"],
        "broken": ["1 / 0"],
    }
    for name, cells in sources.items():
        content = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in cells])
        nbformat.write(content, tmp_path / f"{name}.ipynb")
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    printed = []
    for name, group in (("first", "one"), ("second", None)):
        monkeypatch.setenv("CDGRAB_GROUP", group) if group else monkeypatch.delenv("CDGRAB_GROUP")
        cells = nbformat.read(notebook.execute(name), as_version=4).cells
        assert [cell.execution_count for cell in cells] == [1, 2]
        printed.append("".join(output.text for output in cells[1].outputs).split())
    with pytest.raises(CdgrabError, match="notebook broken failed: ZeroDivisionError: division by zero"):
        notebook.execute("broken")
    assert not hasattr(sys, "ps1")  # by which libraries tell that somebody sits at a prompt
    (process, *first), (same, *second) = printed
    assert process == same == str(os.getpid()) and (first, second) == (["one"], ["None", "False"])
    assert handlers == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
