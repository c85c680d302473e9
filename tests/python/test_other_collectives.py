"""The other collectives: right values, and inputs left as they were."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from collective_cases import lay_out

WORLD_SIZES = (1, 2, 3, 4)
# Integers that every float type holds exactly, so that no order of additions can show.
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8)


def all_to_all_future(rank, world_size):
    output = torch.empty(2 * world_size)
    work = dist.all_to_all_single(output, torch.full((2 * world_size,), float(rank)), async_op=True)
    (value,) = work.get_future().wait()
    assert torch.equal(value, torch.arange(world_size).repeat_interleave(2).float())
    (result,) = work.result()
    assert result.data_ptr() == output.data_ptr() and result.shape == output.shape


def test_all_to_all_single_gives_its_one_output(rank_pool):
    rank_pool(2).run(all_to_all_future)


def numbers(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    return ((torch.arange(count) * 3 + rank) % 11).to(dtype)


def reduces(rank, world_size):
    ranks = range(world_size)
    for root in ranks:
        for dtype in DTYPES:
            for layout in ("contiguous", "transposed", "strided", "offset"):
                for count in (1, 1000, 50_003):
                    flat = numbers(rank, count, dtype)
                    tensor = lay_out(flat, layout)
                    before = tensor.clone()
                    dist.reduce(tensor, dst=root)
                    if rank == root:
                        total = sum(numbers(r, count, torch.int64) for r in ranks)
                        assert torch.equal(tensor.reshape(-1), total.to(dtype)), (dtype, layout, count)
                    else:
                        assert torch.equal(tensor, before), ("input changed", dtype, layout, count)
    for op, function in ((dist.ReduceOp.MAX, torch.amax), (dist.ReduceOp.MIN, torch.amin)):
        tensor = numbers(rank, 100, torch.float32)
        dist.reduce(tensor, dst=0, op=op)
        if rank == 0:
            assert torch.equal(
                tensor, function(torch.stack([numbers(r, 100, torch.float32) for r in ranks]), 0)
            )
    tensor = torch.full((10,), float(rank * world_size))
    dist.reduce(tensor, dst=world_size - 1, op=dist.ReduceOp.AVG)
    assert tensor.eq(sum(ranks) if rank == world_size - 1 else rank * world_size).all()


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_reduce(rank_pool, world_size):
    rank_pool(world_size).run(reduces, timeout=100)


def gathers_and_scatters(rank, world_size):
    ranks = range(world_size)
    for root in ranks:
        for dtype in (*DTYPES, torch.bool):
            for layout in ("contiguous", "transposed", "strided"):
                tensor = lay_out(numbers(rank, 70, dtype), layout)
                outputs = [torch.empty_like(tensor) for _ in ranks] if rank == root else None
                dist.gather(tensor, outputs, dst=root)
                for r, output in enumerate(outputs or []):
                    assert torch.equal(output.reshape(-1), numbers(r, 70, dtype)), (dtype, layout)
                inputs = [lay_out(numbers(r + 5, 70, dtype), layout) for r in ranks] if rank == root else None
                output = torch.empty_like(tensor)
                dist.scatter(output, inputs, src=root)
                assert torch.equal(output.reshape(-1), numbers(rank + 5, 70, dtype)), (dtype, layout)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_gather_and_scatter(rank_pool, world_size):
    rank_pool(world_size).run(gathers_and_scatters)


def reduce_scatters(rank, world_size):
    ranks = range(world_size)
    for dtype in DTYPES:
        for count in (1, 333, 20_001):
            inputs = [numbers(rank + r, count, dtype) for r in ranks]
            before = [i.clone() for i in inputs]
            expected = sum(numbers(r + rank, count, torch.int64) for r in ranks).to(dtype)
            output = torch.empty(count, dtype=dtype)
            dist.reduce_scatter(output, inputs)
            assert torch.equal(output, expected), (dtype, count)
            assert all(map(torch.equal, inputs, before))
            whole = torch.cat(inputs)
            output.zero_()
            dist.reduce_scatter_tensor(output, whole)
            assert torch.equal(output, expected) and torch.equal(whole, torch.cat(before)), (dtype, count)
            result = functional.reduce_scatter_tensor(whole, "sum", 0, dist.group.WORLD)
            assert torch.equal(functional.wait_tensor(result), expected), (dtype, count)
    whole = torch.arange(4.0 * world_size) * world_size + rank * world_size
    output = torch.empty(4)
    dist.reduce_scatter_tensor(output, whole, op=dist.ReduceOp.AVG)
    mine = torch.arange(4.0 * world_size)[4 * rank : 4 * rank + 4] * world_size
    assert torch.equal(output, mine + sum(ranks)), output


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_reduce_scatter(rank_pool, world_size):
    rank_pool(world_size).run(reduce_scatters)


def all_to_alls(rank, world_size):
    ranks = range(world_size)

    def message(source, target, count, dtype=torch.float32):
        return (torch.arange(count) + 10 * source + target).to(dtype)

    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for count in (1, 500):
            single = torch.cat([message(rank, r, count, dtype) for r in ranks])
            output = torch.empty_like(single)
            dist.all_to_all_single(output, single)
            assert torch.equal(output, torch.cat([message(r, rank, count, dtype) for r in ranks]))
    # Uneven: rank r sends t + 1 elements more to rank t, and nothing to itself if it is rank 0.
    send = [0 if rank == r == 0 else rank + r + 1 for r in ranks]
    receive = [0 if rank == r == 0 else rank + r + 1 for r in ranks]
    single = torch.cat([message(rank, r, send[r]) for r in ranks])
    output = torch.empty(sum(receive))
    dist.all_to_all_single(output, single, receive, send)
    assert torch.equal(output, torch.cat([message(r, rank, receive[r]) for r in ranks]))

    outputs = [torch.empty(receive[r]) for r in ranks]
    dist.all_to_all(outputs, [message(rank, r, send[r]) for r in ranks])
    assert all(torch.equal(outputs[r], message(r, rank, receive[r])) for r in ranks)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_all_to_all(rank_pool, world_size):
    rank_pool(world_size).run(all_to_alls)


def objects(rank, world_size):
    ranks = range(world_size)
    everything = [None] * world_size
    dist.all_gather_object(everything, {"rank": rank, "text": "x" * rank})
    assert everything == [{"rank": r, "text": "x" * r} for r in ranks]
    shared = [f"from {rank}", rank] if rank == world_size - 1 else [None, None]
    dist.broadcast_object_list(shared, src=world_size - 1)
    assert shared == [f"from {world_size - 1}", world_size - 1]
    gathered = [None] * world_size if rank == 0 else None
    dist.gather_object((rank, "y" * 3 * rank), gathered, dst=0)
    assert gathered == ([(r, "y" * 3 * r) for r in ranks] if rank == 0 else None)
    mine = [None]
    dist.scatter_object_list(mine, [{"for": r} for r in ranks] if rank == 0 else None, src=0)
    assert mine == [{"for": rank}]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_object_collectives(rank_pool, world_size):
    rank_pool(world_size).run(objects)


def point_to_point(rank, world_size):
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    for count in (1, 1000, 200_001):
        for tag in (0, 7):
            received = torch.empty(count)
            work = dist.irecv(received, src=left, tag=tag)
            dist.send(torch.full((count,), float(rank)), dst=right, tag=tag)
            work.wait()
            assert received.eq(left).all()
    # A receive that is pending while collectives run.
    received = torch.empty(5)
    work = dist.irecv(received, src=left, tag=3)
    total = torch.ones(1000)
    dist.all_reduce(total)
    assert total.eq(world_size).all()
    dist.isend(torch.full((5,), rank + 0.5), dst=right, tag=3).wait()
    work.wait()
    assert received.eq(left + 0.5).all()
    # The order within a batch does not matter.
    received = torch.empty(9)
    operations = [
        dist.P2POp(dist.irecv, received, left),
        dist.P2POp(dist.isend, torch.full((9,), float(rank)), right),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert received.eq(left).all()
    if rank == 0:
        source = dist.recv(received, src=None)
        assert received.eq(100 + source).all()
        for _ in range(world_size - 2):
            dist.recv(received, src=None)
    else:
        dist.send(torch.full((9,), 100.0 + rank), dst=0)
    dist.barrier()


@pytest.mark.parametrize("world_size", (2, 3, 4))
def test_point_to_point(rank_pool, world_size):
    rank_pool(world_size).run(point_to_point)


def sparse(rank, world_size):
    indices = torch.tensor([[rank, 3]])
    tensor = torch.sparse_coo_tensor(indices, torch.tensor([1.0, 2.0]), (5,))
    dist.all_reduce(tensor)
    expected = torch.zeros(5)
    for r in range(world_size):
        expected[r] += 1
        expected[3] += 2
    assert torch.equal(tensor.to_dense(), expected)


@pytest.mark.parametrize("world_size", (1, 2, 3))
def test_sparse_all_reduce(rank_pool, world_size):
    rank_pool(world_size).run(sparse)
