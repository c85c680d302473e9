"""What one rank of any benchmark has: its groups, the board, and a word on what it is doing."""

from __future__ import annotations

import datetime
from abc import ABC, abstractmethod
from typing import Any

import torch.distributed as dist

from fccl.bench.board import Board
from fccl.bench.config import ARENA, DIRECT, NOTHING, YARDSTICKS, BenchConfig, SizePlan

__all__ = ["BenchRank", "engine_of"]


class BenchRank(ABC):
    """The state of one rank over a whole run.

    Args:
        config: The run.
        rank: This rank.
        board: The run's board.
    """

    #: Names among the backends that need no process group, beside the yardsticks.
    without_group: tuple[str, ...] = ()

    def __init__(self, config: BenchConfig, rank: int, board: Board) -> None:
        self.config, self.rank, self.board = config, rank, board
        #: What this rank is doing, for the message if it fails.
        self.phase = "starting"
        self.groups: dict[str, dist.ProcessGroup] = {}

    def make_groups(self, init_method: str) -> None:
        """The first backend carries the default group, the others one more group each."""
        timeout = datetime.timedelta(seconds=self.config.timeout)
        for name in self.config.backends:
            if name in (*YARDSTICKS, NOTHING, *self.without_group):
                continue
            self.phase = f"making the process group of {name}"
            backend = "fccl" if name in (ARENA, DIRECT) else name
            if not self.groups:
                dist.init_process_group(
                    backend,
                    init_method=init_method,
                    rank=self.rank,
                    world_size=self.config.ranks,
                    timeout=timeout,
                )
                group = dist.group.WORLD
            else:
                group = dist.new_group(backend=backend, timeout=timeout)
            assert group is not None
            self.groups[name] = group

    @abstractmethod
    def measure(self, plan: SizePlan) -> dict[str, Any]:
        """Carries out one part of the run; returns what this rank has to say of it, JSON-compatible."""


def engine_of(name: str, group: dist.ProcessGroup) -> dict[str, str]:
    """What carried the calls of a group."""
    if name not in ("fccl", ARENA, DIRECT):
        return {"engine": name, "why": ""}
    import fccl

    backend = fccl.backend_of(group)
    return {"engine": str(backend.engine), "why": str(backend.why_inner)}
