"""A rank that lives and does not call: the other's kernel ends at the group's timeout, with NaN and an error."""

from __future__ import annotations

import time
from datetime import timedelta

import torch
import torch.distributed as dist

SECONDS = 4


def run(rank: int, world: int, device: torch.device) -> str:
    """For two ranks; in a group of its own, since that is done with afterwards."""
    group = dist.new_group(timeout=timedelta(seconds=SECONDS))
    ones = torch.ones(100, device=device)
    dist.all_reduce(ones, group=group)
    assert (ones == world).all()
    note = "the absent one"
    if rank == 0:
        begun = time.monotonic()
        said = ""
        try:
            dist.all_reduce(ones, group=group)
            if device.type == "cuda":  # the host does not wait for the kernel
                torch.cuda.synchronize()
                assert ones.isnan().all(), f"the output is not NaN: {ones[0].item()}"
            dist.all_reduce(torch.ones(100, device=device), group=group)  # the next call learns of it
        except RuntimeError as error:
            said = str(error).splitlines()[0]
        seconds = time.monotonic() - begun
        assert "rank 1" in said, f"no error that names rank 1: {said}"
        assert seconds < 3 * SECONDS, f"the error took {seconds:.0f} s"
        note = f"timeout {SECONDS} s: an error after {seconds:.1f} s: {said}"
    dist.barrier()  # of the default group, which lives on
    return note
