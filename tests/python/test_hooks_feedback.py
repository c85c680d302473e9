"""What BlockQuantize keeps from step to step: that nothing is lost for good, and its state_dict."""

import copy
import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fccl import hooks
from hooks_testing import (
    Net,
    Steered,
    backends,
    batch,
    e5m2_hook,
    formats,
    fp16_hook,
    int8_hook,
    random_gradient,
    same_on_all_ranks,
)


def accumulated(rank, world_size, format, error_feedback, silent_rank=None):
    # One large element hides the others from the code, in one step.
    wanted = torch.full((1000,), 1e-3 * (1 + rank))
    wanted[::100] = 1000.0
    if rank == silent_rank:
        wanted.zero_()
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


@backends
@pytest.mark.parametrize("silent_rank", [0, 1])
def test_error_feedback_needs_no_gradients_of_the_owner(rank_pool, backend, silent_rank):
    # Each rank owns half of the parameter; one has no gradients, of its half neither.
    exact = 1e-3 * (2 - silent_rank) / 2
    for mean in rank_pool(2, backend).run(accumulated, "fp8_e4m3", True, silent_rank):
        assert abs(mean - exact) < 0.15 * exact


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
    bad = torch.tensor([3, 300, 600])
    others = torch.ones(700, dtype=torch.bool)
    others[bad] = False
    for ddp, each in zip(models, (hook, clean_hook), strict=True):
        hooks.register(ddp, each)
    for step in range(3):
        for ddp in models:
            wanted = random_gradient(rank, step, 700)
            if step == 1:
                wanted[bad] = 0
                if ddp is models[0] and rank == 1:
                    wanted[bad] = torch.tensor([float("inf"), float("nan"), float("-inf")])
            ddp.zero_grad()
            ddp(wanted).sum().backward()
        gradient, clean = (ddp.module.parameters_[0].grad for ddp in models)
        assert torch.equal(gradient[others], clean[others]), step  # their neighbours do not notice
        assert gradient[bad].isfinite().any() == (step != 1)
    state, clean_state = (each.state_dict()["residuals"]["parameters_.0"] for each in (hook, clean_hook))
    assert state.isfinite().all()
    assert torch.equal(state[others], clean_state[others])


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
    for bad in ("much", torch.ones(2, 3, dtype=torch.int64)):
        with pytest.raises(
            TypeError, match="the residual of 'weight' is a .*, expected a tensor of floating"
        ):
            hook.load_state_dict({"version": 1, "residuals": {"weight": bad}})
    assert torch.equal(
        hook.state_dict()["residuals"]["weight"], state["residuals"]["weight"]
    )  # nothing half done
    with pytest.warns(UserWarning, match="dropped the residuals of 'bias', which this hook exempts"):
        hook.load_state_dict({"version": 1, "residuals": {"bias": torch.ones(2)}})
    assert hook.state_dict()["residuals"] == {}
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
