"""Signals that arrive while nothing is trained yet: the command still imports, reads data or traces.

Nothing is lost then, and the command says so. This module imports nothing that takes long. When training begins,
`experiments.training.signals` takes over.
"""

from __future__ import annotations

import os
import signal

ANSWERS = {signal.SIGTERM: (75, "stopped"), signal.SIGINT: (130, "interrupted")}  # as in `experiments.training.signals`


def listen() -> None:
    """From now on, in this process. Signals that are ignored stay ignored."""
    for number in ANSWERS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _end)


def _end(number: int, frame: object) -> None:
    status, word = ANSWERS[number]
    if os.environ.get("RANK", "0") == "0":
        os.write(2, f"{word} while not training: nothing is lost, the same command goes on\n".encode())
    os._exit(status)
