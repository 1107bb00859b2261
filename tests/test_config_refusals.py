"""Bad settings are refused in one sentence before anything is started, and nothing that is given is executed."""

import re
import shutil
import subprocess
import tracemalloc

import pytest
import torch

from cdgrab.errors import CdgrabError
from cdgrab.runtime.group import WorkerGroup
from experiments import train
from experiments.launch import main as sweep_main
from experiments.store.files import ROOT
from experiments.training.composition import choices
from experiments.training.config import compose
from experiments.training.launcher import process_count

BAD = [
    (["task=nonsense"], f"unknown task 'nonsense'; the tasks are {', '.join(choices('task'))}"),
    (["sorter=nonsense"], "unknown sorter 'nonsense'; the sorters are cd_grab, d_rr"),
    (["experiment=nonsense"], f"unknown experiment 'nonsense'; the experiments are {', '.join(choices('experiment'))}"),
    (["task=nonsense", "sorter=other"], "2 settings are wrong: unknown task 'nonsense'; the tasks are"),
    (["workers=5"], "task.batch=16 cannot be split evenly over workers=5"),
    (
        ["workers=0", "task.lr=fast", "task.dtype=float8", "data=magic", "+sorter.magic=1"],
        "5 settings are wrong: data must be auto or embedded, got 'magic'; "
        "workers must be a whole number of at least 1, got 0; "
        "task.lr must be a number above 0, got 'fast'; task.dtype must be float32 or float64, got 'float8'; "
        "sorter cd_grab has no option magic",
    ),
    (["workers=0"], "workers must be a whole number of at least 1"),
    (["workers=two"], "workers must be a whole number"),
    (["task.batch=4096", "workers=4096"], "fewer training units"),
    (["epochs=0"], "epochs must be a whole number of at least 1"),
    (["seed=-1"], "seed must be a whole number of at least 0"),
    (["seeds=3"], "seeds must be given by size"),
    (["task.lr=fast"], "task.lr must be a number above 0"),
    (["task.lr=nan"], "task.lr must be a number"),
    (["task.lr=0"], "task.lr must be a number above 0"),
    (["task.momentum=1"], "task.momentum must be a number at least 0 and below 1"),
    (["task.optimiser=magic"], "task.optimiser must be sgd or adamw"),
    (["task.schedule.kind=magic"], "task.schedule.kind must be constant, step or linear"),
    (["task.dtype=float8"], "task.dtype must be float32 or float64"),
    (["task.gradients=magic"], "task.gradients must be vmap, backward or layers"),
    (["task.partition=magic"], "task.partition must be random, contiguous or dirichlet"),
    (["task.train_share=1.5"], "task.train_share must be a number above 0 and below 1"),
    (["task.unknown=1"], "unknown"),
    (["sorter.rule=magic"], "rule must be greedy or walk"),
    (["+sorter.magic=1"], "sorter cd_grab has no option magic"),
    (["data=magic"], "data must be auto or embedded"),
    (["data_root=/nowhere", "data=auto"], "/nowhere does not exist"),
    (["task.state=NY", "data=auto"], "task.state=NY needs the HMDA files"),
    (["resume=perhaps"], "resume must be true or false"),
    (["device=magic"], "device must be auto, cpu or cuda"),
    (["sorter"], "'sorter' is not a setting of the form key=value"),
    (["task.lr="], "task.lr must be a number"),
    (["=5"], "Config group override"),
    (["hydra/launcher=[1,2]"], "'int' is not iterable"),  # found by make fuzz; these are Hydra's words
    (["experiment=null"], "unknown experiment 'null'"),
    (["name=null"], "name must be text, got None"),
    (["name=.."], "name must be the name of a folder, got '..'"),
    (["name=a/../../b"], "name must be the name of a folder, got 'a/../../b'"),
    (["sorter.walk_width=wide"], "walk_width must be a number above 0, got 'wide'"),
    (["sorter.buffer_mb=abc"], "buffer_mb must be a number"),
    (["task=mlp_m4", "task.window_in=2.5"], "task.window_in must be a whole number of at least 1"),
    (["task=mlp_m4", "task.stride=0"], "task.stride must be a whole number of at least 1"),
    (["task=mlp_m4", "task.hidden=true"], "task.hidden must be a whole number of at least 1"),
    (["task=lstm_wiki2", "task.layers=true"], "task.layers must be a whole number of at least 1"),
    (["sorter=kh", "sorter.epochs=abc"], "epochs must be a whole number"),
    (["sorter=d_rr", "sorter.shared=banana"], "shared must be true or false"),
    (["sorter=d_rr", "sorter.shared=1"], "shared must be true or false"),
    (["task.schedule.kind=step"], "task.schedule.every must be a whole number of at least 1"),
    (["task.train_share=abc"], "task.train_share must be a number"),
    (["task.state=NY"], "task.state=NY needs the HMDA files, data=embedded finds none"),
    (["sparsifier=nonsense"], "unknown sparsifier 'nonsense'; the sparsifiers are cltk, deft"),
    (["sparsifier=exdyna", "sparsifier.density=2"], "density must be a number above 0 and at most 1, got 2"),
    (["sparsifier=exdyna", "sparsifier.rule=magic"], "rule must be balanced, paper"),
    (["sparsifier=deft", "sparsifier.layers=[3]"], "layers must sum to dim = 56, got 3"),
    (
        ["sparsifier=topk", "sparsifier.momentum_correction=0.9"],
        "momentum_correction needs task.optimiser=sgd task.momentum=0: got task.momentum=0.9, a second momentum",
    ),
    (["+sparsifier.magic=1"], "sparsifier dense has no option magic; it takes none"),
    (["size=huge"], "size must be smoke, quick or paper"),
    (["task.presets=null"], "task.presets.embedded must have settings for every size, got None"),
    (["task.presets.embedded.smoke=null"], "task.presets.embedded must have settings for every size"),
]


@pytest.mark.parametrize(("settings", "message"), BAD, ids=[" ".join(settings) for settings, _ in BAD])
def test_bad_settings_get_one_sentence_and_a_non_zero_exit(settings, message, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("CDGRAB_DATA", raising=False)
    monkeypatch.chdir(tmp_path)  # no ./data here
    folder = tmp_path / "run"
    status = train.main(["data=embedded", *settings, f"run_dir={folder}"])
    printed = capsys.readouterr().err
    assert status == 2
    assert re.fullmatch(r"error: [^\n]+\n", printed) and message in printed
    assert not folder.exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_said(tmp_path, capsys):
    assert train.main(["data=embedded", "device=cuda", f"run_dir={tmp_path / 'run'}"]) == 2
    assert "no GPU is available" in capsys.readouterr().err


def test_process_counts():
    with pytest.raises(CdgrabError, match="workers=4 cannot be split evenly over 3 processes; start 1, 2 or 4 instead"):
        WorkerGroup(4, world_size=3)
    with pytest.raises(CdgrabError, match="start 1, 2, 4 or 5 instead"):  # at once
        WorkerGroup(2_000_000_000, world_size=3)
    assert process_count(2, 4) == 2
    assert 4 % process_count("auto", 4) == 0
    with pytest.raises(CdgrabError, match="nproc must be"):
        process_count("many", 4)


def test_settings_are_checked_in_little_memory():
    """Found by make fuzz: a sparsifier was made for as many workers as anybody asked for."""
    tracemalloc.start()
    with pytest.raises(CdgrabError, match="cannot be split evenly over workers=4000000"):
        compose(["data=embedded", "sparsifier=exdyna", "workers=4000000"])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**24


def test_how_many_coordinates_a_sparsifier_needs_is_asked_of_the_model(tmp_path, capsys):
    faithful = ["data=embedded", "size=smoke", "sparsifier=exdyna", "sparsifier.faithful=true", f"run_dir={tmp_path}"]
    assert train.main(faithful) == 2
    assert "faithful=true needs 32 coordinates for each of 56 blocks, dim is 56" in capsys.readouterr().err
    assert train.main([*faithful, "sparsifier.blocks=1", "workers=1", "epochs=1"]) == 0


def test_hosts_need_a_place_to_meet(capsys):
    assert compose(["data=embedded", "nnodes=2", "rdzv=first-host:29400"]).config.nnodes == 2
    for rdzv in ("null", "first-host", "''", "7", "first-host:65536"):
        with pytest.raises(CdgrabError, match="nnodes=2 hosts need rdzv=first-host:29400 to meet at"):
            compose(["data=embedded", "nnodes=2", f"rdzv={rdzv}"])
    assert sweep_main(["data=embedded", "nnodes=3", "rdzv=first-host:29400"]) == 2
    assert "cannot be split evenly over 3 processes" in capsys.readouterr().err


def test_overrides_that_name_code_are_refused(capsys):
    for override in (
        "+hydra.callbacks.a._target_=os.getcwd",
        "hydra/callbacks=a",
        "+hydra={callbacks:{a:{_target_:os.getcwd}}}",
        "+hydra.job_logging.handlers.a={class:os.getcwd}",
    ):
        assert sweep_main(["task=lr_hmda", "data=embedded", override, "-m"]) == 2
        assert "names code to be run" in capsys.readouterr().err


def test_make_cleans_its_own_folder_only(tmp_path):
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "mine").mkdir()
    given = [f"{name}=mine; touch F" for name in ("VENV", "BIN", "READY")]
    subprocess.run(["make", "clean", *given], cwd=tmp_path, check=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["Makefile", "mine"]


@pytest.mark.parametrize("target", ["reproduce-a SEEDS=", "study-a SORTERS=", "soak FOR=", "fuzz SEED=", "data-"])
def test_nothing_that_make_is_given_is_executed(target, tmp_path):
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    for name in ("requirements.lock", "requirements-no-deps.lock", "pyproject.toml", ".venv/.ready"):
        (tmp_path / name).touch()
    (tmp_path / ".venv" / "bin" / "python").symlink_to("/bin/echo")
    *words, last = target.split(" ")
    for value in ("x||touch F", "`touch F`", "x';touch F;'", "$(shell touch F)"):
        done = subprocess.run(["make", *words, last + value], cwd=tmp_path, capture_output=True, text=True)
        assert not (tmp_path / "F").exists(), value
        assert "must not hold quotes" in done.stderr if done.returncode else value in done.stdout
    for name in ("GIVEN", "QUOTE", "NEWLINE", "OPTIONS", "PIP", "IMPORTS", "DOWNLOAD", "KERNELS"):  # make's own
        own = ["make", *words, f"{last}x';touch F;'", f"{name}='; touch F; '"]
        subprocess.run(own, cwd=tmp_path, capture_output=True)
        assert not (tmp_path / "F").exists(), name
