"""memcpy: the physical yardstick.

The time in which every rank copies the message once, from one buffer of the working set to the next, with
the C library's memcpy in one thread, all ranks at the same moment. A collective has to move at least about
that much.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

from fccl.bench.buffers import Buffer
from fccl.bench.pattern import Pattern, count_wrong, fill

__all__ = ["bind_copy", "check_copy"]

_memcpy = ctypes.CDLL(None).memcpy
_memcpy.restype = ctypes.c_void_p
_memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def _copy_all(parts: list[tuple[ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]]) -> None:
    for target, source, size in parts:
        _memcpy(target, source, size)


def bind_copy(source: Buffer, target: Buffer) -> Callable[[], Any]:
    """A call that copies the message of `source` into that of `target`."""
    parts = [
        (ctypes.c_void_p(to.data_ptr()), ctypes.c_void_p(origin.data_ptr()), ctypes.c_size_t(to.nbytes))
        for origin, to in zip(source.message, target.message, strict=True)
    ]
    if len(parts) == 1:
        return functools.partial(_memcpy, *parts[0])
    return functools.partial(_copy_all, parts)


def check_copy(pattern: Pattern, source: Buffer, target: Buffer, salt: int, call: Callable[[], Any]) -> int:
    """Makes one copy of predictable data with `call` and returns the number of wrong elements."""
    for origin, to in zip(source.message, target.message, strict=True):
        fill(origin, pattern.source(0, salt, len(origin)))
        to.fill_(pattern.poison())
    call()
    return sum(count_wrong(to, pattern.source(0, salt, len(to))) for to in target.message)
