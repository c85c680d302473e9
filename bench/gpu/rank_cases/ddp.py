"""A few steps of DDP over fccl: equal parameters on all ranks, and those of DDP over plain Gloo."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from rank_cases.expected import same_bits

STEPS = 6


def trained(
    model: torch.nn.Module, group: dist.ProcessGroup | None, rank: int, device: torch.device
) -> torch.Tensor:
    """All parameters after some steps, in one tensor on the CPU."""
    ddp = DistributedDataParallel(copy.deepcopy(model), process_group=group)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    random = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        inputs = torch.randn(32, 20, generator=random).to(device)
        targets = torch.randn(32, 3, generator=random).to(device)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(ddp(inputs), targets).backward()
        optimizer.step()
    return torch.cat([parameter.detach().reshape(-1).cpu() for parameter in ddp.parameters()])


def run(rank: int, world: int, device: torch.device) -> str:
    """Trains twice and compares."""
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(3)
    model = torch.nn.Sequential(
        torch.nn.Linear(20, 200),
        torch.nn.Tanh(),
        torch.nn.Linear(200, 200),
        torch.nn.Tanh(),
        torch.nn.Linear(200, 3),
    ).to(device)
    begun = torch.cat([parameter.detach().reshape(-1).cpu() for parameter in model.parameters()])
    ours = trained(model, None, rank, device)
    gloo = dist.new_group(backend="gloo")
    theirs = trained(model, gloo, rank, device)
    assert not torch.equal(ours, begun), "nothing was learnt"
    everybody = [torch.empty_like(ours) for _ in range(world)]
    dist.all_gather(everybody, ours)
    assert all(same_bits(ours, one) for one in everybody), "parameters differ between ranks"
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    exact = same_bits(ours, theirs)
    # The mean of two is exact whichever way it is formed: with 1 and 2 ranks no order can differ.
    assert exact or world > 2, "parameters differ from those of DDP over Gloo"
    return f"{world} ranks: equal on all, {'to the bit' if exact else 'within 1e-5'} those over Gloo"
