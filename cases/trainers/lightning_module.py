"""Lightning gives each process its part of the examples, by a sampler that it adds to the loader.

id = "trainers/lightning_module"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
requires = ["lightning"]
tags = ["ddp", "loader", "adam"]

[wrong.sampler_unset]
title = "use_distributed_sampler=False"
place = { node = "examples", step = 0, ranks = "all", tensors = "all" }
"""

import contextlib
import os

import lightning
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from cases import harness

BUG = os.environ.get("BUG", "")
BATCH, WORLD = 16, int(os.environ.get("WORLD_SIZE", 1))


class Regression(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, _):
        return nn.functional.mse_loss(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 0.01)


def main():
    lightning.seed_everything(0)
    examples = TensorDataset(torch.randn(128, 8), torch.randn(128, 4))
    loader = DataLoader(examples, BATCH // WORLD, shuffle=True)
    with contextlib.ExitStack() as training:

        def start(trainer, _):  # DDP exists from here on.
            training.enter_context(harness.training(trainer.strategy.model, trainer.optimizers))

        trainer = lightning.Trainer(  # One process uses DDP, too, for one order of examples.
            accelerator="cpu", strategy="ddp", devices=WORLD, max_steps=2, logger=False,
            enable_checkpointing=False, use_distributed_sampler=BUG != "sampler_unset",
            callbacks=[LambdaCallback(on_train_start=start)],
        )  # fmt: skip
        trainer.fit(Regression(), loader)


if __name__ == "__main__":
    main()
