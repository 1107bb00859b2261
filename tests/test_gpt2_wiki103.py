"""GPT2-WikiText-103: the model against `transformers`, gradients and metrics against plain loops."""

import importlib.util
import json
import math

import numpy as np
import pytest
import torch
from novels import write_novels

from cdgrab.errors import CdgrabError
from cdgrab.runtime.group import WorkerGroup
from experiments import train
from experiments.tasks import make_task
from experiments.tasks.gpt2_wiki103 import blocks_at_once, pretrained
from experiments.tasks.tiny_gpt2 import TinyGpt2
from experiments.training.config import compose
from experiments.training.evaluation import evaluate, evaluate_together
from experiments.training.gradients import FlatParameters, at_once, gradient_function, over_replicas

CONTEXT, VOCABULARY = 8, 300
TINY = [f"task.context={CONTEXT}", "task.width=12", f"task.vocabulary={VOCABULARY}", "task.limit=20"]


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A data folder with novels."""
    monkeypatch.setenv("CDGRAB_CACHE", str(tmp_path / "cache"))
    return write_novels(tmp_path)


def tiny_task(root, *changes, device="cpu"):
    run = compose(["task=gpt2_wiki103", f"data_root={root}", *TINY, "task.dtype=float64", "run_dir=unused", *changes])
    return make_task(run.config, run.source, torch.device(device))


# -- the model --------------------------------------------------------------------------------------------------------


def modules_of_both(model, twin):
    body, other = model.body, twin.transformer
    pairs = [(body.tokens, other.wte), (body.positions, other.wpe), (body.norm, other.ln_f)]
    for mine, theirs in zip(body.blocks, other.h, strict=True):
        pairs += [(mine.attention_norm, theirs.ln_1), (mine.attention.input, theirs.attn.c_attn)]
        pairs += [(mine.attention.output, theirs.attn.c_proj), (mine.norm, theirs.ln_2)]
        pairs += [(mine.expand, theirs.mlp.c_fc), (mine.contract, theirs.mlp.c_proj)]
    return pairs


def transposed(mine, theirs):
    """Their linear layers, called Conv1D, keep their weights the other way round."""
    return theirs.T if isinstance(mine, torch.nn.Linear) else theirs


def transformers_twin(model):
    """`transformers`' GPT-2 with the same weights, in float64."""
    from transformers import GPT2Config, GPT2LMHeadModel  # seconds, in every process that collects tests

    body = model.body
    config = GPT2Config(
        vocab_size=body.tokens.num_embeddings,
        n_positions=body.positions.num_embeddings,
        n_embd=body.tokens.embedding_dim,
        n_layer=len(body.blocks),
        n_head=body.blocks[0].attention.heads,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        attn_implementation="eager",
    )
    twin = GPT2LMHeadModel(config).double().eval()
    with torch.no_grad():
        for mine, theirs in modules_of_both(model, twin):
            theirs.weight.copy_(transposed(mine, mine.weight))
            if hasattr(mine, "bias"):
                theirs.bias.copy_(mine.bias)
    return twin


def perturbed(model):
    """Biases and norms away from their initial zeros and ones, so that leaving one out shows."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return model


@pytest.mark.parametrize("sizes", [{}, {"context": 12, "width": 24, "layers": 3, "heads": 4}])
def test_model_equals_transformers(sizes):
    model = perturbed(TinyGpt2(97, **sizes).double())
    twin = transformers_twin(model)
    assert sum(p.numel() for p in model.parameters()) == twin.num_parameters()
    tokens = torch.randint(97, (3, sizes.get("context", 128)), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for sequences in (tokens, tokens[:, :5]):
            output = twin(sequences, output_hidden_states=True)
            torch.testing.assert_close(model(sequences), output.logits, rtol=0, atol=1e-10)
            torch.testing.assert_close(model.body(sequences), output.hidden_states[-1], rtol=0, atol=1e-10)
            for row, sequence in enumerate(sequences):
                torch.testing.assert_close(model(sequence), output.logits[row], rtol=0, atol=1e-10)


def test_model_has_the_papers_size_and_gpt2s_initialisation():
    torch.manual_seed(0)
    model = TinyGpt2(50_257)
    assert sum(p.numel() for p in model.parameters()) == 6_846_080
    deviations = {name: p.std().item() for name, p in model.named_parameters() if p.dim() > 1}
    for name, deviation in deviations.items():
        residual = name.endswith(("attention.output.weight", "contract.weight"))
        assert deviation == pytest.approx(0.01 if residual else 0.02, rel=0.05), name
    vectors = {name: p for name, p in model.named_parameters() if p.dim() == 1}
    assert all((p == (1 if "norm.weight" in name else 0)).all() for name, p in vectors.items())


# -- the task ---------------------------------------------------------------------------------------------------------


def twin_loss(twin, block):
    """As `transformers` has it, in float64: its own takes the scores to float32 first."""
    return torch.nn.functional.cross_entropy(twin(block[None]).logits[0, :-1], block[1:])


@pytest.mark.parametrize("how", ["vmap", "backward"])
@pytest.mark.parametrize("per_worker", [1, 3])
def test_unit_gradients_equal_a_one_by_one_loop_over_transformers(root, how, per_worker):
    task = tiny_task(root)
    twin = transformers_twin(perturbed(task.model))
    flat = FlatParameters(task.model)
    parameters = flat.flatten({name: p.detach() for name, p in task.model.named_parameters()})
    units = torch.randperm(task.train_units)[: 2 * per_worker].view(2, per_worker)
    with torch.no_grad():
        compute = gradient_function(task, flat, per_unit=True, how=how)
        gradients, means, losses = compute(parameters, *task.fetch("train", units))
    expected_losses = torch.empty(2, per_worker, dtype=torch.float64)
    for worker, position in np.ndindex(2, per_worker):
        (block,) = task.fetch("train", units[worker, position])
        twin.zero_grad()
        loss = twin_loss(twin, block)
        loss.backward()
        expected_losses[worker, position] = loss.item()
        named = flat.unflatten(gradients[worker, position])
        names = {module: name for name, module in task.model.named_modules()}
        for mine, theirs in modules_of_both(task.model, twin):
            weight = transposed(mine, theirs.weight.grad)
            torch.testing.assert_close(named[f"{names[mine]}.weight"], weight, rtol=0, atol=1e-10)
            if hasattr(mine, "bias"):
                torch.testing.assert_close(named[f"{names[mine]}.bias"], theirs.bias.grad, rtol=0, atol=1e-10)
    torch.testing.assert_close(losses, expected_losses.mean(1), rtol=0, atol=1e-10)
    torch.testing.assert_close(means, gradients.mean(1), rtol=0, atol=1e-12)


@pytest.mark.parametrize("blocks_at_once", [1, 4, 100])
def test_evaluation_equals_a_plain_loop(root, blocks_at_once):
    task = tiny_task(root)
    task.evaluated_at_once = blocks_at_once
    twin = transformers_twin(perturbed(task.model))
    shares = {"train": torch.arange(task.train_units).tensor_split(3)}
    shares["test"] = torch.arange(task.test_units).tensor_split(task.test_units + 2)  # two workers have no block
    totals = {}
    with torch.no_grad():
        for split, parts in shares.items():
            sums = [task.totals(split, dict(task.model.named_parameters()), part) for part in parts]
            totals[split] = {name: sum(float(part[name]) for part in sums) for name in sums[0]}
        losses = {
            split: [twin_loss(twin, block).item() for block in task.fetch(split, torch.arange(sum(map(len, parts))))[0]]
            for split, parts in shares.items()
        }
    metrics = task.metrics(totals["train"], totals["test"])
    assert metrics["train_loss"] == pytest.approx(np.mean(losses["train"]), rel=1e-10)
    assert metrics["val_loss"] == pytest.approx(np.mean(losses["test"]), rel=1e-10)
    assert metrics["val_ppl"] == pytest.approx(math.exp(np.mean(losses["test"])), rel=1e-10)
    authors = math.exp(sum(losses["test"]) / (len(losses["test"]) - 1))
    assert metrics["val_ppl_authors"] == pytest.approx(authors, rel=1e-10)
    assert task.metrics({"loss": 1.0, "count": 1.0}, {"loss": 1e9, "count": 2.0})["val_ppl"] == math.inf


def test_one_pass_for_the_workers_of_all_runs_gives_their_gradients_and_metrics(root, on_gpu, monkeypatch):
    """What a GPU does for a group of runs; on a CPU by Triton's interpreter."""
    _, device = on_gpu
    monkeypatch.setattr("experiments.tasks.gpt2_wiki103.READ_AT_ONCE", 3 * 2 * CONTEXT)  # three blocks of two runs
    if device == "cpu":  # few programs, since they run one by one
        monkeypatch.setattr("experiments.tasks.vocabulary_kernels.CLASSES", 1024)
    task = tiny_task(root, "workers=2", "task.batch=2", "task.valid_limit=4", device=device)
    flat = FlatParameters(task.model)
    generator = torch.Generator().manual_seed(0)
    parameters = (0.1 * torch.randn(3, flat.dim, generator=generator, dtype=torch.float64)).to(device)
    batch = task.fetch("train", torch.randint(12, (3, 2, 1), generator=generator).to(device))
    with torch.no_grad():
        wanted = over_replicas(gradient_function(task, flat, True), 2, "vmap")(parameters, *batch)
        found = at_once(task, flat, 2)(parameters, *batch)
        for one, other in zip(wanted, found, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-11, atol=1e-13)
            assert one.abs().max() > 0
        owned = torch.stack([torch.arange(12).view(2, 6), torch.arange(11, -1, -1).view(2, 6)]).to(device)
        together = evaluate_together(task, flat.unflatten(parameters[:2]), owned)
        for vector, units, metrics in zip(parameters, owned, together, strict=False):
            assert metrics == pytest.approx(evaluate(task, flat.unflatten(vector), units, WorkerGroup(2)), rel=1e-12)


@pytest.mark.parametrize(("device", "blocks"), [("cuda", 41), ("cpu", 2)])
def test_scores_of_all_gpt2s_tokens_are_evaluated_in_pieces(device, blocks):
    assert blocks_at_once(torch.device(device), 128, 50_257, torch.float32) == blocks
    assert blocks_at_once(torch.device(device), 4096, 2**16, torch.float64) == 1


@pytest.mark.parametrize("sorter", ["cd_grab", "d_rr"])
def test_a_smoke_run_trains_and_leaves_a_model_behind(root, tmp_path, sorter, caplog):
    settings = ["task=gpt2_wiki103", f"data_root={root}", "size=smoke", *TINY, f"sorter={sorter}", "task.lr=0.01"]
    directory = tmp_path / "run"
    assert train.main([*settings, "epochs=2", f"run_dir={directory}"]) == 0
    assert "TorchScript" not in caplog.text  # the step is traced
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 2 and lines[1]["train_loss"] < lines[0]["train_loss"] < math.log(VOCABULARY)
    assert lines[1]["val_ppl"] < lines[1]["val_ppl_authors"]
    manifest = json.loads((directory / "manifest.json").read_text())
    assert manifest["sizes"]["units"] == 5 and manifest["data"]["rows"]["vocabulary"] == VOCABULARY
    assert manifest["data"]["label"] == "novels" and not manifest["data"]["papers_own"]
    assert "wiki" not in json.dumps(manifest["data"]).lower()

    model, tokenizer = pretrained(directory, root=str(root))
    task = tiny_task(root, "task.dtype=float32")
    with torch.no_grad():
        totals = task.totals("test", dict(model.named_parameters()), torch.arange(8))
    assert float(totals["loss"] / 8) == pytest.approx(lines[1]["val_loss"], rel=1e-6)
    assert tokenizer.decode(task.fetch("test", torch.tensor(0))[0].tolist())[:5] == first_line(root)[:5]
    (root / "novels").rename(root / "other")
    if wikitext_is_packaged():
        with pytest.raises(CdgrabError, match="was trained on novels, but the text found here is embedded"):
            pretrained(directory, root=str(root))
    with pytest.raises(CdgrabError, match="holds no checkpoint of Tiny GPT-2"):
        pretrained(tmp_path)


def wikitext_is_packaged():
    return importlib.util.find_spec("gensim") is not None


def first_line(root):
    return (root / "novels" / "Novel_00.txt").read_text("utf-8-sig").splitlines()[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("task.context=1", "task.context must be a whole number of at least 2"),
        ("task.vocabulary=100", "task.vocabulary must be a whole number of at least 256"),
        ("task.vocabulary=100000", "task.vocabulary must be a whole number of at most 65536"),
        ("task.vocabulary=5000", "fewer than task.vocabulary=5000"),
        ("task.width=13", "cannot be split evenly over task.heads=2"),
        ("task.truncate_lines=0", "task.truncate_lines must be a whole number of at least 1"),
        ("task.valid_limit=true", "task.valid_limit must be a whole number"),
        ("task.context=5000", "the train part is too short for one block"),
    ],
)
def test_bad_settings_get_one_sentence(root, change, message):
    with pytest.raises(CdgrabError, match=message):
        tiny_task(root, change)
