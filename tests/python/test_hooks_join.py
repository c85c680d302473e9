"""fccl.hooks in ``DDP.join()``: what the sum is divided by, and what remains afterwards."""

import copy

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import fccl
from hooks_testing import (
    Net,
    SparseNet,
    Steered,
    all_hooks,
    attach,
    backends,
    batch,
    same_on_all_ranks,
)


def train_in_join(ddp, rank, steps_of_rank, divide):
    """Gradients of each of this rank's steps, and the weights after the context."""
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    seen = []
    with ddp.join(divide_by_initial_world_size=divide):
        for step in range(steps_of_rank[rank]):
            optimizer.zero_grad()
            ddp(batch(rank, step).double()).square().mean().backward()
            seen.append([p.grad.clone() for p in ddp.parameters()])
            optimizer.step()
    return seen, [p.detach().clone() for p in ddp.parameters()]


def join_like_ddp(rank, world_size, hook, steps_of_rank, options):
    torch.manual_seed(5)
    net = Net().double()  # in which the steps before do not tell
    options = {"bucket_cap_mb": 0.05, **options}
    # Of the largest gradient; a wrong divisor misses by a third at least.
    tolerance = {"AllReduce": 1e-12, "fp8_e5m2": 0.3, "int8": 0.1}.get(hook, 2**-6)
    plain = DistributedDataParallel(copy.deepcopy(net), **options)
    hooked = DistributedDataParallel(copy.deepcopy(net), **options)
    attach(hooked, hook)
    for divide in (False, True, False):  # a later context may choose anew
        expected, expected_weights = train_in_join(plain, rank, steps_of_rank, divide)
        actual, weights = train_in_join(hooked, rank, steps_of_rank, divide)
        assert len(actual) == len(expected) == steps_of_rank[rank]
        for step, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
            for a, b in zip(ours, theirs, strict=True):
                assert (a - b).abs().max() <= tolerance * b.abs().max() + 1e-9, (divide, step)
        for a, b in zip(weights, expected_weights, strict=True):
            assert torch.allclose(a, b, rtol=10 * tolerance, atol=10 * tolerance)
        assert same_on_all_ranks(weights)


@backends
@all_hooks
@pytest.mark.parametrize(
    "options", [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}], ids=str
)
def test_join_divides_as_ddp_does(rank_pool, backend, hook, options):
    rank_pool(3, backend).run(join_like_ddp, hook, [4, 2, 3], options)


def join_divisor(rank, world_size, hook, form):
    ddp = DistributedDataParallel(Steered(torch.zeros(40000)))
    attach(ddp, hook, form)
    seen = {}
    for divide in (True, False):
        with ddp.join(divide_by_initial_world_size=divide):
            for step in range(1 + 2 * rank):  # rank 1 is alone from its second step on
                ddp.zero_grad()
                ddp(torch.full((40000,), 6.0)).sum().backward()
                (value,) = ddp.module.parameters_[0].grad.unique().tolist()
                seen[divide, step] = value
    return seen


@backends
@all_hooks
def test_join_divisor(rank_pool, backend, hook):
    ranks = rank_pool(2, backend).run(join_divisor, hook, "register")
    assert ranks[0] == {(True, 0): 6.0, (False, 0): 6.0}
    assert ranks[1] == {
        (True, 0): 6.0,
        (True, 1): 3.0,
        (True, 2): 3.0,
        (False, 0): 6.0,
        (False, 1): 6.0,
        (False, 2): 6.0,
    }


def bits_in_join(rank, world_size):
    ddp = DistributedDataParallel(Steered(torch.zeros(1000)))
    attach(ddp, "BF16Compress")
    seen = []
    with ddp.join(divide_by_initial_world_size=False):
        for step in range(1 + rank):  # 3 ranks, then 2, then 1
            ddp.zero_grad()
            ddp(torch.randn(1000, generator=torch.Generator().manual_seed(10 * step + rank))).sum().backward()
            seen.append(ddp.module.parameters_[0].grad.clone())
    return seen


def test_bf16_in_join_gives_the_same_bits_over_all_backends(rank_pool):
    over_fccl, over_gloo = (rank_pool(3, backend).run(bits_in_join) for backend in ("fccl", "gloo"))
    for ours, theirs in zip(over_fccl, over_gloo, strict=True):
        assert len(ours) > 0
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@backends
def test_join_divisor_of_the_python_form_is_the_world_size(rank_pool, backend):
    ranks = rank_pool(2, backend).run(join_divisor, "AllReduce", "python")
    assert ranks[1][True, 1] == ranks[1][False, 1] == 3.0


def join_sixteen_bit_and_sparse(rank, world_size, hook):
    ddp = DistributedDataParallel(Steered(torch.zeros(9, dtype=torch.float16)))
    attach(ddp, hook)
    with ddp.join(divide_by_initial_world_size=False):
        for _ in range(1 + rank):
            ddp.zero_grad()
            ddp(torch.full((9,), 40000.0, dtype=torch.float16)).sum().backward()
            assert (ddp.module.parameters_[0].grad == 40000).all()
    net = SparseNet()
    ddp = DistributedDataParallel(net)
    attach(ddp, hook)
    with torch.no_grad():
        net.linear.weight.zero_()
    # Two steps at least on each rank: DDP itself cannot shadow a sparse bucket that never had a gradient,
    # and it makes the buckets anew after the first.
    with ddp.join(divide_by_initial_world_size=False):
        for step in range(2 + rank):
            ddp.zero_grad(set_to_none=True)
            ddp(torch.tensor([rank]), 4.0).backward()
            gradient = net.embedding.weight.grad.to_dense()
            assert (gradient[1] == (2.0 if step < 2 else 4.0)).all(), gradient
            assert (gradient[0] == (2.0 if step < 2 else 0.0)).all(), gradient


@backends
@all_hooks
def test_join_with_sixteen_bit_and_sparse_gradients(rank_pool, backend, hook):
    rank_pool(2, backend).run(join_sixteen_bit_and_sparse, hook)


def collectives_around_join(rank, world_size, hook, divide):
    """The numbers of collectives of one training step, before and after a join context."""
    ddp = DistributedDataParallel(Net(), bucket_cap_mb=0.05)
    if hook is not None:
        attach(ddp, hook)

    def collectives_of_a_step():
        before = fccl.backend_of().collective_counts()
        ddp(batch(rank, 0)).square().sum().backward()
        after = fccl.backend_of().collective_counts()
        changes = {name: count - before.get(name, 0) for name, count in after.items()}
        return {name: change for name, change in changes.items() if change}

    for _ in range(3):  # until the buckets are what they will be
        collectives_of_a_step()
    first = collectives_of_a_step()
    with ddp.join(divide_by_initial_world_size=divide):
        for _ in range(1 + rank):
            within = collectives_of_a_step()
    return first, within, collectives_of_a_step()


def as_all_reduces(counts):
    compressed = {"compressed_all_reduce", "all_reduce"}
    others = {name: count for name, count in counts.items() if name not in compressed}
    return {**others, "all_reduce": sum(counts.get(name, 0) for name in compressed)}


@all_hooks
@pytest.mark.parametrize("divide", [True, False])
def test_nothing_of_a_join_context_remains(rank_pool, hook, divide):
    """DDP itself goes on with its all_reduces of the join context when that is over, the hooks do not."""
    name = "all_reduce" if hook in ("AllReduce", "BF16Compress") else "compressed_all_reduce"
    ranks = rank_pool(2).run(collectives_around_join, hook, divide)
    plain = rank_pool(2).run(collectives_around_join, None, divide)
    for of_hook, of_ddp in zip(ranks, plain, strict=True):
        first, within, last = map(as_all_reduces, of_hook)
        plain_first, plain_within, plain_last = of_ddp
        buckets = of_hook[0][name]
        assert buckets > 1
        assert first == plain_first
        assert last == plain_last
        # The others count who has data in the exchange itself.
        counts_data = buckets if hook == "AllReduce" and not divide else 0
        assert within["all_reduce"] == plain_within["all_reduce"] + counts_data
