"""Ctrl-C must not get lost."""

import os
import signal
from contextlib import suppress

import pytest

from cdgrab import interruption


def test_an_interruption_that_was_swallowed_is_raised_again():
    before = signal.getsignal(signal.SIGINT)
    with interruption.remembered():
        interruption.raise_if_heard()
        with suppress(KeyboardInterrupt):  # as a finaliser would
            os.kill(os.getpid(), signal.SIGINT)
            signal.sigtimedwait([], 1)
        with pytest.raises(KeyboardInterrupt):
            interruption.raise_if_heard()
    assert signal.getsignal(signal.SIGINT) is before
    interruption.raise_if_heard()  # that was then


def test_who_ignores_interruptions_goes_on_ignoring_them():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interruption.remembered():
            os.kill(os.getpid(), signal.SIGINT)
            interruption.raise_if_heard()
    finally:
        signal.signal(signal.SIGINT, before)
