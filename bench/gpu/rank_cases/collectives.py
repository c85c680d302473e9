"""Collectives of a group through fccl's kernels: types, operations, odd sizes, in place, both kinds of streams.

Numbers are small integers, so every sum is exact in every type, and expected values need no rounding.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from rank_cases.expected import expect_kernels, same_bits

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
REDUCED = [*FLOATS, torch.int32, torch.int64]
MOVED = [*REDUCED, torch.uint8, torch.bool]
COUNTS = [1, 3, 8, 255, 1000]


def numbers(rank: int, count: int, dtype: torch.dtype, turn: int) -> torch.Tensor:
    """What a rank puts in: 0, 1, 2 or 3 in each place."""
    values = torch.arange(count) * (rank + 2) + rank + turn
    return (values % 4).to(dtype)


def reduced(world: int, count: int, dtype: torch.dtype, op: dist.ReduceOp, turn: int) -> torch.Tensor:
    """What an all_reduce of that gives."""
    columns = torch.stack([numbers(rank, count, torch.float64, turn) for rank in range(world)])
    if op == dist.ReduceOp.SUM:
        result = columns.sum(0)
    elif op == dist.ReduceOp.AVG:  # of a power of two of ranks: exact, too
        result = columns.sum(0) / world
    elif op == dist.ReduceOp.PRODUCT:
        result = columns.prod(0)
    elif op == dist.ReduceOp.MIN:
        result = columns.min(0).values
    else:
        result = columns.max(0).values
    return result.to(dtype)


def run(rank: int, world: int, device: torch.device) -> str:
    """All calls; each is compared before the next one is made."""
    calls = 0
    for dtype in REDUCED:
        for op in ("SUM", "AVG", "PRODUCT", "MIN", "MAX"):
            if op == "AVG" and dtype not in FLOATS:
                continue
            for count in COUNTS:
                reduction = getattr(dist.ReduceOp, op)
                tensor = numbers(rank, count, dtype, calls).to(device)
                work = dist.all_reduce(tensor, reduction, async_op=calls % 2 == 1)
                if work is not None:
                    work.wait()
                wanted = reduced(world, count, dtype, reduction, calls)
                assert same_bits(tensor, wanted), f"all_reduce {op} of {count} {dtype}: {tensor} not {wanted}"
                calls += 1
    for dtype in MOVED:
        for count in COUNTS:
            own = numbers(rank, count, dtype, calls).to(device)
            gathered = torch.empty(world * count, dtype=dtype, device=device)
            dist.all_gather_into_tensor(gathered, own)
            wanted = torch.cat([numbers(r, count, dtype, calls) for r in range(world)])
            assert same_bits(gathered, wanted), f"all_gather of {count} {dtype}"
            root = calls % world
            dist.broadcast(own, root)
            assert same_bits(own, numbers(root, count, dtype, calls)), f"broadcast of {count} {dtype}"
            calls += 2
    expect_kernels(device, calls)
    return f"{calls} calls exact with {world} processes"
