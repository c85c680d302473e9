"""fccl.hooks: gradients through the C++ hooks, over Gloo and over fccl.

Most tests steer the gradients: with ``loss = (parameter * wanted).sum()`` a rank's gradient is ``wanted``.
"""

import copy
import gc
import importlib
import os
import pickle
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fccl
from fccl import hooks

BACKENDS = ["gloo", "fccl"]
HOOKS = ["AllReduce", "BF16Compress"]
FORMS = ["register", "python"]

backends = pytest.mark.parametrize("backend", BACKENDS)
both_hooks = pytest.mark.parametrize("hook", HOOKS)


# ---- helpers that run in the ranks ----


class Steered(nn.Module):
    """Parameters whose gradients are what ``forward`` is given."""

    def __init__(self, *parameters):
        super().__init__()
        self.parameters_ = nn.ParameterList(parameters)

    def forward(self, *wanted):
        losses = [
            (p * w.conj()).real.sum() if p.is_complex() else (p * w).sum()
            for p, w in zip(self.parameters_, wanted, strict=True)
        ]
        return torch.stack([loss.double() for loss in losses])


def attach(ddp, hook, form="register"):
    hook = getattr(hooks, hook)()
    if form == "register":
        hooks.register(ddp, hook)
    else:
        ddp.register_comm_hook(None, hook.as_python_hook())


def steered_gradients(hook, wanted, form="register", steps=1, **options):
    """The averaged gradients of a model whose gradients on this rank are ``wanted``."""
    ddp = DistributedDataParallel(Steered(*(torch.zeros_like(w) for w in wanted)), **options)
    if hook is not None:
        attach(ddp, hook, form)
    for _ in range(steps):
        ddp.zero_grad()
        ddp(*wanted).sum().backward()
    return [p.grad.clone() for p in ddp.parameters()]


def same_on_all_ranks(tensors):
    mine = torch.cat(
        [
            torch.view_as_real(t).flatten().double() if t.is_complex() else t.flatten().double()
            for t in tensors
        ]
    )
    theirs = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(theirs, mine)
    return all(torch.equal(other.view(torch.int64), mine.view(torch.int64)) for other in theirs)


class Net(nn.Module):
    """Several buckets at bucket_cap_mb=0.05; `extra` gets no gradient unless asked for."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 120)
        self.second = nn.Linear(120, 120)
        self.extra = nn.Linear(120, 120)
        self.norm = nn.LayerNorm(120)
        self.last = nn.Linear(120, 3)

    def forward(self, x, use_extra=True):
        x = self.second(torch.relu(self.first(x)))
        if use_extra:
            x = x + self.extra(x)
        return self.last(self.norm(x))


def batch(rank, step):
    return torch.randn(5, 8, generator=torch.Generator().manual_seed(1000 * step + rank))


def uses_extra(rank, step, mode):
    if mode == "find_unused":  # on one rank only in step 1, on none in step 2
        return step not in (1, 2) or (step == 1 and rank == 0)
    return mode != "static_unused"


def reference_gradients(net, world_size, step, mode):
    """Mean and mean absolute value of all ranks' gradients, in float64."""
    means, magnitudes = None, None
    for rank in range(world_size):
        model = copy.deepcopy(net).double()
        model(batch(rank, step).double(), uses_extra(rank, step, mode)).square().sum().backward()
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
        means = gradients if means is None else [m + g for m, g in zip(means, gradients, strict=True)]
        absolute = [g.abs() for g in gradients]
        magnitudes = (
            absolute if magnitudes is None else [m + g for m, g in zip(magnitudes, absolute, strict=True)]
        )
    return [m / world_size for m in means], [m / world_size for m in magnitudes]


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
    on_fccl = dist.get_backend() == "fccl"
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
            if hook == "AllReduce":
                bound = 4e-6 * magnitude.max()
                assert (p.grad - q.grad).abs().max() <= bound, (step, name)
                if world_size == 2:  # a division by two loses nothing, whenever it is made
                    assert torch.equal(p.grad, q.grad), (step, name)
            else:
                # Each rank's rounding, and one for every further one that the backend makes.
                roundings = 2 if on_fccl else world_size
                bound = roundings * 2**-8 * magnitude + 1e-6 * magnitude.max()
                assert torch.equal(p.grad, q.grad) is False or p.grad.abs().max() == 0, (step, name)
            assert ((p.grad.double() - mean).abs() <= bound).all(), (step, name)
            if hook == "BF16Compress" and on_fccl:
                assert torch.equal(p.grad, p.grad.bfloat16().float()), (step, name)
        assert same_on_all_ranks(gradients), step
    assert hooked._get_ddp_logging_data()["comm_hook"] == f"fccl.hooks.{hook}"
    if mode == "plain":
        assert hooked._get_ddp_logging_data()["has_rebuilt_buckets"]
        assert len(hooked._get_ddp_logging_data()["rebuilt_bucket_sizes"].split(",")) > 1


@backends
@both_hooks
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mode", ["plain", "find_unused", "static", "static_unused"])
@pytest.mark.parametrize("as_bucket_view", [False, True])
def test_gradients_equal_ddp_and_reference(rank_pool, backend, hook, form, mode, as_bucket_view):
    rank_pool(2, backend).run(train_and_compare, hook, form, mode, as_bucket_view)


@backends
@both_hooks
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
@both_hooks
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
@both_hooks
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
@both_hooks
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
@both_hooks
@pytest.mark.parametrize("as_bucket_view", [False, True])
def test_no_sync_exchanges_the_accumulated_gradient_once(rank_pool, backend, hook, as_bucket_view):
    rank_pool(2, backend).run(accumulate, hook, as_bucket_view)


# ---- sparse ----


class SparseNet(nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.embedding = nn.Embedding(20, 4, sparse=True, dtype=dtype)
        self.linear = nn.Linear(4, 2, dtype=dtype)

    def forward(self, rows, weight):
        return (self.embedding(rows) * weight).sum() + self.linear(self.embedding(rows)).sum()


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
@both_hooks
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sparse_gradients_are_averaged(rank_pool, backend, hook, form, dtype):
    rank_pool(3, backend).run(sparse_gradients, hook, form, dtype)


# ---- join ----


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
    tolerance = 1e-12 if hook == "AllReduce" else 2**-6
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
@both_hooks
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
@both_hooks
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
@both_hooks
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


@both_hooks
@pytest.mark.parametrize("divide", [True, False])
def test_nothing_of_a_join_context_remains(rank_pool, hook, divide):
    """DDP itself goes on with its all_reduces of the join context when that is over, the hooks do not."""
    ranks = rank_pool(2).run(collectives_around_join, hook, divide)
    plain = rank_pool(2).run(collectives_around_join, None, divide)
    for (first, within, last), (plain_first, plain_within, plain_last) in zip(ranks, plain, strict=True):
        buckets = first["all_reduce"]
        assert buckets > 1
        assert first == plain_first
        assert last == plain_last
        counts_data = 0 if divide else buckets
        assert within["all_reduce"] == plain_within["all_reduce"] + counts_data


# ---- errors of the exchange ----


def pull_the_cable(future):
    raise RuntimeError("the cable was pulled later")


class FlakyGroup(dist.ProcessGroup):
    """Passes all_reduce on to the default group, unless told to fail."""

    def __init__(self):
        self.inner = dist.distributed_c10d._get_default_group()
        super().__init__(self.inner.rank(), self.inner.size())
        self.failure = ""

    def allreduce(self, tensors, options):
        if self.failure == "at once":
            raise RuntimeError("the cable was pulled at once")
        work = self.inner.allreduce(tensors, options)
        if self.failure == "later":
            return torch._C._distributed_c10d._create_work_from_future(work.get_future().then(pull_the_cable))
        return work


def failing_exchange(rank, world_size, hook, failure, as_bucket_view):
    group = FlakyGroup()
    ddp = DistributedDataParallel(Steered(torch.zeros(40000)), gradient_as_bucket_view=as_bucket_view)
    native = getattr(hooks, hook)()._native()
    fccl._extension.load().register_comm_hook(ddp.reducer, group, native)
    wanted = torch.full((40000,), 1.0 + 2 * rank)
    for step in range(4):
        ddp.zero_grad()
        group.failure = failure if step == 1 else ""
        if step == 1:
            with pytest.raises(RuntimeError, match=f"the cable was pulled {failure}"):
                ddp(wanted).sum().backward()
            # No promise about which, but gradients: not the bytes of another format.
            values = ddp.module.parameters_[0].grad.unique().tolist()
            assert set(values) <= {1.0, 2.0, 3.0, 4.0}, values
        else:
            ddp(wanted).sum().backward()
            assert (ddp.module.parameters_[0].grad == 2.0).all(), step


@backends
@both_hooks
@pytest.mark.parametrize("failure", ["at once", "later"])
@pytest.mark.parametrize("as_bucket_view", [False, True])
def test_error_is_raised_by_backward_and_the_next_step_works(
    rank_pool, backend, hook, failure, as_bucket_view
):
    rank_pool(2, backend).run(failing_exchange, hook, failure, as_bucket_view)


def python_form_fails(rank, world_size, hook):
    group = FlakyGroup()
    ddp = DistributedDataParallel(Steered(torch.zeros(5)))
    ddp.register_comm_hook(None, getattr(hooks, hook)().as_python_hook(group))
    for step in range(3):
        ddp.zero_grad()
        group.failure = "at once" if step == 1 else ""
        if step == 1:
            with pytest.raises(RuntimeError, match="the cable was pulled at once"):
                ddp(torch.ones(5)).sum().backward()
        else:
            ddp(torch.ones(5)).sum().backward()
            assert (ddp.module.parameters_[0].grad == 1.0).all()


@both_hooks
def test_error_in_the_python_form(rank_pool, hook):
    rank_pool(2, "gloo").run(python_form_fails, hook)


def mismatched_calls(rank, world_size, hook):
    ddp = DistributedDataParallel(Steered(torch.zeros(1000)))
    attach(ddp, hook)
    ddp(torch.ones(1000)).sum().backward()
    ddp.zero_grad()
    loss = ddp(torch.ones(1000)).sum()  # broadcasts the new buckets
    with pytest.raises(RuntimeError, match=r"all_reduce.*broadcast|broadcast.*all_reduce"):
        if rank == 0:
            loss.backward()
        else:
            dist.broadcast(torch.ones(7), src=0)
    if rank == 0:
        ddp.zero_grad()
        loss = ddp(torch.full((1000,), 3.0)).sum()
    loss.backward()
    assert (ddp.module.parameters_[0].grad == 2.0).all()


@both_hooks
def test_mismatched_call_raises_and_the_group_stays_usable(rank_pool, hook):
    rank_pool(2, "fccl").run(mismatched_calls, hook)


# ---- use and misuse ----


def register_errors(rank, world_size):
    module = nn.Linear(2, 2)
    hook = hooks.AllReduce()
    with pytest.raises(TypeError, match=r"not Linear; wrap the module first"):
        hooks.register(module, hook)
    with pytest.raises(TypeError, match="the class DistributedDataParallel"):
        hooks.register(DistributedDataParallel, hook)

    class LightningModule(nn.Module):
        pass

    with pytest.raises(TypeError, match=r"DDPStrategy\(ddp_comm_hook=...\)"):
        hooks.register(LightningModule(), hook)
    ddp = DistributedDataParallel(module)
    with pytest.raises(TypeError, match="OptimizedModule's attribute '_orig_mod'"):
        hooks.register(torch.compile(ddp), hook)
    with pytest.raises(TypeError, match=r"not AllReduce; the arguments are \(model, hook\)"):
        hooks.register(hook, ddp)
    with pytest.raises(TypeError, match=r"the class: fccl.hooks.AllReduce\(\)"):
        hooks.register(ddp, hooks.AllReduce)
    with pytest.raises(TypeError, match="a Python hook goes to ddp.register_comm_hook"):
        hooks.register(ddp, hook.as_python_hook())
    with pytest.raises(TypeError, match="common base"):
        hooks.GradientHook()

    hooks.register(ddp, hook)  # none of the above registered anything
    with pytest.raises(RuntimeError, match="has a communication hook already"):
        hooks.register(ddp, hooks.BF16Compress())
    assert ddp._get_ddp_logging_data()["comm_hook"] == "fccl.hooks.AllReduce"
    ddp(torch.ones(1, 2)).sum().backward()
    assert torch.equal(module.weight.grad, torch.ones(2, 2))

    with importlib.import_module("torch._dynamo").config.patch(optimize_ddp="python_reducer"):
        ddp = DistributedDataParallel(nn.Linear(2, 2))
        with pytest.raises(RuntimeError, match="python_reducer"):
            hooks.register(ddp, hook)
        ddp.register_comm_hook(None, hook.as_python_hook())
        with pytest.raises(TypeError, match="python_reducer"):
            hook.as_python_hook()(None, (torch.ones(1), torch.ones(1)))


def test_register_says_what_is_wrong(rank_pool):
    rank_pool(1, "gloo").run(register_errors)


def integer_bucket(rank, world_size):
    native = hooks.AllReduce()._native()
    bucket = _bucket_of(torch.ones(3, dtype=torch.int64))
    future = native.run(dist.distributed_c10d._get_default_group(), bucket)
    with pytest.raises(RuntimeError, match="averages floating-point gradients, and this bucket holds Long"):
        future.wait()


def _bucket_of(tensor):
    """A GradBucket around `tensor`; only a reducer makes one, so a recording hook catches it."""
    caught = []

    def catch(state, bucket):
        bucket.set_buffer(tensor)
        caught.append(bucket)
        future = torch.futures.Future()
        future.set_result(torch.zeros(3))
        return future

    ddp = DistributedDataParallel(Steered(torch.zeros(3)))
    ddp.register_comm_hook(None, catch)
    ddp(torch.ones(3)).sum().backward()
    return caught[0]


def test_integers_are_refused_through_the_future(rank_pool):
    rank_pool(1, "gloo").run(integer_bucket)


def one_hook_many_models(rank, world_size):
    hook = hooks.BF16Compress()
    models = [DistributedDataParallel(Steered(torch.zeros(3 + i))) for i in range(3)]
    for ddp in models:
        hooks.register(ddp, hook)
    del hook
    gc.collect()
    with models[0].join(divide_by_initial_world_size=False):
        for _ in range(1 + rank):
            models[0].zero_grad()
            models[0](torch.full((3,), 4.0)).sum().backward()
            assert (models[0].module.parameters_[0].grad == 4.0).all()
    for i, ddp in enumerate(models[1:], 1):
        ddp(torch.full((3 + i,), 4.0 * rank)).sum().backward()
        assert (ddp.module.parameters_[0].grad == 2.0).all()


@backends
def test_one_hook_serves_many_models(rank_pool, backend):
    rank_pool(2, backend).run(one_hook_many_models)


def subgroups(rank, world_size, hook, form):
    # Ranks 0 and 1, and rank 2 alone.
    groups = [dist.new_group([0, 1]), dist.new_group([2])]
    group = groups[0] if rank < 2 else groups[1]
    ddp = DistributedDataParallel(Steered(torch.zeros(3)), process_group=group)
    hook = getattr(hooks, hook)()
    if form == "register":
        hooks.register(ddp, hook)
    elif form == "state":
        ddp.register_comm_hook(group, hook.as_python_hook())
    else:
        ddp.register_comm_hook(None, hook.as_python_hook(group))
    ddp(torch.full((3,), 2.0 * rank)).sum().backward()
    assert (ddp.module.parameters_[0].grad == (1.0 if rank < 2 else 4.0)).all()
    dist.barrier()
    # The model first. If it held the last reference to the group, DDP's reducer would join Gloo's threads
    # with the GIL held, and a thread of Gloo's that drops a finished call may just then want the GIL: torch
    # hangs there now and then, hook or no hook.
    del ddp
    dist.destroy_process_group(group)


@backends
@both_hooks
@pytest.mark.parametrize("form", ["register", "state", "argument"])
def test_exchange_is_in_the_models_group(rank_pool, backend, hook, form):
    rank_pool(3, backend).run(subgroups, hook, form)


def copies(rank, world_size):
    ddp = DistributedDataParallel(nn.Linear(2, 2))
    hooks.register(ddp, hooks.AllReduce())
    for clone in (pickle.loads(pickle.dumps(ddp)), copy.deepcopy(ddp)):
        assert "fccl" not in clone._get_ddp_logging_data().get("comm_hook", "")
        hooks.register(clone, hooks.BF16Compress())  # it had none
        for _ in range(2):
            with clone.join(divide_by_initial_world_size=False):
                clone(torch.ones(1, 2)).sum().backward()
        assert torch.equal(clone.module.weight.grad, 2 * torch.ones(2, 2))
    plain = pickle.loads(pickle.dumps(ddp))
    with plain.join():
        plain(torch.ones(1, 2)).sum().backward()
    assert torch.equal(plain.module.weight.grad, torch.ones(2, 2))


def test_copies_of_a_model_have_no_hook(rank_pool):
    rank_pool(1, "gloo").run(copies)


def models_come_and_go(rank, world_size, hook, form):
    def resident_mb():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

    gc.collect()
    gc.disable()
    try:
        for i in range(80):
            ddp = DistributedDataParallel(Steered(torch.zeros(1 << 20)))
            attach(ddp, hook, form)
            ddp(torch.ones(1 << 20)).sum().backward()
            gone = weakref.ref(ddp)
            del ddp
            assert gone() is None  # by reference counting alone: its memory must not wait for the collector
            if i == 9:
                before = resident_mb()
        return resident_mb() - before
    finally:
        gc.enable()


@backends
@both_hooks
@pytest.mark.parametrize("form", FORMS)
def test_model_and_hook_are_freed(rank_pool, backend, hook, form):
    """Seventy models with a bucket of 4 MB each: if only the buckets stayed, that were 280 MB.

    Threads that complete Futures free memory into arenas of their own, which may keep some tens of MB.
    """
    for growth in rank_pool(2, backend).run(models_come_and_go, hook, form):
        assert growth < 140


@pytest.mark.parametrize("hook", [hooks.AllReduce(), hooks.BF16Compress()], ids=repr)
def test_hooks_are_pickled_by_what_they_are(hook):
    clone = pickle.loads(pickle.dumps(hook))
    assert type(clone) is type(hook)
    assert repr(clone) == repr(hook) == f"{hook.name}()"
    python_hook = hook.as_python_hook()
    assert python_hook.__qualname__ == hook.name  # Lightning and DDP show it
    assert pickle.loads(pickle.dumps(python_hook)).__qualname__ == hook.name
    assert not callable(hook)
