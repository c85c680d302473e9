"""What there is to know about an operation in order to measure it.

A case says how a size on the command line becomes tensors, which factor turns algbw into busbw, how the
data of a call is prepared, which torch.distributed call is timed, and how its result is checked. To add an
operation, write one more class and list it in `fccl.bench.cases.CASES`.

Sizes and factors follow NVIDIA's nccl-tests (doc/PERFORMANCE.md), so that numbers can be compared with
those of other libraries.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist

from fccl.bench.buffers import Buffer, Layout
from fccl.bench.pattern import Pattern, count_wrong, fill

if TYPE_CHECKING:
    from fccl.bench.board import Board

__all__ = ["Call", "Case", "SharedCase", "reduce_op"]

Call = Callable[..., Any]

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
    #: Whether only the root has a result.
    rooted_result: ClassVar[bool] = False
    #: Whether it moves data; if not, there is one row of size 0.
    moves_data: ClassVar[bool] = True
    least_ranks: ClassVar[int] = 1
    #: Variants that can be called without torch's wrapper too.
    direct_forms: ClassVar[tuple[str, ...]] = ()
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
        #: The rank whose result --corrupt damages: one that has a result.
        self.damaged_rank = self.root if type(self).rooted_result else ranks - 1

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

    def bind_direct(self, buffer: Buffer, group: dist.ProcessGroup) -> Call:
        """The call without torch's wrapper (`fccl.direct`), of a form in `direct_forms`."""
        raise NotImplementedError

    @abstractmethod
    def count_wrong(self, buffer: Buffer, salt: int) -> int:
        """Number of wrong elements after call number `salt`; the tolerance is zero."""


class SharedCase(Case):
    """An operation whose data are one piece for each rank.

    size = bytes of all pieces together; count = elements of one; busbw = algbw · (n-1)/n, since each rank keeps
    one piece.
    """

    @classmethod
    def count_for(cls, size: int, item_size: int, ranks: int) -> int:
        # A piece is a whole number of 16-byte units.
        unit = 16 // item_size
        return size // item_size // ranks // unit * unit

    @classmethod
    def size_for(cls, count: int, item_size: int, ranks: int) -> int:
        return count * item_size * ranks

    @classmethod
    def busbw_factor(cls, ranks: int) -> float:
        return (ranks - 1) / ranks

    @staticmethod
    def received(count: int, ranks: int) -> int:
        """Elements that a rank must receive from others; what memcpy copies for comparison."""
        return count * max(1, ranks - 1)

    def piece_salt(self, salt: int, to: int) -> int:
        """Tells the pieces for different ranks apart."""
        return salt + 17 * to

    def fill_pieces(self, whole: torch.Tensor, giver: int, salt: int) -> None:
        """Writes what `giver` has for each rank, one piece after the other."""
        for to, piece in enumerate(whole.chunk(self.ranks)):
            fill(piece, self.pattern.source(giver, self.piece_salt(salt, to), len(piece)))

    def count_wrong_pieces(self, whole: torch.Tensor, salt: int) -> int:
        """Number of wrong elements of pieces from all ranks, one after the other."""
        return sum(
            count_wrong(piece, self.pattern.source(rank, salt, len(piece)))
            for rank, piece in enumerate(whole.chunk(self.ranks))
        )
