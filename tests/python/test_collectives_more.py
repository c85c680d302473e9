"""Coalesced and functional forms, order, subgroups, refusals, other carriers, determinism, large tensors."""

from __future__ import annotations

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
from fccl_testing import run_ranks

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
            inputs = [values(r, dtype_name, count) for r in range(world_size)]
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
