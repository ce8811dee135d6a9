"""Trains a small network with Lightning.

python -m lockstep run --reference "python examples/trainers/lightning_module.py" \
    --variant "torchrun --nproc_per_node=2 examples/trainers/lightning_module.py"

`sampler` as argument sets `use_distributed_sampler=False`: a wrong training.
"""

import contextlib
import os
import sys
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep

BATCH, NUM_PROCESSES = 16, int(os.environ.get("WORLD_SIZE", "1"))


class Regression(lightning.LightningModule):
    """A small network."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the predictions."""
        return self.net(x)

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        """Returns the loss."""
        return nn.functional.mse_loss(self(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns the optimizer."""
        return torch.optim.AdamW(self.parameters(), 0.01)


def main(bug: str = "") -> None:
    """Trains for two steps; the reference also uses DDP, for one order of examples."""
    lightning.seed_everything(0)
    examples = TensorDataset(torch.randn(128, 8), torch.randn(128, 4))
    loader = DataLoader(examples, BATCH // NUM_PROCESSES, shuffle=True)
    with contextlib.ExitStack() as recording:

        def start(trainer: lightning.Trainer, _: Any) -> None:  # DDP exists from here on.
            recording.enter_context(lockstep.record(trainer.strategy.model, trainer.optimizers))

        trainer = lightning.Trainer(
            accelerator="cpu", strategy="ddp", devices=NUM_PROCESSES, max_steps=2, logger=False,
            enable_checkpointing=False, use_distributed_sampler=bug != "sampler",
            callbacks=[LambdaCallback(on_train_start=start)],
        )  # fmt: skip
        trainer.fit(Regression(), loader)


if __name__ == "__main__":
    main(*sys.argv[1:])
