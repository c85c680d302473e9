"""A set of ranks as their starter sees it: their channels, results, exits and output. See fccl_testing."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import select
import shutil
import signal
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from fccl_testing_zygote import Zygote, pack

# How long the other ranks may go on once one has failed, before they are killed.
GRACE_AFTER_FAILURE_S = 4.0
# How long a rank may take from its last result to the end of its process.
EXIT_TIMEOUT_S = 20.0
LOG_TAIL_BYTES = 6000

Env = Mapping[str, "str | None"] | Callable[[int], Mapping[str, "str | None"]] | None


class RankError(RuntimeError):
    """A rank raised, died or did not finish; the message has its rank, its traceback and its output."""

    def __init__(self, message: str, rank: int, type_name: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.type_name = type_name


class RankTimeout(RankError):
    """Some ranks were still running when time was up; ``ranks`` says which."""

    def __init__(self, message: str, ranks: Sequence[int]) -> None:
        super().__init__(message, ranks[0] if ranks else -1, "RankTimeout")
        self.ranks = tuple(ranks)


@dataclasses.dataclass(frozen=True)
class Exited:
    """The result of a rank that ended without returning, where ``expect_exit`` allows it.

    Attributes:
        code: exit status; ``-n`` if signal n killed it.
        output: the end of what the process wrote to its standard output and error.
    """

    code: int
    output: str = ""


@dataclasses.dataclass
class _Rank:
    """One rank as its starter sees it."""

    rank: int
    channel: socket.socket
    status: int  # read end of the pipe on which the zygote says pid and exit status
    log: str
    pid: int = 0
    exit_code: int | None = None
    received: bytearray = dataclasses.field(default_factory=bytearray)
    end_of_channel: bool = False

    def read_status(self) -> None:
        data = os.read(self.status, 8)
        if len(data) < 8:  # the zygote itself died
            self.exit_code = -signal.SIGKILL
        elif self.pid == 0:
            self.pid = struct.unpack("<q", data)[0]
        else:
            self.exit_code = struct.unpack("<q", data)[0]

    def read_channel(self) -> None:
        try:
            data = self.channel.recv(1 << 20)
        except ConnectionError:
            data = b""
        if data:
            self.received += data
        else:
            self.end_of_channel = True

    def take_message(self) -> Any:
        """The next whole message, or None."""
        if len(self.received) < 8:
            return None
        size = struct.unpack_from("<Q", self.received)[0]
        if len(self.received) < 8 + size:
            return None
        payload = bytes(self.received[8 : 8 + size])
        del self.received[: 8 + size]
        return pickle.loads(payload)

    def tail(self) -> str:
        try:
            with open(self.log, "rb") as file:
                file.seek(max(0, os.path.getsize(self.log) - LOG_TAIL_BYTES))
                return file.read().decode(errors="replace").strip()
        except OSError:
            return ""


class RankSet:
    def __init__(
        self,
        world_size: int,
        backend: str | None,
        timeout: float,
        env: Env,
        init_kwargs: Mapping[str, Any] | None,
        preload: Iterable[str],
        full_exit: bool,
        ld_preload: str = "",
    ) -> None:
        self._folder = tempfile.mkdtemp(prefix="fccl-test-")
        self._ranks: list[_Rank] = []
        zygote = Zygote.get(tuple(preload), ld_preload)
        try:
            for rank in range(world_size):
                log = os.path.join(self._folder, f"rank{rank}.log")
                setup = {
                    "rank": rank,
                    "world_size": world_size,
                    "backend": backend,
                    "init_method": f"file://{self._folder}/store",
                    "group_timeout": max(timeout - 5, timeout * 0.7),
                    "init_kwargs": dict(init_kwargs or {}),
                    "env": dict(env(rank) if callable(env) else env or {}),
                    "log": log,
                    "path": list(sys.path),
                    "cwd": os.getcwd(),
                    "full_exit": full_exit,
                }
                channel, status = zygote.fork(setup)
                self._ranks.append(_Rank(rank, channel, status, log))
        except BaseException:
            self.kill()
            raise

    def __enter__(self) -> RankSet:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.kill()

    def call(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        deadline: float,
        expect_exit: bool | Mapping[int, int | None] | None,
    ) -> list[Any]:
        """Runs one call on every rank and waits for all results."""
        module = sys.modules[function.__module__]
        task = pack(
            {
                "module": function.__module__,
                "file": getattr(module, "__file__", None),
                "name": function.__qualname__,
                "args": pickle.dumps(tuple(args)),
            }
        )
        for rank in self._ranks:
            with contextlib.suppress(ConnectionError):
                rank.channel.sendall(task)

        may_exit: dict[int, int | None] = {}
        if expect_exit is True:
            may_exit = {rank.rank: None for rank in self._ranks}
        elif expect_exit:
            may_exit = dict(expect_exit)
        results: dict[int, Any] = {}
        failure_time = 0.0
        failures: list[tuple[int, dict[str, str]]] = []
        while len(results) + len(failures) < len(self._ranks):
            pending = [r for r in self._ranks if r.rank not in results and r.rank not in dict(failures)]
            if failures:
                deadline = min(deadline, failure_time + GRACE_AFTER_FAILURE_S)
            if time.monotonic() >= deadline:
                self._raise(failures, [r for r in pending if r.exit_code is None])
            for rank in self._wait(pending, deadline):
                message = rank.take_message()
                if message is None and not (rank.exit_code is not None and rank.end_of_channel):
                    continue
                if message is None:
                    code = rank.exit_code
                    if rank.rank in may_exit and may_exit[rank.rank] in (None, code):
                        results[rank.rank] = Exited(code or 0, rank.tail())
                        continue
                    wanted = f", expected {may_exit[rank.rank]}" if rank.rank in may_exit else ""
                    message = {
                        "type": "ProcessExited",
                        "traceback": f"the process ended with {describe_exit(code or 0)}{wanted}",
                    }
                elif "result" in message:
                    if may_exit.get(rank.rank) is not None:
                        message = {
                            "type": "ProcessReturned",
                            "traceback": f"returned, expected it to end with {may_exit[rank.rank]}",
                        }
                    else:
                        results[rank.rank] = pickle.loads(message["result"])
                        continue
                failures.append((rank.rank, message))
                failure_time = time.monotonic() if len(failures) == 1 else failure_time
        if failures:
            self._raise(failures, [])
        return [results[rank.rank] for rank in self._ranks]

    def finish(self, deadline: float) -> None:
        """Lets the ranks destroy their group and end; raises if one does not end well."""
        running = [r for r in self._ranks if r.exit_code is None]
        for rank in running:
            with contextlib.suppress(OSError):
                rank.channel.sendall(pack(None))
        deadline = max(min(deadline, time.monotonic() + EXIT_TIMEOUT_S), time.monotonic() + 1)
        while any(r.exit_code is None for r in running):
            if time.monotonic() >= deadline:
                self._raise([], [r for r in running if r.exit_code is None], "to end after its last result")
            self._wait([r for r in running if r.exit_code is None], deadline)
        failures = []
        for rank in running:
            while not rank.end_of_channel:
                rank.read_channel()
            message = rank.take_message()
            if message is not None:
                failures.append((rank.rank, message))
            elif rank.exit_code:
                failures.append(
                    (
                        rank.rank,
                        {
                            "type": "ProcessExited",
                            "traceback": "after its last result the process ended with "
                            + describe_exit(rank.exit_code),
                        },
                    )
                )
        if failures:
            self._raise(failures, [])

    def kill(self) -> None:
        """Kills what still runs, shows the ranks' output on this process's, removes the folder."""
        deadline = time.monotonic() + 5
        for rank in self._ranks:
            while rank.pid == 0 and rank.exit_code is None and time.monotonic() < deadline:
                self._wait([rank], deadline)
            if rank.exit_code is None and rank.pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank.pid, signal.SIGKILL)  # the zygote kills the rest of its process group
        while any(r.exit_code is None for r in self._ranks) and time.monotonic() < deadline:
            self._wait([r for r in self._ranks if r.exit_code is None], deadline)
        for rank in self._ranks:
            rank.channel.close()
            os.close(rank.status)
            if text := rank.tail():
                print(f"---- output of rank {rank.rank} ----\n{text}")
        self._ranks = []
        shutil.rmtree(self._folder, ignore_errors=True)

    def _wait(self, ranks: Sequence[_Rank], deadline: float) -> list[_Rank]:
        """Waits until one of the ranks has something new to say; returns those that have."""
        by_fd: dict[int, tuple[_Rank, bool]] = {}
        for rank in ranks:
            if rank.exit_code is None:
                by_fd[rank.status] = (rank, True)
            if not rank.end_of_channel:
                by_fd[rank.channel.fileno()] = (rank, False)
        poll = select.poll()
        for fd in by_fd:
            poll.register(fd, select.POLLIN | select.POLLHUP)
        ready = poll.poll(max(0.0, min(deadline - time.monotonic(), 3600)) * 1000)
        changed: dict[int, _Rank] = {}
        for fd, _ in ready:
            rank, is_status = by_fd[fd]
            rank.read_status() if is_status else rank.read_channel()
            changed[rank.rank] = rank
        return list(changed.values())

    def _raise(
        self,
        failures: Sequence[tuple[int, Mapping[str, str]]],
        running: Sequence[_Rank],
        what: str = "to return",
    ) -> None:
        for rank in running:  # where are they? faulthandler answers without the GIL
            if rank.pid and rank.exit_code is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank.pid, signal.SIGUSR1)
        if running:
            time.sleep(0.3)
        lines = []
        for rank_number, message in failures:
            if message["type"] == "Skipped":
                import pytest

                pytest.skip(message["traceback"])
            lines.append(f"rank {rank_number} of {len(self._ranks)} failed:\n{message['traceback'].strip()}")
        if running:
            names = ", ".join(str(r.rank) for r in running)
            lines.append(f"still running when time was up: rank(s) {names} ({what})")
        told = {number for number, _ in failures} | {r.rank for r in running}
        for rank in self._ranks:
            if rank.rank in told and (text := rank.tail()):
                lines.append(f"---- output of rank {rank.rank} ----\n{text}")
        text = "\n".join(lines)
        if failures:
            raise RankError(text, failures[0][0], failures[0][1]["type"])
        raise RankTimeout(text, [r.rank for r in running])


def describe_exit(code: int) -> str:
    """ "exit status 1" or "signal 9 (SIGKILL)"."""
    if code >= 0:
        return f"exit status {code}"
    try:
        return f"signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"signal {-code}"
