"""Bad input, thousands of times: every answer must be one sentence, and nothing may be lost.

    python -m scripts.fuzz                       # `make fuzz`: ten thousand inputs, some minutes
    python -m scripts.fuzz --inputs 500 --seed 3

Settings, data files, archives, a run's files, gradients and states are made up or damaged at random. An input may be
accepted, or refused with an error of one sentence; anything else, and any change to existing files, is a finding.
"""

from __future__ import annotations

import logging
import os
import random
import resource
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

from tqdm import tqdm

from cdgrab.errors import CdgrabError, file_error
from scripts.arguments import Parser, positive
from scripts.fuzz.archives import archives
from scripts.fuzz.files import files
from scripts.fuzz.gradients import gradients
from scripts.fuzz.runs import MADE, runs
from scripts.fuzz.settings import settings
from scripts.fuzz.states import states

KINDS = {"settings": settings, "files": files, "archives": archives, "runs": runs}
KINDS |= {"gradients": gradients, "states": states}
SHARES = {"settings": 0.2, "files": 0.1, "archives": 0.1, "runs": 0.2, "gradients": 0.2, "states": 0.2}  # of all inputs


def fuzz(kind: str, inputs: int, generator: random.Random, scratch: Path) -> Counter:
    """Counts of inputs that were taken and refused, and of each finding."""
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
    resource.setrlimit(resource.RLIMIT_AS, (2**34, 2**34))  # a cap on memory
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
