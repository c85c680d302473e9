"""all_reduce, broadcast, all_gather, barrier: dtypes, operations, layouts and sizes on 1 to 4 ranks."""

from __future__ import annotations

import contextlib
import itertools
import os

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fccl
from collective_cases import (
    DTYPES,
    LAYOUTS,
    MOST_ELEMENTS,
    OPS,
    Digest,
    expect,
    is_defined,
    lay_out,
    reference,
    shape_for,
    values,
)
from fccl_testing import run_ranks

WORLD_SIZES = (1, 2, 3, 4)
SMALL = (0, 1, 7, 1000)
REFUSED = (TypeError, ValueError, RuntimeError)


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


def one_digest(results: list[str]) -> None:
    assert len(set(results)) == 1, f"ranks hold different bits: {results}"


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


# ---- coalesced calls ----


def coalesced_cases(rank, world_size):
    ranks = range(world_size)
    sizes = (1, 0, 1000, 70_001, 300_001)

    def inputs(dtype_name, r):
        return [values(r, dtype_name, n, start=n % 5) for n in sizes]

    for dtype_name in ("float32", "bfloat16", "int32"):
        expected = [
            reference("sum", list(column))
            for column in zip(*(inputs(dtype_name, r) for r in ranks), strict=True)
        ]
        tensors = inputs(dtype_name, rank)
        with dist._coalescing_manager(async_ops=True) as manager:
            for tensor in tensors:
                dist.all_reduce(tensor)
        manager.wait()
        for tensor, value in zip(tensors, expected, strict=True):
            expect(tensor, value, "coalescing manager, all_reduce", dtype_name)

        for tensor, value in zip(
            functional.all_reduce_coalesced(inputs(dtype_name, rank), "sum", dist.group.WORLD),
            expected,
            strict=True,
        ):
            expect(functional.wait_tensor(tensor), value, "all_reduce_coalesced", dtype_name)

        shares = [values(rank, dtype_name, n) for n in sizes]
        gathered = [torch.cat([values(r, dtype_name, n) for r in ranks]) for n in sizes]
        outputs = [torch.empty(world_size * n, dtype=DTYPES[dtype_name]) for n in sizes]
        with dist._coalescing_manager():
            for output, share in zip(outputs, shares, strict=True):
                dist.all_gather_into_tensor(output, share)
        for output, value in zip(outputs, gathered, strict=True):
            expect(output, value, "coalescing manager, all_gather_into_tensor", dtype_name)
        for output, value in zip(
            functional.all_gather_into_tensor_coalesced(shares, dist.group.WORLD), gathered, strict=True
        ):
            expect(functional.wait_tensor(output), value, "all_gather_into_tensor_coalesced", dtype_name)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_coalesced(rank_pool, world_size):
    rank_pool(world_size).run(coalesced_cases)


def functional_cases(rank, world_size):
    ranks = range(world_size)
    for count in (1, 1000, 100_003):
        inputs = [values(r, "float32", count) for r in ranks]
        for op_name in ("sum", "avg", "max"):
            result = functional.all_reduce(inputs[rank].clone(), op_name, dist.group.WORLD)
            expect(functional.wait_tensor(result), reference(op_name, inputs), "functional", op_name)
        result = functional.all_gather_tensor(inputs[rank], 0, dist.group.WORLD)
        expect(functional.wait_tensor(result), torch.cat(inputs), "functional all_gather_tensor")
        result = functional.broadcast(inputs[rank], 0, dist.group.WORLD)
        expect(functional.wait_tensor(result), inputs[0], "functional broadcast")


@pytest.mark.parametrize("world_size", (1, 2, 4))
def test_functional_collectives(rank_pool, world_size):
    rank_pool(world_size).run(functional_cases)


# ---- barrier, order, groups ----


def barriers(rank, world_size, folder):
    for i in range(20):
        with open(f"{folder}/{i}.{rank}", "w"):
            pass
        if i % 2:
            dist.barrier()
        else:
            work = dist.barrier(async_op=True)
            work.wait()
        # Everybody who should have arrived has.
        for r in range(world_size):
            open(f"{folder}/{i}.{r}").close()


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_barrier(rank_pool, world_size, tmp_path):
    rank_pool(world_size).run(barriers, str(tmp_path))


def many_in_flight(rank, world_size):
    """Asynchronous and synchronous calls mixed run in the order they were made."""
    works = []
    for i in range(60):
        count = (1, 500, 20_000, 90_000)[i % 4]
        inputs = [values(r, "float32", count, start=i % 32) for r in range(world_size)]
        tensor = inputs[rank].clone()
        kind = i % 3
        if kind == 0:
            work = dist.all_reduce(tensor, async_op=True)
            works.append((work, tensor, reference("sum", inputs), i))
        elif kind == 1:
            work = dist.broadcast(tensor, src=i % world_size, async_op=True)
            works.append((work, tensor, inputs[i % world_size], i))
        else:
            dist.all_reduce(tensor, dist.ReduceOp.MAX)
            expect(tensor, reference("max", inputs), "synchronous", i)
    for work, tensor, expected, i in reversed(works):
        work.wait()
        expect(tensor, expected, "asynchronous", i)
    # One tensor through a chain of calls nobody waits for in between.
    tensor = torch.ones(1000)
    chain = [dist.all_reduce(tensor, async_op=True) for _ in range(5)]
    chain[-1].wait()
    assert tensor.eq(world_size**5).all()
    for work in chain:
        work.wait()


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_many_in_flight(rank_pool, world_size):
    rank_pool(world_size).run(many_in_flight)


def subgroups(rank, world_size):
    for members in ([0, 2], [3, 1], [1, 2, 3], [2]):
        group = dist.new_group(members)
        if rank not in members:
            continue
        order = sorted(members)
        tensor = torch.full((1000,), float(rank))
        dist.all_reduce(tensor, group=group)
        assert tensor.eq(sum(members)).all()
        tensor.fill_(rank)
        dist.broadcast(tensor, src=members[-1], group=group)
        assert tensor.eq(members[-1]).all()
        parts = [torch.empty(3) for _ in members]
        dist.all_gather(parts, torch.full((3,), float(rank)), group=group)
        assert [int(p[0]) for p in parts] == order
        dist.barrier(group=group)
    whole = torch.ones(1)
    dist.all_reduce(whole)
    assert whole.item() == world_size


def test_subgroups(rank_pool):
    rank_pool(4).run(subgroups)


# ---- what does not fit ----


def refused_calls(rank, world_size):
    ones = torch.ones(4)
    calls = {
        "a sum of complex bits": lambda: dist.all_reduce(torch.ones(3, dtype=torch.float8_e4m3fn)),
        "band of floats": lambda: dist.all_reduce(torch.ones(3), dist.ReduceOp.BAND),
        "avg of bools": lambda: dist.all_reduce(torch.ones(3).bool(), dist.ReduceOp.AVG),
        "too few outputs": lambda: dist.all_gather([torch.empty(4)] * (world_size - 1), ones),
        "outputs of another dtype": lambda: dist.all_gather(
            [torch.empty(4, dtype=torch.int32) for _ in range(world_size)], ones
        ),
        "an output of another size": lambda: dist.all_gather_into_tensor(
            torch.empty(4 * world_size + 1), ones
        ),
        "a root out of range": lambda: dist.broadcast(ones, src=world_size + 5),
    }
    for name, call in calls.items():
        with pytest.raises((*REFUSED, NotImplementedError)):
            call()
            raise AssertionError(f"{name} was not refused")
        # The group stays usable.
        tensor = torch.full((3,), float(rank))
        dist.all_reduce(tensor)
        assert tensor.eq(sum(range(world_size))).all(), name


@pytest.mark.parametrize("world_size", (1, 2, 3))
def test_refused_calls_leave_the_group_usable(rank_pool, world_size):
    rank_pool(world_size).run(refused_calls)


# ---- other carriers and instruction sets ----


def all_reduce_digest(rank, world_size, isa):
    from fccl import _extension

    digest = Digest()
    for dtype_name, op_name in itertools.product(DTYPES, OPS):
        if not is_defined(dtype_name, op_name):
            continue
        for count, start in ((1003, 0), (40_001, 1)):
            inputs = [values(r, dtype_name, count, start) for r in range(world_size)]
            tensor = lay_out(inputs[rank], "offset")
            dist.all_reduce(tensor, OPS[op_name])
            expect(tensor, reference(op_name, inputs), isa, dtype_name, op_name, count)
            digest.add(tensor)
    return _extension.load().selected_isa(), digest.text()


def test_instruction_sets_give_the_same_bits():
    digests = {}
    for isa in ("portable", "avx2", "avx512"):
        results = run_ranks(all_reduce_digest, 3, isa, env={"FCCL_ISA": isa})
        assert len(set(results)) == 1
        if results[0][0] == isa:  # else this processor lacks it
            digests[isa] = results[0][1]
    assert "portable" in digests and len(set(digests.values())) == 1, digests


def without_shared_memory(rank, world_size):
    dist.barrier()
    with open(os.readlink("/proc/self/fd/2")) as log:  # the warning comes from C++
        told = log.read().count("does not use shared memory")
    assert told == (1 if rank == 0 else 0), told
    backend = fccl.backend_of()
    assert backend.engine == "inner" and "FCCL_SHM" in backend.why_inner, (backend.engine, backend.why_inner)
    for dtype_name, op_name in itertools.product(DTYPES, OPS):
        if not is_defined(dtype_name, op_name):
            with pytest.raises(REFUSED, match=op_name):
                dist.all_reduce(values(rank, dtype_name, 5), OPS[op_name])
            continue
        for count, layout in ((0, "contiguous"), (1, "strided"), (1000, "transposed"), (70_003, "offset")):
            # How Gloo orders infinities and NaNs is its own affair.
            inputs = [values(r, dtype_name, count) for r in range(world_size)]
            if inputs[0].is_floating_point():
                inputs = [torch.nan_to_num(i, 1.0, 2.0, 3.0) for i in inputs]
            tensor = lay_out(inputs[rank], layout)
            dist.all_reduce(tensor, OPS[op_name])
            # Two ranks: one addition per element, so Gloo's order cannot show.
            expected = reference(op_name, inputs).view(shape_for(layout, count))
            expect(tensor, expected, "inner", dtype_name, op_name, count, layout)
    outputs = [torch.zeros(3 + r) for r in range(world_size)]
    dist.all_gather(outputs, torch.full((3 + rank,), float(rank)))
    assert all(o.eq(r).all() for r, o in enumerate(outputs))
    tensor = lay_out(values(rank, "int16", 1000), "strided")
    dist.broadcast(tensor, src=1)
    expect(tensor, values(1, "int16", 1000), "inner broadcast")


@pytest.mark.parametrize("who", ("all", "one"))
def test_without_shared_memory(who):
    """FCCL_SHM=0 on one rank is enough: the decision is joint."""
    run_ranks(
        without_shared_memory,
        2,
        env=lambda rank: {"FCCL_SHM": "0"} if who == "all" or rank == 1 else {},
    )


# ---- determinism ----


def whole_and_pieces(rank, world_size, dtype_name, op_name, count, cuts):
    inputs = [values(r, dtype_name, count) for r in range(world_size)]
    whole = inputs[rank].clone()
    dist.all_reduce(whole, OPS[op_name])
    pieces = inputs[rank].clone()
    borders = [0, *sorted(min(cut, count) for cut in cuts), count]
    works = [
        dist.all_reduce(pieces[begin:end], OPS[op_name], async_op=True)
        for begin, end in itertools.pairwise(borders)
    ]
    for work in works:
        work.wait()
    whole_digest, pieces_digest = Digest(), Digest()
    whole_digest.add(whole)
    pieces_digest.add(pieces)
    assert whole_digest.text() == pieces_digest.text(), "chunking shows in the bits"
    expect(whole, reference(op_name, inputs), dtype_name, op_name, count)
    return whole_digest.text()


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    world_size=st.sampled_from((2, 3, 4)),
    case=st.sampled_from([(d, o) for d in DTYPES for o in OPS if is_defined(d, o)]),
    count=st.one_of(st.integers(0, 5000), st.integers(5001, MOST_ELEMENTS)),
    cuts=st.lists(st.integers(0, MOST_ELEMENTS), max_size=4),
)
def test_results_do_not_depend_on_chunking(rank_pool, world_size, case, count, cuts):
    one_digest(rank_pool(world_size).run(whole_and_pieces, *case, count, cuts))


# ---- large ----


def over_two_gib(rank, world_size):
    count = (1 << 31) + 5
    tensor = torch.empty(count, dtype=torch.int8)
    block = 1 << 26
    pattern = (torch.arange(block) % 31).to(torch.int8)
    for start in range(0, count, block):
        part = tensor[start : start + block]
        part.copy_(pattern[: len(part)])
        part += start // block % 3 + rank
    dist.all_reduce(tensor)
    offset = sum(range(world_size))
    for start in range(0, count, block):
        part = tensor[start : start + block]
        expected = (pattern[: len(part)] + start // block % 3) * world_size + offset
        assert torch.equal(part, expected.to(torch.int8)), start
    tensor[-3:] = rank + 1
    dist.broadcast(tensor, src=1)
    assert tensor[-3:].tolist() == [2, 2, 2]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_tensors_over_two_gib(rank_pool):
    import psutil

    if psutil.virtual_memory().available < 8 << 30:
        pytest.skip("needs 8 GiB of free memory")
    rank_pool(2).run(over_two_gib, timeout=500)
