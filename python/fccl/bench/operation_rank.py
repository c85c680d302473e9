"""One rank of a benchmark of an operation: all backends in one process, in turns.

Backends take turns every few iterations, so that whatever else the machine does hits all of them alike.
"""

from __future__ import annotations

import functools
import gc
import os
import random
import time
from collections.abc import Callable
from typing import Any

import torch

from fccl.bench.board import Board, BoardStopped
from fccl.bench.buffers import Buffer, WorkingSet
from fccl.bench.case import Case
from fccl.bench.cases import CASES
from fccl.bench.config import ARENA, DIRECT, YARDSTICKS, BenchConfig, SizePlan
from fccl.bench.rank import BenchRank, engine_of
from fccl.bench.yardstick import bind_yardstick, check_yardstick

__all__ = ["OperationRank"]

# Backends take turns after this many timed calls of a short message, the first of which follows one that is
# not timed: Gloo's threads go on for a while after its call has returned, and would slow down whoever is
# measured next. A long message outlasts that, and takes turns call by call.
_BURST = 8
_SHORT_MESSAGE = 1 << 20
_SPREAD_SECONDS = 0.005
_MIN_ITERATIONS, _MAX_ITERATIONS = 10, 5000


class OperationRank(BenchRank):
    """Measures an operation; a plan is a size.

    Args:
        config: The run.
        rank: This rank.
        board: The run's board.
    """

    def __init__(self, config: BenchConfig, rank: int, board: Board) -> None:
        super().__init__(config, rank, board)
        self.salt = 0
        self.dropped: dict[str, str] = {}
        self.case: Case = CASES[config.op](
            rank=rank,
            ranks=config.ranks,
            dtype=config.dtype,
            op=config.redop,
            root=config.root,
            form=config.form,
            board=board,
        )

    def call_of(self, name: str, buffer: Buffer) -> Callable[[], Any]:
        """The call of a backend on a buffer, ready to be timed."""
        group = self.groups[name]
        if name == DIRECT:
            return self.case.bind_direct(buffer, group)
        is_async = self.config.mode == "async"
        call = self.case.bind(buffer, group, is_async)
        return functools.partial(_call_and_wait, call) if is_async else call

    # ---- one size ----

    def _bind(self, name: str, working_set: WorkingSet) -> list[Callable[[], Any]]:
        """One ready call per buffer of the rotation."""
        buffers = working_set.buffers
        calls: list[Callable[[], Any]]
        if name in YARDSTICKS:
            # From each buffer to the next.
            targets = buffers[1:] + buffers[:1]
            calls = [bind_yardstick(name, *pair) for pair in zip(buffers, targets, strict=True)]
            results = [buffer.message[0] if buffer.message else None for buffer in targets]
        else:
            calls = [self.call_of(name, buffer) for buffer in buffers]
            results = [buffer.result for buffer in buffers]
        if self.config.corrupt == name:
            calls = [
                functools.partial(_damage, call, result, self.rank == self.case.damaged_rank)
                for call, result in zip(calls, results, strict=True)
            ]
        return calls

    def _checked_call(self, name: str, call: Callable[[], Any], index: int, working_set: WorkingSet) -> int:
        """Fills buffer `index`, makes the call, and returns the number of wrong elements."""
        self.salt += 1
        buffer = working_set.buffers[index]
        if name in YARDSTICKS:
            target = working_set.buffers[(index + 1) % len(working_set.buffers)]
            return check_yardstick(name, self.case.pattern, buffer, target, self.salt, call)
        self.case.prepare(buffer, self.salt)
        call()
        return self.case.count_wrong(buffer, self.salt)

    def _probe(self, name: str, call: Callable[[], Any], working_set: WorkingSet) -> None:
        """Makes a backend's first call; one that is only compared with may refuse, on all ranks alike."""
        refusal = ""
        try:
            self._checked_call(name, call, 0, working_set)
        except BoardStopped:
            raise
        except Exception as error:
            if name == self.config.backends[0]:
                raise
            refusal = " ".join(str(error).split("\n", 1)[0].split()) or type(error).__name__
        if self.board.any_rank(bool(refusal)):
            self.dropped[name] = refusal or "refused by another rank"

    def _iterations(self, calls: dict[str, list[Callable[[], Any]]], first: int) -> int:
        """Warms up, and chooses how many iterations to time; all ranks get rank 0's choice."""
        turn = first
        start = time.perf_counter()
        for _ in range(self.config.warmup):
            for name, ready in calls.items():
                self.board.align()
                ready[turn % len(ready)]()
                turn += 2 if name in YARDSTICKS else 1
        if self.config.iterations is not None:
            return self.board.share(self.config.iterations)
        each = (time.perf_counter() - start) / max(1, self.config.warmup)
        wanted = int(self.config.min_time / each) if self.config.warmup else _MIN_ITERATIONS
        return self.board.share(max(_MIN_ITERATIONS, min(wanted, _MAX_ITERATIONS)))

    def measure(self, plan: SizePlan) -> dict[str, Any]:
        """Measures all backends at one size; returns this rank's part of the result."""
        config, board = self.config, self.board
        layout = self.case.layout(plan.count, config.ranks, config.form)
        sets: dict[bool, WorkingSet] = {}  # by whether it is in the arena
        for arena in {name == ARENA for name in config.backends}:
            sets[arena] = WorkingSet(layout, self.case.dtype, plan.buffers, config.huge_pages, arena)
        where = f"{config.op} of {plan.size} bytes"

        calls: dict[str, list[Callable[[], Any]]] = {}
        for name in config.backends:
            if name in self.dropped:
                continue
            calls[name] = self._bind(name, sets[name == ARENA])
            self.phase = f"first {where} with {name}"
            self._probe(name, calls[name][0], sets[name == ARENA])
            if name in self.dropped:
                del calls[name]
        wrong = dict.fromkeys(calls, 0)
        checked = dict.fromkeys(calls, 0)

        def check_all() -> None:
            for name, ready in calls.items():
                self.phase = f"checking {where} with {name}"
                for index, call in enumerate(ready):
                    wrong[name] += self._checked_call(name, call, index, sets[name == ARENA])
                    checked[name] += 1
                board.align()

        if config.check != "none":
            check_all()
        self.phase = f"warming up {where}"
        iterations = self._iterations(calls, 0)

        times: dict[str, list[int]] = {name: [] for name in calls}
        order = list(calls)
        shuffle = random.Random(config.seed + plan.size).shuffle  # the same on all ranks
        align, clock, every = board.align, time.perf_counter_ns, config.check == "every"
        turn = 0
        settle = plan.size <= _SHORT_MESSAGE
        burst = _BURST if settle else 1
        gc.collect()
        gc.disable()
        for begun in range(0, iterations, burst):
            shuffle(order)
            for name in order:
                self.phase = name
                ready = calls[name]
                # A yardstick uses two buffers of the rotation; every call finds buffers that were used equally
                # long ago.
                step = 2 if name in YARDSTICKS else 1
                if settle:
                    _spread(config.ranks)
                    align()
                    ready[turn % plan.buffers]()
                    turn += step
                for _ in range(min(burst, iterations - begun)):
                    index = turn % plan.buffers
                    turn += step
                    call = ready[index]
                    if every:
                        timed = _Timed(call)
                        wrong[name] += self._checked_call(
                            name, functools.partial(timed, align), index, sets[name == ARENA]
                        )
                        checked[name] += 1
                        times[name].append(timed.nanoseconds)
                        continue
                    align()
                    start = clock()
                    call()
                    stop = clock()
                    times[name].append(stop - start)
        gc.enable()
        if config.check != "none":
            check_all()
        return {
            "times": times,
            "wrong": wrong,
            "checked": checked,
            "dropped": self.dropped,
            "engines": {name: engine_of(name, group) for name, group in self.groups.items()},
        }


def _spread(ranks: int) -> None:
    """Keeps this rank's core busy until the scheduler has given each rank one of its own.

    Ranks that wake one another in turn, as Gloo's do, may be left together on one core for some milliseconds,
    and whoever is measured next would be measured there.
    """
    if 1 < ranks <= len(os.sched_getaffinity(0)):
        end = time.perf_counter() + _SPREAD_SECONDS
        while time.perf_counter() < end:
            pass


class _Timed:
    """Times one call that is made inside a check."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self.nanoseconds = 0

    def __call__(self, align: Callable[[], None]) -> None:
        align()
        start = time.perf_counter_ns()
        self._call()
        self.nanoseconds = time.perf_counter_ns() - start


def _call_and_wait(call: Callable[[], Any]) -> None:
    call().wait()


def _damage(call: Callable[[], Any], result: torch.Tensor | None, here: bool) -> None:
    """The negative control: changes one element of one rank's result; leaves a barrier out."""
    if result is None:
        return
    call()
    if here:
        element = result[-1:]
        element.copy_(element * float("nan") if element.dtype.is_floating_point else element.bitwise_not())
