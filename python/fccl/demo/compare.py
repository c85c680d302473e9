"""The demo's comparison: pure functions on what the ranks recorded."""

from __future__ import annotations

import statistics
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Run", "conclusion", "differences", "summarize", "table"]

# The first steps build buckets and touch memory for the first time.
_WARMUP_STEPS = 5


@dataclass(frozen=True)
class Run:
    """One training run, all ranks together.

    Attributes:
        backend: "fccl" or "gloo".
        engine: What carried the collectives: "shared-memory" or "inner" for fccl, else the backend.
        why: Why fccl's engine did not share memory, or empty.
        parameters: Number of the model's parameters.
        steps: Number of training steps.
        seconds: Duration of the fit.
        accuracy: Share of the test images recognised.
        step_ms: Median duration of a step in milliseconds; of each step the slowest rank's.
        wait_ms: Median wait of a step for the gradient all-reduce in milliseconds; of each step the slowest
            rank's.
        collectives_per_step: Collectives on the default group per step, gradient buckets included.
        buckets: Gradient buckets per step.
        losses: Per rank and step, the bits of the float32 loss.
        weights: Per rank, a hash of the final weights.
    """

    backend: str
    engine: str
    why: str
    parameters: int
    steps: int
    seconds: float
    accuracy: float
    step_ms: float
    wait_ms: float
    collectives_per_step: float
    buckets: int
    losses: list[list[int]]
    weights: list[str]

    def to_dict(self) -> dict[str, Any]:
        """As JSON-compatible values, the losses as numbers."""
        values = asdict(self)
        values["losses"] = [[_as_float(bits) for bits in losses] for losses in self.losses]
        return values


def _as_float(bits: int) -> float:
    value: float = struct.unpack("<f", struct.pack("<I", bits))[0]
    return value


def _median_of_slowest(per_rank: list[list[float]]) -> float:
    slowest = [max(values) for values in zip(*per_rank, strict=True)]
    return statistics.median(slowest[_WARMUP_STEPS:] or slowest or [0.0])


def summarize(records: Sequence[dict[str, Any]]) -> Run:
    """Joins the records of a run's ranks, in the order of the ranks.

    Raises:
        ValueError: the ranks recorded different numbers of steps.
    """
    first = records[0]
    steps = {len(record["losses"]) for record in records}
    if len(steps) != 1:
        raise ValueError(
            f"the ranks of the {first['backend']} run made different numbers of steps: {sorted(steps)}"
        )
    inner = next((record for record in records if record["engine"] != "shared-memory"), first)
    count = steps.pop()
    return Run(
        backend=first["backend"],
        engine=inner["engine"],
        why=inner["why"],
        parameters=first["parameters"],
        steps=count,
        seconds=max(record["seconds"] for record in records),
        accuracy=min(record["accuracy"] for record in records),
        step_ms=_median_of_slowest([record["step_ms"] for record in records]),
        wait_ms=_median_of_slowest([record["wait_ms"] for record in records]),
        collectives_per_step=first["collectives"] / max(1, count),
        buckets=first["buckets"],
        losses=[record["losses"] for record in records],
        weights=[record["weights"] for record in records],
    )


def differences(fccl: Run, gloo: Run, min_accuracy: float) -> list[str]:
    """Everything that is not as it should be, each in a sentence; empty if all is well.

    In float32 on two ranks a gradient mean is one addition and one exact halving, so both runs must agree
    to the bit.
    """
    found = []
    if fccl.engine != "shared-memory":
        found.append(
            f"fccl did not run on shared memory but on its engine {fccl.engine!r}: {fccl.why or 'no reason'}"
        )
    if fccl.steps != gloo.steps:
        found.append(f"the fccl run made {fccl.steps} steps, the gloo run {gloo.steps}")
    if fccl.steps == 0:
        found.append("no training step was made")
    for rank, (ours, theirs) in enumerate(zip(fccl.losses, gloo.losses, strict=True)):
        for step, (a, b) in enumerate(zip(ours, theirs, strict=False)):
            if a != b:
                found.append(
                    f"the losses differ from step {step} on, on rank {rank}: "
                    f"fccl {_as_float(a)!r}, gloo {_as_float(b)!r}"
                )
                break
    for run in (fccl, gloo):
        if len(set(run.weights)) > 1:
            found.append(f"the final weights of the {run.backend} run differ between its ranks")
        if run.accuracy < min_accuracy:
            found.append(
                f"the test accuracy of the {run.backend} run is {run.accuracy:.4f}, below {min_accuracy:.4f}"
            )
    if len({*fccl.weights, *gloo.weights}) > 1 and not any("final weights" in each for each in found):
        found.append("the final weights of the two runs differ")
    return found


# Medians of two runs that follow each other differ by this much on a busy machine.
_ALIKE = 1.05


def _ratio(slow: float, fast: float) -> float:
    return slow / fast if fast > 0 else float("inf")


def table(fccl: Run, gloo: Run) -> str:
    """Both runs side by side."""

    def times(ours: float, theirs: float) -> str:
        return f"{_ratio(theirs, ours):.2f} x"

    engines = {"shared-memory": "shared memory", "inner": "inner (Gloo)", "gloo": "TCP"}
    lines = [
        ("", "fccl", "gloo", "gloo / fccl"),
        ("ran on", *(engines.get(run.engine, run.engine) for run in (fccl, gloo)), ""),
        ("training steps", str(fccl.steps), str(gloo.steps), ""),
        ("test accuracy", f"{fccl.accuracy:.4f}", f"{gloo.accuracy:.4f}", ""),
        ("median step (ms)", f"{fccl.step_ms:.2f}", f"{gloo.step_ms:.2f}", times(fccl.step_ms, gloo.step_ms)),
        (
            "gradient all-reduce (ms)",
            f"{fccl.wait_ms:.2f}",
            f"{gloo.wait_ms:.2f}",
            times(fccl.wait_ms, gloo.wait_ms),
        ),
        ("collectives per step", *(f"{run.collectives_per_step:.2f}" for run in (fccl, gloo)), ""),
        ("gradient buckets per step", str(fccl.buckets), str(gloo.buckets), ""),
        ("whole fit (s)", f"{fccl.seconds:.1f}", f"{gloo.seconds:.1f}", times(fccl.seconds, gloo.seconds)),
    ]
    return "\n".join(
        f"  {name:<27}{ours:>15}{theirs:>15}{ratio:>14}".rstrip() for name, ours, theirs, ratio in lines
    )


def conclusion(fccl: Run, gloo: Run) -> str:
    """Which run was faster, by what ratio; or that they were alike, if that is below what a busy machine does."""
    fast, slow = (fccl, gloo) if fccl.step_ms <= gloo.step_ms else (gloo, fccl)
    times = _ratio(slow.step_ms, fast.step_ms)
    if times < _ALIKE:
        step = "the training step takes as long with both (is the machine busy?)"
    else:
        step = (
            f"{fast.backend} is faster: a training step with {slow.backend} takes {times:.2f} times as long"
        )
    fast, slow = (fccl, gloo) if fccl.wait_ms <= gloo.wait_ms else (gloo, fccl)
    wait = f"the gradient all-reduce with {slow.backend} takes {_ratio(slow.wait_ms, fast.wait_ms):.2f}"
    return f"{step}, and {wait} times as long as with {fast.backend}."
