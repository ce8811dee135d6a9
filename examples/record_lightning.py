"""Records a training with Lightning, in one process and in two.

    python examples/record_lightning.py one.npz
    torchrun --nproc_per_node=2 examples/record_lightning.py two.npz one.npz
    lockstep one.npz two.npz

The second run starts each recorded step from the state in the first recording. A last argument
changes it: `manual` optimizes manually, and is right; `no_sync` does so with `loss.backward()`
instead of `self.manual_backward(loss)`, so that DDP does not all-reduce; with `sampler`, both
processes load all examples. With `strategy="ddp"` also in the first run, both have one order of
examples.
"""

import contextlib
import os
import sys

import lightning
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import record_torch

BATCH, NUM_PROCESSES = 16, int(os.environ.get("WORLD_SIZE", "1"))


class Regression(lightning.LightningModule):
    """A small network; `bug` chooses how it is trained."""

    def __init__(self, bug: str) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        self.bug, self.automatic_optimization = bug, bug not in ("manual", "no_sync")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the predictions."""
        return self.net(x)

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        """Returns the loss."""
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        if not self.automatic_optimization:
            self.optimizers().zero_grad()
            loss.backward() if self.bug == "no_sync" else self.manual_backward(loss)
            self.optimizers().step()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns the optimizer."""
        return torch.optim.AdamW(self.parameters(), 0.01)


def main(path: str, replay: str | None = None, bug: str = "") -> None:
    """Trains for four steps and writes the recording to `path`."""
    lightning.seed_everything(0)
    examples = TensorDataset(torch.randn(128, 8), torch.randn(128, 4))
    loader = DataLoader(examples, BATCH // NUM_PROCESSES, shuffle=True)
    with contextlib.ExitStack() as recording:

        def start(trainer: lightning.Trainer, _: lightning.LightningModule) -> None:
            model, optimizer = trainer.strategy.model, trainer.optimizers[0]
            recorder = record_torch.record(path, model, optimizer, steps=3, replay=replay)
            recording.enter_context(recorder)

        trainer = lightning.Trainer(
            accelerator="cpu", strategy="ddp", devices=NUM_PROCESSES, max_steps=4, logger=False,
            enable_checkpointing=False, use_distributed_sampler=bug != "sampler",
            callbacks=[LambdaCallback(on_train_start=start)],
        )  # fmt: skip
        trainer.fit(Regression(bug), loader)


if __name__ == "__main__":
    main(*sys.argv[1:])
