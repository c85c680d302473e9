"""fccl.hooks: gradients through the C++ hooks, over Gloo and over fccl.

Most tests steer the gradients: with ``loss = (parameter * wanted).sum()`` a rank's gradient is ``wanted``.
"""

import copy

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from hooks_testing import (
    FORMS,
    HOOKS,
    Net,
    SparseNet,
    Steered,
    all_hooks,
    attach,
    backends,
    batch,
    error_bounds,
    reference_gradients,
    same_on_all_ranks,
    steered_gradients,
    uses_extra,
)

# ---- the mean ----


def train_and_compare(rank, world_size, hook, form, mode, as_bucket_view):
    torch.manual_seed(7)
    net = Net()
    options = {
        "plain": {},
        "find_unused": {"find_unused_parameters": True},
        "static": {"static_graph": True},
        "static_unused": {"static_graph": True},
    }[mode]
    options |= {"bucket_cap_mb": 0.05, "gradient_as_bucket_view": as_bucket_view}
    plain = DistributedDataParallel(copy.deepcopy(net), **options)
    hooked = DistributedDataParallel(copy.deepcopy(net), **options)
    attach(hooked, hook, form)
    largest = 0.0
    for step in range(4):  # buckets are rebuilt at the second or third
        for ddp in (plain, hooked):
            ddp.zero_grad()
            ddp(batch(rank, step), uses_extra(rank, step, mode)).square().sum().backward()
        means, magnitudes = reference_gradients(net, world_size, step, mode)
        gradients = []
        for (name, p), q, mean, magnitude in zip(
            hooked.named_parameters(), plain.parameters(), means, magnitudes, strict=True
        ):
            assert (p.grad is None) == (q.grad is None), (step, name)
            if p.grad is None:
                continue
            gradients.append(p.grad)
            largest = max(largest, magnitude.max().item() * world_size)
            if hook == "AllReduce" and world_size == 2:
                # A division by two loses nothing, whenever it is made.
                assert torch.equal(p.grad, q.grad), (step, name)
            if hook != "AllReduce":
                assert torch.equal(p.grad, q.grad) is False or p.grad.abs().max() == 0, (step, name)
            bound = error_bounds(hook, mean, magnitude, world_size, largest)
            assert ((p.grad.double() - mean).abs() <= bound).all(), (step, name)
            if hook == "BF16Compress":
                assert torch.equal(p.grad, p.grad.bfloat16().float()), (step, name)
        assert same_on_all_ranks(gradients), step
    assert hooked._get_ddp_logging_data()["comm_hook"] == HOOKS[hook]().name
    if mode == "plain":
        assert hooked._get_ddp_logging_data()["has_rebuilt_buckets"]
        assert len(hooked._get_ddp_logging_data()["rebuilt_bucket_sizes"].split(",")) > 1


@backends
@all_hooks
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mode", ["plain", "find_unused", "static", "static_unused"])
@pytest.mark.parametrize("as_bucket_view", [False, True])
def test_gradients_equal_ddp_and_reference(rank_pool, backend, hook, form, mode, as_bucket_view):
    rank_pool(2, backend).run(train_and_compare, hook, form, mode, as_bucket_view)


@backends
@all_hooks
@pytest.mark.parametrize("form", FORMS)
def test_gradients_on_three_ranks(rank_pool, backend, hook, form):
    rank_pool(3, backend).run(train_and_compare, hook, form, "plain", True)


def correctly_rounded_mean(rank, world_size, dtype):
    values = [
        torch.randint(-2000, 2000, (1001,), generator=torch.Generator().manual_seed(r))
        for r in range(world_size)
    ]
    values = [v.to(dtype) for v in values]
    (gradient,) = steered_gradients("AllReduce", [values[rank]])
    exact = sum(v.double() for v in values) / world_size
    # The sum of these is exact in float32, so the division's rounding is the only one in float32; 16-bit
    # results are rounded once more, from the accumulator.
    wanted = exact if dtype == torch.float64 else exact.float().to(dtype)
    assert torch.equal(gradient, wanted)


@backends
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("world_size", [1, 3])
def test_all_reduce_mean_is_correctly_rounded(rank_pool, backend, dtype, world_size):
    rank_pool(world_size, backend).run(correctly_rounded_mean, dtype)


def sixteen_bit_sums(rank, world_size, hook):
    # 256 + 1 is 256 in bfloat16: a sum kept in that type is wrong.
    (gradient,) = steered_gradients(hook, [torch.full((999,), [256.0, 1.0, 1.0][rank], dtype=torch.bfloat16)])
    assert torch.equal(gradient, torch.full_like(gradient, 86.0))
    # 3 × 40000 is beyond float16's largest.
    (gradient,) = steered_gradients(hook, [torch.full((999,), 40000.0, dtype=torch.float16)])
    assert torch.equal(gradient, torch.full_like(gradient, 40000.0))


@backends
@all_hooks
def test_sixteen_bit_gradients_are_summed_in_float32(rank_pool, backend, hook):
    rank_pool(3, backend).run(sixteen_bit_sums, hook)


def mixed_dtypes(rank, world_size, hook, as_bucket_view):
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.float32]
    sign = 1 if rank == 0 else -1
    wanted = [torch.full((i + 3,), 4.0 * (i + 1) + sign, dtype=dtype) for i, dtype in enumerate(dtypes)]
    wanted[4] = torch.full((7,), complex(2 + sign, 8 - sign), dtype=torch.complex64)
    gradients = steered_gradients(
        hook, wanted, steps=3, init_sync=False, gradient_as_bucket_view=as_bucket_view
    )
    for i, (gradient, dtype) in enumerate(zip(gradients, dtypes, strict=True)):
        value = complex(2, 8) if dtype.is_complex else 4.0 * (i + 1)
        assert gradient.dtype == dtype
        assert torch.equal(gradient, torch.full_like(gradient, value)), dtype


@backends
@all_hooks
@pytest.mark.parametrize("as_bucket_view", [False, True])
def test_dtypes_in_one_model(rank_pool, backend, hook, as_bucket_view):
    rank_pool(2, backend).run(mixed_dtypes, hook, as_bucket_view)


# ---- bfloat16 ----


def bf16_round_trip(rank, world_size, form):
    generator = torch.Generator().manual_seed(3)
    # Around the size of the pieces in which the bucket is converted, in its own memory.
    for count in (1, 2, 32767, 32768, 32769, 100003):
        for dtype in (torch.float32, torch.float64):
            wanted = torch.randn(count, generator=generator, dtype=dtype) * 1000
            (gradient,) = steered_gradients("BF16Compress", [wanted], form, steps=2)
            assert gradient.dtype == dtype
            assert torch.equal(gradient, wanted.bfloat16().to(dtype)), (count, dtype)


@backends
@pytest.mark.parametrize("form", FORMS)
def test_bf16_is_what_travels(rank_pool, backend, form):
    """One rank: the mean is the gradient itself, rounded to bfloat16 once."""
    rank_pool(1, backend).run(bf16_round_trip, form)


def bf16_mean_of_two(rank, world_size):
    values = [torch.randn(70001, generator=torch.Generator().manual_seed(r)) for r in range(2)]
    (gradient,) = steered_gradients("BF16Compress", [values[rank]])
    total = values[0].bfloat16().float() + values[1].bfloat16().float()
    assert torch.equal(gradient, total.bfloat16().float() / 2)


@backends
def test_bf16_mean_is_rounded_once_after_the_sum(rank_pool, backend):
    rank_pool(2, backend).run(bf16_mean_of_two)


# ---- non-finite ----


def non_finite(rank, world_size, hook, form):
    wanted = torch.full((40000,), 2.0)
    if rank == 1:
        wanted[10], wanted[11], wanted[39999] = float("inf"), float("nan"), float("-inf")
    (gradient,) = steered_gradients(hook, [wanted], form)
    if hook == "int8":  # which has one code for all that is not finite
        assert gradient[[10, 39999]].isnan().all()
    else:
        assert gradient[10] == float("inf")
        assert gradient[39999] == float("-inf")
    assert gradient[11].isnan()
    finite = torch.ones(40000, dtype=torch.bool)
    finite[[10, 11, 39999]] = False
    assert (gradient[finite] == 2.0).all()
    # The next step is clean: nothing is carried over.
    (gradient,) = steered_gradients(hook, [torch.full((40000,), 2.0)], form)
    assert (gradient == 2.0).all()


@backends
@all_hooks
@pytest.mark.parametrize("form", FORMS)
def test_inf_and_nan_reach_every_rank(rank_pool, backend, hook, form):
    rank_pool(2, backend).run(non_finite, hook, form)


def beyond_bf16(rank, world_size):
    largest = torch.finfo(torch.float32).max
    exact, compressed = torch.tensor([largest, 1.0]), torch.tensor([float("inf"), 1.0])
    (gradient,) = steered_gradients("BF16Compress", [exact])
    assert torch.equal(gradient, compressed)
    (gradient,) = steered_gradients("AllReduce", [exact])
    assert torch.equal(gradient, exact)


@backends
def test_beyond_bf16_becomes_inf_as_documented(rank_pool, backend):
    rank_pool(1, backend).run(beyond_bf16)


# ---- accumulation ----


def accumulate(rank, world_size, hook, as_bucket_view):
    ddp = DistributedDataParallel(
        Steered(torch.zeros(50), torch.zeros(3)), gradient_as_bucket_view=as_bucket_view
    )
    attach(ddp, hook)
    for _ in range(3):
        ddp.zero_grad()
        with ddp.no_sync():
            for micro in range(2):
                ddp(torch.full((50,), 2.0 + micro + 2 * rank), torch.ones(3)).sum().backward()
                local = sum(2.0 + m + 2 * rank for m in range(micro + 1))
                assert torch.equal(ddp.module.parameters_[0].grad, torch.full((50,), local))
        ddp(torch.full((50,), 1.0), torch.ones(3)).sum().backward()
        # (5 + 4 · rank) + 1, averaged over ranks 0 and 1
        assert torch.equal(ddp.module.parameters_[0].grad, torch.full((50,), 8.0))
        assert torch.equal(ddp.module.parameters_[1].grad, torch.full((3,), 3.0))


@backends
@all_hooks
@pytest.mark.parametrize("as_bucket_view", [False, True])
def test_no_sync_exchanges_the_accumulated_gradient_once(rank_pool, backend, hook, as_bucket_view):
    rank_pool(2, backend).run(accumulate, hook, as_bucket_view)


# ---- sparse ----


def sparse_gradients(rank, world_size, hook, form, dtype):
    torch.manual_seed(1)
    net = SparseNet(dtype)
    with torch.no_grad():
        net.linear.weight.zero_()
    ddp = DistributedDataParallel(net)
    attach(ddp, hook, form)
    rows = torch.tensor([[3, 3, 5], [5, 7, 9], [9, 9, 9]][rank])
    for _ in range(3):
        ddp.zero_grad(set_to_none=True)
        ddp(rows, (rank + 1) * 3.0).backward()
        gradient = net.embedding.weight.grad
        assert gradient.is_sparse
        assert gradient.dtype == dtype
        wanted = torch.zeros(20, 4, dtype=dtype)
        # Rank r adds 3 (r + 1) for each of its rows; the mean over three ranks.
        for row, value in {3: 2 * 1.0, 5: 1.0 + 2.0, 7: 2.0, 9: 2.0 + 3 * 3.0}.items():
            wanted[row] = value
        assert torch.equal(gradient.to_dense(), wanted)
        assert torch.allclose(net.linear.bias.grad, torch.full((2,), 3.0, dtype=dtype))


@backends
@all_hooks
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sparse_gradients_are_averaged(rank_pool, backend, hook, form, dtype):
    rank_pool(3, backend).run(sparse_gradients, hook, form, dtype)
