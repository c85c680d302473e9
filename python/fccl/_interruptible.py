"""Ctrl-C and SIGTERM in the commands: both end what a command has started, and then the command."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from types import FrameType

__all__ = ["until_interrupted"]


class _Terminated(BaseException):
    """SIGTERM arrived."""


def _on_sigterm(signum: int, frame: FrameType | None) -> None:
    raise _Terminated


def until_interrupted(work: Callable[[], int], last_words: str) -> int:
    """Runs ``work``; returns its result, or 130 after having written ``last_words`` to standard error."""
    try:
        previous = signal.signal(signal.SIGTERM, _on_sigterm)
    except ValueError:
        previous = None  # not the main thread: somebody else decides about signals
    try:
        return work()
    except (KeyboardInterrupt, _Terminated):
        print(last_words, file=sys.stderr)
        return 130
    finally:
        if previous is not None:
            signal.signal(signal.SIGTERM, previous)
