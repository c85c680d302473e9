"""The hooks on CUDA buckets, on a simulated device: the CPU's bits, and what is particular to streams."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fccl
from fccl import hooks
from fccl_testing import RankPool
from hooks_testing import same_on_all_ranks
from sim_cuda import make_fail, simulated, simulated_pool, take_log

pytestmark = simulated

HOOKS: dict[str, Callable[[], Any]] = {
    "AllReduce": hooks.AllReduce,
    "BF16Compress": hooks.BF16Compress,
    "FP16Compress": hooks.FP16Compress,
    "int8": lambda: hooks.BlockQuantize("int8"),
    "fp8_e4m3": lambda: hooks.BlockQuantize("fp8_e4m3", block=128, exempt=None),
    "fp8_e5m2": lambda: hooks.BlockQuantize("fp8_e5m2", error_feedback=False),
}
CODED = [name for name in HOOKS if name != "AllReduce"]


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


class Give(torch.autograd.Function):
    """A loss on the CPU whose gradients are given: the simulated device copies and fills, and computes nothing."""

    @staticmethod
    def forward(ctx: Any, wanted: list[torch.Tensor], *parameters: torch.Tensor) -> torch.Tensor:
        ctx.wanted = wanted
        ctx.device = parameters[0].device
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return None, *(each.to(ctx.device) for each in ctx.wanted)


class Given(nn.Module):
    SHAPES = ((40, 31), (31,), (3, 257), (1000,), (2, 2, 130))

    def __init__(self, device: str, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.given = nn.ParameterList(torch.empty(shape, dtype=dtype, device=device) for shape in self.SHAPES)

    def forward(self, wanted: list[torch.Tensor]) -> torch.Tensor:
        loss: torch.Tensor = Give.apply(wanted, *self.given)
        return loss


def model(device: str, dtype: torch.dtype = torch.float32, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(Given(device, dtype), bucket_cap_mb=0.006, init_sync=False, **options)


def gradients(rank: int, step: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    made = [torch.randn(shape, generator=generator).mul_(10.0 ** (step - 2)) for shape in Given.SHAPES]
    made[2][1] = 0  # whole blocks of which a rank has nothing to say
    if step == 2 and rank == 0:
        made[0][5, 5] = torch.inf
        made[3][7] = torch.nan
    return [each.to(dtype) for each in made]


def backward(ddp: DistributedDataParallel, wanted: list[torch.Tensor]) -> list[torch.Tensor]:
    ddp.zero_grad()
    ddp(wanted).backward()
    return [p.grad.cpu() for p in ddp.parameters()]


def same_bits(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """NaNs may differ in sign and payload; their places may not."""
    return torch.equal(
        ours.nan_to_num(1.5, 2e30, -2e30), theirs.nan_to_num(1.5, 2e30, -2e30)
    ) and torch.equal(ours.isnan(), theirs.isnan())


def state_of(hook: Any, ddp: DistributedDataParallel) -> list[torch.Tensor]:
    if not isinstance(hook, hooks.BlockQuantize):
        return []
    return [value.cpu() for value in hook.state_dict()["residuals"].values()]


# ---- numbers ----


def as_on_cpu(rank: int, world_size: int, name: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    # In which DDP does not cut buckets anew: it goes by the order of the gradients, which is another one on a GPU.
    options = {"find_unused_parameters": True, **options}
    models = {device: model(device, dtype, **options) for device in ("cpu", "cuda")}
    attached = {device: HOOKS[name]() for device in models}
    for device, ddp in models.items():
        hooks.register(ddp, attached[device])
    for step in range(5):
        results = {device: backward(ddp, gradients(rank, step, dtype)) for device, ddp in models.items()}
        for parameter, (ours, theirs) in enumerate(zip(results["cuda"], results["cpu"], strict=True)):
            assert ours.dtype == dtype
            assert same_bits(ours, theirs), f"step {step}, parameter {parameter}"
        assert step == 2 or same_on_all_ranks(results["cuda"])
        states = [state_of(attached[device], ddp) for device, ddp in models.items()]
        assert len(states[0]) == len(states[1])
        assert all(map(torch.equal, states[0], states[1])), f"remainders of step {step}"


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", CODED)
def test_bits_are_the_cpus(pool, world_size, name):
    pool(world_size).run(as_on_cpu, name, torch.float32, {})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_gradients(pool, dtype):
    pool(2).run(as_on_cpu, "int8", dtype, {"gradient_as_bucket_view": True})


class OneGiven(Given):
    """One parameter: DDP's way out of a join context flattens several by a kernel of torch's."""

    SHAPES = ((700,),)


def joins(rank: int, world_size: int, name: str, divide_by_initial: bool) -> None:
    results = {}
    for device in ("cpu", "cuda"):
        ddp = DistributedDataParallel(OneGiven(device), init_sync=False)
        hooks.register(ddp, HOOKS[name]())
        results[device] = []
        with ddp.join(divide_by_initial_world_size=divide_by_initial):
            for _ in range(1 + 2 * rank):
                wanted = [torch.full((700,), float(1 + rank))]
                results[device] += backward(ddp, wanted)
    assert len(results["cuda"]) == 1 + 2 * rank
    assert all(map(torch.equal, results["cuda"], results["cpu"]))
    alone = 1.0 if divide_by_initial else 2.0  # rank 1's two, without rank 0
    expected = [1.5, alone, alone][: 1 + 2 * rank]
    assert [each.mean().item() for each in results["cuda"]] == pytest.approx(expected, rel=0.07)


@pytest.mark.parametrize("divide_by_initial", [False, True])
@pytest.mark.parametrize("name", ["BF16Compress", "fp8_e4m3"])
def test_join(pool, name, divide_by_initial):
    pool(2).run(joins, name, divide_by_initial)


# ---- how the ranks stand to each other ----


def compares_once(rank: int, world_size: int) -> None:
    """What the ranks compare blocks the host: only when a bucket is new, or coded in another way."""
    ddp = model("cuda")
    hooks.register(ddp, hooks.BlockQuantize("int8"))
    counts = []
    for step in range(5):
        before = sum(fccl.backend_of().collective_counts().values())
        backward(ddp, gradients(rank, step % 2))
        counts.append(sum(fccl.backend_of().collective_counts().values()) - before)
    assert counts[0] > 0
    assert counts[3:] == [0, 0], counts  # buckets are cut anew after the first step


def test_ranks_compare_once(pool):
    pool(2).run(compares_once)


def names_the_difference(rank: int, world_size: int) -> None:
    ddp = model("cuda")
    hooks.register(ddp, hooks.BlockQuantize("int8" if rank else "fp8_e5m2"))
    for _ in range(2):  # not once only
        with pytest.raises(RuntimeError, match="fp8_e5m2") as error:
            backward(ddp, gradients(rank, 0))
        assert "int8" in str(error.value)
    ddp = model("cuda")
    hooks.register(ddp, hooks.BlockQuantize("int8"))
    backward(ddp, gradients(rank, 0))


def test_ranks_that_code_differently_are_named(pool):
    pool(2).run(names_the_difference)


def fails_for_all(rank: int, world_size: int) -> None:
    """A rank without memory for the remainders tells the others, who would wait for it."""
    ddp = model("cuda")
    hooks.register(ddp, hooks.BlockQuantize("int8", exempt=None))
    wanted = [each.cuda() for each in gradients(rank, 0)]
    torch.cuda.empty_cache()
    if rank == 1:
        make_fail("cudaMalloc", 2)
    with pytest.raises(RuntimeError, match="failed on this rank|out of memory"):
        ddp(wanted).backward()
    make_fail("cudaMalloc", 0)
    ddp.zero_grad()
    backward(ddp, gradients(rank, 0))


def test_a_failure_reaches_all_ranks(pool):
    pool(2).run(fails_for_all)


# ---- streams ----


def beside_the_backward_pass(rank: int, world_size: int) -> None:
    """The kernels of a bucket are on a stream of the hook's, which waits for the gradients and is waited for."""
    ddp = model("cuda")
    hooks.register(ddp, hooks.BlockQuantize("int8"))
    backward(ddp, gradients(rank, 0))
    backward(ddp, gradients(rank, 1))
    take_log()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        result = backward(ddp, gradients(rank, 3))
    log = take_log()
    passes = [line.rsplit(" on stream ", 1) for line in log if line.startswith("launch") and "Bucket" in line]
    assert {name.split()[1].split("<")[0] for name, _ in passes} >= {"EncodeBucket", "DecodeBucket"}, log
    (side,) = {on for _, on in passes}
    users = f"{stream.cuda_stream:#x}"
    assert side not in (users, "(nil)")
    assert any(line.startswith(f"stream {side} waits") for line in log)
    assert any(line.startswith(f"stream {users} waits") for line in log)
    assert result[0].any()


def test_kernels_are_on_a_stream_of_the_hooks(pool):
    pool(2).run(beside_the_backward_pass)


def in_python_form(rank: int, world_size: int) -> None:
    """The Future has the device: who waits for it on a stream waits there, and callbacks run on it."""
    # Without new buckets, which would be cut by the order in which gradients came: see as_on_cpu().
    reference = model("cuda", find_unused_parameters=True)
    hooks.register(reference, hooks.BlockQuantize("fp8_e4m3"))
    ddp = model("cuda", find_unused_parameters=True)
    hook = hooks.BlockQuantize("fp8_e4m3").as_python_hook()
    copies: list[torch.Tensor] = []

    def watched(state, bucket):
        future = hook(state, bucket)

        def keep(done: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            copies.append(torch.empty_like(done.value()).copy_(done.value()))
            return done.value()

        return future.then(keep)

    watched.__annotations__.update(bucket=dist.GradBucket)  # which DDP wants to see
    ddp.register_comm_hook(None, watched)
    for step in (0, 1, 3):
        copies.clear()
        expected = backward(reference, gradients(rank, step))
        actual = backward(ddp, gradients(rank, step))
        assert all(map(torch.equal, actual, expected))
        torch.cuda.synchronize()
        together = torch.cat([each.cpu().flatten() for each in copies])
        assert torch.equal(together.sort()[0], torch.cat([e.flatten() for e in expected]).sort()[0])


def test_futures_have_the_device(pool):
    pool(2).run(in_python_form)


# ---- state ----


def moves_state(rank: int, world_size: int) -> None:
    """What was kept on a GPU goes on on the CPU, and back."""
    ddp = model("cuda")
    hook = hooks.BlockQuantize("int8")
    hooks.register(ddp, hook)
    for step in (0, 1):
        backward(ddp, gradients(rank, step))
    state = hook.state_dict()
    other = model("cpu")
    on_cpu = hooks.BlockQuantize("int8")
    hooks.register(other, on_cpu)
    on_cpu.load_state_dict(state)
    again = model("cuda")
    on_gpu = hooks.BlockQuantize("int8")
    hooks.register(again, on_gpu)
    on_gpu.load_state_dict(state)
    expected = backward(ddp, gradients(rank, 3))
    assert all(map(torch.equal, backward(other, gradients(rank, 3)), expected))
    assert all(map(torch.equal, backward(again, gradients(rank, 3)), expected))


def test_state_moves_between_devices(pool):
    pool(2).run(moves_state)
