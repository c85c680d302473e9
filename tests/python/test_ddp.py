"""DistributedDataParallel: gradients through fccl equal those through Gloo to the bit.

With two ranks and float32 there is one addition and one division per element, so every correct
all-reduce gives the same bits whatever its order.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fccl_testing import expect_shared_memory, run_ranks


class WithUnused(nn.Module):
    """Uses one of its two branches, by the step's number and, if asked, by rank."""

    def __init__(self, by_rank: bool) -> None:
        super().__init__()
        self.first = nn.Linear(20, 30)
        self.branches = nn.ModuleList(nn.Linear(30, 30) for _ in range(2))
        self.last = nn.Linear(30, 10)
        self.by_rank = by_rank
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        which = (self.calls + (dist.get_rank() if self.by_rank else 0)) % 2
        return self.last(torch.relu(self.branches[which](torch.relu(self.first(x)))))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(20, 24, num_layers=2, batch_first=True)
        self.last = nn.Linear(24, 10)

    def forward(self, x):
        out, _ = self.lstm(x.view(len(x), 1, 20).expand(-1, 4, -1))
        return self.last(out[:, -1])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(1, 32)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.last = nn.Linear(32, 10)

    def forward(self, x):
        return self.last(self.layer(self.embed(x.unsqueeze(-1))).mean(1))


class Convolutions(nn.Module):
    """channels_last weights: their gradients are dense, but not in the order of their shape."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3)
        ).to(memory_format=torch.channels_last)
        self.last = nn.Linear(8 * 2 * 3, 10)

    def forward(self, x):
        image = x.view(-1, 1, 4, 5).to(memory_format=torch.channels_last)
        return self.last(self.body(image).flatten(1))


class Shared(nn.Module):
    """One weight used twice: its gradient is ready only after both uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(20, 20)
        self.last = nn.Linear(20, 10)

    def forward(self, x):
        return self.last(self.first(torch.relu(self.first(x))))


def make_model(name: str) -> nn.Module:
    torch.manual_seed(7)
    if name == "wide":  # 1.7 million parameters: several buckets, all on the staged path
        return nn.Sequential(
            nn.Linear(20, 1200), nn.ReLU(), nn.Linear(1200, 1300), nn.ReLU(), nn.Linear(1300, 10)
        )
    return {
        "tiny": lambda: nn.Linear(20, 10),
        "convolutions": Convolutions,
        "recurrent": Recurrent,
        "attention": Attention,
        "shared": Shared,
        "unused": lambda: WithUnused(by_rank=False),
        "unused_by_rank": lambda: WithUnused(by_rank=True),
    }[name]()


def train(rank, world_size, model_name, ddp_options, accumulate, dtype_name):
    """Six steps of SGD with momentum; returns every step's loss and gradients, and the last weights."""
    dtype = getattr(torch, dtype_name)
    model = make_model(model_name).to(dtype)
    ddp = DistributedDataParallel(model, **ddp_options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    data = torch.Generator().manual_seed(100 + rank)
    record = []
    for step in range(6):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        # torch's reducer asserts where a static graph's first iteration is under no_sync().
        parts = accumulate if step >= 2 else 1
        for part in range(parts):
            inputs = torch.randn(16, 20, generator=data).to(dtype)
            targets = torch.randint(0, 10, (16,), generator=data)
            last = part == parts - 1
            with contextlib.nullcontext() if last else ddp.no_sync():
                loss = nn.functional.cross_entropy(ddp(inputs), targets)
                loss.backward()
        gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        record.append((loss.item(), gradients))
        optimizer.step()
    return record, [p.detach().clone() for p in model.parameters()]


def assert_equal_runs(ours, theirs):
    for rank, ((our_steps, our_weights), (their_steps, their_weights)) in enumerate(
        zip(ours, theirs, strict=True)
    ):
        for step, ((our_loss, our_grads), (their_loss, their_grads)) in enumerate(
            zip(our_steps, their_steps, strict=True)
        ):
            assert our_loss == their_loss, f"rank {rank}, step {step}: loss"
            for i, (a, b) in enumerate(zip(our_grads, their_grads, strict=True)):
                equal = (a is None and b is None) or torch.equal(a, b)
                assert equal, f"rank {rank}, step {step}: gradient {i} differs"
        for i, (a, b) in enumerate(zip(our_weights, their_weights, strict=True)):
            assert torch.equal(a, b), f"rank {rank}: weight {i} differs"


def assert_equal_ranks(results):
    for _, weights in results[1:]:
        for i, (a, b) in enumerate(zip(results[0][1], weights, strict=True)):
            assert torch.equal(a, b), f"ranks differ in weight {i}"


CASES = [
    ("tiny", {}, 1),
    ("wide", {}, 1),
    ("wide", {"bucket_cap_mb": 1, "gradient_as_bucket_view": True}, 1),
    ("wide", {"static_graph": True}, 2),
    ("convolutions", {"broadcast_buffers": True}, 1),
    ("convolutions", {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.001}, 3),
    ("recurrent", {"static_graph": True, "gradient_as_bucket_view": True}, 1),
    ("attention", {"bucket_cap_mb": 0.01}, 2),
    ("shared", {"static_graph": True}, 1),
    ("unused", {"find_unused_parameters": True}, 1),
    ("unused", {"find_unused_parameters": True, "gradient_as_bucket_view": True}, 2),
    ("unused_by_rank", {"find_unused_parameters": True}, 1),
]


@pytest.mark.parametrize(
    ("model", "options", "accumulate"), CASES, ids=[f"{m}-{'-'.join(o) or 'plain'}-{a}" for m, o, a in CASES]
)
def test_gradients_equal_gloo(rank_pool, model, options, accumulate):
    arguments = (model, options, accumulate, "float32")
    ours = rank_pool(2).run(train, *arguments)
    theirs = rank_pool(2, "gloo").run(train, *arguments)
    assert_equal_runs(ours, theirs)
    assert_equal_ranks(ours)


@pytest.mark.parametrize("world_size", (1, 3, 4))
def test_other_world_sizes(rank_pool, world_size):
    """The order of additions counts here: Gloo's may differ in the last bit, our ranks never do."""
    results = rank_pool(world_size).run(train, "wide", {}, 1, "float32")
    assert_equal_ranks(results)
    again = rank_pool(world_size).run(train, "wide", {"bucket_cap_mb": 0.5}, 1, "float32")
    assert_equal_runs(results, again)  # … and buckets do not show


def test_float64(rank_pool):
    arguments = ("attention", {}, 1, "float64")
    assert_equal_runs(rank_pool(2).run(train, *arguments), rank_pool(2, "gloo").run(train, *arguments))


def test_bfloat16_ranks_agree(rank_pool):
    assert_equal_ranks(rank_pool(3).run(train, "wide", {}, 1, "bfloat16"))


def join(rank, world_size):
    """Uneven inputs: the ranks that are done shadow the others' collectives."""
    expect_shared_memory(rank, world_size)
    ddp = DistributedDataParallel(make_model("tiny"))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(rank)
    with ddp.join():
        for _ in range(3 + 2 * rank):
            optimizer.zero_grad()
            ddp(torch.randn(8, 20, generator=data)).square().mean().backward()
            optimizer.step()
    return [p.detach().clone() for p in ddp.parameters()]


def test_join_with_uneven_inputs():
    ours = run_ranks(join, 2)
    theirs = run_ranks(join, 2, backend="gloo")
    for a, b in zip(ours, theirs, strict=True):
        assert all(map(torch.equal, a, b))


def sharded_optimizer(rank, world_size):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 10))
    ddp = DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, lr=1e-2)
    data = torch.Generator().manual_seed(rank)
    for _ in range(4):
        optimizer.zero_grad()
        ddp(torch.randn(8, 20, generator=data)).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in ddp.parameters()]


def test_zero_redundancy_optimizer(rank_pool):
    ours = rank_pool(2).run(sharded_optimizer)
    theirs = rank_pool(2, "gloo").run(sharded_optimizer)
    for a, b in zip(ours, theirs, strict=True):
        assert all(map(torch.equal, a, b))


def stock_hooks(rank, world_size, name, bucket_cap_mb):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    expect_shared_memory(rank, world_size)
    ddp = DistributedDataParallel(make_model("wide"), bucket_cap_mb=bucket_cap_mb)
    if name == "powerSGD":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=3)
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    else:
        ddp.register_comm_hook(None, getattr(default_hooks, name))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    data = torch.Generator().manual_seed(rank)
    for _ in range(6):
        optimizer.zero_grad()
        ddp(torch.randn(8, 20, generator=data)).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in ddp.parameters()]


@pytest.mark.parametrize("name", ["allreduce_hook", "fp16_compress_hook", "powerSGD"])
def test_stock_hooks(name):
    """They issue collectives inside callbacks of futures and block on them."""
    # With one bucket: with several, stock PowerSGD over Gloo blocks all of Gloo's threads for ever.
    ours = run_ranks(stock_hooks, 2, name, 25, timeout=90)
    theirs = run_ranks(stock_hooks, 2, name, 25, backend="gloo", timeout=90)
    for i, (a, b) in enumerate(zip(ours[0], ours[1], strict=True)):
        assert torch.equal(a, b), f"ranks differ in weight {i}"
    for i, (a, b) in enumerate(zip(ours[0], theirs[0], strict=True)):
        if name == "fp16_compress_hook":  # Gloo adds in float16
            torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-4)
        else:
            assert torch.equal(a, b), f"weight {i} differs from Gloo's"


# Not stock PowerSGD: its callbacks and the backward pass would issue collectives side by side, in an order
# that may differ from rank to rank.
@pytest.mark.parametrize("name", ["allreduce_hook", "fp16_compress_hook"])
def test_stock_hooks_with_several_buckets(name):
    ours = run_ranks(stock_hooks, 2, name, 1, timeout=90)
    for i, (a, b) in enumerate(zip(ours[0], ours[1], strict=True)):
        assert torch.equal(a, b), f"ranks differ in weight {i}"
