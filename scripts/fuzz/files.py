"""Data files of every task, one of them damaged."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from experiments.tasks import make_task
from experiments.training.config import compose
from scripts.fuzz.damage import contents, damage


def files(generator: random.Random, scratch: Path) -> Iterator[Callable[[], object]]:
    """Load a task whose data files include a damaged one."""
    text = "".join(f"A line of words , number {n} .\n" for n in range(400))
    rows = "sentence\tlabel\n" + "".join(f"a sentence of {n} words\t{n % 2}\n" for n in range(60))
    week = ",".join(["V1", *(f"V{n}" for n in range(2, 40))]) + "\n"
    week += "".join(",".join([f"W{r}", *(str(100 + r + n % 7) for n in range(38))]) + "\n" for r in range(359))
    trees = {
        "gpt2_wiki103": {"novels/1.txt": text, "novels/2.txt": text, "gpt2/vocab.json": "{}", "gpt2/merges.txt": ""},
        "glue": {"glue/SST-2/train.tsv": rows, "glue/SST-2/dev.tsv": rows},
        "lstm_wiki2": {f"wikitext-2/{part}.txt": text for part in ("train", "valid", "test")},
        "mlp_m4": {"m4/Weekly-train.csv": week, "m4/Weekly-test.csv": week},
        "lr_hmda": {f"hmda/2017-NJ-{part}.csv": "a,b\n1,2\n" for part in ("features", "protected", "target")},
        "cifar10": {f"cifar-10-batches-py/{name}": "\x80\x02}" for name in ("data_batch_1", "test_batch")},
    }

    def attempt(task: str, root: Path) -> None:
        before = contents(root)
        try:
            limit = [] if task == "lr_hmda" else ["task.limit=8"]
            places = [f"data_root={root}", f"run_dir={scratch / 'never made'}"]
            run = compose([f"task={task}", "size=smoke", *limit, *places])
            make_task(run.config, run.source, torch.device("cpu"))
        finally:
            assert contents(root) == before, "data files were changed"
            shutil.rmtree(root)

    while True:
        task, root = generator.choice(list(trees)), Path(tempfile.mkdtemp(dir=scratch))
        for name, content in trees[task].items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(content.encode("latin-1"))
        damage(root / generator.choice(list(trees[task])), generator)
        yield lambda task=task, root=root: attempt(task, root)
