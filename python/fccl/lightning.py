"""fccl for Lightning, namespace ``lightning.pytorch``.

Importing this module registers the strategy::

    import fccl.lightning
    Trainer(strategy="fccl", devices=2, accelerator="cpu")

or, with arguments, ``Trainer(strategy=fccl.lightning.DDPStrategy(...), ...)``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._lightning_mixin import FcclStrategyMixin, import_lightning

if TYPE_CHECKING:
    from lightning.pytorch.strategies import DDPStrategy as _DDPStrategy
    from lightning.pytorch.strategies import StrategyRegistry
else:
    _strategies = import_lightning("lightning.pytorch.strategies", "lightning")
    _DDPStrategy, StrategyRegistry = _strategies.DDPStrategy, _strategies.StrategyRegistry

__all__ = ["DDPStrategy"]


class DDPStrategy(FcclStrategyMixin, _DDPStrategy):
    """``lightning.pytorch.strategies.DDPStrategy`` over fccl."""


DDPStrategy.register_strategies(StrategyRegistry)
