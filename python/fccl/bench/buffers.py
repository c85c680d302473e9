"""The working set: the buffers over which a measurement rotates.

A benchmark that uses one buffer again and again measures the cache. Each timed call here takes the next
buffer of a rotation whose total size is stated with the results. The memory is mapped by hand, because what
`malloc` returns is backed by ordinary pages on one machine and by 2 MiB pages on the next, and results
differ by a lot.
"""

from __future__ import annotations

import contextlib
import mmap
from dataclasses import dataclass

import torch

__all__ = ["Buffer", "Layout", "WorkingSet", "planned_buffers"]

#: Messages above this many bytes are "large": they rotate over several times the last-level cache.
LARGE_MESSAGE = 1 << 20
#: Buffers in rotation for smaller messages, which stay in the cache as a tensor that was just computed does.
SMALL_BUFFERS = 8
#: How many times the last-level cache the working set of large messages is, all ranks together.
CACHE_MULTIPLE = 4
#: At least this many buffers: memcpy needs two at once, and rotation some more.
MIN_BUFFERS = 4
_MAX_BUFFERS = 4096

_CACHE_LINE = 64
_PAGE = mmap.PAGESIZE


@dataclass(frozen=True)
class Layout:
    """The tensors of one call.

    Attributes:
        tensors: Number of elements of each tensor.
        message: Indices of the tensors that a yardstick moves for comparison: the message, or what a rank must
            receive of it.
        elements: If not None, only so many elements of the one message tensor.
        result: Index of a tensor that the call writes; None for the first of the message.
    """

    tensors: tuple[int, ...]
    message: tuple[int, ...]
    elements: int | None = None
    result: int | None = None


@dataclass(frozen=True)
class Buffer:
    """The tensors of one call in memory: 1-D, contiguous; `message` and `result` as `Layout` says."""

    tensors: list[torch.Tensor]
    message: list[torch.Tensor]
    result: torch.Tensor | None


def _span(elements: int, item_size: int) -> int:
    """Bytes set aside for a tensor: whole cache lines, and for long ones whole pages plus a line.

    The extra line gives long tensors the offset within a page that `malloc` gives them, and keeps
    neighbours from lying at the same distance modulo the page size.
    """
    bytes_ = max(1, elements) * item_size
    unit = _PAGE if bytes_ >= _PAGE else _CACHE_LINE
    return -(-bytes_ // unit) * unit + _CACHE_LINE


def planned_buffers(
    bytes_per_call: int, message: int, ranks: int, *, cache: int, memory: int, working_set: int | None
) -> int:
    """Number of buffers to rotate over.

    Args:
        bytes_per_call: Bytes of all tensors of one call on one rank.
        message: Size of the message in bytes.
        ranks: Number of ranks.
        cache: Last-level cache in bytes.
        memory: Bytes that all ranks together may use.
        working_set: Bytes asked for by the user, all ranks together; None for the default rule.

    Raises:
        ValueError: the memory does not hold the least number of buffers.
    """
    if bytes_per_call == 0:
        return 1
    per_buffer = bytes_per_call * ranks
    if working_set is not None:
        wanted = -(-working_set // per_buffer)
    elif message > LARGE_MESSAGE:
        wanted = -(-CACHE_MULTIPLE * cache // per_buffer)
    else:
        wanted = SMALL_BUFFERS
    affordable = memory // per_buffer
    if affordable < MIN_BUFFERS:
        raise ValueError(
            f"a message of {message} bytes needs {MIN_BUFFERS} buffers of {bytes_per_call} bytes on each of "
            f"{ranks} ranks ({MIN_BUFFERS * per_buffer >> 20} MiB), and {memory >> 20} MiB of memory may "
            "be used: lower --end or --ranks"
        )
    return max(MIN_BUFFERS, min(wanted, affordable, _MAX_BUFFERS))


class WorkingSet:
    """`buffers` buffers of one layout in private anonymous memory, touched so that no page fault is timed.

    Args:
        layout: The tensors of one call.
        dtype: Their dtype.
        buffers: How many buffers.
        huge_pages: Ask for 2 MiB pages; otherwise ordinary pages are insisted on.
        arena: In memory that the ranks share (`fccl.empty`) instead; its pages are the system's choice.

    Raises:
        MemoryError: there is no such memory.
    """

    def __init__(
        self,
        layout: Layout,
        dtype: torch.dtype,
        buffers: int,
        huge_pages: bool = False,
        arena: bool = False,
    ) -> None:
        spans = [_span(elements, dtype.itemsize) for elements in layout.tensors]
        total = max(_PAGE, sum(spans) * buffers + _CACHE_LINE)
        memory = _arena_memory(total) if arena else _private_memory(total, huge_pages)
        self.buffers: list[Buffer] = []
        offset = _CACHE_LINE
        for _ in range(buffers):
            tensors: list[torch.Tensor] = []
            for elements, span in zip(layout.tensors, spans, strict=True):
                whole = memory[offset : offset + max(1, elements) * dtype.itemsize].view(dtype)
                tensors.append(whole[:elements])
                offset += span
            message = [tensors[index][: layout.elements] for index in layout.message]
            written = layout.result if layout.result is not None else next(iter(layout.message), None)
            self.buffers.append(Buffer(tensors, message, None if written is None else tensors[written]))


def _private_memory(size: int, huge_pages: bool) -> torch.Tensor:
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    advice = getattr(mmap, "MADV_HUGEPAGE" if huge_pages else "MADV_NOHUGEPAGE", None)
    if advice is not None:
        # A kernel without transparent huge pages refuses, and has ordinary ones.
        with contextlib.suppress(OSError):
            memory.madvise(advice)
    return torch.frombuffer(memory, dtype=torch.uint8).zero_()


def _arena_memory(size: int) -> torch.Tensor:
    import fccl

    memory = fccl.empty(size, dtype=torch.uint8)
    if not fccl.is_shared(memory):
        raise MemoryError(f"the arena has no {size >> 20} MiB; fccl.memory_stats(): {fccl.memory_stats()}")
    return memory.zero_()
