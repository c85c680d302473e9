"""Rows, the table for people, and the JSON file."""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
from collections.abc import Sequence
from typing import IO, Any

from fccl.bench.config import YARDSTICKS, BenchConfig, Row, SizeOutcome, SizePlan

__all__ = ["Table", "make_rows", "write_json"]


def make_rows(config: BenchConfig, plan: SizePlan, outcome: SizeOutcome, busbw_factor: float) -> list[Row]:
    """One row per measured backend, in the order of the table."""
    rows = []
    for name in config.backends:
        if name not in outcome.times:
            continue
        median = statistics.median(outcome.times[name]) / 1000
        algbw = plan.size / median / 1000 if median > 0 else 0.0
        rows.append(
            Row(
                op=config.op,
                backend=name,
                mode=config.row_mode,
                ranks=config.ranks,
                dtype=config.dtype,
                bytes=plan.size,
                median_us=round(median, 3),
                min_us=round(min(outcome.times[name]) / 1000, 3),
                algbw_gbps=round(algbw, 4),
                busbw_gbps=round(algbw if name in YARDSTICKS else algbw * busbw_factor, 4),
                wrong=outcome.wrong[name],
            )
        )
    return rows


def _number(value: float) -> str:
    """Four significant digits without an exponent."""
    return f"{value:.0f}" if value >= 1000 else f"{value:#.4g}".rstrip(".")


class Table:
    """Prints nccl-tests' columns, one line per backend, as results come in.

    Args:
        config: The run.
        reduces: Whether the operation has a reduce operation.
        out: Where to print.
    """

    _HEAD = (
        f"# {'size':>11} {'count':>11} {'type':>9} {'redop':>6}  {'backend':<11} "
        f"{'time':>9} {'min':>9} {'algbw':>8} {'busbw':>8} {'#wrong':>7}  {'ratio':>9}"
    )
    _UNITS = (
        f"# {'(B)':>11} {'(elements)':>11} {'':>9} {'':>6}  {'':<11} "
        f"{'(us)':>9} {'(us)':>9} {'(GB/s)':>8} {'(GB/s)':>8} {'':>7}  {'':>9}"
    )

    def __init__(self, config: BenchConfig, reduces: bool, out: IO[str]) -> None:
        self._config = config
        self._redop = config.redop if reduces else "none"
        self._out = out

    def head(self) -> None:
        """Prints the column heads."""
        first = self._config.backends[0]
        print(self._HEAD + f"\n{self._UNITS} X/{first}".rstrip(), file=self._out, flush=True)

    def size(self, plan: SizePlan, rows: Sequence[Row]) -> None:
        """Prints the lines of one size."""
        lead = f"  {plan.size:>11} {plan.count:>11} {self._config.dtype:>9} {self._redop:>6}"
        base = rows[0].median_us
        for row in rows:
            ratio = "" if row is rows[0] or base <= 0 else f"{row.median_us / base:.3g} x"
            print(
                f"{lead}  {row.backend:<11} {_number(row.median_us):>9} {_number(row.min_us):>9} "
                f"{row.algbw_gbps:>8.2f} {row.busbw_gbps:>8.2f} {row.wrong:>7}  {ratio:>9}".rstrip(),
                file=self._out,
                flush=True,
            )
            lead = " " * len(lead)


def write_json(path: str, meta: dict[str, Any], rows: Sequence[Row]) -> None:
    """Writes ``{"meta": …, "rows": […]}`` to a file, or to standard output for ``"-"``."""
    text = json.dumps({"meta": meta, "rows": [dataclasses.asdict(row) for row in rows]}, indent=1)
    if path == "-":
        print(text, file=sys.stdout, flush=True)
    else:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text + "\n")
