"""A rank that dies or leaves while kernels of the others wait for it, and the host inside CUDA for these kernels."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import fccl
from sim_cuda import run_simulated, simulated

pytestmark = simulated

# Far more than any test takes: nobody may wait for it.
LONG = {"timeout": timedelta(seconds=300)}


def on_gpu(values: list[float]) -> torch.Tensor:
    return torch.tensor(values).to("cuda")


def right_sum(world_size: int) -> None:
    tensor = on_gpu([1.0, 2.0])
    dist.all_reduce(tensor)
    assert tensor.cpu().tolist() == [world_size, 2.0 * world_size]


def waits_inside_cuda(rank: int, world_size: int, leaves: bool, captured: bool) -> None:
    right_sum(world_size)
    tensor = on_gpu([1.0] * 5)
    graph = None
    if captured:
        assert fccl.cuda.warm_up()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            dist.all_reduce(tensor)
    dist.barrier()
    if rank == world_size - 1:
        if leaves:
            dist.destroy_process_group()
            time.sleep(5)  # its process goes on
            return
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.2)
    began = time.monotonic()
    if graph is None:
        dist.all_reduce(tensor)
    else:
        graph.replay()
    torch.cuda.synchronize()  # no thread of the host is in fccl
    assert time.monotonic() - began < 20
    assert tensor.cpu().isnan().all()
    lost = (
        rf"rank {world_size - 1} has left the group"
        if leaves
        else rf"the process of rank {world_size - 1} ended"
    )
    with pytest.raises(dist.DistError, match=lost):
        dist.all_reduce(tensor)


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("leaves", [False, True])
def test_a_lost_rank_ends_the_kernels_that_wait_for_it(leaves, captured):
    expected = None if leaves else {2: -9}
    run_simulated(waits_inside_cuda, 3, leaves, captured, init_kwargs=LONG, expect_exit=expected)


def has_done_its_part(rank: int, world_size: int) -> None:
    """A rank that ends after its last call has failed nobody."""
    tensors = [on_gpu([1.0, 2.0]) for _ in range(50)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    if rank == 1:
        torch.cuda.synchronize()
        os._exit(0)
    time.sleep(1.5)  # several looks of the watch
    for work in works:
        work.wait()
        assert work.is_success()
    torch.cuda.synchronize()
    assert all(tensor.cpu().tolist() == [2.0, 4.0] for tensor in tensors)


def test_a_rank_that_has_done_its_part_may_go():
    run_simulated(has_done_its_part, 2, init_kwargs=LONG, expect_exit={1: 0})


def threads() -> list[str]:
    return [open(f"/proc/self/task/{task}/comm").read().strip() for task in os.listdir("/proc/self/task")]


def watch_ends(rank: int, world_size: int) -> None:
    dist.all_reduce(torch.ones(1))
    tensor = on_gpu([1.0])
    before = len(threads())
    for _ in range(3):
        dist.all_reduce(tensor)
    assert len(threads()) > before  # the watch, among what CUDA starts
    assert threads().count("fccl-watch") == 1
    dist.destroy_process_group()
    assert "fccl-watch" not in threads()


def test_the_watch_ends_with_its_group():
    run_simulated(watch_ends, 2, init_kwargs=LONG)
