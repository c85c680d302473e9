"""Exactly predictable inputs and results for the tests of collectives.

Every rank can make every rank's input, so each checks its own result without communicating. References
follow the documented arithmetic: rank order, accumulation in float32 (float64 for float64, integers
exactly), one rounding at the end. The tolerance is zero.
"""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.uint8,
        torch.bool,
    )
}
OPS = {
    name: getattr(dist.ReduceOp, name.upper())
    for name in ("sum", "avg", "product", "min", "max", "band", "bor", "bxor")
}
WORLD_SIZES = (1, 2, 3, 4)
REFUSED = (TypeError, ValueError, RuntimeError)  # what a call that cannot be made may raise
BITWISE = ("band", "bor", "bxor")
MOST_ELEMENTS = (1 << 20) + 3

_cache: dict[tuple[str, int], torch.Tensor] = {}


def is_defined(dtype_name: str, op_name: str) -> bool:
    """Whether fccl defines this reduction."""
    dtype = DTYPES[dtype_name]
    if dtype == torch.bool:
        return op_name != "avg"
    return not (dtype.is_floating_point and op_name in BITWISE)


def values(rank: int, dtype_name: str, count: int, start: int = 0) -> torch.Tensor:
    """A rank's input: ``count`` values, shape [count], from position ``start`` of its own sequence.

    Floats are normally distributed with a few infinities, NaNs and zeros; integers use their whole range
    (int64: 2**60, so that a sum over 8 ranks fits 64 bits).
    """
    key = (dtype_name, rank)
    if key not in _cache:
        if any(name != dtype_name for name, _ in _cache):
            _cache.clear()  # one dtype at a time: a megabyte or more each
        _cache[key] = _make_values(rank, DTYPES[dtype_name])
    return _cache[key][start : start + count].clone()


def _make_values(rank: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1234 + rank)
    count = MOST_ELEMENTS + 64
    if dtype == torch.bool:
        return torch.randint(0, 2, (count,), generator=generator).bool()
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        low, high = (-(2**60), 2**60) if dtype == torch.int64 else (info.min, info.max + 1)
        return torch.randint(low, high, (count,), generator=generator).to(dtype)
    numbers = torch.randn(count, generator=generator, dtype=torch.float64) * 8
    index = torch.arange(count)
    numbers[index % 61 == 5 + rank] = float("nan")
    numbers[index % 67 == 7 + rank] = float("inf")
    numbers[index % 71 == 9 + rank] = -float("inf")
    numbers[index % 73 == 11 + rank] = 0.0
    return numbers.to(dtype)


def reference(op_name: str, inputs: list[torch.Tensor]) -> torch.Tensor:
    """What all_reduce must give, in the inputs' dtype."""
    dtype = inputs[0].dtype
    if dtype == torch.bool:
        stacked = torch.stack(inputs)
        if op_name == "bxor":
            return stacked.sum(0) % 2 == 1
        return stacked.all(0) if op_name in ("product", "min", "band") else stacked.any(0)
    if dtype.is_floating_point:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
    else:
        wide = torch.int64
    combine = {
        "sum": torch.add,
        "avg": torch.add,
        "product": torch.mul,
        "min": torch.minimum,
        "max": torch.maximum,
        "band": torch.bitwise_and,
        "bor": torch.bitwise_or,
        "bxor": torch.bitwise_xor,
    }[op_name]
    total = inputs[0].to(wide)
    for value in inputs[1:]:
        total = combine(total, value.to(wide))
    if op_name == "avg":
        divisor = torch.full_like(total, len(inputs))
        total = total / divisor if dtype.is_floating_point else total.div(divisor, rounding_mode="trunc")
    return total.to(dtype)


def same(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Elementwise: equal, or both NaN."""
    equal = actual == expected
    return equal | (actual.isnan() & expected.isnan()) if actual.is_floating_point() else equal


def expect(actual: torch.Tensor, expected: torch.Tensor, *what: object) -> None:
    """Raises AssertionError unless both are the same to the bit (any NaN equals any NaN)."""
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape}, expected {expected.shape}"
    assert actual.dtype == expected.dtype, f"{what}: dtype {actual.dtype}, expected {expected.dtype}"
    if torch.equal(actual, expected):
        return
    wrong = (~same(actual, expected)).flatten().nonzero().flatten()
    if len(wrong):
        i = int(wrong[0])
        raise AssertionError(
            f"{what}: {len(wrong)} of {actual.numel()} elements are wrong, the first at {i}: "
            f"{actual.flatten()[i].item()!r}, expected {expected.flatten()[i].item()!r}"
        )


# Every layout turns a flat tensor into one with the same elements in the same logical order.
LAYOUTS = ("contiguous", "transposed", "strided", "offset", "channels_last")


def _factor(count: int) -> int:
    return next((d for d in (7, 5, 3, 2) if count % d == 0), 1)


def shape_for(layout: str, count: int) -> tuple[int, ...]:
    """The shape in which ``lay_out`` puts ``count`` elements."""
    rows = _factor(count)
    if layout == "transposed":
        return (rows, count // rows)
    if layout == "channels_last":
        return (1, rows, count // rows, 1)
    return (count,)


def lay_out(flat: torch.Tensor, layout: str) -> torch.Tensor:
    """A new tensor with the elements of ``flat`` [n] in a layout, in shape_for(layout, n)."""
    count = flat.numel()
    shape = shape_for(layout, count)
    if layout == "contiguous":
        return flat.clone()
    if layout == "transposed":
        out = torch.empty(shape[::-1], dtype=flat.dtype).t()
    elif layout == "strided":
        out = torch.empty(3 * count, dtype=flat.dtype)[::3]
    elif layout == "offset":
        out = torch.empty(count + 1, dtype=flat.dtype)[1:]
    else:
        out = torch.empty(shape, dtype=flat.dtype).contiguous(memory_format=torch.channels_last)
    return out.copy_(flat.view(shape))


class Digest:
    """A hash over results, to be compared between ranks: NaN payloads and signs of zeros count too."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)

    def add(self, tensor: torch.Tensor) -> None:
        # A copy: a tensor of one element counts as contiguous whatever its stride is.
        data = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.detach().flatten())
        self._hash.update(data.view(torch.uint8).numpy().tobytes())

    def text(self) -> str:
        return self._hash.hexdigest()


def one_digest(results: list[str]) -> None:
    assert len(set(results)) == 1, f"ranks hold different bits: {results}"
