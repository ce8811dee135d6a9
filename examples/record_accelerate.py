"""Records a training with Hugging Face Accelerate, in one process and in two.

    python examples/record_accelerate.py one.npz
    torchrun --nproc_per_node=2 examples/record_accelerate.py two.npz one.npz
    lockstep one.npz two.npz

The second run starts each recorded step from the state in the first recording. A last argument
adds a bug to the second run: `unwrapped` calls the model without DDP, so that no gradient is
all-reduced; `scheduler` steps the learning rate once for each process; `clip` clips the gradients
of each micro-batch, not only their sum.
"""

import sys

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import record_torch

BATCH, NUM_MICRO_BATCHES = 16, 2


def main(path: str, replay: str | None = None, bug: str = "") -> None:
    """Trains for one epoch with gradient accumulation and writes the recording to `path`."""
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=NUM_MICRO_BATCHES,
        step_scheduler_with_optimizer=bug == "scheduler",
    )
    set_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    examples = TensorDataset(torch.randn(128, 8), torch.randn(128, 4))
    loader = DataLoader(examples, BATCH // accelerator.num_processes)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    called = accelerator.unwrap_model(model) if bug == "unwrapped" else model
    with record_torch.record(path, model, optimizer, steps=3, replay=replay):
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.mse_loss(called(x), y))
                if accelerator.sync_gradients or bug == "clip":
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                if accelerator.sync_gradients:
                    scheduler.step()
                optimizer.zero_grad()
    accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:])
