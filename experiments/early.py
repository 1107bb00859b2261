"""How every command ends: its exit status, and how it handles signals before training starts, while it still imports,
reads data or traces.

Nothing is lost then, and the command says so. This module imports nothing that takes long. When training starts,
`experiments.training.signals` takes over.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

REQUEUE, INTERRUPTED = 75, 128 + signal.SIGINT  # EX_TEMPFAIL, and the status that shells use
STATUS = {signal.SIGINT: INTERRUPTED, signal.SIGTERM: REQUEUE}
NAMES = {signal.SIGINT: "interrupted", signal.SIGTERM: "stopped"}  # in manifests and messages


def listen() -> None:
    """Handle signals from now on, in this process. Signals that are ignored stay ignored."""
    for number in STATUS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _end)


def _end(number: int, frame: object) -> None:
    if os.environ.get("RANK", "0") == "0":
        erase = "\r\x1b[K" * os.isatty(2)  # what `screen` shows
        sentence = f"{NAMES[number]} before training started: nothing is lost; run the same command again"
        os.write(2, f"{erase}{sentence}\n".encode())
    os._exit(STATUS[number])


def say(sentence: str) -> None:
    """Print why the command fails."""
    from cdgrab.errors import printable  # takes a second

    print(f"error: {printable(sentence)}", file=sys.stderr, flush=True)


def exit_status(action: Callable[[], Any], interrupted: str = "", say: Callable[[str], None] = say) -> Any:
    """What `action` returns (0 for nothing), or: 2 refused, 3 diverged, 4 another process is missing (one sentence on
    stderr each), 75 stopped by a scheduler and to be started again, 130 interrupted."""
    from cdgrab.errors import CdgrabError, Stopped, file_error  # takes a second

    try:
        return action() or 0
    except Stopped as stop:  # whoever raised it has said why
        return STATUS[stop.number]
    except CdgrabError as error:
        say(str(error))
        return error.status
    except OSError as error:
        say(file_error(error))
        return CdgrabError.status
    except KeyboardInterrupt:
        if interrupted:
            print(interrupted, file=sys.stderr)
        return INTERRUPTED
