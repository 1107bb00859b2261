"""Errors that a user can act on: one clear sentence each, shown without a traceback."""

import sys


def warn(sentence: str) -> None:
    """What the user should know, and nothing is refused."""
    print(f"warning: {sentence}", file=sys.stderr, flush=True)


def file_error(error: OSError) -> str:
    """In one sentence."""
    return f"{error.filename or 'a file'} cannot be read or written ({error.strerror or error})"


class CdgrabError(ValueError):
    """Bad input, bad data or a run that cannot go on; the message is one sentence for the user."""


class NotFiniteError(CdgrabError):
    """Gradients that are not finite were handed over; nothing was changed by them."""


class DivergedError(CdgrabError):
    """The loss or the parameters stopped being finite."""


class MissingError(CdgrabError):
    """Another process of the run is gone, or stands still."""


class CollectiveError(RuntimeError):
    """A collective failed. Not for the user: whoever catches this finds out which process is missing."""

    def __init__(self, name: str, number: int, reason: str) -> None:
        super().__init__(f"{name}, collective number {number}, failed: {reason}")
        self.where = f"{name}, collective number {number}"


class Stopped(CdgrabError):
    """A signal asked for training to end, and everything is saved."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.number = number
