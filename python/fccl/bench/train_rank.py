"""One rank of ``fccl bench train``: trains a model once for each backend, taking turns step by step."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import random
import time
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fccl.bench.config import ARENA, NOTHING, SizePlan
from fccl.bench.models import MODELS
from fccl.bench.rank import BenchRank, engine_of

__all__ = ["TrainRank"]


def _as_it_is(bucket: Any) -> Any:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


# A hook that leaves the gradients as they are. DDP looks at a hook's annotations, and a lambda has none.
_nothing: Any = lambda state, bucket: _as_it_is(bucket)  # noqa: E731


class _Run:
    """Training with one backend."""

    def __init__(self, rank: BenchRank, name: str, model: str) -> None:
        import fccl

        torch.manual_seed(rank.config.seed)
        module = MODELS[model].build()
        group = rank.groups[rank.config.backends[0] if name == NOTHING else name]
        with fccl.shared_buckets() if name == ARENA else contextlib.nullcontext():
            self.ddp = DistributedDataParallel(module, process_group=group, gradient_as_bucket_view=True)
        if name == NOTHING:
            self.ddp.register_comm_hook(None, _nothing)
        self.optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)
        self.loss = nn.CrossEntropyLoss()
        self.losses: list[float] = []

    def step(self, inputs: torch.Tensor, wanted: torch.Tensor) -> list[int]:
        """One step; the nanoseconds of forward, backward and optimizer."""
        clock = time.perf_counter_ns
        start = clock()
        loss = self.loss(self.ddp(inputs), wanted)
        forward = clock()
        loss.backward()
        backward = clock()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        stop = clock()
        self.losses.append(loss.item())
        return [forward - start, backward - forward, stop - backward]

    def digest(self) -> str:
        """A hash of the weights' and the losses' bits."""
        found = hashlib.blake2b(digest_size=16)
        for parameter in self.ddp.parameters():
            found.update(parameter.detach().contiguous().view(torch.uint8).numpy().tobytes())
        return found.hexdigest()


class TrainRank(BenchRank):
    """As `fccl.bench.worker` wants it; a plan is a model."""

    def measure(self, plan: SizePlan) -> dict[str, Any]:
        """Trains; returns this rank's times and digests."""
        config, board = self.config, self.board
        self.phase = f"making {plan.model}"
        runs = {name: _Run(self, name, plan.model) for name in config.backends}
        steps = config.iterations or 1
        times: dict[str, list[list[int]]] = {name: [] for name in runs}
        order = list(runs)
        shuffle = random.Random(config.seed).shuffle  # the same on all ranks
        data = torch.Generator().manual_seed(1000 + self.rank)
        gc.collect()
        gc.disable()
        for step in range(config.warmup + steps):
            batch = MODELS[plan.model].batch(data)
            shuffle(order)
            for name in order:
                self.phase = f"step {step} of {plan.model} with {name}"
                board.align()
                parts = runs[name].step(*batch)
                if step >= config.warmup:
                    times[name].append(parts)
        gc.enable()
        result = {
            "times": times,
            "digests": {name: run.digest() for name, run in runs.items()},
            "losses": {name: run.losses[-1] for name, run in runs.items()},
            "engines": {name: engine_of(name, group) for name, group in self.groups.items()},
        }
        board.align()
        return result
