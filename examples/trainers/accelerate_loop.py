"""Trains a small network with Accelerate.

python -m lockstep run --reference "python examples/trainers/accelerate_loop.py" \
    --variant "torchrun --nproc_per_node=2 examples/trainers/accelerate_loop.py"

`unwrapped` as argument calls the model without DDP: a wrong training.
"""

import sys

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep

BATCH = 16


def main(bug: str = "") -> None:
    """Trains for two steps of two micro-batches."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    set_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    examples = TensorDataset(torch.randn(64, 8), torch.randn(64, 4))
    loader = DataLoader(examples, BATCH // accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    called = accelerator.unwrap_model(model) if bug == "unwrapped" else model
    with lockstep.record(model, optimizer):
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.mse_loss(called(x), y))
                optimizer.step()
                optimizer.zero_grad()
    accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:])
