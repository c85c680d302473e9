"""Order of execution, Works and Futures, coalescing, and what the backend composes."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import fccl
from fccl_testing import run_ranks


def mixed_order(rank, world_size):
    total = sum(range(1, world_size + 1))
    tensors = [torch.full((n,), float(rank + 1)) for n in (1, 1000, 70_000, 3, 0, 17)]
    works = []
    for index, tensor in enumerate(tensors):
        works.append(dist.all_reduce(tensor, async_op=True))
        if index % 2:
            # A synchronous call comes after everything submitted before it.
            now = torch.full((5,), float(rank))
            dist.all_reduce(now)
            assert now.eq(total - world_size).all()
            assert all(work.is_completed() for work in works)
    for work in reversed(works):
        assert work.wait() and work.is_success()
    assert all(tensor.eq(total).all() for tensor in tensors)
    # Numbers follow submission.
    assert fccl.backend_of()._get_sequence_number_for_group() == 9


@pytest.mark.parametrize("world_size", (1, 2, 3))
def test_synchronous_and_asynchronous_calls_keep_their_order(world_size):
    run_ranks(mixed_order, world_size)


def from_threads(rank, world_size):
    groups = [dist.new_group() for _ in range(3)]
    errors = []

    def loop(group):
        try:
            for step in range(50):
                tensor = torch.full((64,), float(step + rank))
                work = dist.all_reduce(tensor, group=group, async_op=bool(step % 3))
                if work is not None:
                    work.wait()
                assert tensor.eq(step * world_size + sum(range(world_size))).all()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=loop, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors


def test_groups_are_independent_across_threads():
    run_ranks(from_threads, 2)


def explicit_wait(rank, world_size):
    dist.barrier()
    if rank == 1:
        time.sleep(1.0)
    tensor = torch.ones(4)
    work = dist.all_reduce(tensor, async_op=True)
    if rank == 0:
        with pytest.raises(
            dist.DistBackendError, match=r"all_reduce number 2 on rank 0.*timed out after 100 ms"
        ):
            work.wait(timedelta(milliseconds=100))
        assert not work.is_completed()
    assert work.wait(timedelta(seconds=20))
    assert tensor.eq(2).all()


def test_an_expired_wait_lets_the_collective_go_on():
    run_ranks(explicit_wait, 2)


def futures(rank, world_size):
    tensor = torch.full((3,), float(rank))
    work = dist.all_reduce(tensor, async_op=True)
    doubled = work.get_future().then(lambda future: future.value()[0] * 2)
    assert doubled.wait().eq(2 * sum(range(world_size))).all()
    # On finished work: complete at once.
    future = work.get_future()
    assert (future.done() and future.value()[0] is tensor) or future.value()[0].equal(tensor)
    assert work.result()[0].data_ptr() == tensor.data_ptr()

    # Callbacks that issue collectives and block on them, nested.
    def again(future):
        inner = dist.all_reduce(future.value()[0].clone(), async_op=True).get_future()
        return inner.then(
            lambda f: dist.all_reduce(f.value()[0], async_op=True).get_future().wait()[0]
        ).wait()

    result = dist.all_reduce(torch.ones(2), async_op=True).get_future().then(again).wait()
    assert result.eq(world_size**3).all()

    # An error arrives through the Future.
    bad = dist.all_reduce(torch.ones(2 + rank), async_op=True).get_future()
    with pytest.raises(RuntimeError, match="do not fit"):
        bad.wait()
    dist.barrier()


def test_futures():
    run_ranks(futures, 2)


def coalesced(rank, world_size):
    total = sum(range(world_size))
    device = torch.device("cpu")
    for kwargs in ({}, {"device": device}):
        tensors = [torch.full((n,), float(rank)) for n in (3, 1, 2000)]
        with dist._coalescing_manager(**kwargs):
            for tensor in tensors:
                dist.all_reduce(tensor)
        assert all(tensor.eq(total).all() for tensor in tensors)
    outputs = [torch.zeros(world_size * n) for n in (2, 5)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for output in outputs:
            dist.all_gather_into_tensor(output, torch.full((output.numel() // world_size,), float(rank)))
    manager.wait()
    for output in outputs:
        assert output.view(world_size, -1).eq(torch.arange(world_size).view(-1, 1)).all()
    scattered = [torch.zeros(n) for n in (2, 3)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for output in scattered:
            dist.reduce_scatter_tensor(output, torch.full((output.numel() * world_size,), float(rank)))
    manager.wait()
    assert all(output.eq(total).all() for output in scattered)

    # Point-to-point, batched by torch and by the manager.
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    for batch in (True, False):
        got = torch.zeros(6)[::2]  # strided: received aside, put in place by wait()
        sent = torch.full((3,), float(rank))
        if batch:
            works = dist.batch_isend_irecv(
                [dist.P2POp(dist.irecv, got, left), dist.P2POp(dist.isend, sent, right)]
            )
            for work in works:
                work.wait()
        else:
            with dist._coalescing_manager(device=device, async_ops=True) as manager:
                dist.isend(sent, right)
                dist.irecv(got, left)
            manager.wait()
        assert got.eq(left).all()


@pytest.mark.parametrize("world_size", (2, 3))
def test_coalescing(world_size):
    run_ranks(coalesced, world_size)


def composed(rank, world_size):
    total = sum(range(1, world_size + 1))
    # reduce leaves the input of other ranks alone.
    tensor = torch.full((5,), rank + 1, dtype=torch.int64)
    dist.reduce(tensor, 1, op=dist.ReduceOp.AVG)
    assert tensor.eq(total // world_size if rank == 1 else rank + 1).all()
    # reduce_scatter of unequal pieces, 16 bits, rounded once.
    values = [1.0 / 3 + r for r in range(world_size)]
    expected = torch.tensor(values, dtype=torch.bfloat16).float().sum().bfloat16()
    pieces = [torch.full((r,), values[rank], dtype=torch.bfloat16) for r in range(1, world_size + 1)]
    output = torch.empty(rank + 1, dtype=torch.bfloat16)
    dist.reduce_scatter(output, pieces)
    assert output.eq(expected).all()
    # … which must be cut alike.
    sizes = [2, 1] + [1] * (world_size - 2) if rank == 0 else [1, 2] + [1] * (world_size - 2)
    with pytest.raises(dist.DistBackendError, match=f"list of sizes.*this rank: {sizes[0]}, {sizes[1]}"):
        dist.reduce_scatter(torch.empty(sizes[rank]), [torch.ones(n) for n in sizes])
    # all_to_all where a receiver expects something else.
    extra = 1 if rank == 0 else 0
    with pytest.raises(
        dist.DistBackendError, match="all_to_all.*rank 0 sends 3 elements to rank 1, which expects 2"
    ):
        dist.all_to_all(
            [torch.empty(2) for _ in range(world_size)],
            [torch.ones(2 + (extra if r == 1 else 0)) for r in range(world_size)],
        )
    # A sum with a factor per rank, and complex numbers.
    tensor = torch.ones(3)
    dist.all_reduce(tensor, dist._make_nccl_premul_sum(float(rank + 1)))
    assert tensor.eq(total).all()
    tensor = torch.full((3,), 1 + (rank + 1) * 1j)
    dist.all_reduce(tensor)
    assert tensor.eq(world_size + total * 1j).all()
    # From another thread's point of view and in inference mode.
    with torch.inference_mode():
        tensor = torch.ones(4, 4)[:, ::2]
    dist.all_reduce(tensor, async_op=True).wait()
    assert tensor.eq(world_size).all()
    assert fccl.backend_of().engine == "shared-memory"


@pytest.mark.parametrize("world_size", (2, 3))
def test_composed_collectives(world_size):
    run_ranks(composed, world_size)


def destroyed(rank, world_size):
    dist.barrier()
    backend = fccl.backend_of()
    group = dist.distributed_c10d._get_default_group()
    work = dist.all_reduce(torch.ones(3), async_op=True) if rank == 0 else None
    start = time.monotonic()
    if rank == 0:
        # A collective that nobody joins does not hold up the end.
        dist.destroy_process_group()
        assert time.monotonic() - start < 10
        with pytest.raises(dist.DistError):
            work.wait()
        with pytest.raises(dist.DistBackendError, match="destroyed"):
            group.barrier().wait()
    else:
        with pytest.raises(dist.DistError, match="rank 0"):
            time.sleep(4)
            dist.barrier()
            dist.barrier()
        dist.destroy_process_group()
    assert backend.engine == "shared-memory"


def test_destroy_with_a_pending_collective():
    run_ranks(destroyed, 2)


def aborted(rank, world_size):
    dist.barrier()
    backend = fccl.backend_of()
    if rank == 0:
        threading.Timer(0.5, backend.abort).start()
    with pytest.raises(dist.DistError, match="abort" if rank == 0 else "rank 0"):
        if rank == 0:
            dist.all_reduce(torch.ones(2))
        else:
            time.sleep(1.5)
            dist.all_reduce(torch.ones(2))
    with pytest.raises(dist.DistError):
        dist.barrier()


def test_abort_wakes_whoever_waits():
    run_ranks(aborted, 2)
