"""Errors that a user can act on: one clear sentence each, shown without a traceback."""


class CdgrabError(ValueError):
    """Bad input, bad data or a run that cannot go on; the message is one sentence for the user."""


class NotFiniteError(CdgrabError):
    """Gradients that are not finite were handed over; nothing was changed by them."""


class DivergedError(CdgrabError):
    """The loss or the parameters stopped being finite."""


class MissingError(CdgrabError):
    """Another process of the run is gone, or stands still."""


class Stopped(CdgrabError):
    """A signal asked for training to end, and everything is saved."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.number = number
