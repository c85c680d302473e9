"""Sizes of messages: reading them from the command line, sweeping over them, writing them for people."""

from __future__ import annotations

import re

__all__ = ["DTYPE_ALIASES", "ITEM_SIZE", "format_size", "parse_dtype", "parse_size", "sweep"]

#: Bytes per element of every dtype that the benchmark measures.
ITEM_SIZE: dict[str, int] = {
    "float32": 4,
    "float64": 8,
    "float16": 2,
    "bfloat16": 2,
    "int8": 1,
    "uint8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "bool": 1,
}

#: Other names by which people call them (nccl-tests' among them).
DTYPE_ALIASES: dict[str, str] = {
    "float": "float32",
    "double": "float64",
    "half": "float16",
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
    "fp64": "float64",
    "int": "int32",
    "long": "int64",
}

_SIZE = re.compile(r"(\d+)\s*([KMG]?)(?:i?B)?", re.IGNORECASE)
_SCALE = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_size(text: str) -> int:
    """Reads a number of bytes: ``"4"``, ``"1K"``, ``"64M"``, ``"2GiB"``; K, M and G are powers of 1024.

    Raises:
        ValueError: the text is not a size.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(
            f"{text!r} is not a size: write bytes as a whole number, with K, M or G (powers of 1024)"
        )
    return int(match[1]) * _SCALE[match[2].upper()]


def parse_dtype(text: str) -> str:
    """The canonical name of a dtype.

    Raises:
        ValueError: no such dtype; the message lists the known ones.
    """
    name = DTYPE_ALIASES.get(text.lower(), text.lower()).removeprefix("torch.")
    if name not in ITEM_SIZE:
        raise ValueError(f"unknown dtype {text!r}: known are {', '.join(ITEM_SIZE)}")
    return name


def format_size(size: int) -> str:
    """Writes a number of bytes for people: ``"4 B"``, ``"64 MiB"``, ``"1.5 GiB"``."""
    value, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.4g} {unit}"


def sweep(begin: int, end: int, factor: int) -> list[int]:
    """The sizes ``begin, begin * factor, …`` up to and including ``end``, in bytes.

    Raises:
        ValueError: nothing to sweep over (begin above end, begin below 1, or factor below 2).
    """
    if begin < 1:
        raise ValueError(f"--begin must be at least 1 byte, not {begin}")
    if begin > end:
        raise ValueError(f"--begin ({begin}) is above --end ({end})")
    if factor < 2:
        raise ValueError(f"--factor must be at least 2, not {factor}")
    sizes = []
    while begin <= end:
        sizes.append(begin)
        begin *= factor
    return sizes
