"""send and recv: what they carry, in any order, beside collectives, and what happens when it goes wrong."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import fccl
from fccl_testing import ENGINE_ENV, run_ranks

engines = pytest.mark.parametrize("engine", ENGINE_ENV)
LARGE = 300_001  # elements of a message that does not travel with its announcement

DTYPES = [
    torch.float64,
    torch.bfloat16,
    torch.int16,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
]


def message(seed, count, dtype=torch.float32):
    numbers = (torch.arange(count) + seed) % 97
    return numbers.to(dtype) if dtype != torch.float8_e4m3fn else (numbers % 8).to(torch.float32).to(dtype)


def same(a, b):
    return a.dtype == b.dtype and a.contiguous().view(torch.uint8).equal(b.contiguous().view(torch.uint8))


def carried(rank, world_size, engine):
    """The group's first operation, and one rank has no part in it."""
    if rank == 2:
        return
    other = 1 - rank
    for dtype in DTYPES:
        for count in (0, 1, 777, LARGE):
            got = torch.zeros(count, dtype=dtype)
            if rank == 0:
                dist.send(message(3, count, dtype), other)
                dist.recv(got, other)
                assert same(got, message(4, count, dtype)), (dtype, count)
            else:
                dist.recv(got, other)
                assert same(got, message(3, count, dtype)), (dtype, count)
                dist.send(message(4, count, dtype), other)
    assert fccl.backend_of().engine == engine
    # Strided on both sides, a view of the same number of elements, and in inference mode.
    out = torch.arange(24.0).view(4, 6)
    got = torch.zeros(6, 4)
    with torch.inference_mode():
        if rank == 0:
            dist.send(out.t(), other)
        else:
            dist.recv(got, other)
            assert got.equal(out.t().contiguous())
            got = torch.zeros(8, 6)[::2, ::2].t()
            work = dist.irecv(got[:, :], other, tag=4)
            work.wait()
            assert got.contiguous().view(-1).equal(torch.arange(12.0))
    if rank == 0:
        dist.send(torch.arange(12.0), other, tag=4)


@engines
def test_what_is_carried(engine):
    run_ranks(carried, 3, engine, env=ENGINE_ENV[engine])


def in_any_order(rank, world_size):
    """Everybody to everybody, posted in different orders, beside collectives that run meanwhile."""
    sizes = [5, LARGE, 4097, 1, 70_000]
    plan = [(peer, tag) for peer in range(world_size) if peer != rank for tag in range(len(sizes))]
    shuffle = torch.Generator().manual_seed(rank)
    order = [plan[i] for i in torch.randperm(len(plan), generator=shuffle)]
    got = {key: torch.zeros(sizes[key[1]]) for key in plan}
    works = [dist.irecv(got[peer, tag], peer, tag=tag) for peer, tag in order[::2]]
    gradients = torch.ones(200_000)
    reducing = dist.all_reduce(gradients, async_op=True)
    for peer, tag in reversed(order):
        works.append(dist.isend(message(rank + 10 * tag, sizes[tag]), peer, tag=tag))
    dist.barrier()
    works += [dist.irecv(got[peer, tag], peer, tag=tag) for peer, tag in order[1::2]]
    reducing.wait()
    assert gradients.eq(world_size).all()
    for work in works:
        work.wait()
    for (peer, tag), tensor in got.items():
        assert tensor.equal(message(peer + 10 * tag, sizes[tag])), (peer, tag)
    # The senders of messages from anywhere, and their order.
    if rank == 0:
        seen = {}
        for _ in range(3 * (world_size - 1)):
            tensor = torch.zeros(1)
            source = dist.recv(tensor)
            assert tensor.item() == 10 * source + seen.get(source, 0)
            seen[source] = seen.get(source, 0) + 1
        assert seen == dict.fromkeys(range(1, world_size), 3)
    else:
        for i in range(3):
            dist.send(torch.tensor([10.0 * rank + i]), 0)
    objects = [{"rank": rank}, "x" * 50_000]
    if rank == 0:
        dist.send_object_list(objects, dst=1)
    elif rank == 1:
        received = [None, None]
        dist.recv_object_list(received, src=0)
        assert received == [{"rank": 0}, "x" * 50_000]


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_in_any_order(world_size):
    run_ranks(in_any_order, world_size)


def works(rank, world_size):
    if rank == 0:
        time.sleep(0.2)
        for tag in range(3):
            dist.send(message(tag, LARGE), 1, tag=tag)
        work = dist.isend(torch.ones(3), 1, tag=9)
        work.wait()
        assert work.is_completed() and work.is_success()
        return
    got = [torch.zeros(LARGE, 2)[:, 0] for _ in range(3)]
    pending = [dist.irecv(tensor, 0, tag=tag) for tag, tensor in enumerate(got)]
    assert not pending[0].is_completed()
    deadline = time.monotonic() + 10
    while not pending[0].is_completed() and time.monotonic() < deadline:
        pass
    assert pending[0].is_completed() and got[0].equal(message(0, LARGE))
    total = pending[1].get_future().then(lambda future: future.value()[0].sum().item())
    assert total.wait() == message(1, LARGE).sum().item()
    pending[2].wait()
    assert pending[2].result()[0].equal(message(2, LARGE)) and pending[2].source_rank() == 0
    tensor = torch.zeros(3)
    work = fccl.backend_of().recv_anysource([tensor], 9)
    work.wait()
    assert tensor.eq(1).all() and work.source_rank() == 0


def test_works():
    run_ranks(works, 2)


def shared_memory(rank, world_size):
    tensor = fccl.empty(LARGE)
    before = fccl.backend_of().zero_copy_count
    if rank == 0:
        dist.send(tensor.copy_(message(1, LARGE)), 1)
        tensor.fill_(-1)  # it is the sender's again
        dist.send(tensor[: LARGE // 2], 1)
    else:
        got = torch.zeros(LARGE)
        dist.recv(got, 0)
        assert got.equal(message(1, LARGE))
        dist.recv(tensor[: LARGE // 2], 0)
        assert tensor[: LARGE // 2].eq(-1).all()
    assert fccl.backend_of().zero_copy_count == before + 2


def test_from_shared_memory_without_copies():
    run_ranks(shared_memory, 2)


# ---- when it goes wrong ----


def misfits(rank, world_size):
    with pytest.raises(ValueError, match="the peer is rank 5, expected another rank of the group's 2"):
        fccl.backend_of().send([torch.ones(1)], 5, 0)
    for call in (dist.send, dist.isend, dist.irecv):
        with pytest.raises(ValueError, match="rank -1"):
            call(torch.ones(1), -1)
    with pytest.raises(ValueError, match="expected a dense"):
        fccl.backend_of().send([torch.ones(2, 2).to_sparse()], 1 - rank, 0)
    with pytest.raises(ValueError, match="share memory"):
        dist.recv(torch.ones(1).expand(4), 1 - rank)
    for count in (3, LARGE):
        if rank == 0:
            work = dist.isend(torch.ones(count), 1)
            if count == LARGE:
                with pytest.raises(
                    dist.DistBackendError, match=f"send.*rank 1 receives {count} elements of int32"
                ):
                    work.wait()
        else:
            with pytest.raises(
                dist.DistBackendError,
                match=rf"recv\(int32, count={count}, tag=0\) from rank 0.*rank 0 sent {count} elements of float32"
                ".*usable; send and receive tensors of one dtype and size",
            ):
                dist.recv(torch.ones(count, dtype=torch.int32), 0)
        tensor = torch.full((3,), float(rank))
        dist.all_reduce(tensor)
        assert tensor.eq(1).all()


def test_misfits():
    run_ranks(misfits, 2)


def patience(rank, world_size):
    if rank == 0:
        work = dist.irecv(torch.zeros(5), 1, tag=2)
        with pytest.raises(
            dist.DistBackendError, match=r"recv.*rank 1.*no message has come within 100 ms.*waited for again"
        ):
            work.wait(timedelta(milliseconds=100))
        # The group's time, and what has come instead.
        kept = torch.zeros(5)
        words = "within 1000 ms; the group stays usable.*rank 1 has sent tag 7.*has been given up"
        with pytest.raises(dist.DistBackendError, match=words):
            dist.recv(kept, 1, tag=3)
        dist.barrier()
        work.wait()
        dist.recv(torch.zeros(1), 1, tag=7)
        # The message that came too late is the next receive's.
        tensor = torch.zeros(5)
        dist.recv(tensor, 1, tag=3)
        assert tensor.eq(3).all() and kept.eq(0).all()
    else:
        dist.send(torch.ones(1), 0, tag=7)
        time.sleep(1.5)
        dist.barrier()
        dist.send(torch.ones(5), 0, tag=2)
        dist.send(torch.full((5,), 3.0), 0, tag=3)


def test_a_wait_that_is_over_loses_nothing():
    run_ranks(patience, 2, init_kwargs={"timeout": timedelta(seconds=1)})


def interrupted(rank, world_size):
    tensor = torch.zeros(LARGE)
    if rank == 0:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        work = dist.irecv(tensor, 1)
        start = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            work.wait()
        assert time.monotonic() - start < 5
        with pytest.raises(dist.DistBackendError, match="was given up"):
            work.wait()
        dist.barrier()  # the group is usable
        dist.recv(tensor, 1)
        assert tensor.eq(1).all()
    else:
        dist.barrier()
        dist.send(torch.ones(LARGE), 0)


def test_ctrl_c_ends_a_wait():
    run_ranks(interrupted, 2)


def gone(rank, world_size, how):
    if rank == 1:
        time.sleep(0.3)
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        dist.destroy_process_group()
        return
    words = "process of rank 1 ended" if how == "killed" else "rank 1 has left the group"
    words += (
        rf".*It is needed here for {'send' if rank else 'recv'}\(float32, count=\d+, tag=0\) (to|from) rank 1"
    )
    start = time.monotonic()
    calls = [lambda: dist.recv(torch.zeros(3), 1), lambda: dist.send(fccl.zeros(LARGE), 1)]
    with pytest.raises(dist.DistNetworkError, match=words):
        calls[rank // 2]()
    assert time.monotonic() - start < 5
    with pytest.raises(dist.DistNetworkError):  # failed for good
        dist.all_reduce(torch.ones(1))
    with contextlib.suppress(dist.DistError):
        dist.barrier()


@pytest.mark.parametrize("how", ["killed", "destroyed"])
def test_a_peer_that_is_gone(how):
    run_ranks(gone, 3, how, expect_exit={1: -9} if how == "killed" else None)


def left_behind(rank, world_size):
    """A rank sends, does not wait, and leaves: what it sent arrives."""
    if rank == 0:
        dist.isend(message(1, LARGE), 1)
        dist.isend(message(2, 10), 1, tag=1)
        dist.destroy_process_group()
        return
    time.sleep(0.5)
    small, large = torch.zeros(10), torch.zeros(LARGE)
    dist.recv(small, 0, tag=1)
    dist.recv(large, 0)
    assert small.equal(message(2, 10)) and large.equal(message(1, LARGE))


def test_what_was_sent_before_leaving_arrives():
    run_ranks(left_behind, 2)


def flooded(rank, world_size):
    """Messages that nobody asks for are kept up to a limit; beyond that their senders wait."""
    count, numbers = 400, 4000  # 16 kB each
    if rank == 0:
        works = [dist.isend(message(i, numbers), 1, tag=1) for i in range(count)]
        time.sleep(1)
        completed = sum(work.is_completed() for work in works)
        assert 4 <= completed < 150, completed
        dist.barrier()
        for work in works:
            work.wait()
        dist.send(torch.zeros(1), 1, tag=99)
    else:
        control = dist.irecv(torch.zeros(1), 0, tag=99)  # has messages looked at
        dist.barrier()
        for i in range(count):
            tensor = torch.zeros(numbers)
            dist.recv(tensor, 0, tag=1)
            assert tensor.equal(message(i, numbers)), i
        control.wait()


def test_a_flood_is_held_back():
    run_ranks(flooded, 2)


def forked(rank, world_size):
    """A child has no business with its parent's messages."""
    tensor = torch.zeros(LARGE)
    work = dist.irecv(tensor, 1 - rank)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            for call in (work.is_completed, work.wait, lambda: dist.send(torch.ones(3), 1 - rank)):
                with pytest.raises(dist.DistBackendError, match="fork"):
                    call()
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    dist.barrier()
    dist.isend(message(rank, LARGE), 1 - rank)
    work.wait()
    assert tensor.equal(message(1 - rank, LARGE))
    dist.barrier()


def test_a_forked_child_leaves_messages_alone():
    run_ranks(forked, 2)


# ---- what it does without ----


def thread_names():
    names = []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/comm") as file:
            names.append(file.read().strip())
    return names


def without_gloo(rank, world_size):
    other = 1 - rank
    tensor = torch.zeros(3)
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.irecv, tensor, other), dist.P2POp(dist.isend, torch.ones(3), other)]
    ):
        work.wait()
    dist.all_reduce(tensor)
    dist.all_to_all_single(torch.zeros(4), torch.ones(4))
    dist.group.WORLD.monitored_barrier(timedelta(seconds=20))
    dist.all_reduce(torch.ones(3).to_sparse())
    return [name for name in thread_names() if "gloo" in name]


def test_there_is_no_gloo_where_memory_is_shared():
    assert run_ranks(without_gloo, 2) == [[], []]
    assert all(run_ranks(without_gloo, 2, env={"FCCL_SHM": "0"})), "the name of its threads has changed"
