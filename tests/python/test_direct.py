"""fccl.all_reduce and the other functions beneath torch's wrapper: the same results, order and refusals."""

from __future__ import annotations

import contextlib
import threading
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

import fccl
from collective_cases import DTYPES, OPS, REFUSED, expect, is_defined, lay_out, reference, values
from fccl_testing import run_ranks

GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"


@contextlib.contextmanager
def torch_calls():
    """Notes which of torch's collectives are called."""
    names: list[str] = []
    with contextlib.ExitStack() as stack:
        for name in ("all_reduce", GATHER, "broadcast", "barrier"):
            original = getattr(dist, name)

            def noting(*args, _name=name, _original=original, **kwargs):
                names.append(_name)
                return _original(*args, **kwargs)

            stack.enter_context(mock.patch.object(dist, name, noting))
        yield names


def one_of_each(rank, world_size, group=None):
    """One call of each function, checked; ``rank`` and ``world_size`` are those in the group."""
    ranks = range(world_size)
    tensor = torch.full((3,), float(rank + 1))
    assert fccl.all_reduce(tensor, group=group) is None
    expect(tensor, torch.full((3,), sum(r + 1.0 for r in ranks)), "all_reduce")
    gathered = torch.empty(world_size * 2)
    assert fccl.all_gather_into_tensor(gathered, torch.full((2,), float(rank)), group) is None
    expect(gathered, torch.arange(world_size).repeat_interleave(2).float(), "all_gather_into_tensor")
    tensor = torch.full((5,), float(rank))
    assert fccl.broadcast(tensor, group=group, group_src=world_size - 1) is None
    expect(tensor, torch.full((5,), world_size - 1.0), "broadcast")
    assert fccl.barrier(group) is None


def all_cases(rank, world_size):
    ranks = range(world_size)
    with torch_calls() as names:
        for dtype_name in DTYPES:
            for op_name, op in OPS.items():
                if not is_defined(dtype_name, op_name):
                    continue
                inputs = [values(r, dtype_name, 1001) for r in ranks]
                for layout in ("contiguous", "strided", "transposed"):
                    tensor = lay_out(inputs[rank], layout)
                    expected = lay_out(reference(op_name, inputs), layout)
                    fccl.all_reduce(tensor, op)
                    expect(tensor, expected, "all_reduce", dtype_name, op_name, layout)
        inputs = [values(r, "float32", 300_001) for r in ranks]
        gathered = torch.empty(world_size * 300_001)
        fccl.all_gather_into_tensor(gathered, inputs[rank])
        expect(gathered, torch.cat(inputs), "all_gather_into_tensor")
        for root in ranks:
            tensor = inputs[rank].clone()
            fccl.broadcast(tensor, root)
            expect(tensor, inputs[root], "broadcast")
        # A reduce operation of torch's class, not of its enumeration.
        premultiplied = dist._make_nccl_premul_sum(0.5)
        tensor = torch.full((7,), float(rank + 1))
        fccl.all_reduce(tensor, premultiplied)
        expect(tensor, torch.full((7,), 0.5 * sum(r + 1 for r in ranks)), "PREMUL_SUM")
        one_of_each(rank, world_size)
    assert names == []  # none of it went through torch


@pytest.mark.parametrize("world_size", (1, 2, 3))
def test_results(rank_pool, world_size):
    rank_pool(world_size).run(all_cases)


def in_order(rank, world_size):
    """Direct and other calls are one sequence, also where ranks differ in which they use."""
    before = fccl.backend_of().collective_counts()["all_reduce"]
    started = [torch.full((100_000,), float(i + rank)) for i in range(4)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in started]
    tensor = torch.ones(3)
    (fccl.all_reduce if rank == 0 else dist.all_reduce)(tensor)
    expect(tensor, torch.full((3,), float(world_size)), "after asynchronous calls")
    for i, (work, each) in enumerate(zip(works, started, strict=True)):
        assert work.is_completed()  # it was before the call that has returned
        expect(each, torch.full((100_000,), float(world_size * i + sum(range(world_size)))), i)
    assert fccl.backend_of().collective_counts()["all_reduce"] == before + 5


def test_one_order(rank_pool):
    rank_pool(3).run(in_order)


def complex_numbers(rank, world_size):
    """torch hands them to a backend as real ones: mixed calls must fit all the same."""
    of = fccl if rank == 0 else dist
    tensor = torch.full((3,), complex(rank, 1.0))
    of.all_reduce(tensor)
    expect(torch.view_as_real(tensor), torch.tensor([[1.0, 2.0]] * 3), "all_reduce")
    of.broadcast(tensor, src=1)
    gathered = torch.empty(world_size * 3, dtype=tensor.dtype)
    (fccl.all_gather_into_tensor if rank else getattr(dist, GATHER))(gathered, tensor)
    expect(torch.view_as_real(gathered), torch.tensor([[1.0, 2.0]] * 6), "all_gather_into_tensor")


def test_complex_numbers(rank_pool):
    rank_pool(2).run(complex_numbers)


def in_groups(rank, world_size):
    group = dist.new_group([2, 1], backend="fccl")  # sorted by torch: ranks 1 and 2
    if rank == 0:
        with torch_calls() as names, pytest.warns(UserWarning, match="does not belong"):
            fccl.all_reduce(torch.ones(1), group=group)
        assert names == ["all_reduce"]  # torch says what is wrong
    else:
        with torch_calls() as names:
            one_of_each(rank - 1, 2, group)
            tensor = torch.full((2,), float(rank))
            fccl.broadcast(tensor, 2, group)  # a global rank
            expect(tensor, torch.full((2,), 2.0), "broadcast from a global rank")
        assert names == []
    dist.barrier()


def test_groups(rank_pool):
    rank_pool(3).run(in_groups)


def through_torch(rank, world_size):
    with torch_calls() as names:
        one_of_each(rank, world_size)
    assert names == ["all_reduce", GATHER, "broadcast", "barrier"], names


def test_other_backends_go_through_torch():
    run_ranks(through_torch, 2, backend="gloo")


def test_debug_wrapper_stays_in_force():
    run_ranks(through_torch, 2, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})


class Subclass(torch.Tensor):
    seen: list[str] = []

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        cls.seen.append(func.name())
        raise RuntimeError("seen")


class Function(torch.Tensor):
    seen: list[str] = []

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.seen.append(func.__name__)
        return None


def not_plain(rank, world_size):
    tensor = torch.ones(3).as_subclass(Function)
    for call in (dist.all_reduce, fccl.all_reduce):
        Function.seen.clear()
        call(tensor)
        assert Function.seen == ["all_reduce"], Function.seen
    with torch_calls() as names, FakeTensorMode():
        fccl.all_reduce(torch.ones(3))  # does nothing, as torch's
    assert names == ["all_reduce"]
    with pytest.raises(RuntimeError, match="seen"):
        fccl.all_reduce(torch.ones(3).as_subclass(Subclass))
    assert Subclass.seen == ["c10d::allreduce_"]
    dist.barrier()


def test_fake_tensors_and_subclasses_go_through_torch(rank_pool):
    rank_pool(2).run(not_plain)


def step(tensor):
    tensor = tensor * 2
    fccl.all_reduce(tensor)
    return tensor + 1


def compiled(rank, world_size):
    torch._dynamo.reset()
    result = torch.compile(step, backend="aot_eager", fullgraph=True)(torch.full((3,), float(rank)))
    expect(result, torch.full((3,), 2.0 * sum(range(world_size)) + 1), "compiled")


def test_compiled(rank_pool):
    rank_pool(2).run(compiled)


def refusals(rank, world_size):
    with pytest.raises(REFUSED, match="clone"):
        fccl.all_reduce(torch.ones(()).expand(3))
    with pytest.raises(REFUSED, match="bitwise|BAND|band"):
        fccl.all_reduce(torch.ones(3), dist.ReduceOp.BAND)
    with pytest.raises(REFUSED, match="expected"):
        fccl.all_gather_into_tensor(torch.empty(3), torch.empty(2))
    for arguments in ({}, {"src": 0, "group_src": 0}):
        with pytest.raises(REFUSED):
            fccl.broadcast(torch.ones(1), **arguments)
    # Calls that do not fit are told apart as they are behind torch's wrapper, and the group stays usable.
    with pytest.raises(dist.DistBackendError, match=r"rank 0.*rank 1"):
        fccl.all_reduce(torch.ones(3 + rank))
    one_of_each(rank, world_size)


def test_refusals():
    # Not in the pool: what is refused before it reaches the backend takes no number.
    run_ranks(refusals, 2)


def no_tensors(rank, world_size):
    for direct, through_torch, arguments in (
        (fccl.all_reduce, dist.all_reduce, ([1.0],)),
        (fccl.broadcast, dist.broadcast, (3, 0)),
        (fccl.all_gather_into_tensor, getattr(dist, GATHER), (torch.ones(2), None)),
    ):
        with pytest.raises(REFUSED) as of_torch:
            through_torch(*arguments)
        with pytest.raises(type(of_torch.value)) as ours:
            direct(*arguments)
        assert str(ours.value) == str(of_torch.value)


def test_what_is_no_tensor_is_refused_as_torch_does(rank_pool):
    rank_pool(2).run(no_tensors)


def test_without_a_group():
    assert not dist.is_initialized()
    for call in (
        lambda: fccl.all_reduce(torch.ones(1)),
        fccl.barrier,
        lambda: fccl.broadcast(torch.ones(1), 0),
    ):
        with pytest.raises(ValueError, match="process group"):
            call()


def waiting(rank, world_size):
    """Other Python threads run while a rank waits."""
    if rank == 1:
        time.sleep(0.5)
        fccl.barrier()
        return
    ticks, stop = 0, threading.Event()

    def tick():
        nonlocal ticks
        while not stop.wait(0.01):
            ticks += 1

    thread = threading.Thread(target=tick)
    thread.start()
    fccl.barrier()
    stop.set()
    thread.join()
    assert ticks >= 10


def test_gil_is_free_while_waiting(rank_pool):
    rank_pool(2).run(waiting)
