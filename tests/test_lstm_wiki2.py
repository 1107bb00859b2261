"""LSTM-WikiText-2 against an ordinary nn.LSTM and plain loops; gradient clipping."""

import json
import math
import os
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from tiny_wikitext import write_wikitext
from torch import nn

from cdgrab.errors import CdgrabError
from cdgrab.runtime.group import WorkerGroup
from experiments import train
from experiments.data import wikitext
from experiments.tasks import make_task
from experiments.training.config import compose
from experiments.training.evaluation import evaluate, evaluate_together
from experiments.training.gradients import FlatParameters, at_once, gradient_function, over_replicas, summed
from experiments.training.optimisers import Optimiser

BATCH, LENGTH, TEST_COLUMNS, CHUNKS = 4, 5, 3, 7
TINY = [f"task.batch={BATCH}", f"task.chunk_length={LENGTH}", f"task.test_columns={TEST_COLUMNS}", "task.hidden=6"]
SGD = {"optimiser": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "schedule": {"kind": "constant"}}

real_data = pytest.mark.skipif(
    not (os.environ.get("CDGRAB_DATA") and Path(os.environ["CDGRAB_DATA"], "wikitext-2").is_dir()),
    reason="needs the real WikiText-2: set CDGRAB_DATA (`make data-lstm-wiki2`)",
)


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A data folder with a tiny WikiText-2."""
    return write_wikitext(tmp_path, monkeypatch)


def tiny_task(root, *changes, workers=2):
    """The task and which units each worker owns."""
    settings = [f"data_root={root}", *TINY, f"workers={workers}", "task.dtype=float64", "run_dir=unused"]
    run = compose(["task=lstm_wiki2", *settings, *changes])
    task = make_task(run.config, run.source, torch.device("cpu"))
    return task, task.partition(torch.empty(0))


def side_by_side(text, columns):
    """The published arrangement, [length, columns]."""
    return torch.tensor([text[c * (len(text) // columns) :][: len(text) // columns] for c in range(columns)]).T


class Ordinary(nn.Module):
    """The same model in the plainest words, with the task's parameters."""

    def __init__(self, task):
        super().__init__()
        words, hidden = task.model.embedding.weight.shape
        self.embedding, self.lstm = nn.Embedding(words, hidden), nn.LSTM(hidden, hidden, 2)
        self.double()
        with torch.no_grad():
            for mine, other in zip(self.parameters(), task.model.parameters(), strict=True):
                mine.copy_(other)

    def loss(self, words, targets, state):
        outputs, state = self.lstm(self.embedding(words), state)
        scores = (outputs @ self.embedding.weight.T).log_softmax(-1)
        return -scores.gather(-1, targets[..., None]).mean(), tuple(s.detach() for s in state)


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_every_chunk_of_the_text_is_owned_once(root, workers):
    task, owned = tiny_task(root, workers=workers)
    assert owned.shape == (workers, CHUNKS) and len(owned.unique()) == task.train_units == workers * CHUNKS
    inputs, targets = task.fetch("train", owned)  # [workers, chunks, length, columns of a worker]
    text = side_by_side(wikitext.load(task.source)[0].train.tolist(), BATCH)
    for shifted, chunks in enumerate((inputs, targets)):
        rebuilt = chunks.permute(1, 2, 0, 3).reshape(CHUNKS * LENGTH, BATCH)
        assert torch.equal(rebuilt, text[shifted : shifted + CHUNKS * LENGTH])


@pytest.mark.parametrize(("change", "chunks"), [("task.truncate=true", CHUNKS - 1), ("task.limit=3", 3)])
def test_fewer_chunks_on_request(root, change, chunks):
    owned = tiny_task(root, change)[1]
    assert owned.shape == (2, chunks) and owned[0].tolist() == list(range(chunks))


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("how", ["backward", "vmap"])
def test_gradients_and_carry_over_reordered_chunks_equal_an_ordinary_lstm(root, reset, how):
    task, owned = tiny_task(root, f"task.reset_hidden={reset}")
    flat, ordinary = FlatParameters(task.model), Ordinary(task)
    parameters = flat.flatten({name: p.detach() for name, p in task.model.named_parameters()})
    compute = gradient_function(task, flat, per_unit=True, how=how)
    text = side_by_side(wikitext.load(task.source)[0].train.tolist(), BATCH)
    orders = torch.stack([torch.randperm(CHUNKS, generator=torch.Generator().manual_seed(w)) for w in range(2)])
    states, carry = [None, None], task.first_carry(2)
    assert [tuple(state.shape) for state in carry] == [(2, 2, 2, 6)] * 2  # workers, layers, columns, hidden
    for position in range(CHUNKS):
        units = owned.gather(1, orders[:, [position]])
        with torch.no_grad():
            gradients, means, losses, *carry = compute(parameters, *carry, *task.fetch("train", units))
        for worker, chunk in enumerate(orders[:, position]):
            columns = text[chunk * LENGTH : (chunk + 1) * LENGTH + 1, 2 * worker : 2 * worker + 2]
            loss, states[worker] = ordinary.loss(columns[:-1], columns[1:], None if reset else states[worker])
            ordinary.zero_grad()
            loss.backward()
            expected = torch.cat([p.grad.flatten() for p in ordinary.parameters()])
            torch.testing.assert_close(gradients[worker, 0], expected, rtol=0, atol=1e-10)
            torch.testing.assert_close(means[worker], expected, rtol=0, atol=1e-10)
            torch.testing.assert_close(losses[worker], loss.detach(), rtol=0, atol=1e-10)
            for mine, other in zip(carry, states[worker], strict=True):
                torch.testing.assert_close(mine[worker], other, rtol=0, atol=1e-10)


@pytest.mark.parametrize("test_chunks", [None, 2])
def test_evaluation_equals_a_plain_loop_in_file_order(root, test_chunks):
    task, owned = tiny_task(root, *([f"task.test_chunks={test_chunks}"] if test_chunks else []))
    corpus, ordinary = wikitext.load(task.source)[0], Ordinary(task)
    train_text, test_text = side_by_side(corpus.train.tolist(), BATCH), side_by_side(corpus.test.tolist(), TEST_COLUMNS)

    def chunk_losses(text, end):
        state, losses = None, []
        for start in range(0, end, LENGTH):
            stop = min(start + LENGTH, end)
            loss, state = ordinary.loss(text[start:stop], text[start + 1 : stop + 1], state)
            losses.append((stop - start, loss.item()))
        return losses

    def mean(losses):
        return sum(words * loss for words, loss in losses) / sum(words for words, _ in losses)

    def totals(split, shares):
        parts = [task.totals(split, dict(task.model.named_parameters()), share) for share in shares]
        return {name: sum(float(part[name]) for part in parts) for name in parts[0]}

    visited = owned[:, torch.randperm(CHUNKS)]  # evaluation does not care in which order they were trained on
    shares = torch.arange(task.test_units).tensor_split(4)  # of 4 workers the last has no test column
    with torch.no_grad():
        metrics = task.metrics(totals("train", visited), totals("test", shares))
        test_losses = chunk_losses(test_text, test_chunks * LENGTH if test_chunks else len(test_text) - 1)
        full = [loss for words, loss in test_losses if words == LENGTH]
        assert len(full) < len(test_losses) or len(full) == test_chunks
        assert metrics["train_loss"] == pytest.approx(mean(chunk_losses(train_text, CHUNKS * LENGTH)), abs=1e-12)
        assert metrics["test_ppl"] == pytest.approx(math.exp(mean(test_losses)), rel=1e-12)
        assert metrics["test_ppl_authors"] == pytest.approx(math.exp(sum(full) / (len(full) - 1)), rel=1e-12)
    diverged = {"loss": 1e9, "count": 1.0, "full_chunks": 1e9}
    assert task.metrics(diverged, diverged)["test_ppl"] == math.inf


@pytest.mark.parametrize("sorter", ["cd_grab", "d_rr"])
def test_a_smoke_run_trains_and_logs(root, tmp_path, sorter):
    settings = ["task=lstm_wiki2", f"data_root={root}", *TINY, "size=smoke", f"sorter={sorter}"]
    assert train.main([*settings, "workers=2", "epochs=2", "task.lr=0.5", f"run_dir={tmp_path / 'run'}"]) == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 2 and lines[1]["train_loss"] < lines[0]["train_loss"] < math.log(11.5)
    assert lines[1]["test_ppl"] < lines[1]["test_ppl_authors"]
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["sizes"]["units"] == CHUNKS and manifest["data"]["rows"]["vocabulary"] == 11


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("task.partition=random", "own columns of the text"),
        ("task.limit=0", "task.limit must be a whole number of at least 1"),
        ("task.reset_hidden=maybe", "task.reset_hidden must be true or false"),
        ("task.chunk_length=1000", "too short"),
        ("task.test_columns=60", "too short"),
    ],
)
def test_bad_settings_get_one_sentence(root, change, message):
    with pytest.raises(CdgrabError, match=message):
        tiny_task(root, change)


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("clip", [0.25, 3, None])
def test_clipping_equals_torch_over_a_hundred_steps(clip, traced):
    start = torch.randn(7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    ours, theirs = start.clone(), start.clone().requires_grad_()
    optimiser = Optimiser([OmegaConf.create(SGD | {"clip": clip})], 10, 10, ours, traced)
    reference = torch.optim.SGD([theirs], lr=0.1, momentum=0.9, weight_decay=0.01)
    lengths = set()
    for _ in range(100):
        theirs.grad = theirs.detach() ** 3 - 1.0
        if clip:
            lengths.add(bool(torch.nn.utils.clip_grad_norm_([theirs], clip) > clip))
        with torch.no_grad():
            ours, *optimiser.state = optimiser.update(ours, ours**3 - 1.0, *optimiser.state)
        reference.step()
    assert lengths == ({True, False} if clip else set())  # some were too long, some were not
    torch.testing.assert_close(ours, theirs.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("clip", [0, -1.0, "much", True])
def test_bad_clip_is_refused(clip):
    with pytest.raises(CdgrabError, match="task.clip must be null or a number above 0"):
        compose(["task=lstm_wiki2", "data=embedded", f"task.clip={clip}"])


@real_data
def test_real_data_has_the_papers_counts():
    run = compose(["experiment=fig3b_lstm_wiki2", "data=auto", "size=paper"])
    task = make_task(run.config, run.source, torch.device("cpu"))
    counts = {"vocabulary": 33_278, "train": 2_088_628, "test": 245_569, "chunks": 3729}
    assert task.rows == {"all": 2_088_628 + 245_569, **counts}
    assert task.partition(torch.empty(0)).shape == (4, 3728)
    assert FlatParameters(task.model).dim == 1_081_760 + 32  # the paper counts 33,277 words, <eos> left out
    inputs, targets = task.fetch("train", torch.tensor([[3 * 3729 + 3728]]))
    assert inputs.shape == targets.shape == (1, 1, 35, 4)


def test_one_pass_for_the_workers_of_all_runs_gives_their_gradients_and_metrics(on_gpu, monkeypatch):
    """What a GPU does for a group of runs; on a CPU by Triton's interpreter."""
    _, device = on_gpu
    if device == "cpu":  # few programs, since they run one by one
        monkeypatch.setattr("experiments.tasks.vocabulary_kernels.CLASSES", 8192)
    settings = ["workers=2", "data=embedded", "size=smoke", "task.dtype=float64", "task.hidden=3", "task.batch=4"]
    run = compose(["task=lstm_wiki2", *settings, "task.chunk_length=2", "task.test_chunks=2", "task.test_columns=2"])
    task = make_task(run.config, run.source, torch.device(device))
    flat = FlatParameters(task.model)
    alone = over_replicas(gradient_function(task, flat, True, "backward"), 2, "backward")
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device)

    parameters = 0.1 * normal(3, flat.dim)
    carry = [normal(3, *part.shape) for part in task.first_carry(2)]
    batch = task.fetch("train", torch.randint(8, (3, 2, 1), generator=generator).to(device))
    gradients, means, *rest = alone(parameters, *carry, *batch)
    found = at_once(task, flat, 2)(parameters, *carry, *batch)
    for results, wanted in ((found, means), (summed(lambda: found, 2)(), means.mean(1))):
        for one, other in zip((gradients, wanted, *rest), results, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-14)
            assert one.abs().max() > 0
    owned = task.partition(torch.empty(0))[:, :2].to(device)
    together = evaluate_together(task, flat.unflatten(parameters[:2]), owned.expand(2, -1, -1))
    for vector, metrics in zip(parameters, together, strict=False):
        alone = evaluate(task, flat.unflatten(vector), owned, WorkerGroup(2), at_once=True)
        assert metrics == pytest.approx(alone, rel=1e-12)
