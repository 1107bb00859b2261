"""The command lines of the helpers here: what goes in, and how they end."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import NoReturn

from cdgrab.errors import CdgrabError, file_error


class Parser(argparse.ArgumentParser):
    """Refuses a command line in one sentence, as everything else is refused; --help shows the module's docstring."""

    def __init__(self, description: str) -> None:
        super().__init__(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\n")


def positive(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


def exit_status(work: Callable[[], int | None]) -> int:
    """That of a command which does this work; what it refuses is told in one sentence."""
    try:
        return work() or 0
    except CdgrabError as error:
        print(f"error: {error}", file=sys.stderr)
    except OSError as error:
        print(f"error: {file_error(error)}", file=sys.stderr)
    return 2
