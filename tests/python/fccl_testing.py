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

import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fccl_testing_ranks import Env, Exited, RankError, RankSet, RankTimeout

__all__ = [
    "ENGINE_ENV",
    "Exited",
    "RankError",
    "RankPool",
    "RankTimeout",
    "expect_shared_memory",
    "free_port",
    "run_ranks",
]

# The environment in which a group of one machine is carried by this engine (``fccl.backend_of().engine``).
ENGINE_ENV: dict[str, dict[str, str | None]] = {
    "shared-memory": {"FCCL_SHM": None},
    "inner": {"FCCL_SHM": "0"},
}


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
    ld_preload: str = "",
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
        ld_preload: a shared library whose functions the ranks find before all others.

    Returns:
        What the function returned (pickled), by rank.

    Raises:
        RankError: a rank raised (the first one by time is named) or ended unexpectedly.
        RankTimeout: time was up; the message has the stacks of the ranks still running.
    """
    deadline = time.monotonic() + timeout
    with RankSet(world_size, backend, timeout, env, init_kwargs, preload, full_exit, ld_preload) as ranks:
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
        ld_preload: str = "",
    ) -> None:
        self.world_size = world_size
        self._make = lambda: RankSet(world_size, backend, 60, env, init_kwargs, (), False, ld_preload)
        self._ranks: RankSet | None = None

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
