"""Settings and helpers shared by the tests."""

import gc
import os
import subprocess
import sys
from functools import partial
from itertools import pairwise

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before numpy is loaded: pytest runs in several processes itself
if hasattr(os, "SCHED_BATCH"):
    # Else a process of gloo is interrupted by the one that it has just sent something, and a thread that waits for its
    # lock turns round and round: exchanges then cost twice as much.
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton: its kernels then run on the CPU

import numpy as np
import pytest
from filelock import FileLock
from hypothesis import settings

import cdgrab
from cdgrab import streams
from cdgrab.balance import kernels, reference
from experiments.store.files import ROOT

gc.set_threshold(100_000, 20, 20)  # looking for garbage takes a twentieth of the time otherwise
settings.register_profile("reproducible", deadline=None, derandomize=True, max_examples=20)
settings.load_profile("reproducible")
torch.set_num_threads(1)

ALL = list(cdgrab.SORTERS)
GRADIENT_AWARE = [name for name in ALL if cdgrab.SORTERS[name].needs_gradients]
OBLIVIOUS = [name for name in ALL if name not in GRADIENT_AWARE]
BALANCING = [name for name in GRADIENT_AWARE if "rule" in cdgrab.SORTERS[name].options]
SEED = 5


def make(name, workers=3, units=8, dim=5, **options):
    return cdgrab.make_sorter(name, **{"workers": workers, "units": units, "dim": dim, "seed": SEED} | options)


def make_gradients(kind, epochs, workers, units, dim, seed=0):
    """[epochs, workers, units, dim]. Those that are `repeated`, `tied` or `zero` are whole multiples of `units`: sums,
    means and inner products are then exact in floating point, so that exact ties are ties for every implementation.
    `cancelling`: neighbouring workers have the same fractions, so that an even number of them leaves a running sum of
    exactly zero. `nearly tied`: few coordinates differ from zero, and what units share is tiny."""
    rng = np.random.default_rng(seed)
    shape = (epochs, workers, units, dim)
    values = {
        "random": lambda: rng.normal(size=shape),
        "repeated": lambda: units * rng.integers(-3, 4, size=(3, dim))[rng.integers(3, size=shape[:3])],
        "tied": lambda: units * rng.integers(-1, 2, size=shape),
        "zero": lambda: np.zeros(shape),
        "cancelling": lambda: (
            rng.normal(size=(epochs, -(-workers // 2), units, dim)).repeat(2, axis=1)[:, :workers]
            * (np.arange(units) % 2 == 0)[:, None]
        ),
        "nearly tied": lambda: nearly_tied(rng, *shape),
    }[kind]()
    return torch.from_numpy(values.astype(np.float64))


def nearly_tied(rng, *shape, tiny=1e-8):
    """One number at random in every vector, and a tiny one in the first place of all."""
    values = np.zeros(shape)
    np.put_along_axis(values, rng.integers(shape[-1], size=(*shape[:-1], 1)), rng.normal(size=(*shape[:-1], 1)), -1)
    values[..., 0] = tiny * rng.normal(size=shape[:-1])
    return values


def feed(sorter, gradients, cuts=(), start=0):
    """The rest of an epoch in calls that end at `cuts`, all through one buffer that is overwritten after each call."""
    units = gradients.shape[1]
    buffer = torch.empty_like(gradients)
    for a, b in pairwise([start, *sorted(c for c in cuts if start < c < units), units]):
        view = buffer[:, : b - a].copy_(gradients[:, a:b])
        sorter.observe(range(a, b), view)
        assert torch.equal(view, gradients[:, a:b]), "observe changed the caller's gradients"
        buffer.fill_(torch.nan)


def run(sorter, gradients, cuts=(), feed=feed):
    """Orders of all epochs and of the one after, [epochs + 1, workers, units]."""
    orders = []
    for epoch, epoch_gradients in enumerate(gradients):
        orders.append(sorter.order(epoch))
        feed(sorter, epoch_gradients, cuts)
    return torch.stack([*orders, sorter.order(len(gradients))])


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape)).to(dtype)


def uniform(*shape, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).uniform(-1.0, 1.0, shape))


def walk(width, draws, r, v):
    """Takes the place of the oracle's greedy rule."""
    return +1 if float(np.dot(r, v)) <= width * next(draws) else -1


def oracle(name, first_order, gradients, walk_width=None, kh_epochs=100):
    """The orders that `run` must give, from `cdgrab.balance.rules.reference` and the sorter's random streams."""
    _, workers, units, dim = gradients.shape
    orders, means = [first_order.tolist()], np.zeros((workers, dim))
    decisions = units if name in ("grab", "id_grab_bal") else units // 2
    for epoch, g in enumerate(gradients.double().numpy()):
        draws = np.stack([streams.symmetric_uniform(decisions, SEED, "walk", w, epoch) for w in range(workers)])
        visits = iter((draws.T if name == "cd_grab" else draws).ravel())
        with pytest.MonkeyPatch.context() as patch:
            if walk_width:
                patch.setattr(reference, "greedy", partial(walk, walk_width, visits))
            if name == "kh":
                new = reference.kh(orders[-1], g, draws, epoch + 1, kh_epochs)
            elif name == "cd_grab":
                new = reference.cd_grab(orders[-1], g)
            elif name in ("grab_pair", "id_grab_pair"):
                new = reference.id_grab_pair(orders[-1], g)
            else:
                new, means = reference.id_grab_bal(orders[-1], g, means)
        orders.append(new)
    return torch.tensor(orders)


def assert_independent(permutations):
    """Two independent permutations agree in one place on average, and in more than ten with probability 1e-8."""
    for i, one in enumerate(permutations):
        for other in permutations[i + 1 :]:
            assert int((one == other).sum()) <= 10 and int((one == other.flip(0)).sum()) <= 10


# -- kernels ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def on_gpu():
    """(the module of GPU kernels, device): on a GPU, or on the CPU by Triton's interpreter."""
    pytest.importorskip("triton", reason="there is no Triton for this platform")
    return kernels.optional("gpu"), "cuda" if torch.cuda.is_available() else "cpu"


# -- processes ---------------------------------------------------------------------------------------------------------

# With -n, pytest's processes take files one after the other. First those that take long, so that nobody waits for the
# last one. While the first file compiles the kernels, the second has no need of them: else both would compile them.
LONGEST = (
    *("test_processes", "test_sparsify", "test_figures", "test_studies", "test_examples", "test_replicas"),
    *("test_resuming", "test_runs", "test_kernels", "test_startup", "test_sparse_training", "test_sorters"),
    *("test_config", "test_gpt2_wiki103", "test_bench", "test_glue", "test_study_sparsification", "test_steps"),
    *("test_fuzz", "test_structure", "test_study_herding", "test_verdicts", "test_study_scaling"),
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
        if not (folder / "complete").exists():
            folder.mkdir()
            search = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
            command = [sys.executable, "-m", "tests.process_checks", str(folder)]
            subprocess.run(command, env=os.environ | {"PYTHONPATH": search}, check=True)
            (folder / "complete").touch()
    return folder


def replace_in(path, changes):
    text = path.read_text()
    for before, after in changes.items():
        assert before in text
        text = text.replace(before, after)
    path.write_text(text)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of what the commands need, so that the real results/ stay untouched. The library, which keeps its compiled
    code beside itself, is the same."""
    folder = tmp_path_factory.mktemp("checkout")
    (folder / "cdgrab").symlink_to(ROOT / "cdgrab")
    for name in ("configs", "experiments", "scripts", "notebooks", "results/paper"):
        (folder / name).parent.mkdir(exist_ok=True)
        subprocess.run(["cp", "-a", str(ROOT / name), str(folder / name)], check=True)
    quickly = {
        "pdf.fonttype: 42": "pdf.fonttype: 3",
        "bbox: tight": "bbox: standard",
        "savefig.dpi: 200": "savefig.dpi: 80",
    }
    replace_in(folder / "experiments" / "report" / "paper.mplstyle", quickly)
    replace_in(folder / "experiments" / "report" / "plots.py", {"figure.tight_layout(": "dict("})  # half of the drawing
    return folder


@pytest.fixture(autouse=True, scope="module")
def search_path_of_its_own():
    """Launching processes adds to PYTHONPATH, which later tests of copied checkouts must not inherit."""
    before = os.environ.get("PYTHONPATH")
    yield
    if before is None:
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = before
