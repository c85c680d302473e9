"""One rank of a benchmark: ``python -m fccl.bench.worker``, started by `fccl.bench.runner`.

It reads the configuration as JSON from standard input and writes one line of JSON per size to the
descriptor it is given, and a last line if something fails. One set of processes holds a process group for
each backend, and the backends take turns every few iterations, so that whatever else the machine
does hits all of them alike.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import gc
import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from fccl.bench.board import Board, BoardStopped
from fccl.bench.buffers import WorkingSet
from fccl.bench.case import Case
from fccl.bench.cases import CASES
from fccl.bench.config import ARENA, TRAIN, YARDSTICKS, BenchConfig, SizePlan
from fccl.bench.rank import BenchRank, engine_of
from fccl.bench.yardstick import bind_yardstick, check_yardstick

# Backends take turns after this many timed calls of a short message, the first of which follows one that is
# not timed: Gloo's threads go on for a while after its call has returned, and would slow down whoever is
# measured next. A long message outlasts that, and takes turns call by call.
_BURST = 8
_SHORT_MESSAGE = 1 << 20
_SPREAD_SECONDS = 0.005
_MIN_ITERATIONS, _MAX_ITERATIONS = 10, 5000
_PR_SET_PDEATHSIG = 1


class _Rank(BenchRank):
    """Measures an operation; a plan is a size."""

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
            group, is_async = self.groups[name], self.config.mode == "async"
            calls = [self.case.bind(buffer, group, is_async) for buffer in buffers]
            results = [buffer.result for buffer in buffers]
            if is_async:
                calls = [functools.partial(_call_and_wait, call) for call in calls]
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


def main() -> int:
    """Entry point of a rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--board", type=int, required=True)
    parser.add_argument("--results", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--init-method", required=True)
    args = parser.parse_args()

    # Ctrl-C is the parent's business; and no rank outlives its parent, however that ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != args.parent:
        return 1

    results = os.fdopen(args.results, "w")

    def send(message: dict[str, Any]) -> None:
        results.write(json.dumps(message) + "\n")
        results.flush()

    torch.set_num_threads(1)
    config = BenchConfig.from_dict(json.load(sys.stdin))
    # A little more than a collective may take, so that the collective's own message comes first.
    board = Board(args.board, config.ranks, args.rank, config.timeout + 5)
    rank: BenchRank | None = None
    try:
        import fccl  # noqa: F401  (registers the backend)

        if config.op == TRAIN:
            from fccl.bench.train_rank import TrainRank

            rank = TrainRank(config, args.rank, board)
        else:
            rank = _Rank(config, args.rank, board)
        rank.make_groups(args.init_method)
        for index, plan in enumerate(config.plans):
            board.wait_turn(index + 1)
            send({"size": index, **rank.measure(plan)})
        rank.phase = "leaving"
        board.align()
        dist.destroy_process_group()
    except BaseException as error:
        send(
            {
                "error": f"{type(error).__name__}: {error}",
                "phase": rank.phase if rank is not None else "starting",
                "stopped": isinstance(error, BoardStopped),
                "traceback": traceback.format_exc(),
            }
        )
        # A failed group may have threads that wait for peers: leave without tearing it down.
        os._exit(1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
