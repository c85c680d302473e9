"""fccl for Lightning, namespace ``pytorch_lightning``.

Importing this module registers the strategy::

    import fccl.pytorch_lightning
    Trainer(strategy="fccl", devices=2, accelerator="cpu")

or, with arguments, ``Trainer(strategy=fccl.pytorch_lightning.DDPStrategy(...), ...)``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._lightning_mixin import FcclStrategyMixin, import_lightning

if TYPE_CHECKING:
    from pytorch_lightning.strategies import DDPStrategy as _DDPStrategy
    from pytorch_lightning.strategies import StrategyRegistry
else:
    _strategies = import_lightning("pytorch_lightning.strategies", "pytorch-lightning")
    _DDPStrategy, StrategyRegistry = _strategies.DDPStrategy, _strategies.StrategyRegistry

__all__ = ["DDPStrategy"]


class DDPStrategy(FcclStrategyMixin, _DDPStrategy):
    """``pytorch_lightning.strategies.DDPStrategy`` over fccl."""


DDPStrategy.register_strategies(StrategyRegistry)
