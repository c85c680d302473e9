"""The physical yardsticks: what memory itself takes for the bytes of a message.

memcpy: every rank copies the message once, from one buffer of the working set to the next, with the C
library's memcpy, all ranks at the same moment. A collective has to move at least about that much.

add: every rank adds two thirds of the message to another tensor in place (`Tensor.add_`). An all_reduce without
copies reads each byte of a rank's share of all inputs once and writes as many: twice the message on each rank. An
in-place add reads two tensors and writes one, so that two thirds of the message make the same traffic.

Both in one thread for each rank.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch

from fccl.bench.buffers import Buffer
from fccl.bench.config import ADD, MEMCPY
from fccl.bench.pattern import Pattern, count_wrong, fill

__all__ = ["bind_yardstick", "check_yardstick"]

_memcpy = ctypes.CDLL(None).memcpy
_memcpy.restype = ctypes.c_void_p
_memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def _pairs(name: str, source: Buffer, target: Buffer) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What goes from where to where."""
    pairs = list(zip(source.message, target.message, strict=True))
    if name == ADD:
        # At least one element, so that there is something to check.
        pairs = [(a[: max(1, 2 * len(a) // 3)], b[: max(1, 2 * len(b) // 3)]) for a, b in pairs]
    return pairs


def _each(calls: list[Callable[[], Any]]) -> None:
    for call in calls:
        call()


def bind_yardstick(name: str, source: Buffer, target: Buffer) -> Callable[[], Any]:
    """A call that moves the message of `source` into that of `target`, in the way of the yardstick `name`."""
    calls: list[Callable[[], Any]] = []
    for origin, to in _pairs(name, source, target):
        if name == MEMCPY:
            at = ctypes.c_void_p(to.data_ptr()), ctypes.c_void_p(origin.data_ptr())
            calls.append(functools.partial(_memcpy, *at, ctypes.c_size_t(to.nbytes)))
        elif to.dtype is torch.bool:
            calls.append(functools.partial(to.logical_or_, origin))
        else:
            calls.append(functools.partial(to.add_, origin))
    return calls[0] if len(calls) == 1 else functools.partial(_each, calls)


def check_yardstick(
    name: str, pattern: Pattern, source: Buffer, target: Buffer, salt: int, call: Callable[[], Any]
) -> int:
    """Makes one `call` on predictable data and returns the number of wrong elements."""
    pairs = _pairs(name, source, target)
    for origin, to in pairs:
        fill(origin, pattern.source(0, salt, len(origin)))
        if name == ADD:
            to.zero_()
        else:
            to.fill_(pattern.poison())
    call()
    return sum(count_wrong(to, pattern.source(0, salt, len(to))) for _, to in pairs)
