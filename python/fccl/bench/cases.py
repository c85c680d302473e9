"""The operations that can be measured, one small class each; see `fccl.bench.case`."""

from __future__ import annotations

import functools
import time
from typing import ClassVar

import torch.distributed as dist

from fccl import direct
from fccl.bench.buffers import Buffer, Layout
from fccl.bench.case import Call, Case, SharedCase
from fccl.bench.cases_pieces import AllToAll, Gather, ReduceScatter, Scatter, SendRecv
from fccl.bench.pattern import count_wrong, fill

__all__ = ["CASES"]

# Gathers into one tensor; torch 2.13 gave it a new name and warns at each use of the old one.
_all_gather_single: Call = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


class AllReduce(Case):
    """size = bytes of the tensor; busbw = algbw · 2(n-1)/n. In place, as torch.distributed has it."""

    name = "all_reduce"
    reduces = True
    direct_forms: ClassVar[tuple[str, ...]] = ("",)

    @classmethod
    def busbw_factor(cls, ranks: int) -> float:
        return 2 * (ranks - 1) / ranks

    @classmethod
    def layout(cls, count: int, ranks: int, form: str) -> Layout:
        return Layout((count,), (0,))

    def prepare(self, buffer: Buffer, salt: int) -> None:
        tensor = buffer.tensors[0]
        fill(tensor, self.pattern.source(self.rank, salt, len(tensor)))

    def bind(self, buffer: Buffer, group: dist.ProcessGroup, async_op: bool) -> Call:
        return functools.partial(dist.all_reduce, buffer.tensors[0], self.op, group, async_op)

    def bind_direct(self, buffer: Buffer, group: dist.ProcessGroup) -> Call:
        return functools.partial(direct.all_reduce, buffer.tensors[0], self.op, group)

    def count_wrong(self, buffer: Buffer, salt: int) -> int:
        tensor = buffer.tensors[0]
        return count_wrong(tensor, self.pattern.reduced(salt, len(tensor)))


class AllGather(SharedCase):
    """size = bytes of the output; count = elements that each rank gives.

    Form "tensor" gathers into one tensor (all_gather_single, before: all_gather_into_tensor), "list" into
    one tensor per rank (all_gather).
    """

    name = "all_gather"
    forms = ("tensor", "list")
    direct_forms = ("tensor",)

    @classmethod
    def layout(cls, count: int, ranks: int, form: str) -> Layout:
        if form == "list":
            return Layout((count,) * (ranks + 1), tuple(range(1, max(2, ranks))))
        return Layout((count, count * ranks), (1,), cls.received(count, ranks))

    def prepare(self, buffer: Buffer, salt: int) -> None:
        source, *outputs = buffer.tensors
        fill(source, self.pattern.source(self.rank, salt, len(source)))
        for output in outputs:
            output.fill_(self.pattern.poison())

    def bind(self, buffer: Buffer, group: dist.ProcessGroup, async_op: bool) -> Call:
        source, *outputs = buffer.tensors
        if self.form == "list":
            return functools.partial(dist.all_gather, outputs, source, group, async_op)
        return functools.partial(_all_gather_single, outputs[0], source, group, async_op)

    def bind_direct(self, buffer: Buffer, group: dist.ProcessGroup) -> Call:
        source, output = buffer.tensors
        return functools.partial(direct.all_gather_into_tensor, output, source, group)

    def count_wrong(self, buffer: Buffer, salt: int) -> int:
        source, *outputs = buffer.tensors
        parts = outputs if self.form == "list" else list(outputs[0].chunk(self.ranks))
        return sum(
            count_wrong(part, self.pattern.source(rank, salt, len(source))) for rank, part in enumerate(parts)
        )


class Reduce(AllReduce):
    """size = bytes of the tensor; busbw = algbw. In place on the root.

    What other ranks' tensors hold afterwards is not checked: fccl leaves them alone, Gloo does not.
    """

    name = "reduce"
    rooted = rooted_result = True
    direct_forms = ()

    @classmethod
    def busbw_factor(cls, ranks: int) -> float:
        return 1.0

    def bind(self, buffer: Buffer, group: dist.ProcessGroup, async_op: bool) -> Call:
        return functools.partial(dist.reduce, buffer.tensors[0], self.root, self.op, group, async_op)

    def count_wrong(self, buffer: Buffer, salt: int) -> int:
        return super().count_wrong(buffer, salt) if self.rank == self.root else 0


class Broadcast(Case):
    """size = bytes of the tensor; busbw = algbw."""

    name = "broadcast"
    rooted = True
    direct_forms = ("",)

    @classmethod
    def layout(cls, count: int, ranks: int, form: str) -> Layout:
        return Layout((count,), (0,))

    def prepare(self, buffer: Buffer, salt: int) -> None:
        tensor = buffer.tensors[0]
        if self.rank == self.root:
            fill(tensor, self.pattern.source(self.root, salt, len(tensor)))
        else:
            tensor.fill_(self.pattern.poison())

    def bind(self, buffer: Buffer, group: dist.ProcessGroup, async_op: bool) -> Call:
        return functools.partial(dist.broadcast, buffer.tensors[0], self.root, group, async_op)

    def bind_direct(self, buffer: Buffer, group: dist.ProcessGroup) -> Call:
        return functools.partial(direct.broadcast, buffer.tensors[0], group=group, group_src=self.root)

    def count_wrong(self, buffer: Buffer, salt: int) -> int:
        tensor = buffer.tensors[0]
        return count_wrong(tensor, self.pattern.source(self.root, salt, len(tensor)))


class Barrier(Case):
    """No data: one row of size 0. A wrong result is a rank that leaves before another has entered.

    In a checked call one rank, each in turn, comes late by two milliseconds.
    """

    name = "barrier"
    moves_data = False
    direct_forms = ("",)

    _LATE_SECONDS = 0.002

    @classmethod
    def layout(cls, count: int, ranks: int, form: str) -> Layout:
        return Layout((), ())

    def prepare(self, buffer: Buffer, salt: int) -> None:
        assert self.board is not None
        if salt % self.ranks == self.rank:
            time.sleep(self._LATE_SECONDS)
        self.board.enter(salt)

    def bind(self, buffer: Buffer, group: dist.ProcessGroup, async_op: bool) -> Call:
        return functools.partial(dist.barrier, group, async_op)

    def bind_direct(self, buffer: Buffer, group: dist.ProcessGroup) -> Call:
        return functools.partial(direct.barrier, group)

    def count_wrong(self, buffer: Buffer, salt: int) -> int:
        assert self.board is not None
        return self.board.missing_from(salt)


#: Operations by name.
CASES: dict[str, type[Case]] = {
    case.name: case
    for case in (
        AllReduce,
        Reduce,
        ReduceScatter,
        AllGather,
        Broadcast,
        AllToAll,
        Gather,
        Scatter,
        SendRecv,
        Barrier,
    )
}
