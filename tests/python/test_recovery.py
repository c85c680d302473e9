"""What goes wrong on one rank, or at an awkward moment, neither hangs nor miscounts, and leaves the group usable."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import fccl
from fccl_testing import ENGINE_ENV, run_ranks

# Longer than any test may take: what ends sooner was not ended by the group's timeout.
LONG = {"timeout": timedelta(seconds=30)}
engines = pytest.mark.parametrize("engine", ENGINE_ENV)


def right_sums(rank, world_size, times=3):
    for i in range(times):
        tensor = torch.full((5 + i,), float(rank + 1 + i))
        dist.all_reduce(tensor)
        assert tensor.eq(world_size * (world_size + 1) / 2 + world_size * i).all(), (i, tensor)


def wait_for(path, limit=20.0):
    """Until another rank has made the file."""
    deadline = time.monotonic() + limit
    while not os.path.exists(path):
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.01)


# ---- calls that one rank cannot make ----


@contextlib.contextmanager
def little_memory(megabytes):
    """At most so much new memory for this process."""
    with open("/proc/self/status") as file:
        (size,) = [int(line.split()[1]) for line in file if line.startswith("VmSize:")]
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, ((size + megabytes * 1024) * 1024, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def no_memory_for_the_copy(rank, world_size):
    right_sums(rank, world_size)
    tensor = torch.ones(8192, 8192).t()  # 256 MB, and as much again for a contiguous copy
    start = time.monotonic()
    if rank == 0:
        with little_memory(50), pytest.raises((RuntimeError, MemoryError), match="memory|alloc"):
            dist.all_reduce(tensor)
    else:
        with pytest.raises(dist.DistBackendError, match="rank 0"):
            dist.all_reduce(tensor)
    assert time.monotonic() - start < 10
    right_sums(rank, world_size)
    dist.all_reduce(tensor)
    assert tensor.eq(2).all(), "the call that failed has changed a tensor"
    right_sums(rank, world_size)


@pytest.mark.timeout(60)
@engines
def test_a_call_without_memory_for_its_copy_fails_on_every_rank(engine):
    run_ranks(no_memory_for_the_copy, 2, timeout=50, init_kwargs=LONG, env=ENGINE_ENV[engine])


def no_memory_for_delegated_copies(rank, world_size, engine):
    right_sums(rank, world_size)
    assert fccl.backend_of().engine == engine
    tensor = torch.ones(8192, 8192).t()  # strided: Gloo is given a copy of 256 MB
    into = [torch.zeros(8192, 8192) for _ in range(world_size)] if rank == 0 else None
    out = torch.zeros(8192, 8192)
    for call in (lambda: dist.gather(tensor, into), lambda: dist.all_to_all_single(out, tensor)):
        start = time.monotonic()
        if rank == 1:
            with little_memory(50), pytest.raises((RuntimeError, MemoryError), match="memory|alloc"):
                call()
        else:
            with pytest.raises(dist.DistBackendError, match="rank 1"):
                call()
        assert time.monotonic() - start < 10
        right_sums(rank, world_size)
        call()
        right_sums(rank, world_size)
    assert out.eq(1).all() and (into is None or all(each.eq(1).all() for each in into))


@pytest.mark.timeout(90)
@engines
def test_a_delegated_call_without_memory_fails_on_every_rank(engine):
    run_ranks(
        no_memory_for_delegated_copies,
        2,
        engine,
        timeout=80,
        init_kwargs=LONG,
        env=ENGINE_ENV[engine],
    )


def refused_long_before_the_peer_comes(rank, world_size, engine):
    right_sums(rank, world_size)
    assert fccl.backend_of().engine == engine
    if rank == 0:
        with pytest.raises(TypeError, match="band"):
            dist.all_reduce(torch.ones(3), dist.ReduceOp.BAND)
        time.sleep(4)
    else:
        time.sleep(4)  # longer than the group's timeout
        with pytest.raises(dist.DistBackendError, match="rank 0.*band"):
            dist.all_reduce(torch.ones(3))
    right_sums(rank, world_size)


@pytest.mark.timeout(40)
@engines
def test_a_refused_call_waits_for_late_peers(engine):
    run_ranks(
        refused_long_before_the_peer_comes,
        2,
        engine,
        timeout=30,
        init_kwargs={"timeout": timedelta(seconds=2)},
        env=ENGINE_ENV[engine],
    )


def no_thread_can_be_started():
    try:
        thread = threading.Thread(target=int)
        thread.start()
        thread.join()
    except RuntimeError:
        return True
    return False


def no_thread_for_the_worker(rank, world_size):
    right_sums(rank, world_size)
    tensors = [torch.full((n,), float(rank)) for n in (3, 100_000, 1)]
    if rank == 0:
        with little_memory(7):  # less than a thread's stack
            assert no_thread_can_be_started()
            works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
            assert all(work.is_completed() for work in works)
            values = [work.get_future().then(lambda future: future.value()[0].sum().item()) for work in works]
            assert [value.wait() for value in values] == [3, 100_000, 1]
            works = [dist.all_reduce(torch.ones(2), async_op=True)]
            assert works[0].wait(timedelta(seconds=5))  # a limit would be kept by the worker's help
    else:
        works = [dist.all_reduce(tensor, async_op=True) for tensor in [*tensors, torch.ones(2)]]
        for work in works:
            work.wait()
    assert all(tensor.eq(1).all() for tensor in tensors)
    right_sums(rank, world_size)
    work = dist.all_reduce(tensors[0], async_op=True)  # there are threads again
    work.wait()
    assert tensors[0].eq(2).all()


@pytest.mark.timeout(60)
def test_asynchronous_calls_without_a_thread_to_start():
    run_ranks(no_thread_for_the_worker, 2, timeout=50, init_kwargs=LONG)


def no_thread_for_the_callbacks(rank, world_size):
    right_sums(rank, world_size)
    dist.all_reduce(torch.ones(1), async_op=True).wait()  # the worker is there
    tensor = torch.full((3,), float(rank))
    if rank == 0:
        with little_memory(7):  # less than a thread's stack
            assert no_thread_can_be_started()
            work = dist.all_reduce(tensor, async_op=True)
            threads = work.get_future().then(
                lambda future: (future.value()[0].clone(), threading.get_ident())
            )
            assert not work.is_completed(), "rank 1 should be late"
            value, thread = threads.wait()
        assert value.eq(1).all() and thread != threading.get_ident()
    else:
        time.sleep(0.5)
        dist.all_reduce(tensor)
    right_sums(rank, world_size)


@pytest.mark.timeout(60)
def test_callbacks_without_a_thread_to_start():
    run_ranks(no_thread_for_the_callbacks, 2, timeout=50, init_kwargs=LONG)


# ---- memory that Gloo has been given ----


def aborted_inside_gloo(rank, world_size, folder):
    """Rank 0 gives up while Gloo is writing into buffers of fccl's, in the middle of a gather."""
    right_sums(rank, world_size)
    side = 9000
    tensor = torch.full((side, side), rank, dtype=torch.int8)  # contiguous: Gloo begins at once
    for _ in range(2):  # Gloo's first use of a connection is slow
        dist.gather(torch.ones(3), [torch.ones(3) for _ in range(world_size)] if rank == 0 else None)
    backend, inner_went_on = fccl.backend_of(), Path(folder, "rank 0 has given up")
    # Strided outputs: what Gloo writes to is fccl's own, and freed memory of this size is unmapped at once.
    outputs = (
        [torch.empty(side, side, dtype=torch.int8).t() for _ in range(world_size)] if rank == 0 else None
    )
    if rank == 0:
        work = dist.gather(tensor, outputs, async_op=True)
        time.sleep(0.02)
        backend.abort()
        with pytest.raises(RuntimeError):
            work.wait()
        del work, outputs
        inner_went_on.touch()
        time.sleep(1)  # Gloo's threads work on
    else:
        with contextlib.suppress(RuntimeError):
            dist.gather(tensor, None)
        wait_for(inner_went_on)
        time.sleep(1)


@pytest.mark.timeout(60)
def test_gloo_keeps_what_it_was_given(tmp_path):
    run_ranks(aborted_inside_gloo, 3, str(tmp_path), timeout=50, init_kwargs=LONG, env={"FCCL_SHM": "0"})


def many_refused(rank, world_size, refused_on, bursts):
    right_sums(rank, world_size)
    start = time.monotonic()
    for burst in bursts:
        for _ in range(burst):
            if rank in refused_on:
                with pytest.raises((TypeError, ValueError, RuntimeError), match="band"):
                    dist.all_reduce(torch.ones(3), dist.ReduceOp.BAND)
            else:
                with pytest.raises(dist.DistBackendError, match="rank 0"):
                    dist.all_reduce(torch.ones(3))
        right_sums(rank, world_size)
    assert time.monotonic() - start < 10


@pytest.mark.timeout(40)
@pytest.mark.parametrize("refused_on", [(0,), (0, 1)], ids=["one rank", "both ranks"])
@pytest.mark.parametrize("bursts", [(10, 10, 10, 10), (40,)], ids=["in bursts", "at once"])
@engines
def test_many_refused_calls_in_a_row(refused_on, bursts, engine):
    """A refused call returns without its peers, so that this rank runs ahead: none may be lost or repeated."""
    run_ranks(many_refused, 2, refused_on, bursts, timeout=30, env=ENGINE_ENV[engine])


# ---- signals ----


def terminated_while_waiting(rank, world_size, operation, folder):
    """The handler's collective comes after the one that the signal found under way."""

    def collective():
        tensor = torch.full((3,), 10.0 + rank)
        if operation == "broadcast":
            dist.broadcast(tensor, src=0)
            return tensor.eq(10).all().item()
        dist.all_reduce(tensor)
        return tensor.eq(21).all().item()

    right_sums(rank, world_size)
    joins = Path(folder, "rank 1 joins")
    if rank == 1:
        time.sleep(1)
        joins.touch()
        right_sums(rank, world_size, times=1)
        assert collective()
    else:
        handled = []

        def handler(number, frame):
            handled.append((number, joins.exists(), collective()))

        signal.signal(signal.SIGTERM, handler)
        timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM))
        timer.start()
        right_sums(rank, world_size, times=1)
        timer.join()
        assert handled == [(signal.SIGTERM, True, True)]
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    right_sums(rank, world_size)


@pytest.mark.timeout(40)
@pytest.mark.parametrize("operation", ["broadcast", "all_reduce"])
def test_a_handler_may_issue_a_collective(operation, tmp_path):
    run_ranks(terminated_while_waiting, 2, operation, str(tmp_path), timeout=30)


# ---- abort, destruction, exit ----


def abort():
    start = time.monotonic()
    timer = threading.Timer(0.5, fccl.backend_of().abort)
    timer.start()
    with pytest.raises(RuntimeError):
        dist.all_reduce(torch.ones(3))
    assert 0.4 < time.monotonic() - start < 3
    timer.join()


def destroy():
    work = dist.all_reduce(torch.ones(3), async_op=True)
    start = time.monotonic()
    dist.destroy_process_group()
    with pytest.raises(RuntimeError):
        work.wait()
    assert time.monotonic() - start < 10


def refuse_then_destroy():
    work = dist.all_reduce(torch.ones(3), async_op=True)
    with pytest.raises(TypeError, match="band"):
        dist.all_reduce(torch.ones(3), dist.ReduceOp.BAND)
    dist.destroy_process_group()
    with pytest.raises(RuntimeError):
        work.wait()


def interrupt():
    """The thread waits for its second work by making the first: Ctrl-C is for the thread, not for a work."""
    works = [dist.all_reduce(torch.ones(3), async_op=True) for _ in range(2)]
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        works[1].wait()
    timer.join()


def gives_up(rank, world_size, engine, folder, how):
    """Rank 0 ends a collective that rank 1 never makes."""
    right_sums(rank, world_size)
    assert fccl.backend_of().engine == engine
    done = Path(folder, "done")
    if rank == 1:
        wait_for(done)
        return
    try:
        how()
    finally:
        done.touch()


@pytest.mark.timeout(50)
@engines
@pytest.mark.parametrize("how", [abort, destroy, refuse_then_destroy, interrupt])
def test_a_waiting_call_can_be_ended(engine, how, tmp_path):
    run_ranks(
        gives_up,
        2,
        engine,
        str(tmp_path),
        how,
        timeout=40,
        init_kwargs=LONG,
        env=ENGINE_ENV[engine],
        full_exit=True,
    )


def thread_count():
    return len(os.listdir("/proc/self/task"))


def destroyed_groups_leave_nothing(rank, world_size, folder):
    before = thread_count()
    for i in range(3):
        dist.init_process_group("fccl", init_method=f"file://{folder}/{i}", rank=rank, world_size=world_size)
        group = dist.new_group([0, 1])
        if i != 1:  # also groups that were never used, which have none
            right_sums(rank, world_size)
            dist.all_reduce(torch.ones(3), async_op=True, group=group).wait()
            received = torch.zeros(3)
            work = dist.irecv(received, 1 - rank)
            dist.send(torch.ones(3), 1 - rank)
            work.wait()
            dist.all_reduce(torch.ones(3).to_sparse())  # Gloo's
        assert (thread_count() > before) == (i != 1)
        dist.destroy_process_group(group)
        del group
        dist.destroy_process_group()
        assert thread_count() == before


@pytest.mark.timeout(40)
def test_destroyed_groups_leave_no_threads(tmp_path):
    run_ranks(destroyed_groups_leave_nothing, 2, str(tmp_path), backend=None, timeout=30, full_exit=True)


def slow_callback(future):
    time.sleep(0.2)
    return future.value()[0] * 2


def ends_during_callbacks(rank, world_size, destroy):
    right_sums(rank, world_size)
    time.sleep(0.1 * rank)  # so that rank 0's callbacks run when its main thread is done
    for _ in range(3):
        dist.all_reduce(torch.ones(10), async_op=True).get_future().then(slow_callback)
    if not destroy:
        dist.destroy_process_group = lambda *a, **k: None  # the program just ends


@pytest.mark.timeout(40)
@pytest.mark.parametrize("destroy", [False, True], ids=["just ends", "destroys"])
def test_end_while_python_callbacks_run(destroy):
    """Threads that want the GIL of an interpreter that is gone would end the process with an abort."""
    run_ranks(ends_during_callbacks, 2, destroy, timeout=30, full_exit=True)


# ---- fork ----


def error_in_a_forked_child(call):
    """What a call says in a child of this process."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            call()
            text = "no error"
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writing, text.encode())
        os._exit(0)
    os.close(writing)
    try:
        ready, _, _ = select.select([reading], [], [], 5)
        return os.read(reading, 65536).decode() if ready else "the child hangs"
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(reading)


def forked(rank, world_size):
    right_sums(rank, world_size)
    for call in (
        lambda: dist.all_reduce(torch.ones(3)),
        lambda: dist.send(torch.ones(3), 1 - rank),
        lambda: dist.recv(torch.ones(3), 1 - rank),
    ):
        text = error_in_a_forked_child(call)
        assert "DistBackendError" in text and "fork" in text, text
    right_sums(rank, world_size)


@pytest.mark.timeout(40)
def test_forked_child():
    run_ranks(forked, 2, timeout=30)


def forked_by_another_thread(rank, world_size, folder):
    right_sums(rank, world_size)
    joins = Path(folder, "rank 1 joins")
    if rank == 1:
        wait_for(joins)
        right_sums(rank, world_size)
        return
    texts = []

    def fork_and_listen():
        time.sleep(0.3)  # the main thread waits in its collective by now
        try:
            texts.append(error_in_a_forked_child(lambda: dist.all_reduce(torch.ones(3))))
        finally:
            joins.touch()

    thread = threading.Thread(target=fork_and_listen)
    thread.start()
    right_sums(rank, world_size)
    thread.join()
    (text,) = texts
    assert "fork" in text, text


@pytest.mark.timeout(40)
def test_child_forked_during_a_collective(tmp_path):
    run_ranks(forked_by_another_thread, 2, str(tmp_path), timeout=30)
