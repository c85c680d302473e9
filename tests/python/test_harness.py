"""The harness itself, with Gloo: results, failures, deaths, time-outs, and that nothing stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

from fccl_testing import Exited, RankError, RankPool, RankTimeout, run_ranks


def add_up(rank, world_size, start):
    value = torch.tensor([start + rank])
    dist.all_reduce(value)
    return value, torch.get_num_threads(), os.environ.get("FCCL_TEST_VARIABLE")


def fail_on_one(rank, world_size, which):
    print(f"hello from {rank}")
    if rank == which:
        raise KeyError("a message for people")
    dist.barrier()


def die(rank, world_size, how):
    if rank == 1:
        if how == "signal":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(how)
    return "alive"


def hang(rank, world_size, pid_file):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with open(f"{pid_file}.{rank}", "w") as file:
        file.write(f"{os.getpid()} {child.pid}")
    if rank == 1:
        time.sleep(600)


def leave_a_child(rank, world_size):
    return os.getpid(), subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid


def skip_here(rank, world_size):
    pytest.skip("not on this rank")


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pids) -> None:
    deadline = time.monotonic() + 5
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(is_running, pids))


@pytest.mark.parametrize("full_exit", [False, True])
def test_results_come_back_in_rank_order(full_exit):
    results = run_ranks(
        add_up,
        3,
        10,
        backend="gloo",
        full_exit=full_exit,
        env=lambda rank: {"FCCL_TEST_VARIABLE": f"of rank {rank}"},
    )
    for rank, (value, threads, variable) in enumerate(results):
        assert value.tolist() == [33] and threads == 1 and variable == f"of rank {rank}"


def test_no_group():
    assert run_ranks(die, 1, 0, backend=None) == ["alive"]


def test_a_failure_names_its_rank():
    with pytest.raises(RankError, match="rank 1 of 2 failed") as caught:
        run_ranks(fail_on_one, 2, 1, backend="gloo")
    assert caught.value.rank == 1 and caught.value.type_name == "KeyError"
    assert "a message for people" in str(caught.value)
    assert "fail_on_one" in str(caught.value) and "hello from 1" in str(caught.value)


def test_deaths():
    with pytest.raises(RankError, match=r"rank 1 of 2.*\n.*signal 9 \(SIGKILL\)"):
        run_ranks(die, 2, "signal", backend=None)
    with pytest.raises(RankError, match="exit status 3, expected -9"):
        run_ranks(die, 2, 3, backend=None, expect_exit={1: -9})
    results = run_ranks(die, 2, "signal", backend=None, expect_exit={1: -9})
    assert results[0] == "alive" and isinstance(results[1], Exited) and results[1].code == -9
    assert run_ranks(die, 2, 7, backend=None, expect_exit=True)[1].code == 7


def test_a_rank_that_should_have_died():
    with pytest.raises(RankError, match="returned, expected it to end with -9"):
        run_ranks(die, 1, 0, backend=None, expect_exit={0: -9})


def test_time_is_up(tmp_path):
    with pytest.raises(RankTimeout, match=r"still running when time was up: rank\(s\) 1 ") as caught:
        run_ranks(hang, 2, str(tmp_path / "pid"), backend=None, timeout=3)
    assert caught.value.ranks == (1,)
    assert "in hang" in str(caught.value)  # the stack
    pids = [int(pid) for rank in (0, 1) for pid in (tmp_path / f"pid.{rank}").read_text().split()]
    wait_until_gone(pids)


def test_nothing_stays_behind():
    pids = [pid for pair in run_ranks(leave_a_child, 2, backend=None) for pid in pair]
    wait_until_gone(pids)


def test_skip():
    with pytest.raises(pytest.skip.Exception, match="not on this rank"):
        run_ranks(skip_here, 1, backend=None)


def test_pool_survives_failures():
    pool = RankPool(2, "gloo")
    try:
        for start in (1, 2, 3):
            assert pool.run(add_up, start)[0][0].item() == 2 * start + 1
        with pytest.raises(RankError, match="a message for people"):
            pool.run(fail_on_one, 0)
        assert pool.run(add_up, 5)[1][0].item() == 11
    finally:
        pool.close()


def test_a_start_is_quick():
    run_ranks(die, 2, 0, backend=None, expect_exit=True)  # the zygote is up from here on
    start = time.monotonic()
    run_ranks(die, 2, 0, backend=None, expect_exit=True)
    assert time.monotonic() - start < 3  # tens of milliseconds on an idle machine
