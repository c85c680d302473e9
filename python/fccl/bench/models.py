"""The models that ``fccl bench train`` trains: a perceptron, a convolutional net, a transformer.

Data are random numbers: what a step costs does not depend on them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

__all__ = ["MODELS", "TrainModel"]


@dataclass(frozen=True)
class TrainModel:
    """A model and its data.

    Attributes:
        text: What it is, for people.
        build: Makes the model.
        batch: Makes one rank's batch: inputs, and the class of each.
    """

    text: str
    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], tuple[Tensor, Tensor]]


class _Transformer(nn.Module):
    """Six encoder layers that predict the next of 256 tokens: 10.8 million parameters."""

    _TOKENS, _WIDTH, _LENGTH = 256, 384, 64

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(self._TOKENS, self._WIDTH)
        layer = nn.TransformerEncoderLayer(self._WIDTH, 6, 4 * self._WIDTH, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.head = nn.Linear(self._WIDTH, self._TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        result: Tensor = self.head(self.layers(self.embed(tokens))).flatten(0, 1)
        return result

    @classmethod
    def batch(cls, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(cls._TOKENS, (4, cls._LENGTH + 1), generator=generator)
        return tokens[:, :-1], tokens[:, 1:].flatten()


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 10))


def _cnn() -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 32), (32, 64), (64, 128), (128, 256)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(1024, 256), nn.ReLU(), nn.Linear(256, 10))


def _batch(*shape: int) -> Callable[[torch.Generator], tuple[Tensor, Tensor]]:
    def make(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return torch.randn(shape, generator=generator), torch.randint(10, shape[:1], generator=generator)

    return make


#: By the name on the command line.
MODELS = {
    "mlp": TrainModel("a perceptron of three layers", _mlp, _batch(64, 512)),
    "cnn": TrainModel("a convolutional net of four layers", _cnn, _batch(16, 3, 32, 32)),
    "transformer": TrainModel("a transformer of six layers", _Transformer, _Transformer.batch),
}
