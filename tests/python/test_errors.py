"""docs/errors.md: which exception, on which ranks, with what message, and whether the group goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from fccl_testing import ENGINE_ENV, run_ranks

SHORT = {"timeout": timedelta(seconds=2)}
engines = pytest.mark.parametrize("engine", ENGINE_ENV)


def still_works(rank, world_size):
    tensor = torch.full((4,), float(rank + 1))
    dist.all_reduce(tensor)
    assert tensor.eq(world_size * (world_size + 1) / 2).all(), tensor


def message_of(kind, call):
    """The text of the exception that ``call`` raises, which must be of ``kind``."""
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def expect_failed(kind, *words):
    """The group has failed: the same error at once, for any collective."""
    texts = []
    for call in (lambda: dist.all_reduce(torch.ones(3)), dist.barrier):
        start = time.monotonic()
        texts.append(message_of(kind, call))
        assert time.monotonic() - start < 0.5, "a failed group must answer at once"
    for word in words:
        assert word in texts[0], texts[0]


# ---- calls that do not fit ----


def mismatches(rank, world_size):
    last = rank == world_size - 1
    pairs = {
        "dtype": (
            lambda: dist.all_reduce(torch.ones(4)),
            lambda: dist.all_reduce(torch.ones(4, dtype=torch.int32)),
            ("float32", "int32"),
        ),
        "count": (
            lambda: dist.all_reduce(torch.ones(4)),
            lambda: dist.all_reduce(torch.ones(5)),
            ("count=4", "count=5"),
        ),
        "large count": (
            lambda: dist.all_reduce(torch.ones(400_000)),
            lambda: dist.all_reduce(torch.ones(3)),
            ("count=400000", "count=3"),
        ),
        "op": (
            lambda: dist.all_reduce(torch.ones(4)),
            lambda: dist.all_reduce(torch.ones(4), dist.ReduceOp.MAX),
            ("op=sum", "op=max"),
        ),
        "operation": (
            lambda: dist.all_reduce(torch.ones(4)),
            lambda: dist.broadcast(torch.ones(4), src=0),
            ("all_reduce", "broadcast"),
        ),
        "root": (
            lambda: dist.broadcast(torch.ones(4), src=0),
            lambda: dist.broadcast(torch.ones(4), src=1),
            ("root=0", "root=1"),
        ),
        "barrier": (
            dist.barrier,
            lambda: dist.all_reduce(torch.ones(4)),
            ("barrier", "all_reduce"),
        ),
        "sizes": (
            lambda: dist.all_gather_into_tensor(torch.ones(3 * world_size), torch.ones(3)),
            lambda: dist.all_gather_into_tensor(torch.ones(4 * world_size), torch.ones(4)),
            ("all_gather", "3", "4"),
        ),
        "delegated": (
            lambda: dist.reduce(torch.ones(4), dst=0),
            lambda: dist.all_reduce(torch.ones(4)),
            ("reduce", "all_reduce"),
        ),
        "sparse shape": (
            lambda: dist.all_reduce(torch.ones(4, 3).to_sparse()),
            lambda: dist.all_reduce(torch.ones(3, 4).to_sparse()),
            ("sparse", "sizes"),
        ),
        "delegated root": (
            lambda: dist.scatter(torch.ones(2), [torch.ones(2)] * world_size if rank == 0 else None, src=0),
            lambda: dist.gather(torch.ones(2), [torch.ones(2)] * world_size if rank == 0 else None, dst=0),
            ("scatter", "gather"),
        ),
    }
    for name, (common, other, words) in pairs.items():
        text = message_of(dist.DistBackendError, other if last else common)
        for word in (*words, f"rank {world_size - 1}"):
            assert word in text, f"{name}: {word!r} is not in {text!r}"
        still_works(rank, world_size)
    # Asynchronous, several in flight: only the one that does not fit fails.
    works = [dist.all_reduce(torch.ones(4 + (i == 1 and last)), async_op=True) for i in range(3)]
    works[0].wait()
    with pytest.raises(dist.DistBackendError):
        works[1].wait()
    works[2].wait()
    still_works(rank, world_size)


@pytest.mark.parametrize("world_size", (2, 3, 4))
@engines
def test_mismatches_raise_everywhere_and_leave_the_group_usable(world_size, engine):
    run_ranks(mismatches, world_size, env=ENGINE_ENV[engine])


def one_rank_is_refused(rank, world_size):
    if rank == 0:
        text = message_of(
            (TypeError, ValueError, RuntimeError), lambda: dist.all_reduce(torch.ones(3), dist.ReduceOp.BOR)
        )
        assert "bor" in text and "float32" in text and "rank 0" in text, text
    else:
        text = message_of(dist.DistBackendError, lambda: dist.all_reduce(torch.ones(3)))
        assert "rejected" in text and "rank 0" in text and "bor" in text, text
    still_works(rank, world_size)


@pytest.mark.parametrize("world_size", (2, 3))
@engines
def test_a_call_refused_on_one_rank_reaches_its_peers(world_size, engine):
    run_ranks(one_rank_is_refused, world_size, env=ENGINE_ENV[engine])


# ---- time ----


def one_does_not_come(rank, world_size):
    still_works(rank, world_size)
    if rank == 1:
        time.sleep(4)
        expect_failed((dist.DistNetworkError, dist.DistBackendError), "rank 0")
        return
    start = time.monotonic()
    text = message_of(dist.DistBackendError, lambda: dist.all_reduce(torch.ones(3)))
    assert 1.8 < time.monotonic() - start < 3.5
    for word in ("timed out", "rank 1", "all_reduce", "#2"):
        assert word in text, text
    expect_failed(dist.DistBackendError, "timed out")


def test_time_out_names_who_has_not_come():
    run_ranks(one_does_not_come, 2, init_kwargs=SHORT)


def first_collective(rank, world_size):
    if rank == 2:
        time.sleep(3.5)
        return
    text = message_of(dist.DistError, lambda: dist.all_reduce(torch.ones(3)))
    assert "rank 2" in text and "timed out" in text, text


def test_time_out_in_the_first_collective():
    run_ranks(first_collective, 3, init_kwargs=SHORT)


def one_is_gone_before_the_first_collective(rank, world_size, how, group_of):
    group = dist.new_group([0, 1]) if group_of == "two" else None
    if rank == 1:
        if how == "exit":
            os._exit(5)
        dist.destroy_process_group(group)
        return
    if rank == 0:
        start = time.monotonic()
        text = message_of(dist.DistNetworkError, lambda: dist.all_reduce(torch.ones(3), group=group))
        assert "rank 1" in text, text
        assert ("ended without" if how == "exit" else "has left the group: it was destroyed") in text, text
        assert time.monotonic() - start < 5


@pytest.mark.parametrize("group_of", ["all", "two"])
@pytest.mark.parametrize("how", ["exit", "destroy"])
def test_a_rank_that_is_gone_before_the_first_collective(how, group_of):
    run_ranks(
        one_is_gone_before_the_first_collective,
        2 if group_of == "all" else 3,
        how,
        group_of,
        expect_exit={1: 5} if how == "exit" else None,
    )


def wait_with_a_limit(rank, world_size):
    still_works(rank, world_size)
    if rank == 1:
        time.sleep(1)
    tensor = torch.full((3,), float(rank))
    work = dist.all_reduce(tensor, async_op=True)
    if rank == 0:
        with pytest.raises(dist.DistBackendError):
            work.wait(timedelta(milliseconds=200))
        assert not work.is_completed()
    work.wait()
    assert tensor.eq(1).all()
    still_works(rank, world_size)


def test_expiry_of_wait_is_not_sticky():
    run_ranks(wait_with_a_limit, 2)


# ---- death and departure ----


def one_dies(rank, world_size, how):
    still_works(rank, world_size)
    if rank == 1:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(5)
    start = time.monotonic()
    text = message_of(dist.DistNetworkError, lambda: dist.all_reduce(torch.ones(3)))
    assert "rank 1" in text, text
    assert time.monotonic() - start < 2
    expect_failed(dist.DistNetworkError, "rank 1")


@pytest.mark.parametrize(("how", "code"), [("kill", -9), ("exit", 5)])
@pytest.mark.parametrize("world_size", (2, 3))
def test_death_of_a_peer(world_size, how, code):
    run_ranks(one_dies, world_size, how, expect_exit={1: code}, full_exit=True)


def dies_within(rank, world_size):
    """Killed in the middle of large collectives, with asynchronous ones pending."""
    still_works(rank, world_size)
    if rank == 1:
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    tensor = torch.ones(4_000_000)
    with pytest.raises(dist.DistNetworkError, match="rank 1"):
        for _ in range(10_000):
            works = [dist.all_reduce(tensor, dist.ReduceOp.MAX, async_op=True) for _ in range(3)]
            for work in works:
                work.wait()
    expect_failed(dist.DistNetworkError, "rank 1")


def test_death_in_the_middle():
    run_ranks(dies_within, 2, expect_exit={1: -9}, full_exit=True)


PROGRAM = """
import sys, time, torch, torch.distributed as dist
rank, store, how = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("fccl", init_method=f"file://{store}", rank=rank, world_size=2)
dist.barrier()
if rank == 1:
    if how == "raise":
        raise ValueError("the data are gone")
    sys.exit(0)
try:
    dist.all_reduce(torch.ones(3))
except dist.DistNetworkError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("how", "why"),
    [("raise", "its program ended with ValueError: the data are gone"), ("exit", "its program has ended")],
)
def test_peers_learn_how_a_program_ended(how, why, tmp_path):
    programs = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(tmp_path / "store"), how],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        (said, _), (_, trace) = (program.communicate(timeout=60) for program in programs)
    finally:
        for program in programs:
            program.kill()
    assert f"rank 1 has left the group: {why}" in said, said
    assert ("ValueError" in trace) == (how == "raise")


def one_leaves(rank, world_size):
    still_works(rank, world_size)
    if rank == 1:
        dist.destroy_process_group()
        return
    start = time.monotonic()
    text = message_of(dist.DistNetworkError, lambda: dist.all_reduce(torch.ones(3)))
    assert "rank 1" in text and time.monotonic() - start < 6, text


def test_departure_of_a_peer():
    run_ranks(one_leaves, 2, full_exit=True)


def done_before_leaving(rank, world_size):
    """A peer that did its part and then leaves, or dies, is not missed."""
    if rank == 0:
        time.sleep(0.3)
    tensor = torch.ones(1000)
    dist.all_reduce(tensor)
    assert tensor.eq(2).all()


def test_a_peer_may_leave_after_its_part():
    run_ranks(done_before_leaving, 2, full_exit=True)


# ---- interruption ----


def interrupted(rank, world_size):
    still_works(rank, world_size)
    if rank == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may start jobs without it
        threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        start = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            dist.all_reduce(torch.ones(3))
        assert time.monotonic() - start < 2
    else:
        time.sleep(1.5)
        text = message_of(
            (dist.DistNetworkError, dist.DistBackendError), lambda: dist.all_reduce(torch.ones(3))
        )
        assert "rank 0" in text, text


def test_control_c_while_waiting():
    run_ranks(interrupted, 2)


# ---- life ----


def again_and_again(rank, world_size, folder):
    dist.destroy_process_group()
    for i in range(10):
        dist.init_process_group(
            "fccl", init_method=f"file://{folder}/store{i}", rank=rank, world_size=world_size
        )
        still_works(rank, world_size)
        group = dist.new_group([0, 1])
        dist.barrier(group=group)
        dist.destroy_process_group()


def test_ten_rounds_of_destroy_and_init(tmp_path):
    run_ranks(again_and_again, 2, str(tmp_path), full_exit=True)


def no_destroy(rank, world_size):
    still_works(rank, world_size)
    dist.all_reduce(torch.ones(10), async_op=True)
    dist.destroy_process_group = lambda *a, **k: None  # the program just ends


def test_end_without_destroy():
    run_ranks(no_destroy, 2, full_exit=True, timeout=30)
