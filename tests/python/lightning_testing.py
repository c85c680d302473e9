"""Models, data and ranks for the tests of the Lightning strategies."""

from __future__ import annotations

import collections
import hashlib
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fccl_testing import free_port, run_ranks

NAMESPACES = {"lightning.pytorch": "fccl.lightning", "pytorch_lightning": "fccl.pytorch_lightning"}
# Importing Lightning takes seconds: once, in the process that ranks are forked from.
PRELOAD = (*NAMESPACES, "torchmetrics")


def load(namespace: str) -> tuple[Any, Any]:
    """Lightning in that namespace, and fccl's module for it."""
    return importlib.import_module(namespace), importlib.import_module(NAMESPACES[namespace])


def run_lightning(function: Callable[..., Any], *args: Any, world: int = 2, **options: Any) -> list[Any]:
    """Runs ``function(rank, world, *args)`` on ranks whose Trainers find each other; they make the group."""
    port = str(free_port())

    def env(rank: int) -> dict[str, str]:
        return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_RANK": str(rank), "NODE_RANK": "0"}

    options = {"backend": None, "env": env, "preload": PRELOAD, "timeout": 90, **options}
    return run_ranks(function, world, *args, **options)


def trainer_of(pl: Any, strategy: Any, folder: str, **options: Any) -> Any:
    """A quiet Trainer for two processes on the CPU."""
    options = {
        "devices": 2,
        "max_epochs": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "default_root_dir": folder,
        **options,
    }
    if isinstance(strategy, str) or strategy._accelerator is None:
        options["accelerator"] = "cpu"
    return pl.Trainer(strategy=strategy, **options)


def data(batch_size: int = 4, batches: int = 8, seed: int = 5) -> DataLoader:
    """A regression problem: ``batches`` batches of inputs ``[batch_size, 6]``, over all ranks."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch_size * batches, 6, generator=generator)
    return DataLoader(TensorDataset(x, x.sum(dim=1, keepdim=True)), batch_size=batch_size)


def small_model(pl: Any, **members: Any) -> Any:
    """A LightningModule of two layers; ``members`` replace or add methods and attributes of its class."""

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))

        def forward(self, x):
            return self.layers(x)

        def loss(self, batch):
            return nn.functional.mse_loss(self(batch[0]).float(), batch[1])

        def training_step(self, batch, batch_idx):
            return self.loss(batch)

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=0.01)

    for name, member in members.items():
        setattr(Model, name, member)
    return Model()


def digest(model: nn.Module) -> str:
    """Of all parameters; equal if and only if they are equal to the bit."""
    sha = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        sha.update(
            name.encode() + parameter.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        )
    return sha.hexdigest()


def recording(strategy_class: type, names: tuple[str, ...]) -> type:
    """A subclass that counts the calls of the methods ``names`` in ``self.calls``."""

    def recorded(name: str) -> Callable[..., Any]:
        def method(self, *args, **kwargs):
            self.calls[name] += 1
            return getattr(super(Recording, self), name)(*args, **kwargs)

        return method

    class Recording(strategy_class):
        def __init__(self, *args, **kwargs):
            self.calls = collections.Counter()
            super().__init__(*args, **kwargs)

    for name in names:
        assert hasattr(strategy_class, name), name
        setattr(Recording, name, recorded(name))
    return Recording
