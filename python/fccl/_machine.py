"""What the machine is: processor, cores, caches, memory. Shared by ``fccl info``, ``bench`` and ``demo``."""

from __future__ import annotations

import os
import platform
from pathlib import Path

__all__ = [
    "available_memory",
    "core_count",
    "cpu_model",
    "format_handover",
    "handover_ns",
    "last_level_cache_bytes",
    "load_average",
]

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


def cpu_model() -> str:
    """The processor's name as the kernel tells it, or the architecture if it does not."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.lower().startswith(("model name", "cpu model", "hardware")):
                return " ".join(line.partition(":")[2].split())
    except OSError:
        pass
    return platform.machine()


def handover_ns() -> tuple[float, float] | None:
    """Nanoseconds that a cache line takes from one core to another: the closest and the farthest pair.

    The caches of two cores may be one or lie on different chips, and a virtual machine's cores may be moved between
    such places at any time; what is staged through memory that two cores share costs up to twice as much then.

    Returns:
        None with one core only, or without the compiled module.
    """
    try:
        from fccl import _extension

        found: tuple[float, float] | None = _extension.load().handover_ns()
    except ImportError:
        return None
    return found


def format_handover(found: tuple[float, float] | None) -> str:
    """``"57 ns"``, ``"27 to 265 ns"`` if pairs of cores differ, or empty."""
    if found is None:
        return ""
    nearest, farthest = found
    far = "" if farthest < 1.5 * nearest else f" to {farthest:.0f}"
    return f"{nearest:.0f}{far} ns"


def core_count() -> int:
    """Number of cores this process may run on (its affinity mask, not the machine's total)."""
    return len(os.sched_getaffinity(0))


def _cache_size(text: str) -> int:
    text = text.strip()
    scale = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:].upper(), 1)
    return int(text[:-1] if scale != 1 else text) * scale


def last_level_cache_bytes() -> int:
    """Size in bytes of the last-level data cache as seen from core 0; 0 if the kernel does not tell."""
    level, size = 0, 0
    for index in _CACHES.glob("index*"):
        try:
            if (index / "type").read_text().strip() == "Instruction":
                continue
            this_level = int((index / "level").read_text())
            this_size = _cache_size((index / "size").read_text())
        except (OSError, ValueError):
            continue
        if this_level > level:
            level, size = this_level, this_size
    return size


def _cgroup_headroom() -> int | None:
    """Bytes that the memory cgroup of this process still allows, or None if it sets no limit."""
    for limit_file, usage_file in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            limit = Path(limit_file).read_text().strip()
            usage = Path(usage_file).read_text().strip()
        except OSError:
            continue
        if limit == "max" or int(limit) >= 1 << 60:
            return None
        return max(0, int(limit) - int(usage))
    return None


def available_memory() -> int:
    """Bytes of memory that can be had without swapping: the kernel's estimate, or the cgroup's limit."""
    available = 1 << 30
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
                break
    except (OSError, ValueError, IndexError):
        pass
    headroom = _cgroup_headroom()
    return available if headroom is None else min(available, headroom)


def load_average() -> float:
    """Load average of the last minute: how busy the machine was before a measurement."""
    try:
        return os.getloadavg()[0]
    except OSError:
        return 0.0
