"""The server process that ranks are forked from, and the life of a rank. See fccl_testing."""

from __future__ import annotations

import array
import contextlib
import ctypes
import faulthandler
import importlib
import importlib.util
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
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


def pack(message: Any) -> bytes:
    payload = pickle.dumps(message)
    return struct.pack("<Q", len(payload)) + payload


class Zygote:
    """The server process that ranks are forked from; one per set of preloaded modules and library."""

    _all: dict[tuple[tuple[str, ...], str], Zygote] = {}

    def __init__(self, preload: tuple[str, ...], ld_preload: str) -> None:
        self._owner = os.getpid()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = os.pathsep.join([HERE, *filter(None, [environment.get("PYTHONPATH")])])
        if ld_preload:
            environment["LD_PRELOAD"] = ld_preload
        code = f"import fccl_testing_zygote as z; z.zygote_main({theirs.fileno()}, {preload!r})"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            pass_fds=[theirs.fileno()],
            env=environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()

    @classmethod
    def get(cls, preload: tuple[str, ...], ld_preload: str = "") -> Zygote:
        key = (preload, ld_preload)
        zygote = cls._all.get(key)
        if zygote is None or zygote._owner != os.getpid() or zygote._process.poll() is not None:
            zygote = cls._all[key] = cls(preload, ld_preload)
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


def zygote_main(control_fd: int, preload: Sequence[str]) -> None:
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
    if "torch.distributed" in sys.modules:
        # torch read this one when it was imported, in the zygote.
        sys.modules["torch.distributed"].set_debug_level_from_env()
    channel = socket.socket(fileno=channel_fd)
    ok = True
    try:
        _serve(setup, channel)
    except BaseException as error:
        ok = False
        with contextlib.suppress(OSError):
            channel.sendall(pack(_describe(error)))
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
        channel.sendall(pack(message))
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
