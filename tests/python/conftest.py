"""Fixtures for all tests."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator

import pytest

from fccl_testing import RankPool, expect_shared_memory

# A shell starts what it puts into the background (`make test &`) with Ctrl-C ignored, and so would be every
# process that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[Callable[..., RankPool]]:
    """A function ``rank_pool(world_size, backend="fccl")`` that gives the session's pool of that size."""
    pools: dict[tuple[int, str], RankPool] = {}

    def get(world_size: int, backend: str = "fccl") -> RankPool:
        key = (world_size, backend)
        if key not in pools:
            pools[key] = RankPool(world_size, backend)
            if backend == "fccl":
                pools[key].run(expect_shared_memory)
        return pools[key]

    yield get
    for pool in pools.values():
        pool.close()
