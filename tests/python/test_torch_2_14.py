"""What torch has had since 2.14: abort hooks, gather_single, groups that may be reconfigured."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import fccl
from collective_cases import REFUSED
from fccl_testing import run_ranks

pytestmark = pytest.mark.skipif(
    not hasattr(dist.ProcessGroup, "register_abort_hook"), reason="this torch has no such interfaces"
)

QUICK = {"timeout": timedelta(seconds=1)}


def hooks_at_a_timeout(rank, world_size):
    group, called = dist.group.WORLD, []
    backend = fccl.backend_of()
    # Since 2.15 torch's own hooks ask first.
    assert getattr(backend, "supports_abort_hooks", True), "registered nowhere"
    group.register_abort_hook(1, lambda: called.append("first"))
    group.register_abort_hook(2, lambda: 1 / 0)  # a warning, no more
    group.register_abort_hook(3, lambda: called.append("third"))
    group.register_abort_hook(4, lambda: called.append("fourth"))
    group.unregister_abort_hook(3)
    dist.all_reduce(torch.ones(1))
    assert called == []
    if rank == 1:
        time.sleep(2.5)
        return
    with pytest.raises(dist.DistBackendError, match="timed out after 1000 ms"):
        dist.all_reduce(torch.ones(1))
    assert called == ["first", "fourth"]  # before the error was seen
    with pytest.raises(dist.DistBackendError):
        dist.all_reduce(torch.ones(1))
    assert called == ["first", "fourth"], "once for a group"


def test_abort_hooks_run_when_a_call_times_out():
    run_ranks(hooks_at_a_timeout, 2, init_kwargs=QUICK)


def hooks_at_a_death(rank, world_size):
    called = []
    pending = dist.irecv(torch.ones(1), 1, tag=3) if rank == 0 else None

    def hook():
        # What a user may do in it: look at what is under way, and let another thread use the group.
        called.append(pending.is_completed())
        thread = threading.Thread(target=lambda: called.append(fccl.backend_of().engine))
        thread.start()
        thread.join()
        dist.group.WORLD.unregister_abort_hook(7)

    dist.group.WORLD.register_abort_hook(7, hook)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError, match="process of rank 1 ended"):
        dist.recv(torch.ones(1), 1)
    deadline = time.monotonic() + 5  # another thread may have noticed first
    while len(called) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert called == [True, "shared-memory"]


def test_abort_hooks_run_when_a_peer_dies():
    run_ranks(hooks_at_a_death, 2, expect_exit={1: -9})


def hooks_at_abort(rank, world_size):
    called = []
    dist.group.WORLD.register_abort_hook(1, lambda: called.append(1))
    dist.distributed_c10d._abort_process_group()
    assert called == [1]


@pytest.mark.parametrize("world_size", (1, 2))
def test_abort_hooks_run_at_an_abort(world_size):
    run_ranks(hooks_at_abort, world_size)


def hooks_around_calls(rank, world_size):
    group = dist.group.WORLD
    seen: list = []
    group.register_pre_hook(1, lambda args: seen.append((args.name, args.root, len(args.input_tensors))))
    group.register_post_hook(1, lambda args: seen.append(args.name))
    calls = (
        (dist.all_reduce, fccl.all_reduce, (torch.ones(2),), {}),
        (dist.broadcast, fccl.broadcast, (torch.ones(2),), {"src": 1}),
        (
            dist.all_gather_single,
            fccl.all_gather_into_tensor,
            (torch.ones(2 * world_size), torch.ones(2)),
            {},
        ),
        (dist.barrier, fccl.barrier, (), {}),
    )
    for through_torch, direct, arguments, options in calls:
        noted = []
        for call in (through_torch, direct):
            seen.clear()
            call(*arguments, **options)
            noted.append(list(seen))
        assert noted[0] == noted[1] and len(noted[0]) == 2, noted
    group.unregister_pre_hook(1)
    group.unregister_post_hook(1)


def test_hooks_around_calls_see_direct_ones(rank_pool):
    rank_pool(2).run(hooks_around_calls)


def gathers(rank, world_size):
    for root in range(world_size):
        for count, dtype in ((3, torch.float32), (100_001, torch.bfloat16)):
            tensor = torch.full((count,), float(rank + 1), dtype=dtype)
            output = torch.empty(world_size * count, dtype=dtype) if rank == root else None
            work = dist.gather_single(tensor, output, dst=root, async_op=True)
            work.wait()
            if output is not None:
                expected = torch.arange(1, world_size + 1).repeat_interleave(count).to(dtype)
                assert output.equal(expected)
    # A strided output, and an input that lies within it.
    wide = torch.zeros(world_size * 4, 2)
    dist.gather_single(torch.full((4,), float(rank)), wide[:, 0] if rank == 0 else None, dst=0)
    if rank == 0:
        assert (
            wide[:, 0].equal(torch.arange(world_size).repeat_interleave(4).float()) and wide[:, 1].eq(0).all()
        )
    whole = torch.full((world_size * 2,), float(rank))
    dist.gather_single(whole[1:3], whole if rank == 0 else None, dst=0)
    if rank == 0:
        assert whole.equal(torch.arange(world_size).repeat_interleave(2).float())
    with pytest.raises(REFUSED):
        dist.gather_single(torch.ones(3), torch.empty(3) if rank == 0 else None, dst=0)
    dist.barrier()


def test_gather_single(rank_pool):
    rank_pool(2).run(gathers)
    rank_pool(3).run(gathers)


def test_reconfigurable_groups_are_refused(tmp_path):
    class Options:
        group_rank, group_size, group_id, enable_reconfigure = 0, 1, "g", True
        timeout, global_ranks_in_group = None, (0,)

    from fccl import _registration

    with pytest.raises(NotImplementedError, match="cannot be reconfigured"):
        _registration.create_backend(Options())
    assert fccl.is_available()
