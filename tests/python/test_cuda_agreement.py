"""What ranks must have in common for their CUDA tensors, and what becomes of a call that one rank refuses.

On a simulated device (tests/sim_cuda): a rank's GPU is memory of the host and kernels run on fibres.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fccl
from fccl_testing import RankPool
from sim_cuda import run_simulated, simulated, simulated_pool

pytestmark = simulated

# Far more than any test takes: who waits for it has not been told.
LONG = {"timeout": timedelta(seconds=60)}


@pytest.fixture(scope="module")
def pool() -> Iterator[Callable[[int], RankPool]]:
    pools: dict[int, RankPool] = {}

    def get(world_size: int) -> RankPool:
        if world_size not in pools:
            pools[world_size] = simulated_pool(world_size)
        return pools[world_size]

    yield get
    for each in pools.values():
        each.close()


def on_gpu(values: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.as_tensor(values, dtype=dtype).to("cuda")


def right_sum(world_size: int) -> None:
    tensor = on_gpu([1.0, 2.0, 3.0])
    dist.all_reduce(tensor)
    assert tensor.cpu().tolist() == [world_size * value for value in (1.0, 2.0, 3.0)]


# ---- wishes ----


def kernels_are_for_all_or_none(rank: int, world_size: int) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        right_sum(world_size)
    why = "FCCL_CUDA_KERNELS is 1 on rank 0 and not on rank 1; all ranks must ask for them"
    assert fccl.cuda.why_no_kernels() == why
    assert fccl.cuda.launch_counts() == {}
    told = [str(each.message) for each in caught if "CUDA kernels" in str(each.message)]
    assert len(told) == (1 if rank == 0 else 0)
    assert all(why in text and "go through Gloo" in text for text in told)
    assert fccl.cuda.warm_up() is False


def test_kernels_are_for_all_ranks_or_none():
    run_simulated(
        kernels_are_for_all_or_none,
        2,
        init_kwargs=LONG,
        env=lambda rank: {"FCCL_CUDA_KERNELS": "1" if rank == 0 else None},
    )


def inner_engines_differ(rank: int, world_size: int) -> None:
    tensor = on_gpu([1.0])
    began = time.monotonic()
    for _ in range(2):
        with pytest.raises(
            ValueError, match="FCCL_CUDA_INNER is gloo on rank 0 and nccl, the default, on rank 1"
        ):
            dist.all_reduce(tensor)
    with pytest.raises(ValueError, match="FCCL_CUDA_INNER is gloo on rank 0"):
        dist.send(tensor, 1 - rank)
    assert time.monotonic() - began < 30
    ones = torch.ones(3)  # the CPU's collectives are none the worse
    dist.all_reduce(ones)
    assert (ones == world_size).all()


def test_inner_engines_must_be_the_same():
    run_simulated(
        inner_engines_differ,
        2,
        init_kwargs=LONG,
        env=lambda rank: {"FCCL_CUDA_INNER": "gloo" if rank == 0 else "nccl", "FCCL_CUDA_KERNELS": None},
    )


def without_what_only_one_wants(rank: int, world_size: int) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        right_sum(world_size)
    told = [str(each.message) for each in caught if "FCCL_CUDA_DETERMINISTIC" in str(each.message)]
    assert len(told) == (1 if rank == 0 else 0)
    assert all("is 1 on rank 1 and not on rank 0" in text for text in told)
    assert fccl.cuda.why_no_kernels() == ""
    assert sum(fccl.cuda.launch_counts().values()) == 1


def test_a_wish_of_one_rank_does_not_hold():
    run_simulated(
        without_what_only_one_wants,
        2,
        init_kwargs=LONG,
        env=lambda rank: {"FCCL_CUDA_DETERMINISTIC": "1" if rank == 1 else None},
    )


# ---- float32 accumulation ----

COUNT = 1 << 20  # 2 MiB of 16-bit numbers: the inner engine's, but for the wish


def sums_of_16_bits(rank: int, world_size: int, wanted: bool) -> None:
    # 256, and then ones: each is lost where a sum is rounded to 8 bits after each addition.
    for dtype in (torch.bfloat16, torch.float16):
        value = 256.0 if rank == 0 else 1.0
        tensor = torch.full((COUNT,), value, dtype=dtype).to("cuda")
        before = sum(fccl.cuda.launch_counts().values())
        dist.all_reduce(tensor)
        assert sum(fccl.cuda.launch_counts().values()) - before == (1 if wanted else 0)
        if wanted:
            exact = torch.tensor(256.0 + world_size - 1).to(dtype)
            assert (tensor.cpu() == exact).all()
    tensor = torch.ones(COUNT).to("cuda")  # float32 is none of its business
    before = sum(fccl.cuda.launch_counts().values())
    dist.all_reduce(tensor)
    assert sum(fccl.cuda.launch_counts().values()) == before
    assert (tensor.cpu() == world_size).all()


@pytest.mark.parametrize("wanted", [True, False])
def test_float32_accumulation(wanted):
    run_simulated(
        sums_of_16_bits,
        3,
        wanted,
        init_kwargs=LONG,
        env={"FCCL_CUDA_FLOAT32_ACCUMULATION": "1" if wanted else "0"},
    )


# ---- tensors with gaps ----


def gaps(rank: int, world_size: int, async_op: bool) -> None:
    right_sum(world_size)
    before = sum(fccl.cuda.launch_counts().values())

    # The layouts differ from rank to rank; the plan must not.
    rows = torch.full((6, 5), float(rank + 1)).to("cuda")
    tensor = rows.t() if rank == 0 else rows.new_zeros(0).set_(rows).view(5, 6)
    work = dist.all_reduce(tensor, async_op=async_op)
    if async_op:
        work.wait()
    assert (rows.cpu() == world_size * (world_size + 1) / 2).all()

    wide = torch.arange(20.0).view(10, 2).add(100 * rank).to("cuda")
    column = wide[:, 1]
    gathered = torch.zeros(10 * world_size, 2).to("cuda")
    into = gathered[:, 0] if rank == 1 else torch.zeros(10 * world_size).to("cuda")
    work = dist.all_gather_into_tensor(into, column, async_op=async_op)
    if async_op:
        work.wait()
    expected = torch.cat([torch.arange(20.0).view(10, 2)[:, 1] + 100 * r for r in range(world_size)])
    assert torch.equal(into.cpu(), expected)
    assert (gathered[:, 1].cpu() == 0).all(), "written between the elements"

    # An expanded tensor can be sent, not received into.
    source = torch.full((1,), 7.0).to("cuda").expand(8) if rank == 0 else torch.zeros(16).to("cuda")[::2]
    work = dist.broadcast(source, 0, async_op=async_op)
    if async_op:
        work.wait()
    assert (source.cpu() == 7).all()
    assert sum(fccl.cuda.launch_counts().values()) - before == 3


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("world_size", [2, 3])
def test_tensors_with_gaps(pool, world_size, async_op):
    pool(world_size).run(gaps, async_op)


# ---- refused calls ----


def wrong_calls() -> dict[str, tuple[Callable[[], Any], type[Exception], str]]:
    def gather(count: int, dtype: torch.dtype = torch.float32) -> Callable[[], Any]:
        return lambda: dist.all_gather_into_tensor(on_gpu([0] * count, dtype), on_gpu([1.0, 2.0]))

    return {
        "too short": (gather(3), ValueError, r"with 3 elements, expected 4, 2 times those of the input"),
        "another dtype": (gather(4, torch.int32), TypeError, r"expected dtype float32 like the input"),
        "expanded": (
            lambda: dist.all_reduce(on_gpu([1.0]).expand(4)),
            ValueError,
            r"share one place in memory \(it was expanded\)",
        ),
    }


def all_refuse(rank: int, world_size: int) -> None:
    began = time.monotonic()
    for call, error, match in wrong_calls().values():
        for _ in range(2):
            with pytest.raises(error, match=match):
                call()
        right_sum(world_size)
    ones = torch.ones(3)
    dist.all_reduce(ones)
    assert (ones == world_size).all()
    assert time.monotonic() - began < 30


def test_a_call_that_all_refuse_costs_nothing(pool):
    pool(2).run(all_refuse)


def one_refuses(rank: int, world_size: int, name: str) -> None:
    right_sum(world_size)
    began = time.monotonic()
    call, error, match = wrong_calls()[name]
    if rank == 1:
        with pytest.raises(error, match=match):
            call()
    else:
        tensor = on_gpu([1.0, 2.0])
        if name == "expanded":
            dist.all_reduce(on_gpu([1.0] * 4))
        else:
            dist.all_gather_into_tensor(on_gpu([0.0] * 4), tensor)
        torch.cuda.synchronize()
    with pytest.raises(dist.DistError) as raised:
        torch.cuda.synchronize()
        dist.all_reduce(on_gpu([1.0]))
    text = str(raised.value)
    if "do not fit" in text:  # who notices first; the other is told by it
        assert "rank 1 refused the call it was to make; its own error says why" in text
    else:
        assert "gave up" in text
    assert time.monotonic() - began < 30
    ones = torch.ones(3)  # the CPU's half of the group goes on
    dist.all_reduce(ones)
    assert (ones == world_size).all()


@pytest.mark.parametrize("name", ["too short", "another dtype", "expanded"])
def test_peers_of_a_refused_call_do_not_wait(name):
    run_simulated(one_refuses, 2, name, init_kwargs=LONG)


def no_memory_for_a_copy(rank: int, world_size: int) -> None:
    right_sum(world_size)
    began = time.monotonic()
    wide = torch.ones(30_000, 2).to("cuda")
    if rank == 1:
        torch.cuda.set_per_process_memory_fraction(1e-9)  # another stream finds nothing in the cache
        with pytest.raises(torch.OutOfMemoryError):
            dist.all_reduce(wide[:, 0], async_op=True)
    else:
        dist.all_reduce(wide[:, 0], async_op=True)
    with pytest.raises(dist.DistError, match="refused the call it was to make|gave up"):
        torch.cuda.synchronize()
        dist.all_reduce(on_gpu([1.0]))
    assert time.monotonic() - began < 30


def test_peers_hear_of_a_copy_that_found_no_memory():
    run_simulated(no_memory_for_a_copy, 2, init_kwargs=LONG)


# ---- timeouts ----


def own_timeout(rank: int, world_size: int) -> None:
    right_sum(world_size)
    group = dist.distributed_c10d._get_default_group()
    if rank == 0:
        options = dist.AllreduceOptions()
        options.timeout = timedelta(milliseconds=400)
        tensor = on_gpu([1.0])
        began = time.monotonic()
        group.allreduce([tensor], options)
        torch.cuda.synchronize()
        assert 0.3 < time.monotonic() - began < 30
        assert tensor.cpu().isnan().all()
        with pytest.raises(dist.DistError, match="rank 1 did not come within 400 ms"):
            dist.all_reduce(tensor)
    dist.barrier()


def test_a_call_has_a_timeout_of_its_own():
    run_simulated(own_timeout, 2, init_kwargs=LONG)


# ---- batches ----


def batch(rank: int, world_size: int) -> None:
    right_sum(world_size)
    tensors = [on_gpu([float(rank)] * 3), on_gpu([1.0] * 5)]
    group = dist.distributed_c10d._get_default_group()
    device = torch.device("cuda", 0)
    group._start_coalescing(device)  # what torch's own manager calls
    for tensor in tensors:
        group.allreduce([tensor])
    work = group._end_coalescing(device)
    future = work.get_future()
    values = future.then(lambda done: [value.cpu().tolist() for value in done.value()]).wait()
    assert sorted(values, key=len) == [[float(sum(range(world_size)))] * 3, [float(world_size)] * 5]
    work.wait()


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_future_of_a_batch_has_all_its_values(pool, world_size):
    pool(world_size).run(batch)
