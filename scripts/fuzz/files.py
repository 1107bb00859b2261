"""Data files of every task, one of them damaged. What is taken, and of what no checksum is known, must be what a plain
reading of the same files gives."""

from __future__ import annotations

import os
import random
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import torch

from experiments.data import glue
from experiments.tasks import make_task
from experiments.training.config import compose
from scripts.fuzz.damage import contents, damage
from scripts.fuzz.words import words

ROWS = 60  # in each of GLUE's files
TEXT = "".join(f"A line of words , number {n} .\n" for n in range(400))
SENTENCES = "sentence\tlabel\n" + "".join(f"a sentence of {n} words\t{n % 2}\n" for n in range(ROWS))
WEEKS = ",".join(f"V{n}" for n in range(1, 40)) + "\n"
WEEKS += "".join(",".join([f"W{r}", *(str(100 + r + n % 7) for n in range(38))]) + "\n" for r in range(359))
TREES = {
    "gpt2_wiki103": {"novels/1.txt": TEXT, "novels/2.txt": TEXT, "gpt2/vocab.json": "{}", "gpt2/merges.txt": ""},
    "glue": {"glue/SST-2/train.tsv": SENTENCES, "glue/SST-2/dev.tsv": SENTENCES},
    "lstm_wiki2": {f"wikitext-2/{part}.txt": TEXT for part in ("train", "valid", "test")},
    "mlp_m4": {"m4/Weekly-train.csv": WEEKS, "m4/Weekly-test.csv": WEEKS},
    "lr_hmda": {f"hmda/2017-NJ-{part}.csv": "a,b\n1,2\n" for part in ("features", "protected", "target")},
    "cifar10": {f"cifar-10-batches-py/{name}": "\x80\x02}" for name in ("data_batch_1", "test_batch")},
}


PLAIN = ("gpt2_wiki103", "glue")  # of their files no checksum is known; others are never those that were published
SHORT = {"SST-2": replace(glue.LAYOUTS["SST-2"], rows={"train.tsv": ROWS, "dev.tsv": ROWS})}


def files(generator: random.Random, scratch: Path) -> Iterator[Callable[[], object]]:
    """Load a task whose data files include a damaged one."""

    def attempt(task: str, root: Path) -> None:
        before = contents(root)
        try:
            with mock.patch.dict(os.environ, CDGRAB_CACHE=str(scratch / "cache")), mock.patch.dict(glue.LAYOUTS, SHORT):
                found = _read(task, root)
                assert task in PLAIN, "files were taken that are not those that were published"
                for path in [*root.glob("novels/*.txt"), *root.glob("glue/*/*.tsv")]:
                    path.write_text(REWRITTEN[path.suffix](_lines(path)), newline="")
                before = contents(root)
                assert _read(task, root) == found, "a plain reading finds something else"
        finally:
            assert contents(root) == before, "data files were changed"
            shutil.rmtree(root)

    def cache(root: Path, cached: Path) -> None:
        """What was prepared and is damaged now is made again. (One whose checksums are right is believed.)"""
        with mock.patch.dict(os.environ, CDGRAB_CACHE=str(cached)):
            before, found = contents(root), _read("gpt2_wiki103", root)
            damage(generator.choice(list(cached.glob("*.npz"))), generator)
            assert _read("gpt2_wiki103", root) == found, "what is damaged was read"
            assert contents(root) == before, "data files were changed"
        shutil.rmtree(root)

    while True:
        task, root = generator.choice(list(TREES)), Path(tempfile.mkdtemp(dir=scratch))
        for name, content in TREES[task].items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(content.encode("latin-1"))
        if task == "gpt2_wiki103" and generator.random() < 0.5:
            (root / "gpt2" / "vocab.json").unlink(), (root / "gpt2" / "merges.txt").unlink()
            yield partial(cache, root, Path(tempfile.mkdtemp(dir=scratch)))
            continue
        damage(root / generator.choice(list(TREES[task])), generator)
        yield partial(attempt, task, root)


def _read(task: str, root: Path) -> str:
    if task == "glue":
        loaded, _ = glue.load(glue.locate(root=str(root)))
        return words([(part.texts, part.labels.tolist()) for part in (loaded.train, *loaded.validation)])
    limit = [] if task == "lr_hmda" else ["task.limit=8"]
    run = compose([f"task={task}", "size=smoke", *limit, f"data_root={root}", f"run_dir={root / 'never made'}"])
    return words(make_task(run.config, run.source, torch.device("cpu")).data)


def _lines(path: Path) -> list[str]:
    return re.split("\r\n|\r|\n", path.read_bytes().decode("utf-8-sig"))


def _sentences(lines: list[str]) -> str:
    """The rows that are not broken."""
    header, *rows = (line.split("\t") for line in lines)
    sentence, label = map(header.index, ("sentence", "label"))
    right = [row for row in rows if len(row) == len(header) and row[label] in ("0", "1")]
    return "sentence\tlabel\n" + "".join(f"{row[sentence]}\t{row[label]}\n" for row in right)


REWRITTEN = {".txt": "\n".join, ".tsv": _sentences}
