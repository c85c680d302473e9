"""FP16Compress and BlockQuantize: their numbers to the bit, and misuse. Their state: test_hooks_feedback.py."""

import copy
import os
import pickle
import signal

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import fccl
from fccl import hooks
from fccl_testing import run_ranks
from hooks_testing import (
    Net,
    Steered,
    backends,
    batch,
    e4m3_hook,
    e5m2_hook,
    formats,
    fp16_hook,
    int8_hook,
    random_gradient,
    same_on_all_ranks,
    steered_gradients,
)

# ---- the numbers, once more in torch's own operations ----

LARGEST = {"int8": 127.0, "fp8_e4m3": 448.0, "fp8_e5m2": 57344.0}
CAST = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2, "float16": torch.float16}


def coded(values, format, block):
    """``values`` (finite, float32) as they come out of a code, a block at a time."""
    result = torch.empty_like(values)
    for begin in range(0, values.numel(), block):
        x = values[begin : begin + block]
        largest = x.abs().max()
        if format == "float16":
            scale = torch.ldexp(torch.tensor(1.0), torch.frexp(largest).exponent - 15)
            inverse = 1 / scale
        else:
            scale, inverse = largest / LARGEST[format], LARGEST[format] / largest
        if largest < 2**-80:
            decoded = torch.zeros_like(x)
        elif format == "int8":
            decoded = (x * inverse).round()
        else:
            decoded = (x * inverse).to(CAST[format]).float()
        result[begin : begin + block] = decoded * scale
    return result


def gradient_with_gaps(rank, step, count, block):
    """One rank alone has nothing to say of a block, all but one have nothing, and all."""
    gradient = random_gradient(rank, step, count)
    for index, begin in enumerate(range(0, count, block)):
        if step > 0 and (
            (step % 2 == 1 and index == rank) or (step == 2 and index != rank) or (step == 4 and index == 0)
        ):
            gradient[begin : begin + block] = 0
    return gradient


def equals_model(rank, world_size, make_hook, format, block, error_feedback):
    count = 3 * block + 17
    ddp = DistributedDataParallel(Steered(torch.zeros(count)))
    hooks.register(ddp, make_hook(block=block, error_feedback=error_feedback))
    remainders = [torch.zeros(count) for _ in range(world_size)]
    blocks = -(-count // block)
    shard = -(-blocks // world_size) * block
    for step in range(6):
        gradients = [gradient_with_gaps(r, step, count, block) for r in range(world_size)]
        ddp.zero_grad()
        ddp(gradients[rank]).sum().backward()
        # All ranks' part of it, on each rank.
        sent = []
        for r in range(world_size):
            speaks = of_whole_blocks(gradients[r] != 0, block)
            value = gradients[r] + (remainders[r] * speaks if error_feedback else 0)
            sent.append(coded(value, format, block))
            remainders[r] = torch.where(speaks, value - sent[r], remainders[r])
        total = sent[0]
        for other in sent[1:]:
            total = total + other
        anybody = of_whole_blocks(torch.stack(sent).ne(0).any(0), block)
        joins = torch.zeros(count, dtype=torch.bool)  # where the shard's owner is silent and others are not
        for r in range(world_size):
            own = slice(r * shard, (r + 1) * shard)
            joins[own] = (anybody & ~of_whole_blocks(sent[r] != 0, block))[own]
            if error_feedback:
                total[own] += remainders[r][own] * joins[own]
        mean = total / world_size
        result = coded(mean, format, block)
        for r in range(world_size):
            own = slice(r * shard, (r + 1) * shard)
            waiting = torch.where(joins, 0, remainders[r])
            remainders[r][own] = (waiting + world_size * (mean - result))[own]
        assert torch.equal(ddp.module.parameters_[0].grad, result), step


def of_whole_blocks(any_of, block):
    """Whether it is true of any element of an element's block."""
    return torch.cat([part.any().expand(part.numel()) for part in any_of.split(block)])


@backends
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(
    ("make_hook", "format", "block", "error_feedback"),
    [
        (fp16_hook, "float16", 256, False),
        (int8_hook, "int8", 128, True),
        (int8_hook, "int8", 1024, False),
        (e4m3_hook, "fp8_e4m3", 256, True),
        (e5m2_hook, "fp8_e5m2", 512, True),
    ],
)
def test_equals_the_model_to_the_bit(
    rank_pool, backend, world_size, make_hook, format, block, error_feedback
):
    rank_pool(world_size, backend).run(equals_model, make_hook, format, block, error_feedback)


def fp16_range(rank, world_size):
    wanted = torch.zeros(1024)
    wanted[:256] = 1e6  # beyond float16's largest
    wanted[256:512] = 1e-8  # below its least
    wanted[512:768] = torch.linspace(1, 1e38, 256)
    wanted[768:] = 1e-38
    (gradient,) = steered_gradients("FP16Compress", [wanted])
    error = (gradient - wanted).abs()
    assert (error[:512] <= 2**-11 * wanted[:512]).all()
    assert (error[512:768] <= 2**-10 * wanted[512:768] + 2**-39 * 1e38).all()
    assert (gradient[768:] == 0).all()  # as documented


@backends
def test_fp16_keeps_large_and_small_gradients(rank_pool, backend):
    rank_pool(2, backend).run(fp16_range)


def both_engines(rank, world_size, format):
    torch.manual_seed(2)
    ddp = DistributedDataParallel(Net(), bucket_cap_mb=0.05)
    hooks.register(ddp, hooks.BlockQuantize(format))
    gradients = []
    for step in range(4):
        ddp.zero_grad()
        ddp(batch(rank, step)).square().sum().backward()
        gradients.append([p.grad.clone() for p in ddp.parameters()])
    return gradients


@formats
def test_all_engines_give_the_same_bits(rank_pool, format):
    over_fccl = rank_pool(3).run(both_engines, format)
    over_gloo = rank_pool(3, "gloo").run(both_engines, format)
    without_memory = run_ranks(both_engines, 3, format, env={"FCCL_SHM": "0"})
    in_detail = run_ranks(both_engines, 3, format, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})
    for others in (over_gloo, without_memory, in_detail):
        for steps, other_steps in zip(over_fccl, others, strict=True):
            for step, other_step in zip(steps, other_steps, strict=True):
                for gradient, other in zip(step, other_step, strict=True):
                    assert torch.equal(gradient, other)


# ---- exempt parameters ----


def exemption(rank, world_size):
    def gradients_are_exact(exempt):
        torch.manual_seed(3)
        net = Net()
        hooked, plain = (DistributedDataParallel(copy.deepcopy(net)) for _ in range(2))
        hooks.register(hooked, hooks.BlockQuantize(exempt=exempt))
        hooks.register(plain, hooks.AllReduce())
        for ddp in (hooked, plain):
            ddp(batch(rank, 0)).square().sum().backward()
        pairs = zip(hooked.module.named_parameters(), plain.parameters(), strict=True)
        return {name for (name, p), q in pairs if torch.equal(p.grad, q.grad)}

    names = {name for name, _ in Net().named_parameters()}
    one_dimension = {name for name, p in Net().named_parameters() if p.dim() < 2}
    assert gradients_are_exact("auto") == one_dimension
    assert gradients_are_exact(None) == set()
    assert gradients_are_exact(["first.*", "last.weight"]) == {"first.weight", "first.bias", "last.weight"}
    assert gradients_are_exact(lambda name, p: p.numel() > 1000) == {"second.weight", "extra.weight"}
    assert gradients_are_exact(["*"]) == names


@backends
def test_exempt_parameters_travel_exactly(rank_pool, backend):
    rank_pool(2, backend).run(exemption)


# ---- use and misuse ----


def test_arguments_are_checked():
    with pytest.raises(ValueError, match="format='int4'.*int8, fp8_e4m3, fp8_e5m2"):
        hooks.BlockQuantize("int4")
    with pytest.raises(ValueError, match="block=100.*128, 256, 512, 1024"):
        hooks.BlockQuantize(block=100)
    with pytest.raises(ValueError, match=r"a list: exempt=\['norm'\]"):
        hooks.BlockQuantize(exempt="norm")
    with pytest.raises(TypeError, match="list of patterns"):
        hooks.BlockQuantize(exempt=3)
    with pytest.raises(ValueError, match="without names"):
        hooks.BlockQuantize(exempt=["*.bias"]).as_python_hook()


@pytest.mark.parametrize("exempt", ["auto", None, ["*.norm", "head.*"]])
def test_a_hook_is_copied_by_its_arguments(exempt):
    hook = hooks.BlockQuantize("fp8_e4m3", 512, False, exempt)
    for clone in (pickle.loads(pickle.dumps(hook)), copy.deepcopy(hook)):
        assert repr(clone) == repr(hook)
        assert "error_feedback=False" in repr(hook)


def unknown_pattern(rank, world_size):
    ddp = DistributedDataParallel(Net())
    with pytest.raises(
        ValueError, match=r"'\*.gamma' matches no parameter of the model, which has first.weight"
    ):
        hooks.register(ddp, hooks.BlockQuantize(exempt=["*.bias", "*.gamma"]))
    hooks.register(ddp, hooks.BlockQuantize())  # it has none yet


def test_a_pattern_without_a_match_is_an_error(rank_pool):
    rank_pool(1, "gloo").run(unknown_pattern)


def mismatch(rank, world_size):
    ddp = DistributedDataParallel(Steered(torch.zeros(1000)))
    hooks.register(ddp, hooks.BlockQuantize("int8" if rank == 0 else "fp8_e5m2", exempt=None))
    with pytest.raises(RuntimeError) as caught:
        ddp(torch.ones(1000)).sum().backward()
    message = str(caught.value)
    assert "how the elements are coded differs" in message
    for called in (
        "rank 0 called compressed_all_reduce(float32, int8, block=256, error_feedback, bucket 0, count=1000",
        "rank 1 called compressed_all_reduce(float32, fp8_e5m2, block=256, error_feedback, bucket 0, count=1000",
    ):
        assert called in message
    group_goes_on(world_size)


def group_goes_on(world_size):
    ones = torch.ones(3)
    dist.all_reduce(ones)
    assert (ones == world_size).all()


@backends
def test_different_hooks_on_the_ranks_are_named(rank_pool, backend):
    rank_pool(2, backend).run(mismatch)


def fails_before_the_exchange(rank, world_size):
    ddp = DistributedDataParallel(Net(), bucket_cap_mb=0.05)
    hook = hooks.BlockQuantize().as_python_hook()
    fail = False

    def wrapped(state, bucket):
        if rank == 1 and bucket.index() == 1 and fail:
            bucket.set_buffer(torch.zeros(5))  # which its gradients do not fit
        return hook(state, bucket)

    ddp.register_comm_hook(None, wrapped)
    ddp(batch(rank, 2)).square().sum().backward()  # after which there are several buckets
    ddp.zero_grad()
    fail = True
    with pytest.raises(RuntimeError) as caught:
        ddp(batch(rank, 0)).square().sum().backward()
    assert "invalid for input of size 5" in str(caught.value)
    if rank == 0:
        assert "rank 1" in str(caught.value)
    # No bucket was paired with another: all are compared, and go on.
    fail = False
    ddp.zero_grad()
    ddp(batch(rank, 1)).square().sum().backward()
    assert same_on_all_ranks([p.grad for p in ddp.parameters()])
    group_goes_on(world_size)


@backends
def test_a_failure_on_one_rank_reaches_all(rank_pool, backend):
    rank_pool(2, backend).run(fails_before_the_exchange)


def divides_differently(rank, world_size):
    ddp = DistributedDataParallel(Steered(torch.zeros(1000)))
    hooks.register(ddp, hooks.FP16Compress())
    ddp.join_hook._state.divide_by_active_ranks = (
        rank == 1
    )  # as if they had asked join() for different divisors
    with pytest.raises(RuntimeError, match="rank 1 called .*divided by the ranks that have data"):
        ddp(torch.ones(1000)).sum().backward()
    group_goes_on(world_size)


@backends
def test_different_divisors_are_named(rank_pool, backend):
    rank_pool(2, backend).run(divides_differently)


def counts(rank, world_size):
    ddp = DistributedDataParallel(Net(), bucket_cap_mb=0.05)
    hooks.register(ddp, hooks.BlockQuantize())
    before = fccl.backend_of().collective_counts()
    ddp(batch(rank, 0)).square().sum().backward()
    after = fccl.backend_of().collective_counts()
    changed = {name for name in after if after[name] != before.get(name, 0)}
    assert changed == {"compressed_all_reduce"}


def test_a_bucket_is_one_call_of_the_group(rank_pool):
    rank_pool(2).run(counts)


def lose_a_peer(rank, world_size):
    ddp = DistributedDataParallel(Steered(torch.zeros(300000)))
    hooks.register(ddp, hooks.BlockQuantize(exempt=None))
    ddp(torch.ones(300000)).sum().backward()
    loss = ddp(torch.ones(300000)).sum()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError, match="compressed_all_reduce.*rank 1"):
        loss.backward()
    return True


def test_a_peer_that_dies_is_named():
    results = run_ranks(lose_a_peer, 2, expect_exit={1: -9})
    assert results[0] is True
