"""The board: a page of shared memory on which the parent and its ranks talk without any of the backends.

Every 128-byte line has one writer and holds 64-bit words that only grow, so nothing is locked. Python reads
and writes an aligned word in one access. The board aligns the ranks before each timed call: waiting for
each other through one of the measured backends would favour it.
"""

from __future__ import annotations

import mmap
import os
import time

__all__ = ["Board", "BoardStopped", "board_bytes"]

_LINE_WORDS = 16
_PARENT, _LEADER, _FIRST_RANK = 0, 1, 2
# Polls before a waiting rank begins to give its core away: about 10 microseconds. Not longer, because a
# backend's own threads (Gloo's) may need that core to finish the previous call on another rank.
_SPINS = 100
_POLLS_PER_LOOK = 256


class BoardStopped(Exception):
    """The parent has told the ranks to stop, or a rank did not come to the start line in time."""


def board_bytes(ranks: int) -> int:
    """Size in bytes of the board of a run with `ranks` ranks."""
    return (_FIRST_RANK + ranks) * _LINE_WORDS * 8


class Board:
    """One process's view of the board.

    Args:
        descriptor: File descriptor of `board_bytes(ranks)` bytes of shared memory.
        ranks: Number of ranks.
        rank: This process's rank, or -1 for the parent.
        timeout: Seconds after which waiting for another rank raises.
    """

    def __init__(self, descriptor: int, ranks: int, rank: int, timeout: float) -> None:
        self._map = mmap.mmap(descriptor, board_bytes(ranks))
        self._words = memoryview(self._map).cast("Q")
        self._ranks = ranks
        self._timeout = timeout
        self._mine = (_FIRST_RANK + rank) * _LINE_WORDS
        self._others = [(_FIRST_RANK + r) * _LINE_WORDS for r in range(ranks) if r != rank]
        self._arrivals = 0
        crowded = ranks > len(os.sched_getaffinity(0))
        self._spins = 0 if crowded else _SPINS

    # ---- parent ----

    def stop(self) -> None:
        """Tells the ranks to stop at their next look."""
        self._words[_PARENT * _LINE_WORDS] = 1

    def let_go(self, turn: int) -> None:
        """Lets the ranks begin their part number `turn`."""
        self._words[_PARENT * _LINE_WORDS + 1] = turn

    # ---- ranks ----

    def _look(self, deadline: float, place: str) -> None:
        if self._words[_PARENT * _LINE_WORDS]:
            raise BoardStopped("stopped by the parent")
        if time.monotonic() > deadline:
            missing = [
                word // _LINE_WORDS - _FIRST_RANK
                for word in self._others
                if self._words[word] < self._arrivals
            ]
            raise BoardStopped(f"ranks {missing} did not come to {place} within {self._timeout:g} s")

    def wait_turn(self, turn: int) -> None:
        """Sleeps until the parent lets part `turn` begin."""
        while self._words[_PARENT * _LINE_WORDS + 1] < turn:
            if self._words[_PARENT * _LINE_WORDS]:
                raise BoardStopped("stopped by the parent")
            time.sleep(0.0005)

    def align(self) -> None:
        """Returns at nearly the same moment on all ranks, once all have called it.

        Raises:
            BoardStopped: the parent said stop, or a rank is missing after the timeout.
        """
        words = self._words
        self._arrivals += 1
        turn = self._arrivals
        words[self._mine] = turn
        polls = 0
        deadline = 0.0
        for other in self._others:
            while words[other] < turn:
                polls += 1
                if polls > self._spins:
                    os.sched_yield()
                if polls % _POLLS_PER_LOOK == 0:
                    deadline = deadline or time.monotonic() + self._timeout
                    self._look(deadline, "the start line")

    def share(self, value: int) -> int:
        """Gives rank 0's `value` (0 … 2**64 - 1) to all ranks, which call this together."""
        if self._mine == _FIRST_RANK * _LINE_WORDS:
            self._words[_LEADER * _LINE_WORDS] = value
        self.align()
        shared = self._words[_LEADER * _LINE_WORDS]
        self.align()  # nobody overwrites it before all have read it
        return shared

    def any_rank(self, flag: bool) -> bool:
        """Whether `flag` is true on any rank; all ranks call this together."""
        self._words[self._mine + 2] = int(flag)
        self.align()
        seen = any(self._words[line + 2] for line in [self._mine, *self._others])
        self.align()
        return seen

    def enter(self, number: int) -> None:
        """Notes that this rank is about to enter barrier `number`, counted up from 1."""
        self._words[self._mine + 1] = number

    def missing_from(self, number: int) -> int:
        """How many ranks have not entered barrier `number` yet."""
        return sum(self._words[line + 1] < number for line in self._others)
