"""What a run of the benchmark is asked to do, and what comes back."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "ADD",
    "ARENA",
    "DIRECT",
    "MEMCPY",
    "NOTHING",
    "TRAIN",
    "YARDSTICKS",
    "BenchConfig",
    "Row",
    "SizePlan",
]

#: The yardsticks' names among the backends.
MEMCPY, ADD = "memcpy", "add"
YARDSTICKS = (MEMCPY, ADD)
#: fccl on tensors in memory that the ranks share (`fccl.empty`), beside fccl on ordinary ones.
ARENA = "fccl-arena"
#: fccl without torch's Python wrapper (`fccl.all_reduce` and its sisters), on ordinary tensors.
DIRECT = "fccl-direct"
#: In training: a hook that communicates nothing, to tell what communication costs.
NOTHING = "nothing"
#: The "operation" that trains models.
TRAIN = "train"


@dataclass(frozen=True)
class SizePlan:
    """One size of the sweep.

    Attributes:
        size: nccl-tests' size in bytes.
        count: nccl-tests' count in elements.
        buffers: Number of buffers in rotation on each rank.
        working_set: Bytes of all of them, all ranks together.
        model: In training, the model; a name in `fccl.bench.models.MODELS`.
    """

    size: int
    count: int
    buffers: int
    working_set: int
    model: str = ""


@dataclass(frozen=True)
class BenchConfig:
    """A run of the benchmark; travels to the ranks as JSON.

    Attributes:
        op: Name of the operation, a key of `fccl.bench.cases.CASES`.
        form: Variant of the call; see `Case.forms`.
        ranks: Number of processes.
        dtype: Name of the dtype.
        redop: Name of the reduce operation.
        root: Root rank.
        backends: Measured backends in the order of the table; the first is the one the others are compared
            with.
        mode: "sync" (the call blocks) or "async" (`async_op=True`, then `wait()`; both are timed).
        plans: The sizes.
        iterations: Timed iterations per size, or None to choose by `min_time`.
        min_time: Seconds of measuring per size, all backends together.
        warmup: Untimed rounds before the timed ones.
        check: "ends" (every buffer before and after the timed iterations), "every" (these, and each timed
            iteration) or "none".
        timeout: Seconds that a collective, and a rank waiting for another, may take.
        huge_pages: Ask for 2 MiB pages.
        corrupt: Backend whose every result is damaged on purpose, to see the check find it.
        seed: Seed of the order in which backends take turns.
    """

    op: str
    form: str
    ranks: int
    dtype: str
    redop: str
    root: int
    backends: list[str]
    mode: str
    plans: list[SizePlan]
    iterations: int | None = None
    min_time: float = 1.0
    warmup: int = 5
    check: str = "ends"
    timeout: float = 60.0
    huge_pages: bool = False
    corrupt: str | None = None
    seed: int = 1234

    def to_dict(self) -> dict[str, Any]:
        """As JSON-compatible values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> BenchConfig:
        """The inverse of `to_dict`."""
        plans = [SizePlan(**plan) for plan in values["plans"]]
        return cls(**{**values, "plans": plans})

    @property
    def row_mode(self) -> str:
        """The "mode" of a row: how the call was made, with its form where an operation has several."""
        return f"{self.mode}:{self.form}" if self.form else self.mode


@dataclass(frozen=True)
class Row:
    """One backend at one size: a row of the JSON file (same names, same order).

    Attributes:
        op: Operation.
        backend: Backend.
        mode: How the call was made: "sync" or "async", for all_gather followed by ":tensor" or ":list".
        ranks: Number of ranks.
        dtype: Dtype.
        bytes: nccl-tests' size in bytes.
        median_us: Median over the iterations of the slowest rank's time, in microseconds.
        min_us: Minimum of the same.
        algbw_gbps: bytes / median, in 10^9 bytes per second.
        busbw_gbps: algbw times the operation's factor; for yardsticks equal to algbw.
        wrong: Wrong elements found on all ranks in all checked calls.
    """

    op: str
    backend: str
    mode: str
    ranks: int
    dtype: str
    bytes: int
    median_us: float
    min_us: float
    algbw_gbps: float
    busbw_gbps: float
    wrong: int


@dataclass
class SizeOutcome:
    """What the ranks report about one size.

    Attributes:
        times: Per backend and iteration, the slowest rank's time in nanoseconds.
        wrong: Per backend, wrong elements on all ranks.
        checked: Per backend, number of checked calls.
        dropped: Backends that refused the operation, with their message.
        engines: Per torch backend, what carried the calls ("shared-memory" or "inner" for fccl), with the
            reason if fccl could not share memory.
    """

    times: dict[str, list[int]] = field(default_factory=dict)
    wrong: dict[str, int] = field(default_factory=dict)
    checked: dict[str, int] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)
    engines: dict[str, dict[str, str]] = field(default_factory=dict)
