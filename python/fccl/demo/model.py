"""What the demo trains, and the callback that records what happens."""

from __future__ import annotations

import hashlib
import struct
import time
from typing import Any

import lightning.pytorch as pl
import numpy
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

__all__ = ["Digits", "Recorder", "digits", "weights_hash"]

_WIDTH = 1536  # 2.5 million parameters, of which the middle layer has 2.4 million
_TEST_IMAGES = 360  # of 1797


def digits(batch_size: int, seed: int) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """The handwritten digits that scikit-learn ships: 1437 images of 8 x 8 pixels to train with, 360 to test.

    Args:
        batch_size: Images per batch and rank.
        seed: Seed of the split.

    Returns:
        The loaders of the training set (shuffled) and of the test set.
    """
    data = load_digits()
    images = torch.from_numpy(data.images.astype(numpy.float32) / 16)
    labels = torch.from_numpy(data.target.astype(numpy.int64))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    test, train = order[:_TEST_IMAGES], order[_TEST_IMAGES:]
    return (
        DataLoader(TensorDataset(images[train], labels[train]), batch_size, shuffle=True, drop_last=True),
        DataLoader(TensorDataset(images[test], labels[test]), batch_size),
    )


class Digits(pl.LightningModule):
    """A perceptron with two hidden layers.

    Attributes:
        accuracy: Share of the test images that are recognised, over all ranks; set by `Trainer.test`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Flatten(),
            torch.nn.Linear(64, _WIDTH),
            torch.nn.ReLU(),
            torch.nn.Linear(_WIDTH, _WIDTH),
            torch.nn.ReLU(),
            torch.nn.Linear(_WIDTH, 10),
        )
        self.accuracy = 0.0
        self._right_and_seen = torch.zeros(2, dtype=torch.int64)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        images, labels = batch
        loss = functional.cross_entropy(self.net(images), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def test_step(self, batch: list[torch.Tensor], index: int) -> None:
        images, labels = batch
        right = (self.net(images).argmax(1) == labels).sum()
        self._right_and_seen += torch.tensor([int(right), len(labels)])

    def on_test_epoch_end(self) -> None:
        total = self.trainer.strategy.reduce(self._right_and_seen, reduce_op="sum")
        self.accuracy = float(total[0]) / float(total[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def weights_hash(module: torch.nn.Module) -> str:
    """SHA-256 over the bits of all parameters and buffers."""
    digest = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _calls_so_far() -> int:
    """Collectives that the default group has begun, as its backend numbers them; the same question to any backend."""
    group = dist.distributed_c10d._get_default_group()
    return int(group._get_backend(torch.device("cpu"))._get_sequence_number_for_group())


class Recorder(pl.Callback):
    """Records each step: its loss to the bit, how long it took, and how long it waited for the gradients.

    The wait begins when the first layer's gradient, the last one of the backward pass, has been computed on
    this rank, and ends when backward returns, which it does when the gradients of all buckets have been
    reduced: it is the part of the gradient all-reduce (waiting for a slower rank included) that the
    backward pass does not hide.

    Attributes:
        losses: Per step, the bits of the float32 loss.
        step_ms: Per step, milliseconds since the end of the step before; the first of each epoch is left out.
        wait_ms: Per step, milliseconds of waiting for gradients.
        collectives: Collectives begun from the first step to the last.
        seconds: Duration of the training, from its first batch on.
        buckets: Gradient buckets per step, as DDP rebuilt them after the first.
    """

    def __init__(self) -> None:
        self.losses: list[int] = []
        self.step_ms: list[float] = []
        self.wait_ms: list[float] = []
        self.collectives = 0
        self.buckets = 0
        self.seconds = 0.0
        self._started = 0.0
        self._calls_before = 0
        self._last_end = 0
        self._last_gradient = 0

    def _gradient_is_there(self, parameter: torch.Tensor) -> None:
        self._last_gradient = time.perf_counter_ns()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, Digits)
        for parameter in pl_module.net[1].parameters():
            parameter.register_post_accumulate_grad_hook(self._gradient_is_there)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if not self.losses:
            self._started = time.perf_counter()
            self._calls_before = _calls_so_far()

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.wait_ms.append((time.perf_counter_ns() - self._last_gradient) / 1e6)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now = time.perf_counter_ns()
        if batch_idx > 0:
            self.step_ms.append((now - self._last_end) / 1e6)
        self._last_end = now
        loss = outputs["loss"].detach().float().item()
        self.losses.append(struct.unpack("<I", struct.pack("<f", loss))[0])
        self.collectives = _calls_so_far() - self._calls_before

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.seconds = time.perf_counter() - self._started
        ddp: Any = trainer.strategy.model
        data = ddp._get_ddp_logging_data()
        sizes = str(data.get("rebuilt_bucket_sizes") or data.get("bucket_sizes") or "")
        self.buckets = len(sizes.split(",")) if sizes else 0
