"""Exactly predictable data.

Element ``i`` of rank ``r`` in call ``salt`` is a small whole number that follows from the three alone, and
small enough that every partial sum is exact in the dtype. So the expected result is known without asking
anybody, it does not depend on the order in which a backend adds, and the tolerance is zero: one differing
element is a wrong result. The values repeat with a prime period, so that no shift by a power of two (the way
in which chunked algorithms go wrong) maps the pattern onto itself, and they differ from call to call, so that
a stale result does not pass for a fresh one.
"""

from __future__ import annotations

import torch

__all__ = ["PERIOD", "REDUCE_OPS", "Pattern", "check_op", "count_wrong", "fill"]

#: The pattern repeats after this many elements. A prime.
PERIOD = 251

# A tile is a whole number of periods, large enough that filling and comparing run at memory speed.
_TILE_PERIODS = 256
# Comparing makes a temporary of one byte per element; this bounds it.
_COMPARE_ELEMENTS = 8 << 20

#: Reduce operations by the names on the command line.
REDUCE_OPS = ("sum", "avg", "prod", "min", "max", "band", "bor", "bxor")
_BITWISE = ("band", "bor", "bxor")

# Largest n such that all whole numbers 0 … n are exact in the dtype.
_EXACT_UP_TO = {
    "float16": 1 << 11,
    "bfloat16": 1 << 8,
    "float32": 1 << 24,
    "float64": 1 << 53,
    "int8": (1 << 7) - 1,
    "uint8": (1 << 8) - 1,
    "int16": (1 << 15) - 1,
    "int32": (1 << 31) - 1,
    "int64": (1 << 62) - 1,
    "bool": 1,
}
# Only these first ranks contribute factors of two to a product: 2**6 fits into every dtype.
_PRODUCT_RANKS = 6


def check_op(dtype: str, op: str) -> None:
    """Raises ValueError if `op` is unknown or has no meaning for `dtype`; the message says what has."""
    if op not in REDUCE_OPS:
        raise ValueError(f"unknown reduce operation {op!r}: known are {', '.join(REDUCE_OPS)}")
    if op in _BITWISE and dtype in ("float16", "bfloat16", "float32", "float64"):
        raise ValueError(
            f"{op} works on the bits of integers and bool; {dtype} can do sum, avg, prod, min, max"
        )
    if op == "avg" and dtype == "bool":
        raise ValueError("bool has no average; it can do sum (or), prod (and), min, max, band, bor, bxor")


class Pattern:
    """The data of one measured operation.

    Args:
        dtype: Name of the dtype, such as ``"float32"``.
        ranks: Number of ranks.
        op: Reduce operation, or None for operations that only move data.
    """

    def __init__(self, dtype: str, ranks: int, op: str | None = None) -> None:
        if op is not None:
            check_op(dtype, op)
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._ranks = ranks
        self._op = op
        exact = _EXACT_UP_TO[dtype]
        if op == "sum":
            domain = exact // ranks + 1
        elif op == "avg":
            # The values are multiples of the number of ranks, so that the mean is whole too.
            domain = exact // (ranks * ranks) + 1
        else:
            domain = exact + 1
        self._domain = max(2, min(PERIOD, domain))

    def _values(self, rank: int, salt: int) -> torch.Tensor:
        """One period of rank's values: int64, shape [PERIOD]."""
        base = (torch.arange(PERIOD) * 7 + rank * 31 + salt * 13) % PERIOD
        if self._op == "prod":
            return 1 + base % 2 if rank < _PRODUCT_RANKS else torch.ones_like(base)
        values = base % self._domain
        return values * self._ranks if self._op == "avg" else values

    def _tile(self, period: torch.Tensor, count: int) -> torch.Tensor:
        return period.repeat(max(1, min(_TILE_PERIODS, -(-count // PERIOD))))

    def source(self, rank: int, salt: int, count: int) -> torch.Tensor:
        """A tile of rank's input: 1-D, whole periods, at most about `count` elements; see `fill`."""
        return self._tile(self._values(rank, salt).to(self._dtype), count)

    def reduced(self, salt: int, count: int) -> torch.Tensor:
        """A tile of the result of reducing all ranks' inputs."""
        stored = torch.stack([self._values(rank, salt).to(self._dtype) for rank in range(self._ranks)])
        return self._tile(_reduce(stored, self._op or "sum"), count)

    def poison(self) -> float | int | bool:
        """A value that no correct result holds everywhere, to fill outputs with before a checked call."""
        if self._dtype is torch.bool:
            return True
        return 127 if not self._dtype.is_floating_point else float("nan")


def _reduce(stored: torch.Tensor, op: str) -> torch.Tensor:
    """Reduces [ranks, PERIOD] over the ranks in wide arithmetic, then rounds once to the dtype."""
    dtype = stored.dtype
    wide = stored.to(torch.float64 if dtype.is_floating_point else torch.int64)
    if op == "sum":
        result = wide.sum(0)
    elif op == "avg":
        total = wide.sum(0)
        result = (
            total / len(wide)
            if dtype.is_floating_point
            else torch.div(total, len(wide), rounding_mode="trunc")
        )
    elif op == "prod":
        result = wide.prod(0)
    elif op == "min":
        result = wide.amin(0)
    elif op == "max":
        result = wide.amax(0)
    else:
        combine = {"band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor}[op]
        result = wide[0]
        for row in wide[1:]:
            result = combine(result, row)
    return result.to(dtype)


def fill(tensor: torch.Tensor, tile: torch.Tensor) -> None:
    """Repeats `tile` over the contiguous 1-D `tensor`."""
    whole = len(tensor) // len(tile)
    if whole:
        tensor[: whole * len(tile)].view(whole, len(tile)).copy_(tile.expand(whole, -1))
    rest = tensor[whole * len(tile) :]
    rest.copy_(tile[: len(rest)])


def count_wrong(tensor: torch.Tensor, tile: torch.Tensor) -> int:
    """Number of elements of the contiguous 1-D `tensor` that differ from the repeated `tile`; NaN differs."""
    wrong = 0
    rows = max(1, _COMPARE_ELEMENTS // len(tile))
    whole = len(tensor) // len(tile)
    for first in range(0, whole, rows):
        last = min(whole, first + rows)
        block = tensor[first * len(tile) : last * len(tile)].view(last - first, len(tile))
        wrong += int(torch.count_nonzero(block != tile))
    rest = tensor[whole * len(tile) :]
    return wrong + int(torch.count_nonzero(rest != tile[: len(rest)]))
