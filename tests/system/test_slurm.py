"""Runs through a real Slurm: a sweep by Hydra's submitit launcher, and a job that is told to end and queued again."""

import importlib.util
import shutil
import subprocess
import sys
import time

import pytest
import slurm

from experiments.store.files import ROOT
from experiments.store.records import read_manifest, read_metrics

RUN = ["data=embedded", "size=smoke", "task=lr_hmda", "workers=2", "compile=off"]
NAME = "slurm_test"
REASON = slurm.why_not()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON or "-")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    try:
        with slurm.running(tmp_path_factory.mktemp("slurm")) as environment:
            yield environment | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    except RuntimeError as error:
        pytest.skip(str(error))


def orders(folder):
    return [line["order_hash"] for line in read_metrics(folder / "metrics.jsonl")]


def alone(folder, *more):
    command = [sys.executable, "-m", "experiments.train", *RUN, *more, f"run_dir={folder}"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return orders(folder)


def test_a_sweep_by_hydras_launcher(cluster, tmp_path):
    if not importlib.util.find_spec("hydra_plugins.hydra_submitit_launcher"):
        pytest.skip("hydra-submitit-launcher is not installed: pip install 'cdgrab[slurm]'")
    runs = ROOT / "results" / "runs" / "lr_hmda" / NAME
    launcher = ["hydra/launcher=submitit_slurm", "hydra.launcher.timeout_min=5", "hydra.launcher.cpus_per_task=1"]
    # numbers of jobs begin at 1 in every new Slurm: results of another one's must not be there
    launcher += [f"hydra.launcher.submitit_folder={tmp_path / 'submitit'}"]
    sweep = ["sorter=cd_grab,d_rr", f"name={NAME}", "epochs=2", "nproc=2"]
    command = [sys.executable, "-m", "experiments.launch", "-m", *launcher, *RUN, *sweep]
    try:
        done = subprocess.run(command, cwd=ROOT, env=cluster, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        found = {path.name: path for path in runs.glob("*/*")}
        assert found.keys() == {"cd_grab-s0", "d_rr-s0"}, done.stdout + done.stderr
        for name, folder in found.items():
            assert read_manifest(folder)["status"] == "finished" and read_manifest(folder)["processes"] == 2
            assert orders(folder) == alone(tmp_path / name, f"sorter={name.removesuffix('-s0')}", "epochs=2")
    finally:
        shutil.rmtree(runs, ignore_errors=True)


def test_a_job_that_is_told_to_end_is_queued_again_and_goes_on(cluster, tmp_path):
    folder, settings = tmp_path / "run", ["epochs=60", "checkpoint.every_steps=10"]
    command = ["sbatch", "--nodes=1", "--parsable", f"--output={tmp_path}/job.log", "scripts/hosts.sbatch"]
    command += [*RUN, *settings, f"run_dir={folder}", "nproc=2"]
    environment = cluster | {"PYTHON": sys.executable}
    submitted = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert submitted.returncode == 0, submitted.stderr
    job = submitted.stdout.strip()

    def wait_for(right):
        deadline = time.monotonic() + 240
        while not right():
            assert time.monotonic() < deadline, (tmp_path / "job.log").read_text()
            time.sleep(0.05)

    wait_for(lambda: len(read_metrics(folder / "metrics.jsonl")) >= 3)
    subprocess.run(["scancel", "--signal=TERM", job], env=cluster, check=True)
    wait_for(lambda: read_manifest(folder).get("status") == "stopped")
    subprocess.run(["scontrol", "update", f"jobid={job}", "StartTime=now"], env=cluster)  # not after two minutes
    deadline = time.monotonic() + 240
    while read_manifest(folder).get("status") != "finished":
        assert time.monotonic() < deadline, (tmp_path / "job.log").read_text()
        subprocess.run(["scontrol", "update", f"jobid={job}", "StartTime=now"], env=cluster, capture_output=True)
        time.sleep(1)
    assert len(read_manifest(folder)["resumed"]) == 1
    assert orders(folder) == alone(tmp_path / "alone", *settings)
