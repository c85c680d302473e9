"""The operations that can be measured, one small class each.

A case says how a size on the command line becomes tensors, which factor turns algbw into busbw, how the
data of a call is prepared, which torch.distributed call is timed, and how its result is checked. To add an
operation, write one more class and list it in `CASES`.

Sizes and factors follow NVIDIA's nccl-tests (doc/PERFORMANCE.md), so that numbers can be compared with
those of other libraries.
"""

from __future__ import annotations

import functools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist

from fccl.bench.buffers import Buffer, Layout
from fccl.bench.pattern import Pattern, count_wrong, fill

if TYPE_CHECKING:
    from fccl.bench.board import Board

__all__ = ["CASES", "Case", "reduce_op"]

Call = Callable[..., Any]

# Gathers into one tensor; torch 2.13 gave it a new name and warns at each use of the old one.
_all_gather_single: Call = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_TORCH_OP_NAMES = {"prod": "PRODUCT"}


def reduce_op(op: str) -> dist.ReduceOp.RedOpType:
    """The reduce operation of torch for a name on the command line."""
    result: dist.ReduceOp.RedOpType = getattr(dist.ReduceOp, _TORCH_OP_NAMES.get(op, op.upper()))
    return result


class Case(ABC):
    """One operation as one rank sees it.

    Args:
        rank: This rank.
        ranks: Number of ranks.
        dtype: Name of the dtype.
        op: Name of the reduce operation (used by operations that reduce).
        root: Rank that the data comes from (used by operations that have one).
        form: One of `forms`.
        board: The board of the run (used by operations without data).
    """

    name: ClassVar[str]
    #: Whether the operation takes a reduce operation, a root.
    reduces: ClassVar[bool] = False
    rooted: ClassVar[bool] = False
    #: Whether it moves data; if not, there is one row of size 0.
    moves_data: ClassVar[bool] = True
    #: Variants of the call; the first is the default.
    forms: ClassVar[tuple[str, ...]] = ("",)

    def __init__(
        self, *, rank: int, ranks: int, dtype: str, op: str, root: int, form: str, board: Board | None = None
    ) -> None:
        self.rank, self.ranks, self.root, self.form = rank, ranks, root, form
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.op = reduce_op(op)
        self.pattern = Pattern(dtype, ranks, op if self.reduces else None)
        self.board = board

    # ---- sizes: pure functions, also used by the parent ----

    @classmethod
    def count_for(cls, size: int, item_size: int, ranks: int) -> int:
        """The "count" column for a size in bytes: elements, rounded down to what the call can take."""
        return size // item_size

    @classmethod
    def size_for(cls, count: int, item_size: int, ranks: int) -> int:
        """The size in bytes that a count stands for."""
        return count * item_size

    @classmethod
    def busbw_factor(cls, ranks: int) -> float:
        """The ratio of busbw to algbw."""
        return 1.0

    @classmethod
    @abstractmethod
    def layout(cls, count: int, ranks: int, form: str) -> Layout:
        """The tensors of one call."""

    # ---- one call ----

    @abstractmethod
    def prepare(self, buffer: Buffer, salt: int) -> None:
        """Writes the inputs of call number `salt`, and poison where only the call should write."""

    @abstractmethod
    def bind(self, buffer: Buffer, group: dist.ProcessGroup, async_op: bool) -> Call:
        """The torch.distributed call on `buffer`, all arguments bound, so that only the call is timed."""

    @abstractmethod
    def count_wrong(self, buffer: Buffer, salt: int) -> int:
        """Number of wrong elements after call number `salt`; the tolerance is zero."""


class AllReduce(Case):
    """size = bytes of the tensor; busbw = algbw · 2(n-1)/n. In place, as torch.distributed has it."""

    name = "all_reduce"
    reduces = True

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

    def count_wrong(self, buffer: Buffer, salt: int) -> int:
        tensor = buffer.tensors[0]
        return count_wrong(tensor, self.pattern.reduced(salt, len(tensor)))


class AllGather(Case):
    """size = bytes of the output; count = elements that each rank gives; busbw = algbw · (n-1)/n.

    Form "tensor" gathers into one tensor (all_gather_single, before: all_gather_into_tensor), "list" into
    one tensor per rank (all_gather).
    """

    name = "all_gather"
    forms = ("tensor", "list")

    @classmethod
    def count_for(cls, size: int, item_size: int, ranks: int) -> int:
        # Each rank's share is a whole number of 16-byte units.
        unit = 16 // item_size
        return size // item_size // ranks // unit * unit

    @classmethod
    def size_for(cls, count: int, item_size: int, ranks: int) -> int:
        return count * item_size * ranks

    @classmethod
    def busbw_factor(cls, ranks: int) -> float:
        return (ranks - 1) / ranks

    @classmethod
    def layout(cls, count: int, ranks: int, form: str) -> Layout:
        if form == "list":
            return Layout((count,) * (ranks + 1), tuple(range(1, ranks + 1)))
        return Layout((count, count * ranks), (1,))

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

    def count_wrong(self, buffer: Buffer, salt: int) -> int:
        source, *outputs = buffer.tensors
        parts = outputs if self.form == "list" else list(outputs[0].chunk(self.ranks))
        return sum(
            count_wrong(part, self.pattern.source(rank, salt, len(source))) for rank, part in enumerate(parts)
        )


class Broadcast(Case):
    """size = bytes of the tensor; busbw = algbw."""

    name = "broadcast"
    rooted = True

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

    def count_wrong(self, buffer: Buffer, salt: int) -> int:
        tensor = buffer.tensors[0]
        return count_wrong(tensor, self.pattern.source(self.root, salt, len(tensor)))


class Barrier(Case):
    """No data: one row of size 0. A wrong result is a rank that leaves before another has entered.

    In a checked call one rank, each in turn, comes late by two milliseconds.
    """

    name = "barrier"
    moves_data = False

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

    def count_wrong(self, buffer: Buffer, salt: int) -> int:
        assert self.board is not None
        return self.board.missing_from(salt)


#: Operations by name.
CASES: dict[str, type[Case]] = {case.name: case for case in (AllReduce, AllGather, Broadcast, Barrier)}
