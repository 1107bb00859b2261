"""Settings and fixtures shared by the tests. With -n, this is also loaded by the process that only tells others which
tests to run: what takes long to import is left to those."""

import gc
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before numpy is loaded: pytest runs in several processes itself
if hasattr(os, "SCHED_BATCH"):
    # Else a process of gloo is interrupted by the one that it has just sent something, and a thread that waits for its
    # lock turns round and round: exchanges then cost twice as much.
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

import pytest
from filelock import FileLock
from hypothesis import settings

ROOT = Path(__file__).parents[1]
# Bytecode is kept, as the compiled kernels are: else every process that a test starts compiles all modules anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
gc.set_threshold(100_000, 20, 20)  # looking for garbage takes a twentieth of the time otherwise
settings.register_profile("reproducible", deadline=None, derandomize=True, max_examples=20)
settings.load_profile("reproducible")


def pytest_configure(config):
    if config.option.dist == "no" or hasattr(config, "workerinput"):
        import torch

        torch.set_num_threads(1)
        if not torch.cuda.is_available():
            # before anything imports Triton: its kernels then run on the CPU
            os.environ.setdefault("TRITON_INTERPRET", "1")


# -- kernels ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def triton_device():
    """A GPU, or the CPU with Triton's interpreter, which then checks every address that a kernel reads or writes."""
    pytest.importorskip("triton", reason="there is no Triton for this platform")
    import torch

    if torch.cuda.is_available():
        yield "cuda"
    else:
        from checked_accesses import every_access_checked

        with every_access_checked():
            yield "cpu"


@pytest.fixture(scope="session")
def on_gpu(triton_device):
    """(the module of GPU kernels, device)"""
    from cdgrab.balance import kernels

    return kernels.optional("gpu"), triton_device


# -- processes ---------------------------------------------------------------------------------------------------------

# With -n, pytest's processes take files one after the other. First those that take long, so that nobody waits for the
# last one. While the first file compiles the kernels, the second has no need of them: else both would compile them.
LONGEST = (
    *("test_processes", "test_sparsify_oracles", "test_sparsify", "test_sparsify_density", "test_reproduce"),
    *("test_studies", "test_examples", "test_replicas", "test_resuming_processes", "test_resuming", "test_runs"),
    *("test_figures", "test_kernels", "test_startup", "test_sparse_training", "test_sorters", "test_sweeps"),
    *("test_config", "test_gpt2_wiki103", "test_bench", "test_glue", "test_study_sparsification", "test_steps"),
    *("test_cifar10", "test_fuzz", "test_structure", "test_study_herding", "test_verdicts", "test_study_scaling"),
)


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST))


def pytest_collection_finish():
    gc.freeze()  # what is imported stays: looking through it for garbage takes long, and more so in forked processes


@pytest.fixture(scope="session")
def spawned(tmp_path_factory):
    """A folder with what `process_checks` leaves behind on 4 and on 2 processes, made once for all of pytest's own."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "spawned"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            from forked import elsewhere
            from process_checks import main

            from scripts.soak.processes import load_kernels

            load_kernels()  # here, where later tests need them, too
            folder.mkdir()
            assert elsewhere(main, folder) == 0
            (folder / "complete").touch()
    if not (folder / "complete").exists():
        pytest.fail("the processes failed: see the first test that wanted what they find", pytrace=False)
    return folder


# -- models ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def narrow_resnet(monkeypatch):
    """A ResNet-18 with few channels: that of the task takes most of its time to copy its gradients."""
    monkeypatch.setattr("experiments.tasks.cifar10_models.WIDTHS", (32, 32, 64, 64))


# -- pages -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    reason = "pages are tried in Chromium where Selenium, chromium and chromedriver are installed"
    webdriver = pytest.importorskip("selenium.webdriver", reason=reason)
    found = {name: shutil.which(name) for name in ("chromium", "chromedriver")}
    if not all(found.values()):
        pytest.skip(reason)
    options = webdriver.ChromeOptions()
    options.binary_location = found["chromium"]
    flags = "headless no-sandbox disable-gpu disable-quic no-first-run disable-background-networking disable-sync"
    for flag in (*flags.split(), "disable-component-update", "force-prefers-reduced-motion", "window-size=1280,900"):
        options.add_argument(f"--{flag}")
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('chromium')}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(executable_path=found["chromedriver"])
    driver = webdriver.Chrome(options=options, service=service)
    yield driver
    driver.quit()


# -- checkouts ---------------------------------------------------------------------------------------------------------


def replace_in(path, changes):
    text = path.read_text()
    for before, after in changes.items():
        assert before in text
        text = text.replace(before, after)
    path.write_text(text)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of what the commands need, so that the real results/ stay untouched. What keeps its compiled code beside
    itself is the same."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("configs", "experiments", "scripts", "notebooks", "results/paper"):
        (folder / name).parent.mkdir(exist_ok=True)
        subprocess.run(["cp", "-a", str(ROOT / name), str(folder / name)], check=True)
    shutil.rmtree(folder / "experiments" / "studies")
    for name in ("cdgrab", "experiments/studies"):
        (folder / name).symlink_to(ROOT / name)
    quickly = {
        "pdf.fonttype: 42": "pdf.fonttype: 3",
        "bbox: tight": "bbox: standard",
        "savefig.dpi: 200": "savefig.dpi: 80",
    }
    replace_in(folder / "experiments" / "report" / "paper.mplstyle", quickly)
    replace_in(folder / "experiments" / "report" / "plots.py", {"figure.tight_layout(": "dict("})  # half of the drawing
    loose = {"Config({": 'Config({"InlineBackend": {"print_figure_kwargs": {"bbox_inches": None}}, '}  # it draws twice
    replace_in(folder / "experiments" / "report" / "notebook.py", loose)
    return folder


@pytest.fixture(autouse=True, scope="module")
def nothing_stays_behind():
    """Which files share a process depends on how fast they are: what one leaves behind breaks another at random."""
    environment, folder = dict(os.environ), os.getcwd()
    handlers = [(number, signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM)]
    yield
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)
    os.chdir(folder)
    for number, handler in handlers:
        signal.signal(number, handler)
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)
        torch.set_default_dtype(torch.float32)
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
            pytest.fail("a process group stays behind")
    if pyplot := sys.modules.get("matplotlib.pyplot"):
        pyplot.close("all")  # a notebook shows all figures that are open
    gc.collect()
    gc.freeze()  # modules that this file has imported: the sampler looks for accelerate's wrappers among all objects
