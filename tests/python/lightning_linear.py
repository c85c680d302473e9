"""A LightningModule that processes started by "spawn" and scripts can import. Imports Lightning: seconds."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
import torch.nn.functional as F


class Linear(pl.LightningModule):
    """One linear layer, for the problem of ``lightning_testing.data``; logs which backend serves how many."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = torch.nn.Linear(6, 1)

    def training_step(self, batch, batch_idx):
        self.log("is_fccl", float(torch.distributed.get_backend() == "fccl"), sync_dist=True)
        self.log("ranks", float(self.all_gather(torch.ones(1)).sum()))
        return F.mse_loss(self.layer(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
