"""Collectives captured into a CUDA graph and replayed, with other collectives between the replays."""

from __future__ import annotations

import torch
import torch.distributed as dist

import fccl
from rank_cases.expected import expect_kernels

COUNT = 1000
REPLAYS = 5


def run(rank: int, world: int, device: torch.device) -> str:
    """Captures one of each kind; replays with new numbers each time."""
    assert fccl.cuda.warm_up(), f"no kernels: {fccl.cuda.why_no_kernels()}"
    summed = torch.zeros(COUNT, device=device)
    own = torch.zeros(COUNT, device=device)
    gathered = torch.zeros(world * COUNT, device=device)
    sent = torch.zeros(COUNT, dtype=torch.int32, device=device)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        dist.all_reduce(summed)
        dist.all_gather_into_tensor(gathered, own)
        dist.broadcast(sent, world - 1)
    expect_kernels(device, 3)
    for replay in range(REPLAYS):
        summed.fill_(rank + replay)
        own.fill_(rank * 10 + replay)
        sent.fill_(rank + 100 * replay)
        graph.replay()
        torch.cuda.synchronize()
        total = float(sum(r + replay for r in range(world)))
        assert (summed == total).all(), f"replay {replay}: all_reduce gave {summed[0].item()}, not {total}"
        for r in range(world):
            part = gathered[r * COUNT : (r + 1) * COUNT]
            assert (part == r * 10 + replay).all(), (
                f"replay {replay}: all_gather has {part[0].item()} of rank {r}"
            )
        assert (sent == world - 1 + 100 * replay).all(), f"replay {replay}: broadcast gave {sent[0].item()}"
        # One that is not captured, between two replays.
        beside = torch.full((7,), float(rank), device=device)
        dist.all_reduce(beside)
        assert (beside == world * (world - 1) / 2).all(), f"beside replay {replay}: {beside[0].item()}"
    expect_kernels(device, 3 + REPLAYS)
    return f"3 captured collectives, {REPLAYS} replays right, {world} ranks"
