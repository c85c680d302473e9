"""The backend on CUDA tensors, under torch on a simulated device: values, and who carries what on which stream."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist

import fccl
from fccl_testing import RankPool
from sim_cuda import counts, run_simulated, simulated, simulated_pool, take_log

pytestmark = simulated

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [torch.int32, torch.int64]
OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "product": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}
NAP = 400_000_000  # of torch.cuda._sleep, which the simulation takes for nanoseconds


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


def launched(what: str = "") -> int:
    return sum(count for name, count in fccl.cuda.launch_counts().items() if what in name)


def values(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * count + rank)
    if dtype.is_floating_point:
        return torch.randn(count, generator=generator, dtype=torch.float64).mul_(3).to(dtype)
    return torch.randint(-5, 6, (count,), generator=generator).to(dtype)


def reduced(op: str, count: int, dtype: torch.dtype, world_size: int) -> torch.Tensor:
    """In rank order, in float32 (float64, integers) and rounded once."""
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    result = values(0, count, dtype).to(wide)
    for rank in range(1, world_size):
        other = values(rank, count, dtype).to(wide)
        result = {
            "sum": torch.add,
            "avg": torch.add,
            "product": torch.mul,
            "min": torch.minimum,
            "max": torch.maximum,
        }[op](result, other)
    return (result / world_size if op == "avg" else result).to(dtype)


# ---- values ----


def all_reduces(rank: int, world_size: int, dtype: torch.dtype) -> None:
    dist.all_reduce(torch.ones(1).to("cuda"))
    for op in OPS:
        if op == "avg" and not dtype.is_floating_point:
            continue
        for count in (1, 7, 1000, 4099):
            before = launched("all_reduce")
            tensor = values(rank, count, dtype).to("cuda")
            dist.all_reduce(tensor, OPS[op])
            assert torch.equal(tensor.cpu(), reduced(op, count, dtype, world_size)), (op, count)
            assert launched("all_reduce") == before + 1, (op, count)


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS], ids=str)
@pytest.mark.parametrize("world_size", [2, 3])
def test_all_reduce(pool, world_size, dtype):
    pool(world_size).run(all_reduces, dtype)


def large_all_reduce(rank: int, world_size: int) -> None:
    """Two hops where one would send too much: by the policy, with four ranks from 32 KiB on over PCIe."""
    count = 20_001
    tensor = values(rank, count, torch.float32).to("cuda")
    dist.all_reduce(tensor)
    assert torch.equal(tensor.cpu(), reduced("sum", count, torch.float32, world_size))
    assert launched("two-shot") == 1


def test_two_shot_all_reduce():
    run_simulated(large_all_reduce, 4)


def copies(rank: int, world_size: int) -> None:
    dist.all_reduce(torch.ones(1).to("cuda"))
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool):
        for count in (1, 9, 2000):
            before = launched("all_gather"), launched("broadcast")
            own = values(rank, count, torch.int64).to(dtype)
            gathered = torch.zeros(world_size * count, dtype=dtype).to("cuda")
            dist.all_gather_into_tensor(gathered, own.to("cuda"))
            all_of_them = [values(r, count, torch.int64).to(dtype) for r in range(world_size)]
            assert torch.equal(gathered.cpu(), torch.cat(all_of_them))
            for root in range(world_size):
                tensor = own.to("cuda")
                dist.broadcast(tensor, root)
                assert torch.equal(tensor.cpu(), all_of_them[root])
            assert (launched("all_gather"), launched("broadcast")) == (before[0] + 1, before[1] + world_size)


@pytest.mark.parametrize("world_size", [2, 3])
def test_all_gather_and_broadcast(pool, world_size):
    pool(world_size).run(copies)


def by_the_inner_engine(rank: int, world_size: int) -> None:
    """What has no kernel, and what is too large, is Gloo's here, and as right."""
    dist.all_reduce(torch.ones(1).to("cuda"))
    before = launched()
    tensor = torch.full((6,), rank + 1, dtype=torch.uint8).to("cuda")
    dist.all_reduce(tensor)
    assert tensor.cpu().tolist() == [world_size * (world_size + 1) // 2] * 6
    large = torch.full((3 << 20,), float(rank)).to("cuda")
    dist.all_reduce(large)
    assert (large.cpu() == world_size * (world_size - 1) / 2).all()
    parts = [torch.zeros(5).to("cuda") for _ in range(world_size)]
    dist.all_gather(parts, torch.full((5,), float(rank)).to("cuda"))
    assert [part.cpu().tolist() for part in parts] == [[float(r)] * 5 for r in range(world_size)]
    assert launched() == before


def test_the_rest_is_the_inner_engines(pool):
    pool(2).run(by_the_inner_engine)


def not_asked_for(rank: int, world_size: int) -> None:
    tensor = torch.ones(4).to("cuda")
    dist.all_reduce(tensor)
    assert tensor.cpu().tolist() == [float(world_size)] * 4
    assert fccl.cuda.launch_counts() == {}
    assert fccl.cuda.why_no_kernels() == "FCCL_CUDA_KERNELS is not 1"
    assert fccl.cuda.warm_up() is False


def test_kernels_are_for_those_who_ask():
    run_simulated(not_asked_for, 2, env={"FCCL_CUDA_KERNELS": None})


def deterministic(rank: int, world_size: int, wanted: bool) -> None:
    count = 1 << 19  # 2 MiB
    tensor = values(rank, count, torch.float32).to("cuda")
    dist.all_reduce(tensor)
    if wanted:
        assert torch.equal(tensor.cpu(), reduced("sum", count, torch.float32, world_size))
    assert launched("all_reduce") == wanted


@pytest.mark.parametrize("wanted", [True, False])
def test_deterministic_sends_all_that_fits_to_the_kernels(wanted):
    run_simulated(deterministic, 3, wanted, env={"FCCL_CUDA_DETERMINISTIC": "1" if wanted else None})


def subgroups(rank: int, world_size: int) -> None:
    before = launched()
    pairs = [dist.new_group([0, 1]), dist.new_group([1, 2])]
    for members, group in zip(([0, 1], [1, 2]), pairs, strict=True):
        if rank in members:
            tensor = torch.full((3,), float(rank)).to("cuda")
            dist.all_reduce(tensor, group=group)
            assert tensor.cpu().tolist() == [float(sum(members))] * 3
            assert sum(fccl.cuda.launch_counts(group).values()) == 1
    assert launched() == before  # the default group has counts of its own


def test_subgroups(pool):
    pool(3).run(subgroups)


# ---- streams ----


def streams_of(log: list[str], kernel: str) -> list[str]:
    found = (
        re.match(rf"launch {kernel}\S* .*on stream (\S+)$|launch {kernel}.* on stream (\S+)$", line)
        for line in log
    )
    return [match[1] or match[2] for match in found if match]


def handle_of(stream: torch.cuda.Stream) -> str:
    return f"{stream.cuda_stream:#x}"


def synchronous(rank: int, world_size: int) -> None:
    """On the caller's stream, with nothing between: the host is not held up, and the stream is."""
    dist.all_reduce(torch.ones(1).to("cuda"))
    stream = torch.cuda.Stream()
    source = torch.full((3,), float(rank + 1)).to("cuda")
    torch.cuda.synchronize()
    take_log()
    began = time.monotonic()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(NAP)
        tensor = torch.empty_like(source).copy_(source)  # not there before the nap is over
        dist.all_reduce(tensor)
        assert time.monotonic() - began < 0.3
        result = tensor.cpu()  # on this stream, so behind the kernel
    assert time.monotonic() - began >= 0.4
    assert result.tolist() == [float(world_size * (world_size + 1) // 2)] * 3
    assert streams_of(take_log(), "OneShotAllReduce") == [handle_of(stream)]


def test_synchronous_calls_are_on_the_callers_stream(pool):
    pool(2).run(synchronous)


def asynchronous(rank: int, world_size: int) -> None:
    """On another stream, which waits for the caller's; the caller's goes on until wait()."""
    dist.all_reduce(torch.ones(1).to("cuda"))
    stream = torch.cuda.Stream()
    source = torch.full((3,), float(rank + 1)).to("cuda")
    torch.cuda.synchronize()
    take_log()
    began = time.monotonic()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(NAP)
        tensor = torch.empty_like(source).copy_(source)
        work = dist.all_reduce(tensor, async_op=True)
        log = take_log()
        (side,) = streams_of(log, "OneShotAllReduce")
        assert side not in (handle_of(stream), "(nil)")
        assert any(line.startswith(f"stream {side} waits for event") for line in log), log
        assert not any(line.startswith(f"stream {handle_of(stream)} waits for event") for line in log), log
        work.wait()
        assert any(line.startswith(f"stream {handle_of(stream)} waits for event") for line in take_log())
        assert time.monotonic() - began < 0.3, "wait() held up the host"
        result = tensor.cpu()
    assert time.monotonic() - began >= 0.4
    assert result.tolist() == [float(world_size * (world_size + 1) // 2)] * 3


def test_asynchronous_calls_are_on_a_stream_of_their_own(pool):
    pool(2).run(asynchronous)


def in_turn(rank: int, world_size: int) -> None:
    """Calls of one group follow each other on the device, whatever streams they were made on, the inner's too."""
    dist.all_reduce(torch.ones(1).to("cuda"))
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    tensors = [torch.full((4,), float(rank + i)).to("cuda") for i in range(2)]
    torch.cuda.synchronize()
    for a, b in ((first, second), (second, first)):
        take_log()
        with torch.cuda.stream(a):
            torch.cuda._sleep(NAP // 4)
            dist.all_reduce(tensors[0])
        with torch.cuda.stream(b):
            dist.all_reduce(tensors[1])
        log = take_log()
        launches = [i for i, line in enumerate(log) if line.startswith("launch OneShotAllReduce")]
        assert len(launches) == 2
        assert streams_of(log, "OneShotAllReduce") == [handle_of(a), handle_of(b)]
        between = log[launches[0] : launches[1]]
        recorded = [
            line.split()[2]
            for line in between
            if line.startswith("record event") and line.endswith(handle_of(a))
        ]
        waited = [
            line.split()[-1] for line in between if line.startswith(f"stream {handle_of(b)} waits for event")
        ]
        assert set(recorded) & set(waited), log
        torch.cuda.synchronize()


def test_calls_follow_each_other(pool):
    pool(2).run(in_turn)


def memory_is_kept(rank: int, world_size: int, work_is_kept: bool) -> None:
    """An input that is dropped while its call waits in line is given to nobody else, be the Work kept or not."""
    dist.all_reduce(torch.ones(1).to("cuda"))
    count = 1 << 14
    stream = torch.cuda.Stream()
    source = torch.full((count,), float(rank + 1)).to("cuda")
    output = torch.zeros(world_size * count).to("cuda")
    torch.empty(4, device="cuda").fill_(-1)  # the first launch of a kernel waits for all that runs
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        # The nap is on the stream of the call, not on the caller's, which would hold up what comes after as well.
        dist.all_gather_into_tensor(output, source, async_op=True)
        tensor = torch.empty_like(source).copy_(source)
        stream.synchronize()
        side = torch.cuda.ExternalStream(int(streams_of(take_log(), "OneShotAllGather")[-1], 16))
        with torch.cuda.stream(side):
            torch.cuda._sleep(NAP)
        place = tensor.data_ptr()
        work = dist.all_gather_into_tensor(output, tensor, async_op=True)
        del tensor
        if not work_is_kept:
            del work
        others = [torch.empty(count, device="cuda").fill_(-1) for _ in range(3)]
        stream.synchronize()  # they are written before the kernel reads its input
        assert not side.query(), "too late to tell"
        assert place not in [other.data_ptr() for other in others]
    torch.cuda.synchronize()
    expected = [float(r + 1) for r in range(world_size) for _ in range(count)]
    assert output.cpu().tolist() == expected


@pytest.mark.parametrize("work_is_kept", [True, False])
def test_tensors_of_a_call_under_way_are_kept(pool, work_is_kept):
    pool(2).run(memory_is_kept, work_is_kept)


def futures(rank: int, world_size: int) -> None:
    """A callback's stream waits for the collective, so what it puts there finds the result."""
    dist.all_reduce(torch.ones(1).to("cuda"))
    stream = torch.cuda.Stream()
    source = torch.full((5,), float(rank + 1)).to("cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(NAP)
        tensor = torch.empty_like(source).copy_(source)
        began = time.monotonic()
        work = dist.all_reduce(tensor, async_op=True)
        streams: list[str] = []

        def copy(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            streams.append(handle_of(torch.cuda.current_stream()))
            value = done.value()[0]
            return torch.empty_like(value).copy_(value)

        then = work.get_future().then(copy)
        assert time.monotonic() - began < 0.3, "the callback waited on the host"
        result = then.wait()
        assert streams and streams[0] != handle_of(stream)
        assert result.cpu().tolist() == [float(world_size * (world_size + 1) // 2)] * 5
        work.wait()


def test_futures_carry_their_device(pool):
    pool(2).run(futures)


def barriers(rank: int, world_size: int) -> None:
    """The host waits for what is on its stream, and then for the peers."""
    dist.barrier(device_ids=[0])
    take_log()
    began = time.monotonic()
    if rank == 0:
        torch.cuda._sleep(NAP)
    dist.barrier(device_ids=[0])
    assert time.monotonic() - began >= 0.4
    assert not any("AllReduce" in line for line in take_log())


def test_barrier_is_the_hosts(pool):
    pool(2).run(barriers)


# ---- graphs ----


def graphs(rank: int, world_size: int) -> None:
    assert fccl.cuda.warm_up()
    tensor = torch.zeros(6).to("cuda")
    source = torch.full((6,), float(rank + 1)).to("cuda")
    eager = torch.ones(6).to("cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tensor.copy_(source)
        dist.all_reduce(tensor)
        dist.all_reduce(tensor)
    expected = world_size * world_size * (world_size + 1) / 2
    for replay in range(5):
        tensor.fill_(0)
        graph.replay()
        eager.fill_(1)
        dist.all_reduce(eager)  # launches of its own, beside the graph's
        assert tensor.cpu().tolist() == [expected] * 6, replay
        assert eager.cpu().tolist() == [float(world_size)] * 6
    dist.destroy_process_group()
    del eager
    assert counts()["mappings"] > 0  # what the graph needs outlives the group


def test_graphs_replay():
    run_simulated(graphs, 2)


def not_warm(rank: int, world_size: int) -> None:
    tensor = torch.ones(6).to("cuda")
    dist.all_reduce(tensor)
    graph = torch.cuda.CUDAGraph()
    says = pytest.raises(NotImplementedError, match=r"after fccl\.cuda\.warm_up\(group\)")
    with says, torch.cuda.graph(graph):
        dist.all_reduce(tensor)


def test_a_capture_without_warm_up_says_what_to_do():
    run_simulated(not_warm, 2)


# ---- the end ----


def leaves_nothing(rank: int, world_size: int) -> None:
    before = counts()
    tensor = torch.ones(6).to("cuda")
    for _ in range(3):
        dist.all_reduce(tensor)
    assert counts()["mappings"] > before["mappings"]
    dist.destroy_process_group()
    after = counts()
    for kind in ("pinned", "handles", "mappings", "opened"):
        assert after[kind] == before[kind], (kind, before, after)


def test_a_group_leaves_nothing_behind():
    run_simulated(leaves_nothing, 2)
