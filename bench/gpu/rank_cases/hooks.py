"""The hooks on CUDA buckets: gradients to the bit what they are for the same bucket on the CPU.

The loss is the sum of each parameter times a fixed tensor, which then is its gradient, bit for bit, on any device.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import fccl
from rank_cases.expected import same_bits

STEPS = 4  # error feedback needs several
SHAPES = [(300, 77), (77,), (64, 64), (64,), (5, 3, 3), (1,), (1000, 33), (33,)]

HOOKS: dict[str, Callable[[], fccl.hooks.GradientHook]] = {
    "AllReduce": fccl.hooks.AllReduce,
    "BF16Compress": fccl.hooks.BF16Compress,
    "FP16Compress": fccl.hooks.FP16Compress,
    "BlockQuantize int8": lambda: fccl.hooks.BlockQuantize(format="int8"),
    "BlockQuantize fp8_e4m3": lambda: fccl.hooks.BlockQuantize(format="fp8_e4m3", block=128),
    "BlockQuantize fp8_e5m2": lambda: fccl.hooks.BlockQuantize(format="fp8_e5m2", block=1024),
    "BlockQuantize int8, no feedback": lambda: fccl.hooks.BlockQuantize(format="int8", error_feedback=False),
    "BlockQuantize int8, none exempt": lambda: fccl.hooks.BlockQuantize(
        format="int8", block=512, exempt=None
    ),
}


class Steered(torch.nn.Module):
    """Its gradients are what it is called with."""

    def __init__(self) -> None:
        """Makes parameters of SHAPES."""
        super().__init__()
        self.weights = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(shape)) for shape in SHAPES])

    def forward(self, wanted: list[torch.Tensor]) -> torch.Tensor:
        """The loss whose gradients are `wanted`."""
        products = [(weight * gradient).sum() for weight, gradient in zip(self.weights, wanted, strict=True)]
        return torch.stack(products).sum()


def wanted_gradients(rank: int, step: int) -> list[torch.Tensor]:
    """Of many magnitudes, with zeros where one rank or all have nothing to say, and now and then inf and NaN."""
    random = torch.Generator().manual_seed(1000 * step + rank)
    gradients = []
    for index, shape in enumerate(SHAPES):
        exponents = torch.randint(-20, 5, shape, generator=random).float()
        gradient = torch.randn(shape, generator=random) * torch.exp2(exponents)
        if index == 2 and rank == step % 2:
            gradient.zero_()
        flat = gradient.view(-1)
        if index == 0:
            flat[500:1500] = 0
        if index == 6 and step == 1:
            flat[40 + rank] = float("inf")
            flat[7000] = float("nan")
        gradients.append(gradient)
    return gradients


def trained(hook: fccl.hooks.GradientHook, rank: int, device: torch.device) -> list[list[torch.Tensor]]:
    """The gradients of each step."""
    # In which DDP does not cut buckets anew: it goes by the order of the gradients, which may be another one on a GPU,
    # and who keeps what the mean's code loses goes by the place in the bucket.
    ddp = DistributedDataParallel(Steered().to(device), find_unused_parameters=True)
    fccl.hooks.register(ddp, hook)
    steps = []
    for step in range(STEPS):
        ddp.zero_grad()
        ddp([gradient.to(device) for gradient in wanted_gradients(rank, step)]).backward()
        gradients = [parameter.grad for parameter in ddp.parameters()]
        steps.append([gradient.detach().cpu().clone() for gradient in gradients if gradient is not None])
    return steps


def run(rank: int, world: int, device: torch.device) -> str:
    """Every hook on the CPU and on `device`; refusals and differences are all named."""
    complaints = []
    for name, make in HOOKS.items():
        on_cpu = trained(make(), rank, torch.device("cpu"))
        try:
            on_device = trained(make(), rank, device)
        except (
            NotImplementedError,
            TypeError,
            ValueError,
        ) as error:  # on all ranks alike: the group lives on
            complaints.append(f"{name}: {type(error).__name__}: {error}".splitlines()[0])
            continue
        for step in range(STEPS):
            for index in range(len(SHAPES)):
                if not same_bits(on_cpu[step][index], on_device[step][index]):
                    complaints.append(f"{name}: step {step}, parameter {index}: other bits than on the CPU")
    dist.barrier()
    if complaints:
        raise AssertionError(f"{len(complaints)} complaints: {'; '.join(complaints)}")
    return f"{len(HOOKS)} hooks, {STEPS} steps, {world} ranks: the CPU's bits"
