"""What the tests of fccl.hooks share: models whose gradients are known, and ways to attach a hook."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fccl import hooks

BACKENDS = ["gloo", "fccl"]
# By name, since a test's arguments go to other processes. Most tests steer parameters of one dimension, so the
# quantising hooks here exempt none.
HOOKS = {
    "AllReduce": hooks.AllReduce,
    "BF16Compress": hooks.BF16Compress,
    "FP16Compress": hooks.FP16Compress,
    "int8": lambda: hooks.BlockQuantize("int8", exempt=None),
    "fp8_e5m2": lambda: hooks.BlockQuantize("fp8_e5m2", block=128, error_feedback=False, exempt=None),
}
FORMS = ["register", "python"]

backends = pytest.mark.parametrize("backend", BACKENDS)
all_hooks = pytest.mark.parametrize("hook", HOOKS)


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
    hook = HOOKS[hook]()
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


def error_bounds(hook, exact, magnitude, world_size, largest):
    """By how much a hook may miss the mean of one parameter's gradients, at most.

    ``exact``: the mean; ``magnitude``: the mean of the ranks' magnitudes; ``largest``: the largest magnitude of
    any rank's so far, for hooks that code blocks or owe what earlier steps lost.
    """
    own = 4e-6 * magnitude.max()  # float32's
    if hook == "AllReduce":
        return torch.full_like(exact, own)
    if hook == "BF16Compress":  # each rank's rounding, and the mean's
        return 2**-8 * magnitude + 2**-8 * (exact.abs() + 2**-8 * magnitude) + own
    if hook == "FP16Compress":
        return 2**-11 * magnitude + 2**-11 * (exact.abs() + 2**-11 * magnitude) + 2**-38 * largest + own
    # Twice coded: on the way in, and the mean. Error feedback adds as much again, of the step before: to what
    # is coded, and to the mean.
    if hook == "int8":
        return torch.full_like(exact, (2 + world_size) * 1.1 * largest / 254) + own
    return 2**-3 * magnitude + 2**-3 * (exact.abs() + 2**-3 * magnitude) + 2**-31 * largest + own


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


class SparseNet(nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.embedding = nn.Embedding(20, 4, sparse=True, dtype=dtype)
        self.linear = nn.Linear(4, 2, dtype=dtype)

    def forward(self, rows, weight):
        return (self.embedding(rows) * weight).sum() + self.linear(self.embedding(rows)).sum()


# ---- of the hooks that send codes ----

FORMATS = ["int8", "fp8_e4m3", "fp8_e5m2"]
formats = pytest.mark.parametrize("format", FORMATS)


def random_gradient(rank, step, count):
    generator = torch.Generator().manual_seed(100 * step + rank)
    gradient = torch.randn(count, generator=generator)
    gradient[count // 2 :] *= 1e-6  # other blocks, another scale
    gradient[7] = 0
    return gradient


def fp16_hook(block, error_feedback):
    return hooks.FP16Compress()


def int8_hook(block, error_feedback):
    return hooks.BlockQuantize("int8", block, error_feedback, exempt=None)


def e4m3_hook(block, error_feedback):
    return hooks.BlockQuantize("fp8_e4m3", block, error_feedback, exempt=None)


def e5m2_hook(block, error_feedback):
    return hooks.BlockQuantize("fp8_e5m2", block, error_feedback, exempt=None)
