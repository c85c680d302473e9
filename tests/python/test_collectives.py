"""all_reduce, broadcast, all_gather, barrier: dtypes, operations, layouts and sizes on 1 to 4 ranks."""

from __future__ import annotations

import contextlib
import itertools

import pytest
import torch
import torch.distributed as dist

import fccl
from collective_cases import (
    DTYPES,
    LAYOUTS,
    MOST_ELEMENTS,
    OPS,
    REFUSED,
    WORLD_SIZES,
    Digest,
    expect,
    is_defined,
    lay_out,
    one_digest,
    reference,
    shape_for,
    values,
)

SMALL = (0, 1, 7, 1000)


def sizes_at_borders(world_size: int, itemsize: int) -> list[int]:
    """Element counts around the limits between algorithms and around chunks (cpu/tuning.h)."""
    one_shot = ((64 if world_size <= 2 else 32) << 10) // itemsize
    piece = (256 << 10) // itemsize
    sizes = {16383, 16384, 16385, one_shot - 1, one_shot, one_shot + 1, piece, piece + 1}
    sizes |= {piece * world_size - 1, piece * world_size + 1, 300_001}
    return sorted(size for size in sizes if size <= MOST_ELEMENTS)


_mode = itertools.count()


def modes():
    """Takes turns: (async_op, a context to make the call in)."""
    i = next(_mode)
    return i % 3 == 1, torch.inference_mode() if i % 5 == 2 else contextlib.nullcontext()


def finish(work, is_async: bool) -> None:
    if is_async:
        assert work is not None
        work.wait()
        assert work.is_completed()
    else:
        assert work is None


def counts() -> dict[str, int]:
    return dict(fccl.backend_of().collective_counts())


# ---- all_reduce ----


def all_reduce_cases(rank, world_size, dtype_name):
    digest = Digest()

    def check(op_name, count, layout, start=0):
        is_async, context = modes()
        inputs = [values(r, dtype_name, count, start) for r in range(world_size)]
        with context:
            tensor = lay_out(inputs[rank], layout)
            finish(dist.all_reduce(tensor, OPS[op_name], async_op=is_async), is_async)
            expected = reference(op_name, inputs).view(shape_for(layout, count))
            expect(tensor, expected, "all_reduce", dtype_name, op_name, count, layout)
        digest.add(tensor)

    dist.barrier()  # the group's first collective settles what carries it
    if world_size > 1:
        assert fccl.backend_of().engine == "shared-memory", fccl.backend_of().why_inner
    before = counts().get("all_reduce", 0)
    calls = 0
    for op_name in OPS:
        if not is_defined(dtype_name, op_name):
            with pytest.raises(REFUSED, match=op_name):
                dist.all_reduce(values(rank, dtype_name, 5), OPS[op_name])
            check("max", 3, "contiguous")
            calls += 1
            continue
        for count, layout in itertools.product(SMALL, LAYOUTS):
            check(op_name, count, layout, start=count % 13)
            calls += 1
        for count in sizes_at_borders(world_size, DTYPES[dtype_name].itemsize):
            check(op_name, count, LAYOUTS[count % len(LAYOUTS)], start=count % 7)
            calls += 1
    for op_name in ("sum", "max"):
        check(op_name, MOST_ELEMENTS, "contiguous")
        calls += 1
    assert counts()["all_reduce"] == before + calls, "not all of them ran on the engine"
    return digest.text()


@pytest.mark.parametrize("dtype_name", DTYPES)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_all_reduce(rank_pool, world_size, dtype_name):
    one_digest(rank_pool(world_size).run(all_reduce_cases, dtype_name))


def integer_averages(rank, world_size):
    for dtype_name in ("int8", "int16", "int32", "int64", "uint8"):
        dtype = DTYPES[dtype_name]
        info = torch.iinfo(dtype)
        picks = [info.min, info.max, info.max - 1, info.min + 1, 0, 1, 2, 7]
        if info.min < 0:
            picks += [-1, -2, -7]
        rows = [[picks[(i + r * r) % len(picks)] for i in range(len(picks))] for r in range(world_size)]
        tensor = torch.tensor(rows[rank], dtype=dtype)
        dist.all_reduce(tensor, dist.ReduceOp.AVG)
        totals = [sum(column) for column in zip(*rows, strict=True)]
        # Truncation toward zero, in Python's unbounded integers.
        expected = [abs(t) // world_size * (1 if t >= 0 else -1) for t in totals]
        assert tensor.tolist() == expected, dtype_name


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_integer_averages_of_extreme_values(rank_pool, world_size):
    rank_pool(world_size).run(integer_averages)


def odd_shapes(rank, world_size):
    ranks = range(world_size)
    scalar = torch.tensor(float(rank + 1))
    dist.all_reduce(scalar)
    assert scalar.shape == () and scalar.item() == sum(r + 1 for r in ranks)
    for shape in ((0,), (3, 0), (0, 2, 5)):
        empty = torch.empty(shape)
        dist.all_reduce(empty)
        dist.broadcast(empty, src=world_size - 1)
        assert empty.shape == shape
        # Every rank has its own strides: elements match by position in the shape, not in memory.
    tensor = lay_out(torch.arange(35.0) * (rank + 1), "transposed" if rank % 2 else "contiguous")
    dist.all_reduce(tensor)
    expect(tensor.reshape(-1), torch.arange(35.0) * sum(r + 1 for r in ranks), "mixed strides")
    tensor = torch.full((2, 3, 4, 5), float(rank + 1)).permute(3, 1, 0, 2)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    assert torch.equal(tensor, torch.full_like(tensor, world_size))
    # What lies between the elements of a strided tensor is not touched.
    whole = torch.full((20,), -7.0)
    dist.all_reduce(whole[1::2])
    assert whole[::2].eq(-7).all() and whole[1::2].eq(-7 * world_size).all()


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_odd_shapes(rank_pool, world_size):
    rank_pool(world_size).run(odd_shapes)


def with_gradients(rank, world_size):
    leaf = torch.full((5,), float(rank), requires_grad=True)
    dist.all_reduce(leaf.data)
    assert leaf.eq(sum(range(world_size))).all() and leaf.requires_grad and leaf.is_leaf
    with torch.no_grad():
        dist.broadcast(leaf, src=0)
        dist.all_reduce(leaf, dist.ReduceOp.MAX)
    assert leaf.requires_grad and leaf.is_leaf
    source = torch.full((3,), float(rank), requires_grad=True)
    parts = [torch.empty(3) for _ in range(world_size)]
    dist.all_gather(parts, source)
    assert [p[0].item() for p in parts] == list(range(world_size))
    (source * 2).sum().backward()
    assert source.grad is not None and source.grad.eq(2).all()
    frozen = torch.nn.Parameter(torch.full((4,), float(rank)), requires_grad=False)
    dist.all_reduce(frozen)
    assert frozen.eq(sum(range(world_size))).all()


@pytest.mark.parametrize("world_size", (1, 2))
def test_tensors_that_require_gradients(rank_pool, world_size):
    rank_pool(world_size).run(with_gradients)


# ---- broadcast ----


def broadcast_cases(rank, world_size, dtype_name):
    digest = Digest()
    sizes = (*SMALL, *sizes_at_borders(world_size, DTYPES[dtype_name].itemsize)[::3])
    for i, (count, layout) in enumerate(itertools.product(sizes, LAYOUTS)):
        root = i % world_size
        is_async, context = modes()
        sent = values(root, dtype_name, count, start=i % 11)
        with context:
            tensor = lay_out(values(rank, dtype_name, count, start=i % 11), layout)
            finish(dist.broadcast(tensor, src=root, async_op=is_async), is_async)
            expect(tensor, sent.view(shape_for(layout, count)), "broadcast", dtype_name, root, count, layout)
        digest.add(tensor)
    large = values(rank, dtype_name, MOST_ELEMENTS)
    dist.broadcast(large, src=world_size - 1)
    expect(large, values(world_size - 1, dtype_name, MOST_ELEMENTS), "broadcast", dtype_name, "large")
    return digest.text()


@pytest.mark.parametrize("dtype_name", DTYPES)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_broadcast(rank_pool, world_size, dtype_name):
    one_digest(rank_pool(world_size).run(broadcast_cases, dtype_name))


# ---- all_gather ----


def all_gather_cases(rank, world_size, dtype_name):
    digest = Digest()
    dtype = DTYPES[dtype_name]
    ranks = range(world_size)
    sizes = (*SMALL, *sizes_at_borders(world_size, dtype.itemsize)[::4], MOST_ELEMENTS // world_size)
    for i, (count, layout) in enumerate(itertools.product(sizes, (*LAYOUTS, "expanded"))):
        if count > 100_000 and layout not in ("contiguous", "strided"):
            continue
        if layout == "expanded":
            flats = [values(r, dtype_name, 1, start=i % 11).expand(count) for r in ranks]
            shape = (count,)
            tensor = flats[rank]
        else:
            flats = [values(r, dtype_name, count, start=i % 11) for r in ranks]
            shape = shape_for(layout, count)
            tensor = lay_out(flats[rank], layout)
        what = ("all_gather", dtype_name, count, layout)

        # A list of tensors, each in a layout of its own.
        is_async, context = modes()
        with context:
            out_layouts = [LAYOUTS[(r + i) % len(LAYOUTS)] if layout != "expanded" else "" for r in ranks]
            outputs = [
                lay_out(torch.zeros(count, dtype=dtype), name).reshape(shape)
                if shape_for(name, count) != shape
                else lay_out(torch.zeros(count, dtype=dtype), name)
                for name in (name or "contiguous" for name in out_layouts)
            ]
            finish(dist.all_gather(outputs, tensor, async_op=is_async), is_async)
            for r in ranks:
                expect(outputs[r], flats[r].reshape(shape), *what, "list", r)
                digest.add(outputs[r])

        # One tensor: concatenated, stacked, and with an odd offset.
        is_async, context = modes()
        with context:
            for into in (
                torch.zeros(world_size * shape[0], *shape[1:], dtype=dtype),
                torch.zeros(world_size, *shape, dtype=dtype),
                torch.zeros(world_size * count + 1, dtype=dtype)[1:].view(world_size, *shape),
            ):
                finish(dist.all_gather_into_tensor(into, tensor, async_op=is_async), is_async)
                expect(into.reshape(-1), torch.cat([f.reshape(-1) for f in flats]), *what, into.shape)
        if layout != "expanded":
            expect(tensor, flats[rank].view(shape), *what, "its input must not change")
    return digest.text()


@pytest.mark.parametrize("dtype_name", DTYPES)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_all_gather(rank_pool, world_size, dtype_name):
    one_digest(rank_pool(world_size).run(all_gather_cases, dtype_name))


def uneven_all_gather(rank, world_size):
    ranks = range(world_size)
    all_sizes = (
        list(ranks),
        [3 * (world_size - r) for r in ranks],
        [70_000 if r == 0 else 5 for r in ranks],
        [0 if r % 2 == 0 else 150_001 for r in ranks],
        [200_000 + 7919 * r for r in ranks],
    )
    for dtype_name, sizes in itertools.product(("float32", "int8", "int64"), all_sizes):
        outputs = [torch.zeros(n, dtype=DTYPES[dtype_name]) for n in sizes]
        dist.all_gather(outputs, values(rank, dtype_name, sizes[rank]))
        for r in ranks:
            expect(outputs[r], values(r, dtype_name, sizes[r]), "uneven", sizes, dtype_name, r)
    # Shapes may differ as well.
    outputs = [torch.zeros(r + 1, 2) for r in ranks]
    dist.all_gather(outputs, torch.full((rank + 1, 2), float(rank)))
    assert all(o.eq(r).all() for r, o in enumerate(outputs))


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_uneven_all_gather(rank_pool, world_size):
    rank_pool(world_size).run(uneven_all_gather)


# Types that are moved and never reduced.
def moved_types(rank, world_size):
    for dtype in (torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2):
        raw = [torch.arange(64, dtype=torch.uint8) % 60 + r for r in range(world_size)]
        bits = [b.view(dtype) for b in raw]
        outputs = [torch.empty_like(bits[0]) for _ in range(world_size)]
        dist.all_gather(outputs, bits[rank])
        for r in range(world_size):
            assert torch.equal(outputs[r].view(torch.uint8), raw[r]), dtype
        tensor = bits[rank].clone()
        dist.broadcast(tensor, src=world_size - 1)
        assert torch.equal(tensor.view(torch.uint8), raw[-1]), dtype
    with pytest.raises(REFUSED):
        dist.all_reduce(torch.zeros(3).to(torch.float8_e5m2))
    dist.barrier()


@pytest.mark.parametrize("world_size", (1, 2, 3))
def test_types_that_are_only_moved(rank_pool, world_size):
    rank_pool(world_size).run(moved_types)
