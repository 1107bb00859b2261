"""Errors that a user can act on: one clear sentence each, shown without a traceback."""


class CdgrabError(ValueError):
    """Bad input, bad data or a run that cannot go on; the message is one sentence for the user."""


class DivergedError(CdgrabError):
    """The loss or the parameters stopped being finite."""
