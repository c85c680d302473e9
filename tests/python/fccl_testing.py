"""Runs test functions on several ranks, each in a process of its own.

``run_ranks(function, world_size, ...)`` is the plain form: fresh processes, one process group, one call
per rank. ``RankPool`` keeps the processes and their group for many calls and is for tests of many small
cases.

The processes are forked from a *zygote*: a small single-threaded server process that has torch imported
already, so that a rank starts in tens of milliseconds. Test functions must be at module level of a test
file: they travel by name.

Nothing stays behind. Every rank leads a process group of its own, which is killed when the rank ends
(with whatever it forked) and when time is up; ranks die with the zygote, and the zygote with the process
that runs the tests.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import dataclasses
import faulthandler
import importlib
import importlib.util
import os
import pickle
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))

# torch._dynamo is imported by the first optimizer or DDP step of a process, at a second or more each:
# better once here.
DEFAULT_PRELOAD = (
    "numpy",
    "torch",
    "torch.distributed",
    "torch.nn.parallel",
    "torch.optim",
    "torch._dynamo",
    "fccl",
    "pytest",
    "hypothesis",
)

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


def free_port() -> int:
    """A TCP port of the loopback interface that is free at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    backend: str | None = "fccl",
    timeout: float = 60,
    env: Env = None,
    expect_exit: bool | Mapping[int, int | None] | None = None,
    init_kwargs: Mapping[str, Any] | None = None,
    preload: Iterable[str] = (),
    full_exit: bool = False,
) -> list[Any]:
    """Calls ``function(rank, world_size, *args)`` in ``world_size`` fresh processes.

    Args:
        function: a function at module level of an importable file (a test file is).
        world_size: number of ranks.
        *args: passed on; pickled.
        backend: the process group's backend; None: no group is initialised.
        timeout: seconds for everything, start and end of the processes included. Then all are killed.
        env: environment variables for the ranks (None as a value removes one), or a function from the
            rank to such a mapping.
        expect_exit: which ranks may end without returning: ``{rank: code}`` says that this rank must
            end with this exit status (-9: killed by SIGKILL; None: any status), True that any rank
            may. Such a rank's result is an ``Exited``.
        init_kwargs: further arguments for ``init_process_group`` (may replace init_method, timeout and
            pg_options; the group's timeout is a little below ``timeout`` otherwise).
        preload: modules to import once, before the ranks are forked ("lightning" takes seconds).
        full_exit: end the processes through the interpreter's whole shut-down (exit handlers, module
            and static destructors) and require exit status 0, instead of ``os._exit``.

    Returns:
        What the function returned (pickled), by rank.

    Raises:
        RankError: a rank raised (the first one by time is named) or ended unexpectedly.
        RankTimeout: time was up; the message has the stacks of the ranks still running.
    """
    deadline = time.monotonic() + timeout
    with _RankSet(world_size, backend, timeout, env, init_kwargs, preload, full_exit) as ranks:
        results = ranks.call(function, args, deadline, expect_exit)
        ranks.finish(deadline)
    return results


def expect_shared_memory(rank: int, world_size: int) -> None:
    """In a rank: asserts that the default group, if it is fccl's, runs on the engine.

    Gloo would give the same answers, so a test of values does not see that the engine stood aside. All ranks
    must call it. Nothing is asserted for one rank, nor where FCCL_SHM=0 asks for Gloo.
    """
    import torch.distributed as dist

    import fccl

    if dist.get_backend() != "fccl" or world_size == 1 or os.environ.get("FCCL_SHM") == "0":
        return
    dist.barrier()  # the first collective connects
    backend = fccl.backend_of()
    assert backend.engine == "shared-memory", f"rank {rank}: {backend.engine}: {backend.why_inner}"


class RankPool:
    """Processes that stay, with one process group, for many calls.

    After any failure the processes are killed; the next call starts new ones.
    """

    def __init__(
        self,
        world_size: int,
        backend: str | None = "fccl",
        env: Env = None,
        init_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.world_size = world_size
        self._make = lambda: _RankSet(world_size, backend, 60, env, init_kwargs, (), False)
        self._ranks: _RankSet | None = None

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 60) -> list[Any]:
        """As ``run_ranks``, in the pool's processes."""
        deadline = time.monotonic() + timeout
        if self._ranks is None:
            self._ranks = self._make()
        try:
            return self._ranks.call(function, args, deadline, None)
        except BaseException:
            self.kill()
            raise

    def close(self, timeout: float = 20) -> None:
        """Destroys the group and ends the processes."""
        if self._ranks is not None:
            try:
                self._ranks.finish(time.monotonic() + timeout)
            finally:
                self.kill()

    def kill(self) -> None:
        """Ends the processes at once."""
        if self._ranks is not None:
            self._ranks.kill()
            self._ranks = None


# ---- this side: a set of ranks ----


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


class _RankSet:
    def __init__(
        self,
        world_size: int,
        backend: str | None,
        timeout: float,
        env: Env,
        init_kwargs: Mapping[str, Any] | None,
        preload: Iterable[str],
        full_exit: bool,
    ) -> None:
        self._folder = tempfile.mkdtemp(prefix="fccl-test-")
        self._ranks: list[_Rank] = []
        zygote = _Zygote.get(tuple(preload))
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

    def __enter__(self) -> _RankSet:
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
        task = _pack(
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
                rank.channel.sendall(_pack(None))
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


def _pack(message: Any) -> bytes:
    payload = pickle.dumps(message)
    return struct.pack("<Q", len(payload)) + payload


# ---- the zygote ----


class _Zygote:
    """The server process that ranks are forked from; one per set of preloaded modules."""

    _all: dict[tuple[str, ...], _Zygote] = {}

    def __init__(self, preload: tuple[str, ...]) -> None:
        self._owner = os.getpid()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = os.pathsep.join([HERE, *filter(None, [environment.get("PYTHONPATH")])])
        code = f"import fccl_testing; fccl_testing._zygote_main({theirs.fileno()}, {preload!r})"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            pass_fds=[theirs.fileno()],
            env=environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()

    @classmethod
    def get(cls, preload: tuple[str, ...]) -> _Zygote:
        zygote = cls._all.get(preload)
        if zygote is None or zygote._owner != os.getpid() or zygote._process.poll() is not None:
            zygote = cls._all[preload] = cls(preload)
        return zygote

    def fork(self, setup: Mapping[str, Any]) -> tuple[socket.socket, int]:
        """Starts a rank. Returns the channel to it and the descriptor on which its status will come."""
        ours, theirs = socket.socketpair()
        status_read, status_write = os.pipe()
        # The set-up travels in a file: a packet has a size limit.
        path = setup["log"] + ".setup"
        with open(path, "wb") as file:
            pickle.dump(dict(setup), file)
        fds = array.array("i", [theirs.fileno(), status_write])
        self._socket.sendmsg([path.encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds.tobytes())])
        theirs.close()
        os.close(status_write)
        return ours, status_read


def _zygote_main(control_fd: int, preload: Sequence[str]) -> None:
    """The zygote's life: forks on request, reports exit statuses, ends with its starter."""
    for name in (*DEFAULT_PRELOAD, *preload):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    # A child of a process with threads inherits locks that nobody will release.
    others = [t.name for t in threading.enumerate() if t is not threading.main_thread()]
    if others:
        print(f"fccl_testing: preloading {preload} started threads {others}", file=sys.stderr)

    control = socket.socket(fileno=control_fd)
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    status_of: dict[int, int] = {}
    while True:
        ready, _, _ = select.select([control, wake_read], [], [])
        if wake_read in ready:
            os.read(wake_read, 4096)
            _reap(status_of)
        if control in ready:
            data, ancillary, _, _ = control.recvmsg(4096, socket.CMSG_SPACE(8))
            if not data:
                break
            channel, status = struct.unpack("ii", ancillary[0][2][:8])
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for fd in (status, wake_read, wake_write, *status_of.values()):
                    os.close(fd)
                control.close()
                _rank_main(data.decode(), channel)
                return  # full_exit: through the interpreter's own shut-down
            os.close(channel)
            os.write(status, struct.pack("<q", pid))
            status_of[pid] = status
    for pid in status_of:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    os._exit(0)


def _reap(status_of: dict[int, int]) -> None:
    while status_of:
        info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if info is None:
            return
        # Not reaped yet, so the number still is this process group's: end what the rank left behind.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(info.si_pid, signal.SIGKILL)
        _, wait_status = os.waitpid(info.si_pid, 0)
        status = status_of.pop(info.si_pid, None)
        if status is not None:
            with contextlib.suppress(BrokenPipeError):
                os.write(status, struct.pack("<q", os.waitstatus_to_exitcode(wait_status)))
            os.close(status)


# ---- inside a rank ----


def _rank_main(setup_path: str, channel_fd: int) -> None:
    os.setpgid(0, 0)
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, int(signal.SIGKILL), 0, 0, 0)
    with open(setup_path, "rb") as file:
        setup = pickle.load(file)
    log = os.open(setup["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    sys.path[:] = setup["path"]
    os.chdir(setup["cwd"])
    for name, value in setup["env"].items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    channel = socket.socket(fileno=channel_fd)
    ok = True
    try:
        _serve(setup, channel)
    except BaseException as error:
        ok = False
        with contextlib.suppress(OSError):
            channel.sendall(_pack(_describe(error)))
    sys.stdout.flush()
    sys.stderr.flush()
    if not (setup["full_exit"] and ok):
        os._exit(0)


def _serve(setup: Mapping[str, Any], channel: socket.socket) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    rank, world_size = setup["rank"], setup["world_size"]
    if setup["backend"] is not None:
        arguments = {
            "init_method": setup["init_method"],
            "timeout": timedelta(seconds=setup["group_timeout"]),
            **setup["init_kwargs"],
        }
        dist.init_process_group(setup["backend"], rank=rank, world_size=world_size, **arguments)
    stream = channel.makefile("rb")
    while True:
        header = stream.read(8)
        if len(header) < 8:
            return
        task = pickle.loads(stream.read(struct.unpack("<Q", header)[0]))
        if task is None:
            break
        try:
            function = _find(task)
            result = function(rank, world_size, *pickle.loads(task["args"]))
            message = {"result": pickle.dumps(result)}
        except Exception as error:
            message = _describe(error)
        except BaseException as error:
            if type(error).__name__ != "Skipped":  # pytest.skip()
                raise
            message = _describe(error)
        channel.sendall(_pack(message))
    if dist.is_initialized():
        dist.destroy_process_group()


def _find(task: Mapping[str, Any]) -> Callable[..., Any]:
    """The function that a task names, imported by its module's name, else from its file."""
    folder = os.path.dirname(task["file"]) if task["file"] else HERE
    if folder not in sys.path:
        sys.path.insert(0, folder)
    if task["module"] == "__main__":
        name = os.path.splitext(os.path.basename(task["file"]))[0]
    else:
        name = task["module"]
    try:
        target: Any = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name not in name.split(".") or not task["file"]:
            raise
        spec = importlib.util.spec_from_file_location(name, task["file"])
        assert spec is not None and spec.loader is not None
        target = importlib.util.module_from_spec(spec)
        sys.modules[name] = target
        spec.loader.exec_module(target)
    for part in task["name"].split("."):
        target = getattr(target, part)
    return target


def _describe(error: BaseException) -> dict[str, str]:
    if type(error).__name__ == "Skipped":
        return {"type": "Skipped", "traceback": str(error)}
    return {"type": type(error).__name__, "traceback": "".join(traceback.format_exception(error))}
