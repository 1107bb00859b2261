"""Configurations: every choice composes and builds, folders tell runs apart, missing files are named at once."""

import pytest
import torch
from omegaconf import OmegaConf

from cdgrab.errors import CdgrabError
from cdgrab.sorters import SORTERS, make_sorter, sorter_options
from cdgrab.sparsify import SPARSIFIERS
from experiments import train
from experiments.launch import main as sweep_main
from experiments.tasks import TASKS, make_task
from experiments.training import composition
from experiments.training.composition import choices, compose_config
from experiments.training.config import compose, refuse_other_settings


def test_every_sorter_and_task_has_its_yaml():
    assert set(choices("sorter")) == set(SORTERS)
    assert set(choices("task")) == set(TASKS)


@pytest.mark.parametrize("sorter", sorted(SORTERS))
def test_every_sorter_config_builds_and_shows_all_options(sorter):
    config = compose(["data=embedded", f"sorter={sorter}"]).config
    built = make_sorter(workers=2, units=6, dim=3, **config.sorter)
    built.order(0)
    assert set(config.sorter) - {"name"} == set(sorter_options(sorter))


RUNS_OF_ANOTHER = {"fig9_cifar10_herding": "fig4_cifar10_workers"}


@pytest.mark.parametrize("experiment", choices("experiment"))
def test_every_experiment_composes(experiment):
    run = compose([f"experiment={experiment}", "data=embedded"])
    name = RUNS_OF_ANOTHER.get(experiment, experiment)
    assert run.config.name == name and name in run.directory.parts


@pytest.mark.parametrize("experiment", choices("experiment"))
def test_every_sweep_of_an_experiment_names_settings_that_exist(experiment):
    config = compose([f"experiment={experiment}", "data=embedded"]).config
    assert set(config.sweeps) == set(config.seeds) == {"smoke", "quick", "paper"} and config.sweeps.paper
    for size, sweeps in config.sweeps.items():
        for sweep in filter(None, sweeps):
            first = [f"{key}={str(values).partition(',')[0]}" for key, values in sweep.items()]
            compose([f"experiment={experiment}", "data=embedded", f"size={size}", *first])


def test_a_stored_run_is_continued_wherever_it_was_made_but_not_with_other_settings():
    run = compose(["task=lr_hmda", "data=embedded"])
    refuse_other_settings(run, run.science | {"task.device": "cuda", "threads": 8}, run.directory)
    with pytest.raises(CdgrabError, match=r"other settings \(task.lr 7 there, 0.0\d+ here\)"):
        refuse_other_settings(run, run.science | {"task.lr": 7}, run.directory)


@pytest.mark.parametrize("name", sorted(TASKS))
def test_every_task_builds_on_its_embedded_default(name):
    run = compose([f"task={name}", "data=embedded", "size=smoke"])
    task = make_task(run.config, run.source, torch.device("cpu"))
    owned = task.partition(torch.randperm(task.train_units))
    assert owned.shape[0] == 4 and len(owned.unique()) == owned.numel()
    assert task.source.embedded and task.rows["all"] > 0 and task.test_units > 0


def test_embedded_settings_apply_unless_overridden(tmp_path):
    assert compose(["data=embedded"]).config.task.lr == 0.05
    assert compose(["data=embedded", "task.lr=5e-3"]).config.task.lr == 0.005
    new_jersey(tmp_path)
    assert compose([f"data_root={tmp_path}"]).config.task.lr == 0.005


def new_jersey(root):
    (root / "hmda").mkdir()
    for part in ("features", "protected", "target"):
        (root / "hmda" / f"2017-NJ-{part}.csv").touch()


def test_a_missing_file_is_refused_before_anything_is_started_and_once(tmp_path, capsys):
    new_jersey(tmp_path)
    (tmp_path / "hmda" / "2017-NJ-protected.csv").unlink()
    sweep = ["-m", f"data_root={tmp_path}", "nproc=2", "seed=0,1,2", f"run_dir={tmp_path}/run${{seed}}"]
    assert sweep_main(sweep) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    assert "2017-NJ-protected.csv is missing; get it with" in printed.err
    assert not list(tmp_path.glob("run*"))


def test_missing_tokens_of_gpt2_are_refused_before_anything_is_started_if_they_are_needed(tmp_path, capsys):
    (tmp_path / "novels").mkdir()
    for name in ("one", "two"):
        (tmp_path / "novels" / f"{name}.txt").touch()
    settings = ["task=gpt2_wiki103", f"data_root={tmp_path}", f"run_dir={tmp_path}/run"]
    assert compose([*settings, "size=smoke"]).config.task.vocabulary == 512  # trained on the text
    assert sweep_main([*settings, "size=paper", "nproc=2"]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and "vocab.json is missing; get it with `make data-gpt2-wiki103`" in printed.err
    assert not (tmp_path / "run").exists()


def test_naming_the_state_that_is_found_anyway_is_the_same_run(tmp_path):
    new_jersey(tmp_path)
    found, named = compose([f"data_root={tmp_path}"]), compose([f"data_root={tmp_path}", "task.state=NJ"])
    assert (found.directory, found.science) == (named.directory, named.science)


def test_runs_that_differ_never_share_a_folder():
    variants = [
        [],
        ["sorter=d_rr"],
        ["sorter=d_rr", "sorter.shared=true"],
        ["seed=1"],
        ["workers=8"],
        ["epochs=3"],
        ["task.lr=0.1"],
        ["task.partition=contiguous"],
        ["experiment=fig3a_lr_hmda"],
        ["experiment=fig3a_lr_hmda", "task.truncate=false"],
    ]
    folders = [compose(["data=embedded", *variant]).directory for variant in variants]
    assert len(set(folders)) == len(variants)
    assert str(folders[0]) == "results/runs/lr_hmda/adhoc/embedded/cd_grab-s0"
    assert str(folders[5]) == "results/runs/lr_hmda/adhoc/embedded,epochs=3/cd_grab-s0"
    # where and how a run is carried out does not make it another run
    elsewhere = compose(["data=embedded", "device=cpu", "nproc=4", "compile=off", "resume=true", "threads=2"])
    assert compose(["data=embedded", "task.device=auto"]).science == elsewhere.science
    assert elsewhere.directory == folders[0] and elsewhere.science == compose(["data=embedded"]).science
    few = compose(["data=embedded", "task=gpt2_wiki103", "task.batch=2", "workers=2"])
    assert "presets" not in str(few.directory)  # whose batch follows the number of workers


def test_help_lists_what_there_is(capsys):
    assert train.main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert all(
        name in printed
        for name in [
            *SORTERS,
            *SPARSIFIERS,
            *TASKS,
            *choices("experiment"),
            "torchrun",
            "resume",
            "size=smoke|quick|paper",
        ]
    )


PAPERS_SETTINGS = {  # workers, epochs, batch, optimiser, rate, weight decay, schedule
    "fig3a_lr_hmda": (4, 50, 16, "sgd", 5e-3, 0.0, {"kind": "constant"}),
    "fig3b_lstm_wiki2": (4, 50, 16, "sgd", 5.0, 0.0, {"kind": "step", "every": 10, "factor": 0.1}),
    "fig3c_mlp_m4": (32, 30, 32, "sgd", 1e-3, 0.0, {"kind": "step", "every": 10, "factor": 0.25}),
    "fig3c_mlp_m4_4workers": (4, 30, 4, "sgd", 1e-3, 0.0, {"kind": "step", "every": 10, "factor": 0.25}),
    "fig11_gpt2_wiki103": (64, 30, 64, "adamw", 5e-4, 1e-4, {"kind": "constant"}),
    "table1_glue": (32, 10, 32, "adamw", 5e-4, 1e-4, {"kind": "linear"}),
}


@pytest.mark.parametrize("experiment", PAPERS_SETTINGS)
def test_experiments_have_the_papers_settings(experiment):
    config = compose_config([f"experiment={experiment}", "size=paper"])
    task = config.task
    found = (config.workers, config.epochs, task.batch, task.optimiser, task.lr, task.weight_decay, task.schedule)
    assert found == PAPERS_SETTINGS[experiment]
    assert task.optimiser == "adamw" or task.momentum == 0.9
    assert task.get("clip") == (0.25 if task.name == "lstm_wiki2" else None)


def test_settings_that_follow_the_size_are_in_no_folder_name():
    """So that runs at the paper's size are recognised as the paper's."""
    settings = ["experiment=table1_glue", "size=paper", "data=embedded"]
    assert compose(settings).directory.parent.name == "embedded"
    assert "pretrained_size=quick" in str(compose([*settings, "task.pretrained_size=quick"]).directory)


PLAIN = [
    [],
    ["task=mlp_m4", "task.lr=1", "seed=3", "sorter=grab", "sorter.sketch=countsketch"],
    ["experiment=fig4_cifar10_workers", "size=paper", "workers=8", "task.limit=null", "run_dir='a b'"],
    ["experiment=fig3a_lr_hmda", "sorter=kh", "sparsifier=exdyna", "sparsifier.density=1e-3"],
    ["task=lstm_wiki2", "task.schedule={kind: linear}", "checkpoint.every_steps=3", "seed=1", "seed=2"],
    ["task.dtype=float64", "+task.anything=3"],
]
WRONG = [["nothing=3"], ["task.nothing=3"], ["task.lr=["], ["seed=1,2"]]
WRONG += [["sorter=kh", "sorter.nothing=3"], ["sorter=kh,grab"]]
ODD = [["task.schedule=3"], ["seed="], ["sorter=kh", "sorter=grab"]]


@pytest.mark.parametrize("overrides", [*PLAIN, *WRONG, *ODD], ids=str)
def test_settings_are_put_in_as_hydra_does(overrides):
    def composed(compose):
        try:
            config = compose(overrides, "config")
            return OmegaConf.to_container(config), OmegaConf.is_struct(config)
        except CdgrabError as error:
            return str(error)

    assert composed(compose_config) == composed(composition._by_hydra)
    assert isinstance(composed(compose_config), str) == (overrides in WRONG)
