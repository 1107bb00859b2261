"""Errors that a user can act on: one clear sentence each, shown without a traceback."""

import sys


def warn(sentence: str) -> None:
    """Print a warning; the program continues."""
    print(f"warning: {printable(sentence)}", file=sys.stderr, flush=True)


def printable(sentence: str) -> str:
    """As one line. A file may have any name, and a terminal obeys control characters."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in sentence)


def file_error(error: OSError) -> str:
    """Describe a file error in one sentence."""
    return f"{error.filename or 'a file'} cannot be read or written ({error.strerror or error})"


def first_line(error: object) -> str:
    """What an error of another library says, short enough for one sentence of ours."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


class CdgrabError(ValueError):
    """Bad input, bad data or a run that cannot continue; the message is one sentence for the user."""

    status = 2  # exit status of a command that ends with it


class NotFiniteError(CdgrabError):
    """The gradients passed in are not finite. No state was changed."""


class DivergedError(CdgrabError):
    """The loss or the parameters stopped being finite."""

    status = 3


class MissingError(CdgrabError):
    """Another process of the run has died or hangs."""

    status = 4


class CollectiveError(RuntimeError):
    """A collective failed. Not shown to the user: whoever catches it finds out which process is missing."""

    def __init__(self, name: str, number: int, reason: str) -> None:
        super().__init__(f"{name}, collective number {number}, failed: {reason}")
        self.where = f"{name}, collective number {number}"


class Stopped(CdgrabError):
    """Training stopped on a signal, and everything is saved."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.number = number
