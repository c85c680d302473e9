"""Operations in which each rank has a piece for, or of, every other; see `fccl.bench.case`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from fccl.bench.buffers import Buffer, Layout
from fccl.bench.case import Call, Case, SharedCase
from fccl.bench.pattern import count_wrong, fill

__all__ = ["AllToAll", "Gather", "ReduceScatter", "Scatter", "SendRecv"]

# Scatters one tensor; torch 2.13 gave it a new name and warns at each use of the old one.
_reduce_scatter_single: Call = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class _OnePieceEach(SharedCase):
    """From one tensor that has a piece for each rank into one of a piece."""

    @classmethod
    def layout(cls, count: int, ranks: int, form: str) -> Layout:
        return Layout((count * ranks, count), (0,), cls.received(count, ranks), result=1)

    @property
    def giver(self) -> int:
        """The rank whose data this rank's input is."""
        return self.rank

    def prepare(self, buffer: Buffer, salt: int) -> None:
        source, output = buffer.tensors
        self.fill_pieces(source, self.giver, salt)
        output.fill_(self.pattern.poison())


class ReduceScatter(_OnePieceEach):
    """size = bytes of the input; count = elements that each rank gets. From one tensor into one."""

    name = "reduce_scatter"
    reduces = True

    def bind(self, buffer: Buffer, group: dist.ProcessGroup, async_op: bool) -> Call:
        source, output = buffer.tensors
        return functools.partial(_reduce_scatter_single, output, source, self.op, group, async_op)

    def count_wrong(self, buffer: Buffer, salt: int) -> int:
        output = buffer.tensors[1]
        return count_wrong(output, self.pattern.reduced(self.piece_salt(salt, self.rank), len(output)))


class AllToAll(SharedCase):
    """size = bytes of the output; count = elements that each rank sends to each. From one tensor into one."""

    name = "all_to_all"

    @classmethod
    def layout(cls, count: int, ranks: int, form: str) -> Layout:
        return Layout((count * ranks, count * ranks), (1,), cls.received(count, ranks))

    def prepare(self, buffer: Buffer, salt: int) -> None:
        source, output = buffer.tensors
        self.fill_pieces(source, self.rank, salt)
        output.fill_(self.pattern.poison())

    def bind(self, buffer: Buffer, group: dist.ProcessGroup, async_op: bool) -> Call:
        source, output = buffer.tensors
        return functools.partial(dist.all_to_all_single, output, source, None, None, group, async_op)

    def count_wrong(self, buffer: Buffer, salt: int) -> int:
        return self.count_wrong_pieces(buffer.tensors[1], self.piece_salt(salt, self.rank))


class Gather(SharedCase):
    """size = bytes of what the root gets; count = elements that each rank gives."""

    name = "gather"
    rooted = rooted_result = True

    @classmethod
    def layout(cls, count: int, ranks: int, form: str) -> Layout:
        return Layout((count, count * ranks), (1,), cls.received(count, ranks))

    def prepare(self, buffer: Buffer, salt: int) -> None:
        source, whole = buffer.tensors
        fill(source, self.pattern.source(self.rank, salt, len(source)))
        whole.fill_(self.pattern.poison())

    def bind(self, buffer: Buffer, group: dist.ProcessGroup, async_op: bool) -> Call:
        source, whole = buffer.tensors
        outputs = list(whole.chunk(self.ranks)) if self.rank == self.root else None
        return functools.partial(dist.gather, source, outputs, self.root, group, async_op)

    def count_wrong(self, buffer: Buffer, salt: int) -> int:
        if self.rank != self.root:
            return 0
        return self.count_wrong_pieces(buffer.tensors[1], salt)


class Scatter(_OnePieceEach):
    """size = bytes of what the root gives; count = elements that each rank gets."""

    name = "scatter"
    rooted = True

    @property
    def giver(self) -> int:
        return self.root

    def bind(self, buffer: Buffer, group: dist.ProcessGroup, async_op: bool) -> Call:
        whole, output = buffer.tensors
        inputs = list(whole.chunk(self.ranks)) if self.rank == self.root else None
        return functools.partial(dist.scatter, output, inputs, self.root, group, async_op)

    def count_wrong(self, buffer: Buffer, salt: int) -> int:
        output = buffer.tensors[1]
        return count_wrong(
            output, self.pattern.source(self.root, self.piece_salt(salt, self.rank), len(output))
        )


class _Works:
    """Several works as one."""

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


class SendRecv(Case):
    """size = bytes of a message; busbw = algbw.

    Form "ring": each rank sends to the next one and receives from the one before. Form "pingpong": rank 0
    sends to rank 1, which sends another message back; the time is that of both ways, and further ranks
    look on.
    """

    name = "send_recv"
    forms = ("ring", "pingpong")
    least_ranks = 2

    @classmethod
    def layout(cls, count: int, ranks: int, form: str) -> Layout:
        return Layout((count, count), (1,))

    def _source(self) -> int:
        if self.form == "ring":
            return (self.rank - 1) % self.ranks
        return 1 - self.rank if self.rank < 2 else self.rank

    def prepare(self, buffer: Buffer, salt: int) -> None:
        out, into = buffer.tensors
        fill(out, self.pattern.source(self.rank, salt, len(out)))
        if self._source() == self.rank:
            fill(into, self.pattern.source(self.rank, salt, len(into)))
        else:
            into.fill_(self.pattern.poison())

    def bind(self, buffer: Buffer, group: dist.ProcessGroup, async_op: bool) -> Call:
        out, into = buffer.tensors
        after, before = (self.rank + 1) % self.ranks, self._source()

        def ring() -> _Works | None:
            works = _Works([dist.irecv(into, before, group), dist.isend(out, after, group)])
            if async_op:
                return works
            works.wait()
            return None

        def pingpong() -> _Works:
            turns: list[Callable[..., Any]] = (
                [dist.send, dist.recv] if self.rank == 0 else [dist.recv, dist.send]
            )
            if self.rank < 2:
                for turn in turns:
                    turn(out if turn is dist.send else into, before, group)
            return _Works([])

        return ring if self.form == "ring" else pingpong

    def count_wrong(self, buffer: Buffer, salt: int) -> int:
        into: torch.Tensor = buffer.tensors[1]
        return count_wrong(into, self.pattern.source(self._source(), salt, len(into)))
