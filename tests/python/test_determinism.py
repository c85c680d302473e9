"""The result of a reduction has the same bits whichever way it is come by, and is what rank order gives."""

from __future__ import annotations

import fractions
import itertools

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fccl
from collective_cases import (
    DTYPES,
    LAYOUTS,
    OPS,
    Digest,
    expect,
    is_defined,
    lay_out,
    one_digest,
    reference,
    shape_for,
    values,
)

COMBINATIONS = [(dtype, op) for dtype in DTYPES for op in OPS if is_defined(dtype, op)]
# Sizes on both sides of where a message takes another path, as well as any.
COUNTS = st.one_of(
    st.integers(1, 40),
    st.integers(1, 5000),
    st.sampled_from([8191, 8192, 8193, 16384, 16385, 65536, 131072, 131073, 262145]),
    st.integers(5000, 300_000),
)
# Where a tensor is cut into buckets or pieces, as parts of it.
CUTS = st.lists(st.fractions(0, 1), max_size=5)


def shared(flat):
    return fccl.empty(flat.shape, dtype=flat.dtype).copy_(flat)


def pieces(count, cuts):
    """The borders between which a tensor is cut: [(begin, end), …]."""
    borders = sorted({0, count, *(int(cut * count) for cut in cuts)})
    return list(itertools.pairwise(borders))


def by_every_way(rank, world_size, dtype_name, op_name, count, start, cuts, layout):
    inputs = [values(r, dtype_name, count, start) for r in range(world_size)]
    own, op = inputs[rank], OPS[op_name]
    results = {}

    results["ordinary"] = own.clone()
    dist.all_reduce(results["ordinary"], op)
    tensor = lay_out(own, layout)
    dist.all_reduce(tensor, op)
    results[layout] = tensor.contiguous().view(-1) if layout != "channels_last" else tensor.reshape(-1)
    assert tensor.shape == shape_for(layout, count)
    results["shared"] = shared(own)
    dist.all_reduce(results["shared"], op)
    results["shared on rank 0"] = shared(own) if rank == 0 else own.clone()
    dist.all_reduce(results["shared on rank 0"], op)
    results["asynchronous"] = own.clone()
    dist.all_reduce(results["asynchronous"], op, async_op=True).wait()

    cut = pieces(count, cuts)
    buckets = [shared(own[a:b]) if i % 2 else own[a:b].clone() for i, (a, b) in enumerate(cut)]
    works = [dist.all_reduce(bucket, op, async_op=True) for bucket in buckets]
    for work in works:
        work.wait()
    results["in buckets"] = torch.cat(buckets)
    together = [own[a:b].clone() for a, b in cut]
    dist.all_reduce_coalesced(together, op)
    results["coalesced"] = torch.cat(together)

    # A piece for each rank, of any size, from an ordinary tensor and from a shared one.
    borders = [0, *sorted(int(cut * count) for cut in (cuts * world_size)[: world_size - 1]), count]
    borders += [count] * (world_size + 1 - len(borders))
    sizes = [b - a for a, b in itertools.pairwise(borders)]
    for name, source in (("ordinary", own.clone()), ("shared", shared(own))):
        piece = torch.empty(sizes[rank], dtype=own.dtype)
        dist.reduce_scatter(piece, list(source.split(sizes)), op)
        gathered = [torch.empty(size, dtype=own.dtype) for size in sizes]
        dist.all_gather(gathered, piece)
        results[f"reduce_scatter of {name}, all_gather"] = torch.cat(gathered)
    root = count % world_size
    for name, make in (("ordinary", torch.clone), ("shared", shared)):
        tensor = make(own)
        dist.reduce(tensor, root, op)
        dist.broadcast(tensor, root)
        results[f"reduce of {name}, broadcast"] = tensor

    expected = reference(op_name, inputs)
    expect(results["ordinary"], expected, "all_reduce", dtype_name, op_name, count)
    bits = results["ordinary"].view(torch.uint8)
    for name, result in results.items():
        assert torch.equal(result.view(torch.uint8), bits), f"{name}: other bits"
    digest = Digest()
    digest.add(results["ordinary"])
    return digest.text()


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_the_same_bits_by_every_way(rank_pool, world_size):
    pool = rank_pool(world_size)

    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(
        combination=st.sampled_from(COMBINATIONS),
        count=COUNTS,
        start=st.integers(0, 60),
        cuts=CUTS,
        layout=st.sampled_from(LAYOUTS),
    )
    def check(combination, count, start, cuts, layout):
        cuts = [fractions.Fraction(cut) for cut in cuts]
        one_digest(pool.run(by_every_way, *combination, count, start, cuts, layout))

    check()


def again_and_again(rank, world_size):
    """Equal inputs, other messages between, ranks late in turn: equal bits."""
    own = values(rank, "bfloat16", 200_000)
    seen = set()
    for step in range(20):
        tensor = shared(own) if step % 3 == 0 else own.clone()
        if step % world_size == rank:
            torch.randn(100, 100).mm(torch.randn(100, 100))
        dist.all_reduce(torch.ones(step + 1))
        dist.all_reduce(tensor, dist.ReduceOp.AVG)
        digest = Digest()
        digest.add(tensor)
        seen.add(digest.text())
    assert len(seen) == 1
    return seen.pop()


def test_the_same_bits_from_run_to_run(rank_pool):
    first = rank_pool(3).run(again_and_again)
    rank_pool(3).kill()  # other processes
    one_digest(first + rank_pool(3).run(again_and_again))
