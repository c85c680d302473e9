"""Starts the ranks of a benchmark, collects what they measured, and ends them whatever happens."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from fccl.bench.board import Board, board_bytes
from fccl.bench.config import BenchConfig, SizeOutcome

__all__ = ["RankFailure", "RankSet", "combine", "run_parts"]

# How long the other ranks get to report their own view of a failure, and then to leave by themselves.
_GATHER_SECONDS = 3.0
_LEAVE_SECONDS = 10.0


class RankFailure(RuntimeError):
    """A rank raised an error or died. The message says which, and what it was doing.

    Attributes:
        tracebacks: Per rank that raised an error, its traceback.
    """

    def __init__(self, message: str, tracebacks: dict[int, str] | None = None) -> None:
        super().__init__(message)
        self.tracebacks = tracebacks or {}


def combine(parts: list[dict[str, Any]]) -> SizeOutcome:
    """Joins the ranks' parts of one size: the slowest rank's time per iteration, all wrong elements."""
    outcome = SizeOutcome()
    for name in parts[0]["times"]:
        outcome.times[name] = [
            max(each) for each in zip(*(part["times"][name] for part in parts), strict=True)
        ]
        outcome.wrong[name] = sum(part["wrong"][name] for part in parts)
        outcome.checked[name] = parts[0]["checked"][name]
    for part in parts:
        outcome.dropped.update(part["dropped"])
    # Ranks of one group always agree; should they not, the one that does not share memory is what matters.
    for part in parts:
        for name, engine in part["engines"].items():
            if name not in outcome.engines or engine["engine"] != "shared-memory":
                outcome.engines[name] = engine
    return outcome


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"exited with status {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


class RankSet:
    """The processes of one run. Use as a context manager: leaving it ends them all.

    Args:
        config: The run.
    """

    def __init__(self, config: BenchConfig) -> None:
        self._config = config
        self._processes: list[subprocess.Popen[bytes]] = []
        self._selector = selectors.DefaultSelector()
        self._pending: dict[int, bytes] = {}
        self._errors: dict[int, dict[str, Any]] = {}
        self._scratch = tempfile.TemporaryDirectory(prefix="fccl-bench-")
        descriptor = os.memfd_create("fccl-bench-board")
        os.ftruncate(descriptor, board_bytes(config.ranks))
        self._board = Board(descriptor, config.ranks, -1, config.timeout)
        try:
            for rank in range(config.ranks):
                self._start(rank, descriptor)
        except BaseException:
            self.end()
            raise
        finally:
            os.close(descriptor)

    def _start(self, rank: int, board: int) -> None:
        receive, send = os.pipe()
        rendezvous = Path(self._scratch.name) / "rendezvous"
        command = [sys.executable, "-m", "fccl.bench.worker", "--rank", str(rank), "--board", str(board)]
        command += [
            "--results",
            str(send),
            "--parent",
            str(os.getpid()),
            "--init-method",
            rendezvous.as_uri(),
        ]
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=2,  # standard output belongs to the table or the JSON
                pass_fds=(board, send),
                # One thread per rank for every backend and for memcpy.
                env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
                start_new_session=True,
            )
        finally:
            os.close(send)
        self._processes.append(process)
        self._pending[rank] = b""
        self._selector.register(receive, selectors.EVENT_READ, rank)
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(self._config.to_dict()).encode())
            process.stdin.close()
        except BrokenPipeError:
            pass  # it has died already: reading its results says how

    @property
    def pids(self) -> list[int]:
        """Process ids in the order of the ranks."""
        return [process.pid for process in self._processes]

    def _messages(self, deadline: float | None = None) -> Iterator[tuple[int, dict[str, Any] | None]]:
        """Yields (rank, message) as they come; the message is None when a rank has closed its end."""
        while self._selector.get_map():
            wait = None if deadline is None else deadline - time.monotonic()
            if wait is not None and wait <= 0:
                return
            for key, _ in self._selector.select(wait):
                rank: int = key.data
                data = os.read(key.fd, 1 << 20)
                if not data:
                    self._selector.unregister(key.fd)
                    os.close(key.fd)
                    yield rank, None
                    continue
                *lines, self._pending[rank] = (self._pending[rank] + data).split(b"\n")
                for line in lines:
                    yield rank, json.loads(line)

    def measure(self, turn: int) -> list[dict[str, Any]]:
        """Lets the ranks carry out part number `turn` (from 0, each once and in order).

        Returns:
            What each rank has to say, by rank.

        Raises:
            RankFailure: a rank failed or died. All ranks have ended by then.
        """
        self._board.let_go(turn + 1)
        parts: dict[int, dict[str, Any]] = {}
        for rank, message in self._messages():
            if message is None or "error" in message:
                raise self._failure(rank, message)
            parts[rank] = message
            if len(parts) == self._config.ranks:
                return [parts[r] for r in range(self._config.ranks)]
        raise RankFailure("all ranks have gone")

    def finish(self) -> None:
        """Waits until the ranks have taken leave of each other and exited.

        Raises:
            RankFailure: one of them did not do so in an orderly way.
        """
        deadline = time.monotonic() + _LEAVE_SECONDS
        gone = 0
        for rank, message in self._messages(deadline):
            if message is not None:
                raise self._failure(rank, message)
            gone += 1
        if gone < self._config.ranks:
            raise RankFailure(f"only {gone} of {self._config.ranks} ranks ended within {_LEAVE_SECONDS:g} s")
        for rank, process in enumerate(self._processes):
            if process.wait(timeout=_LEAVE_SECONDS) != 0:
                raise self._failure(rank, None)

    def _failure(self, rank: int, message: dict[str, Any] | None) -> RankFailure:
        """Stops everything, hears what the other ranks have to say, and says what happened."""
        self._board.stop()
        dead: list[int] = []
        if message is None:
            dead.append(rank)
        else:
            self._errors[rank] = message
        for other, said in self._messages(time.monotonic() + _GATHER_SECONDS):
            if said is None:
                if other not in self._errors:
                    dead.append(other)
            elif "error" in said:
                self._errors[other] = said
        lines = []
        for each in dead:
            try:
                code = self._processes[each].wait(timeout=_GATHER_SECONDS)
                lines.append(f"rank {each} (process {self._processes[each].pid}) {_describe_exit(code)}")
            except subprocess.TimeoutExpired:
                lines.append(f"rank {each} closed its results")
        own = {r: said for r, said in self._errors.items() if not said["stopped"]} or (
            {} if dead else self._errors
        )
        for each, said in sorted(own.items()):
            lines.append(f"rank {each}, {said['phase']}: {said['error']}")
        self.end()
        tracebacks = {each: said["traceback"] for each, said in own.items()}
        return RankFailure("\n".join(lines) or "a rank failed", tracebacks)

    def end(self) -> None:
        """Ends every rank that still runs, and waits for it."""
        self._board.stop()
        for process in self._processes:
            if process.poll() is None:
                process.kill()
        for process in self._processes:
            process.wait()
        for key in list(self._selector.get_map().values()):
            self._selector.unregister(key.fd)
            os.close(int(key.fd))
        self._scratch.cleanup()

    def __enter__(self) -> RankSet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()


def run_parts(config: BenchConfig) -> Generator[list[dict[str, Any]], None, None]:
    """Runs a benchmark; yields what the ranks say of each of its plans as soon as it is there.

    Raises:
        RankFailure: a rank failed or died; all have ended by then. Also when the caller stops early, all
            are ended.
    """
    with RankSet(config) as ranks:
        for turn in range(len(config.plans)):
            yield ranks.measure(turn)
        ranks.finish()
