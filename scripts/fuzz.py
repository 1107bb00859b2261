"""Bad input, thousands of times: whatever comes, one sentence, and nothing lost.

    python -m scripts.fuzz                       # `make fuzz`: ten thousand inputs, some minutes
    python -m scripts.fuzz --inputs 500 --seed 3

Settings of every key, data files, files of a run, and gradients are made up or damaged at random. An input may be
taken, or refused by an error that is one sentence; anything else, and any change to what was there, is a finding.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

import cdgrab
from cdgrab import checkpoint, signals
from cdgrab.config import choices, compose, compose_config, flatten
from cdgrab.errors import CdgrabError, DivergedError, file_error
from cdgrab.runlog import read_manifest, read_metrics
from cdgrab.tasks import make_task
from cdgrab.workers import WorkerGroup
from experiments import train
from scripts.arguments import Parser, positive

WORDS = ["", "null", "true", "-1", "0", "1", "2", "3.5", "1e309", "-0.0", "nan", "inf", "abc", "cd_grab", "[]", "[1,2]"]
WORDS += ["{}", "{a:1}", "${seed}", "${nothing}", "'", '"', "a b", "ü", "../..", "/", "0x10", "1_000", "\\", "~", "a=b"]
WORDS += ["3000000000", "2000000000", "99999999", "9" * 30, "-" + "9" * 30, "1e300", "1e-300"]
SHARES = {"settings": 0.25, "files": 0.1, "runs": 0.25, "gradients": 0.4}  # of all inputs
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool, torch.complex64)
WAYS = ("cut", "flip", "flip", "empty", "utf-16", "folder", "loop", "gone", "noise", "long line", "columns", "nothing")
MADE = "made by a checkpoint"
NUMBERS = (0.0, -0.0, 1.0, -1.0, 1e-320, 1e-45, 1e38, -1e38, 1e200, float("nan"), float("inf"), -float("inf"))


def settings(generator: random.Random, scratch: Path) -> Iterator[Callable[[], object]]:
    """Overrides of every key of every task; some of them up to the first step of training, on little data."""
    keys = {}
    for task in choices("task"):
        flat = flatten(dict(compose_config([f"task={task}"])))
        keys[task] = [key for key in flat if not key.startswith(("hydra.", "task.presets."))]

    def attempt(task: str, overrides: list[str], build: bool) -> None:
        small = ["size=smoke", "compile=off", *([] if task == "lr_hmda" else ["task.limit=16"])] if build else []
        run = compose([f"task={task}", "data=embedded", f"run_dir={scratch / 'never made'}", *small, *overrides])
        train.may_start(run, speak=False)
        if build:
            train.built(run, WorkerGroup(run.config.workers), torch.device("cpu"))

    while True:
        task = generator.choice(list(keys))
        names = generator.sample(keys[task], generator.choice((1, 1, 2, 3)))
        yield partial(attempt, task, [f"{name}={_word(generator)}" for name in names], generator.random() < 0.3)


def _word(generator: random.Random) -> str:
    if generator.random() < 0.7:
        return generator.choice(WORDS)
    if generator.random() < 0.5:
        return repr(generator.choice((generator.randint(-(10**6), 10**9), generator.uniform(-1e3, 1e3))))
    return "".join(chr(generator.randrange(32, 1000)) for _ in range(generator.randrange(8)))


def files(generator: random.Random, scratch: Path) -> Iterator[Callable[[], object]]:
    """Files that are cut, flipped, of another encoding, empty, folders, or links to themselves."""
    text = "".join(f"A line of words , number {n} .\n" for n in range(400))
    rows = "sentence\tlabel\n" + "".join(f"a sentence of {n} words\t{n % 2}\n" for n in range(60))
    week = ",".join(["V1", *(f"V{n}" for n in range(2, 40))]) + "\n"
    week += "".join(",".join([f"W{r}", *(str(100 + r + n % 7) for n in range(38))]) + "\n" for r in range(359))
    trees = {
        "gpt2_wiki103": {
            "novels/one.txt": text,
            "novels/two.txt": text,
            "gpt2/vocab.json": "{}",
            "gpt2/merges.txt": "",
        },
        "glue": {"glue/SST-2/train.tsv": rows, "glue/SST-2/dev.tsv": rows},
        "lstm_wiki2": {f"wikitext-2/{part}.txt": text for part in ("train", "valid", "test")},
        "mlp_m4": {"m4/Weekly-train.csv": week, "m4/Weekly-test.csv": week},
        "lr_hmda": {f"hmda/2017-NJ-{part}.csv": "a,b\n1,2\n" for part in ("features", "protected", "target")},
        "cifar10": {f"cifar-10-batches-py/{name}": "\x80\x02}" for name in ("data_batch_1", "test_batch")},
    }

    def attempt(task: str, root: Path) -> None:
        before = _contents(root)
        try:
            limit = [] if task == "lr_hmda" else ["task.limit=8"]
            run = compose(
                [f"task={task}", f"data_root={root}", "size=smoke", *limit, f"run_dir={scratch / 'never made'}"]
            )
            make_task(run.config, run.source, torch.device("cpu"))
        finally:
            assert _contents(root) == before, "data files were changed"
            shutil.rmtree(root)

    while True:
        task, root = generator.choice(list(trees)), Path(tempfile.mkdtemp(dir=scratch))
        for name, content in trees[task].items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(content.encode("latin-1"))
        _damage(root / generator.choice(list(trees[task])), generator)
        yield lambda task=task, root=root: attempt(task, root)


def _damage(path: Path, generator: random.Random) -> None:
    content = bytearray(path.read_bytes())
    way = "huge" if generator.random() < 0.005 else generator.choice(WAYS)
    if way == "cut":
        content = content[: generator.randrange(len(content) + 1)]
    elif way == "flip" and content:
        for _ in range(generator.choice((1, 1, 5, 50))):
            content[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
    elif way == "empty":
        content.clear()
    elif way == "utf-16":
        content = bytearray(content.decode("latin-1").encode("utf-16"))
    elif way == "noise":
        content = bytearray(generator.randbytes(generator.randrange(2000)))
    elif way == "long line":
        content += b"x," * 10**6
    elif way == "huge":
        content *= 2**24 // (len(content) + 1) + 1
    elif way == "columns":  # names in another order, one of them missing
        first, _, rest = bytes(content).partition(b"\n")
        separator = b"\t" if b"\t" in first else b","
        names = first.split(separator)
        content = bytearray(separator.join(generator.sample(names, len(names) - 1)) + b"\n" + rest)
    if way in ("folder", "loop", "gone"):
        path.unlink()
        if way == "folder":
            path.mkdir()
        elif way == "loop":
            path.symlink_to(path)
        return
    path.write_bytes(content)


def runs(generator: random.Random, scratch: Path) -> Iterator[Callable[[], object]]:
    """Files of a run that is half done: damaged, or made to look right with another content. It is read or resumed."""
    overrides = ["data=embedded", "size=smoke", "task.limit=64", "epochs=3", "compile=off"]
    good, whole = _half_done(scratch, overrides)
    names = [path.name for path in good.iterdir()]

    def attempt(folder: Path, counterfeit: bool, resume: bool) -> None:
        before = _contents(folder)
        try:
            if resume:
                _resumed([*overrides, f"run_dir={folder}", "resume=true"])
                assert counterfeit or _losses(folder) == whole, "another result"
            else:
                run = compose([*overrides, f"run_dir={folder}", "resume=true"])
                train.may_start(run, speak=False)
                read_manifest(folder), read_metrics(folder / "metrics.jsonl"), checkpoint.load(folder, lambda _: None)
        except DivergedError:  # what was made to look right was trained on
            raise
        except (CdgrabError, OSError):
            there = tuple(_contents(folder).values())  # a damaged checkpoint may have been put aside
            if (folder / "logs").exists():  # training began, and could not save
                before.pop(str(folder / "manifest.json"), None)
            assert all(any(new.startswith(old) for new in there) for old in before.values()), "a file was changed"
            raise
        finally:
            shutil.rmtree(folder)

    while True:
        folder = scratch / f"run{generator.random()}"
        shutil.copytree(good, folder)
        counterfeit = generator.random() < 0.4
        if counterfeit:
            _counterfeit(folder, generator)
        else:
            for name in generator.sample(names, generator.choice((1, 1, 2))):
                _damage(folder / name, generator)
        yield partial(attempt, folder, counterfeit, generator.random() < 0.4)


def _half_done(scratch: Path, overrides: list[str]) -> tuple[Path, list]:
    """The folder of a run that was stopped in its second epoch, and what it comes to when it goes on."""
    folder, steps = scratch / "good", iter(range(10**6))
    asked = signals.Wish.__call__
    signals.Wish.__call__ = lambda wish: signal.SIGTERM * (next(steps) == 5)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            status = train.main([*overrides, f"run_dir={folder}", "checkpoint.every_steps=1"])
    finally:
        signals.Wish.__call__ = asked
    assert status == signals.REQUEUE and len(read_metrics(folder / "metrics.jsonl")) == 1
    shutil.rmtree(folder / "logs")
    shutil.copytree(folder, scratch / "whole")
    assert train.main([*overrides, f"run_dir={scratch / 'whole'}", "resume=true"]) == 0
    return folder, _losses(scratch / "whole")


def _losses(folder: Path) -> list:
    return [(line["train_loss"], line["order_hash"]) for line in read_metrics(folder / "metrics.jsonl")]


def _resumed(arguments: list[str]) -> None:
    """By the command itself; what it refuses, in one line, is raised."""
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(io.StringIO()):
        status = train.main(arguments)
    *warnings, error = printed.getvalue().splitlines() or [""]
    assert all(line.startswith("warning: ") for line in warnings), printed.getvalue()
    if status:
        assert status in (train.REFUSED, train.DIVERGED) and error.startswith("error: "), printed.getvalue()
        raise CdgrabError(error) if status == train.REFUSED else DivergedError(error)


class Malice:
    """Pickled: whoever loads it makes a folder."""

    def __reduce__(self) -> tuple:
        return os.mkdir, (MADE,)


def _counterfeit(folder: Path, generator: random.Random) -> None:
    """Checkpoints whose checksums are right."""
    content = checkpoint.load(folder)
    key = generator.choice(list(content))
    way = generator.choice(("without", "other", "shape", "values", "program", "version"))
    if way == "without":
        del content[key]
    elif way == "other":
        content[key] = generator.choice((None, "text", -1, 10**9, 0.5, [], {}, torch.zeros(0), torch.tensor(torch.nan)))
    elif way == "shape":
        content["parameters"] = torch.zeros(generator.randrange(100), dtype=generator.choice(DTYPES))
    elif way == "values":
        content["parameters"] = torch.full_like(content["parameters"], generator.choice(NUMBERS))
    elif way == "program":
        content = Malice()
    for path in folder.glob("checkpoint*.pt"):
        path.unlink()
    buffer = io.BytesIO()
    torch.save(content, buffer)
    first = b"cdgrab checkpoint 1 " if way == "version" else checkpoint.FORMAT
    signature = hashlib.sha256(buffer.getvalue()).hexdigest().encode()
    (folder / checkpoint.FILE).write_bytes(first + signature + b"\n" + buffer.getvalue())


def gradients(generator: random.Random, scratch: Path) -> Iterator[Callable[[], object]]:
    """What is no gradient, for sorters and sparsifiers; one that refuses it must be as it was."""
    makers = [lambda name=name: cdgrab.make_sorter(name, workers=2, units=4, dim=3) for name in cdgrab.SORTERS]
    makers += [
        lambda name=name: cdgrab.make_sparsifier(name, workers=2, dim=9, density=0.3) for name in cdgrab.SPARSIFIERS
    ]

    def attempt(make: Callable[[], object]) -> None:
        made = make()
        sorter = hasattr(made, "observe")
        if sorter:
            made.order(0)
        for _ in range(2):
            given = _no_gradient(generator, [2, 1, 3] if sorter else [2, 9])
            before = repr(made.state_dict())
            try:
                made.observe([made.position], given) if sorter else made.reduce(given)
            except CdgrabError:
                assert repr(made.state_dict()) == before, "a refused call changed the state"
                raise

    while True:
        make = generator.choice(makers)
        yield lambda make=make: attempt(make)


def _no_gradient(generator: random.Random, shape: list[int]) -> object:
    if generator.random() < 0.1:
        return generator.choice((None, "gradient", 3, [], [[1.0]], np.zeros(shape), object()))
    if generator.random() < 0.3:
        shape = [max(0, size + generator.choice((-1, 0, 1))) for size in shape][: generator.randrange(4)]
    numbers = NUMBERS if generator.random() < 0.5 else NUMBERS[:5]
    values = torch.tensor([generator.choice(numbers) for _ in range(int(np.prod(shape)))], dtype=torch.float64)
    return values.reshape(shape).to(generator.choice(DTYPES))


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


KINDS = {"settings": settings, "files": files, "runs": runs, "gradients": gradients}


def fuzz(kind: str, inputs: int, generator: random.Random, scratch: Path) -> Counter:
    """How many inputs were taken and refused, and the findings by what they are."""
    found: Counter = Counter()
    attempts = KINDS[kind](generator, scratch)
    for _ in tqdm(range(inputs), desc=kind, unit="input", disable=not sys.stderr.isatty()):
        attempt = next(attempts)
        try:
            attempt()
            found["taken"] += 1
        except (CdgrabError, OSError) as error:  # commands make one sentence of both
            words = file_error(error) if isinstance(error, OSError) else str(error)
            found["refused" if words and "\n" not in words else f"not one sentence: {words}"] += 1
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            found[f"{type(error).__name__} at {where.filename}:{where.lineno}: {str(error)[:200]}"] += 1
    if os.path.exists(MADE):
        os.rmdir(MADE)
        found["a checkpoint was executed"] += 1
    return found


def main(command_line: list[str] | None = None) -> int:
    parser = Parser(__doc__)
    parser.add_argument("--inputs", type=positive, default=10_000, help="how many (default: 10000)")
    parser.add_argument("--seed", type=int, default=None, help="of what is drawn (default: the time)")
    parser.add_argument("--kind", choices=KINDS, help="only these (default: all)")
    arguments = parser.parse_args(command_line)
    seed = time.time_ns() % 10**6 if arguments.seed is None else arguments.seed
    shares = {arguments.kind: 1.0} if arguments.kind else SHARES
    os.environ.pop("CDGRAB_DATA", None)
    resource.setrlimit(resource.RLIMIT_AS, (2**34, 2**34))  # what asks for more memory is refused it
    logging.getLogger("cdgrab").addHandler(logging.NullHandler())
    print(f"seed {seed}", flush=True)
    findings = 0
    for kind, share in shares.items():
        with tempfile.TemporaryDirectory() as scratch:
            found = fuzz(kind, round(share * arguments.inputs), random.Random(seed), Path(scratch))
        print(f"{kind}: {found.pop('taken', 0)} taken, {found.pop('refused', 0)} refused", flush=True)
        for words, times in found.most_common():
            print(f"  {times} × {words}", flush=True)
        findings += len(found)
    print(f"{findings} findings")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
