"""A rank that waits for another burns no CPU."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from fccl_testing import run_ranks

SECONDS = 5
MOST_CPU_SECONDS = 0.05


def waiting(rank, world_size, how):
    dist.barrier()
    other = 1 - rank
    if rank == 1:
        time.sleep(SECONDS)
    before = time.process_time()
    start = time.monotonic()
    if how == "collective":
        dist.all_reduce(torch.ones(10))
    elif how == "asynchronous collective":
        dist.all_reduce(torch.ones(10), async_op=True).wait()
    elif how == "message":
        dist.send(torch.ones(3), other) if rank == 1 else dist.recv(torch.ones(3), other)
    else:  # a message that nobody waits for meanwhile
        work = dist.isend(torch.ones(3), other) if rank == 1 else dist.irecv(torch.ones(3), other)
        if rank == 0:
            time.sleep(SECONDS)
        work.wait()
    if rank == 0:
        assert time.monotonic() - start > SECONDS - 1
        assert time.process_time() - before < MOST_CPU_SECONDS
    dist.barrier()


@pytest.mark.parametrize(
    "how", ["collective", "asynchronous collective", "message", "message in the background"]
)
def test_waiting_burns_no_cpu(how):
    run_ranks(waiting, 2, how)
