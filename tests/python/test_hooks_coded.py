"""FP16Compress and BlockQuantize: their numbers to the bit, and what BlockQuantize keeps from step to step."""

import copy
import os
import pickle
import signal

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fccl
from fccl import hooks
from fccl_testing import run_ranks
from hooks_testing import Net, Steered, backends, batch, same_on_all_ranks, steered_gradients

FORMATS = ["int8", "fp8_e4m3", "fp8_e5m2"]
formats = pytest.mark.parametrize("format", FORMATS)

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


def random_gradient(rank, step, count):
    generator = torch.Generator().manual_seed(100 * step + rank)
    gradient = torch.randn(count, generator=generator)
    gradient[count // 2 :] *= 1e-6  # other blocks, another scale
    gradient[7] = 0
    return gradient


def equals_model(rank, world_size, make_hook, format, block, error_feedback):
    count = 3 * block + 17
    ddp = DistributedDataParallel(Steered(torch.zeros(count)))
    hooks.register(ddp, make_hook(block=block, error_feedback=error_feedback))
    remainders = [torch.zeros(count) for _ in range(world_size)]
    blocks = -(-count // block)
    shard = -(-blocks // world_size) * block
    for step in range(4):
        ddp.zero_grad()
        ddp(random_gradient(rank, step, count)).sum().backward()
        # All ranks' part of it, on each rank.
        sent = []
        for r in range(world_size):
            value = random_gradient(r, step, count) + (remainders[r] if error_feedback else 0)
            sent.append(coded(value, format, block))
            remainders[r] = value - sent[r]
        total = sent[0]
        for other in sent[1:]:
            total = total + other
        mean = total / world_size
        result = coded(mean, format, block)
        for r in range(world_size):
            own = slice(r * shard, (r + 1) * shard)
            remainders[r][own] += world_size * (mean - result)[own]
        assert torch.equal(ddp.module.parameters_[0].grad, result), step


def fp16_hook(block, error_feedback):
    return hooks.FP16Compress()


def int8_hook(block, error_feedback):
    return hooks.BlockQuantize("int8", block, error_feedback, exempt=None)


def e4m3_hook(block, error_feedback):
    return hooks.BlockQuantize("fp8_e4m3", block, error_feedback, exempt=None)


def e5m2_hook(block, error_feedback):
    return hooks.BlockQuantize("fp8_e5m2", block, error_feedback, exempt=None)


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


# ---- error feedback ----


def accumulated(rank, world_size, format, error_feedback):
    # One large element hides the others from the code, in one step.
    wanted = torch.full((1000,), 1e-3 * (1 + rank))
    wanted[::100] = 1000.0
    ddp = DistributedDataParallel(Steered(torch.zeros(1000)))
    hooks.register(ddp, hooks.BlockQuantize(format, error_feedback=error_feedback, exempt=None))
    total = torch.zeros(1000, dtype=torch.float64)
    for _ in range(40):
        ddp.zero_grad()
        ddp(wanted).sum().backward()
        total += ddp.module.parameters_[0].grad
    small = torch.ones(1000, dtype=torch.bool)
    small[::100] = False
    return (total[small] / 40).mean().item()


@backends
def test_error_feedback_loses_nothing_for_good(rank_pool, backend):
    exact = 1e-3 * 1.5
    for with_it in rank_pool(2, backend).run(accumulated, "fp8_e4m3", True):
        assert abs(with_it - exact) < 0.1 * exact
    for without in rank_pool(2, backend).run(accumulated, "int8", False):
        assert without == 0.0


def conserved(rank, world_size, mode):
    """What all ranks had to say is what came out and what is still kept, though buckets are cut anew."""
    torch.manual_seed(4)
    options = {"find_unused_parameters": True} if mode == "find_unused" else {}
    net = Net()
    net.second.weight.data = net.second.weight.data.t().contiguous().t()  # another order in memory
    ddp = DistributedDataParallel(net, bucket_cap_mb=0.05, **options)
    local = copy.deepcopy(net)
    hook = hooks.BlockQuantize("fp8_e5m2")
    hooks.register(ddp, hook)
    said = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in net.named_parameters()}
    wanted = copy.deepcopy(said)
    for step in range(5):
        # Not used at all in step 1, by rank 0 alone in step 2.
        use_extra = mode != "find_unused" or not (step == 1 or (step == 2 and rank != 0))
        ddp.zero_grad()
        local.zero_grad()
        ddp(batch(rank, step), use_extra).square().sum().backward()
        local(batch(rank, step), use_extra).square().sum().backward()
        for (name, p), q in zip(net.named_parameters(), local.parameters(), strict=True):
            if p.grad is not None:
                said[name] += p.grad.double() * world_size
            if q.grad is not None:
                wanted[name] += q.grad.double()
    assert ddp._get_ddp_logging_data()["has_rebuilt_buckets"] or mode == "find_unused"
    kept = hook.state_dict()["residuals"]
    assert set(kept) == {name for name, p in net.named_parameters() if p.dim() > 1}
    for name, parameter in net.named_parameters():
        owed = wanted[name] - (kept[name].double() if name in kept else 0)
        dist.all_reduce(owed)
        assert (owed - said[name]).abs().max() <= 1e-5 * wanted[name].abs().max(), name
        if name in kept:
            assert kept[name].stride() == parameter.stride()
            assert kept[name].abs().max() > 0, name


@backends
@pytest.mark.parametrize("mode", ["plain", "find_unused"])
def test_remainders_follow_their_parameters(rank_pool, backend, mode):
    rank_pool(2, backend).run(conserved, mode)


def poisoned(rank, world_size, format):
    hook = hooks.BlockQuantize(format, exempt=None)
    clean_hook = hooks.BlockQuantize(format, exempt=None)
    models = [DistributedDataParallel(Steered(torch.zeros(700))) for _ in range(2)]
    for ddp, each in zip(models, (hook, clean_hook), strict=True):
        hooks.register(ddp, each)
    for step in range(3):
        for ddp in models:
            wanted = random_gradient(rank, step, 700)
            if ddp is models[0] and step == 1 and rank == 1:
                wanted[[3, 300, 600]] = torch.tensor([float("inf"), float("nan"), float("-inf")])
            ddp.zero_grad()
            ddp(wanted).sum().backward()
        poisoned_gradient, clean = (ddp.module.parameters_[0].grad for ddp in models)
        if step == 1:
            assert not poisoned_gradient[[3, 300, 600]].isfinite().any()
            assert poisoned_gradient.isfinite().sum() == 697
    assert poisoned_gradient.isfinite().all()
    assert hook.state_dict()["residuals"]["parameters_.0"].isfinite().all()
    # The one element whose remainder stayed apart, the others are as if nothing had been.
    assert (poisoned_gradient != clean).sum() <= 700
    assert (poisoned_gradient - clean).abs().max() <= 0.5 * clean.abs().max()


@backends
@formats
def test_what_is_not_finite_stays_out_of_the_state(rank_pool, backend, format):
    rank_pool(2, backend).run(poisoned, format)


def scaler_overflow(rank, world_size, make_hook):
    torch.manual_seed(6)
    ddp = DistributedDataParallel(nn.Linear(300, 4))
    hooks.register(ddp, make_hook(256, True))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    start = ddp.module.weight.detach().clone()
    for step in range(4):
        before = ddp.module.weight.detach().clone()
        optimizer.zero_grad()
        x = torch.randn(2, 300, generator=torch.Generator().manual_seed(step * 10 + rank))
        if step == 1 and rank == 1:
            x[0, 5] = float("inf")
        scaler.scale(ddp(x).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(ddp.module.weight, before) == (step == 1)  # skipped, on every rank
    assert scaler.get_scale() == 2.0**9
    assert ddp.module.weight.isfinite().all()
    assert not torch.equal(start, ddp.module.weight)
    assert same_on_all_ranks([ddp.module.weight])


@backends
@pytest.mark.parametrize("make_hook", [fp16_hook, int8_hook, e5m2_hook])
def test_grad_scaler_skips_an_overflow_on_every_rank(rank_pool, backend, make_hook):
    rank_pool(2, backend).run(scaler_overflow, make_hook)


# ---- state_dict ----


def resumed(rank, world_size, format):
    def train(net, hook, steps, state=None):
        ddp = DistributedDataParallel(net)
        hooks.register(ddp, hook)
        if state is not None:
            hook.load_state_dict(state)
        gradients = []
        for step in steps:
            ddp.zero_grad()
            ddp(batch(rank, step)).square().sum().backward()
            gradients.append([p.grad.clone() for p in ddp.parameters()])
        return gradients

    torch.manual_seed(7)
    net = Net()
    whole = train(copy.deepcopy(net), hooks.BlockQuantize(format), range(6))
    first = hooks.BlockQuantize(format)
    trained = copy.deepcopy(net)
    train(trained, first, range(3))  # the DDP around it is gone when the state is asked for
    path = f"/tmp/fccl-test-{os.getpid()}.pt"
    try:
        torch.save(first.state_dict(), path)
        state = torch.load(path, weights_only=True)
    finally:
        os.unlink(path)
    assert state["version"] == 1
    rest = train(copy.deepcopy(net), hooks.BlockQuantize(format), range(3, 6), state)
    # The buckets of a new model are cut as the old one's were in its first steps, and then anew: who keeps what
    # the mean lost may differ, so the sums agree, not the bits.
    for ours, theirs in zip(rest, whole[3:], strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert (a - b).abs().max() <= 0.3 * b.abs().max()
    assert all(torch.equal(a, b) for a, b in zip(rest[0], whole[3], strict=True))
    forgetful = train(copy.deepcopy(net), hooks.BlockQuantize(format), range(3, 6))
    assert not all(torch.equal(a, b) for a, b in zip(forgetful[0], whole[3], strict=True))


@backends
@formats
def test_training_goes_on_from_a_state_dict(rank_pool, backend, format):
    rank_pool(2, backend).run(resumed, format)


def state_errors(rank, world_size):
    hook = hooks.BlockQuantize()
    with pytest.raises(RuntimeError, match=r"state_dict: the hook is registered with no model"):
        hook.state_dict()
    ddp = DistributedDataParallel(nn.Linear(3, 2))
    hooks.register(ddp, hook)
    assert hook.state_dict() == {"version": 1, "residuals": {}}
    ddp(torch.randn(2, 3)).sum().backward()
    state = hook.state_dict()
    assert list(state["residuals"]) == ["weight"]
    assert hook.state_dict(ddp.module)["residuals"].keys() == state["residuals"].keys()
    for bad, message in [
        ({}, "of version 1"),
        ({"version": 2, "residuals": {}}, "of version 1"),
        (
            {"version": 1, "residuals": {"weight": torch.ones(2, 3), "other": torch.ones(1)}},
            "no parameter 'other'",
        ),
        ({"version": 1, "residuals": {"weight": torch.ones(3)}}, r"shape \(3,\) and the parameter \(2, 3\)"),
    ]:
        with pytest.raises(ValueError, match=message):
            hook.load_state_dict(bad)
    assert torch.equal(
        hook.state_dict()["residuals"]["weight"], state["residuals"]["weight"]
    )  # nothing half done
    hook.load_state_dict({"version": 1, "residuals": {}})
    assert hook.state_dict()["residuals"] == {}
    hook.load_state_dict({"version": 1, "residuals": {"weight": torch.ones(2, 3, dtype=torch.float64)}})
    assert torch.equal(hook.state_dict()["residuals"]["weight"], torch.ones(2, 3))

    stateless = hooks.BlockQuantize(error_feedback=False)
    with pytest.raises(RuntimeError, match="keeps no residuals"):
        stateless.load_state_dict(state, ddp)

    other = DistributedDataParallel(nn.Linear(3, 2))
    with pytest.raises(RuntimeError, match="serves another model"):
        hooks.register(other, hook)
    again = DistributedDataParallel(ddp.module)
    hooks.register(again, hook)  # the same model, wrapped anew
    assert list(hook.state_dict()["residuals"]) == ["weight"]


def test_state_says_what_is_wrong(rank_pool):
    rank_pool(1, "gloo").run(state_errors)


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
    assert (
        "rank 0 called compressed_all_reduce(float32, int8, block=256, error_feedback, count=1000" in message
    )
    assert (
        "rank 1 called compressed_all_reduce(float32, fp8_e5m2, block=256, error_feedback, count=1000"
        in message
    )
    # Nothing was exchanged, and the group goes on.
    ones = torch.ones(3)
    dist.all_reduce(ones)
    assert (ones == world_size).all()


@backends
def test_different_hooks_on_the_ranks_are_named(rank_pool, backend):
    rank_pool(2, backend).run(mismatch)


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
