"""A rank is killed while another one's kernel waits for it: an error that names it, in bounded time."""

from __future__ import annotations

import os
import signal
import time

import torch
import torch.distributed as dist

from rank_cases.expected import expect_kernels

DIES = {1}
TIMEOUT_SECONDS = 15  # of the group
MOST_SECONDS = 20


def run(rank: int, world: int, device: torch.device) -> str:
    """For two ranks."""
    ones = torch.ones(100, device=device)
    dist.all_reduce(ones)
    assert (ones == world).all()
    expect_kernels(device, 1)
    if rank == 1:
        time.sleep(1)  # rank 0's kernel is waiting by then
        os.kill(os.getpid(), signal.SIGKILL)
    begun = time.monotonic()
    error: Exception | None = None
    try:
        while time.monotonic() < begun + 2 * MOST_SECONDS and error is None:
            dist.all_reduce(ones)
            if device.type == "cuda":
                torch.cuda.synchronize()
    except Exception as raised:
        error = raised
    seconds = time.monotonic() - begun
    assert error is not None, "no error was raised"
    said = str(error).splitlines()[0]
    assert "rank 1" in said, f"the error does not name rank 1: {said}"
    assert seconds < MOST_SECONDS, f"the error took {seconds:.0f} s: {said}"
    return f"an error after {seconds:.1f} s: {said}"
