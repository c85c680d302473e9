"""One training run of the demo: ``python -m fccl.demo.worker``.

Lightning starts the second rank by running this command again. Each rank leaves a file ``rank<N>.json``.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import logging
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1


def _engine(backend: str) -> tuple[str, str]:
    """What carried the collectives, and why not shared memory."""
    if backend != "fccl":
        return backend, ""
    import fccl

    group_backend = fccl.backend_of(None)
    return str(group_backend.engine), str(group_backend.why_inner)


def train(
    backend: str, epochs: int, steps: int, batch_size: int, seed: int, progress: bool
) -> dict[str, Any]:
    """Trains and tests with one backend; returns what this rank recorded.

    Args:
        backend: "fccl" or "gloo".
        epochs: Number of epochs, if `steps` is 0.
        steps: Number of steps, or 0.
        batch_size: Images per batch and rank.
        seed: Seed of everything.
        progress: Whether Lightning shows its progress bar.

    Raises:
        RuntimeError: another backend ran than the one asked for.
    """
    import lightning.pytorch as pl
    import torch
    import torch.distributed as dist
    from lightning.pytorch.callbacks import TQDMProgressBar
    from lightning.pytorch.plugins.environments import LightningEnvironment
    from lightning.pytorch.strategies import DDPStrategy

    import fccl.lightning  # noqa: F401  (registers the strategy "fccl")
    from fccl.demo.model import Digits, Recorder, digits, weights_hash

    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    warnings.filterwarnings("ignore", message=".*DistributedSampler.*")
    warnings.filterwarnings("ignore", message=".*treespec, LeafSpec.*")
    # Lightning's advertisements.
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(
        lambda record: "Tip:" not in record.getMessage()
    )
    torch.set_num_threads(1)
    pl.seed_everything(seed, workers=True, verbose=False)
    model, recorder = Digits(), Recorder()
    train_set, test_set = digits(batch_size, seed)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="fccl" if backend == "fccl" else DDPStrategy(process_group_backend="gloo"),
        plugins=[LightningEnvironment()],
        callbacks=[recorder, *([TQDMProgressBar(refresh_rate=10)] if progress else [])],
        enable_progress_bar=progress,
        max_epochs=-1 if steps else epochs,
        max_steps=steps or -1,
        deterministic=True,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(model, train_set)
    ran = dist.get_backend()
    if ran != backend:
        raise RuntimeError(f"the run with {backend} used the backend {ran!r}")
    trainer.test(model, test_set, verbose=False)
    engine, why = _engine(backend)
    return {
        "backend": ran,
        "engine": engine,
        "why": why,
        "rank": trainer.global_rank,
        "ranks": trainer.world_size,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "losses": recorder.losses,
        "step_ms": recorder.step_ms,
        "wait_ms": recorder.wait_ms,
        "collectives": recorder.collectives,
        "buckets": recorder.buckets,
        "accuracy": model.accuracy,
        "weights": weights_hash(model),
        "seconds": recorder.seconds,
    }


def main() -> int:
    """Entry point of the run, and of each further rank that Lightning starts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", choices=("fccl", "gloo"), required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--no-progress", action="store_true")
    args = parser.parse_args()
    # No rank outlives the process that started it.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    record = train(args.backend, args.epochs, args.steps, args.batch_size, args.seed, not args.no_progress)
    target = args.out / f"rank{record['rank']}.json"
    partial = target.with_suffix(".part")
    partial.write_text(json.dumps(record))
    os.replace(partial, target)

    import torch.distributed as dist

    dist.barrier()  # the first rank's exit ends the run: all files are there by then
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
