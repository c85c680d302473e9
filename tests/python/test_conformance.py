"""The same calls with the same results over Gloo, and over fccl by each of its ways."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import fccl
from fccl_testing import RankPool

WORLD_SIZE = 3
SIZES = (1, 1000, 100_003)

# Backend, environment, and whether tensors are made in shared memory.
WAYS = {
    "gloo": ("gloo", {}, False),
    "staged": ("fccl", {"FCCL_ARENA_SIZE": "0"}, False),
    "zero-copy": ("fccl", {}, True),
    "inner": ("fccl", {"FCCL_SHM": "0"}, False),
}


def full(shared, count, value, dtype=torch.float32):
    """``count`` numbers: ``value``, ``value`` + 1 …, of period 11 and exact in every dtype."""
    tensor = fccl.empty(count, dtype=dtype) if shared else torch.empty(count, dtype=dtype)
    return tensor.copy_(torch.arange(count) % 11 + value)


def check_reductions(rank, n, shared):
    for dtype in (torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8):
        for count in SIZES:
            inputs = [full(False, count, r, dtype) for r in range(n)]
            total = sum(inputs)
            for op, expected in (
                (dist.ReduceOp.SUM, total),
                (dist.ReduceOp.MAX, inputs[-1]),
                (dist.ReduceOp.MIN, inputs[0]),
            ):
                tensor = full(shared, count, rank, dtype)
                dist.all_reduce(tensor, op)
                assert tensor.equal(expected), ("all_reduce", dtype, count, op)
            for root in range(n):
                tensor = full(shared, count, rank, dtype)
                dist.reduce(tensor, root)
                assert rank != root or tensor.equal(total), ("reduce", dtype, count)
            parts = [full(shared, count, rank + t, dtype) for t in range(n)]
            out = torch.zeros(count, dtype=dtype)
            dist.reduce_scatter(out, parts)
            expected = sum(full(False, count, r + rank, dtype) for r in range(n))
            assert out.equal(expected), ("reduce_scatter", dtype, count)
            whole = full(shared, 0, 0, dtype).resize_(n * count).copy_(torch.cat(parts))
            out.zero_()
            dist.reduce_scatter_tensor(out, whole)
            assert out.equal(expected), ("reduce_scatter_tensor", dtype, count)


def check_gathers(rank, n, shared):
    for count in SIZES:
        expected = [full(False, count, 10 * r) for r in range(n)]
        source = full(shared, count, 10 * rank)
        outputs = [torch.zeros(count) for _ in range(n)]
        dist.all_gather(outputs, source)
        assert all(map(torch.equal, outputs, expected)), ("all_gather", count)
        whole = torch.zeros(n * count)
        dist.all_gather_into_tensor(whole, source)
        assert whole.equal(torch.cat(expected)), ("all_gather_into_tensor", count)
        for root in range(n):
            outputs = [torch.zeros(count) for _ in range(n)] if rank == root else None
            dist.gather(source, outputs, root)
            assert rank != root or all(map(torch.equal, outputs, expected)), ("gather", count)
            inputs = [full(shared, count, 10 * t + root) for t in range(n)] if rank == root else None
            out = torch.zeros(count)
            dist.scatter(out, inputs, root)
            assert out.equal(full(False, count, 10 * rank + root)), ("scatter", count)
            tensor = full(shared, count, 5 if rank == root else 0)
            dist.broadcast(tensor, root)
            assert tensor.equal(full(False, count, 5)), ("broadcast", count)


def check_exchanges(rank, n, shared):
    for count in SIZES:
        source = torch.cat([full(False, count, 10 * rank + t) for t in range(n)])
        source = full(shared, n * count, 0).copy_(source)
        out = torch.zeros(n * count)
        dist.all_to_all_single(out, source)
        assert out.equal(torch.cat([full(False, count, 10 * r + rank) for r in range(n)])), count
        # Uneven: r sends r + t + 1 shares to t.
        sends, receives = [rank + t + 1 for t in range(n)], [r + rank + 1 for r in range(n)]
        source = full(shared, sum(sends) * count, rank)
        out = torch.zeros(sum(receives) * count)
        dist.all_to_all_single(out, source, [s * count for s in receives], [s * count for s in sends])
        for r, piece in enumerate(out.split([s * count for s in receives])):
            begin = sum(r + t + 1 for t in range(rank)) * count
            assert piece.equal(full(False, begin + len(piece), r)[begin:]), ("uneven", count, r)


def check_messages(rank, n, shared):
    after, before = (rank + 1) % n, (rank - 1) % n
    for count in SIZES:
        into = torch.zeros(count)
        works = [
            dist.irecv(into, before, tag=3),
            dist.isend(full(shared, count, rank), after, tag=3),
        ]
        for work in works:
            work.wait()
        assert into.equal(full(False, count, before)), count
    if rank == 0:
        for _ in range(n - 1):
            into = torch.zeros(2)
            source = dist.recv(into)
            assert into.eq(source).all()
    else:
        dist.send(torch.full((2,), float(rank)), 0)


def check_the_rest(rank, n, shared):
    dist.barrier()
    objects = [None] * n
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": r} for r in range(n)]
    tensors = [full(shared, count, rank) for count in SIZES]
    dist.all_reduce_coalesced(tensors)
    for tensor, count in zip(tensors, SIZES, strict=True):
        assert tensor.equal(sum(full(False, count, r) for r in range(n)))
    work = dist.all_reduce(tensors[2], async_op=True)
    work.wait()
    assert tensors[2].equal(n * sum(full(False, SIZES[2], r) for r in range(n)))
    tensor = torch.full((3,), 1 + rank * 1j)
    dist.all_reduce(tensor)
    assert tensor.eq(n + sum(range(n)) * 1j).all()
    sparse = torch.sparse_coo_tensor([[rank, n]], [1.0, 2.0], (n + 1,), check_invariants=True)
    dist.all_reduce(sparse)
    assert sparse.to_dense().equal(torch.tensor([1.0] * n + [2.0 * n]))
    group = dist.new_group([0, n - 1])
    if rank in (0, n - 1):
        tensor = full(shared, SIZES[2], rank)
        dist.all_reduce(tensor, group=group)
        assert tensor.equal(full(False, SIZES[2], 0) + full(False, SIZES[2], n - 1))


CHECKS = (check_reductions, check_gathers, check_exchanges, check_messages, check_the_rest)


def run_check(rank, world_size, index, way):
    backend, _, shared = WAYS[way]
    CHECKS[index](rank, world_size, shared)
    if backend == "gloo":
        return
    backend = fccl.backend_of()
    assert backend.engine == ("inner" if way == "inner" else "shared-memory")
    assert (backend.zero_copy_count > 0) == (way == "zero-copy")


@pytest.fixture(scope="module")
def pools():
    """A pool of processes for each way."""
    made = {way: RankPool(WORLD_SIZE, backend, env=env) for way, (backend, env, _) in WAYS.items()}
    yield made
    for pool in made.values():
        pool.close()


@pytest.mark.parametrize("index", range(len(CHECKS)), ids=[check.__name__[6:] for check in CHECKS])
@pytest.mark.parametrize("way", WAYS)
def test_conformance(pools, way, index):
    pools[way].run(run_check, index, way)
