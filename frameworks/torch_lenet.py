"""Trains LeNet or ResNet-18 on Fashion-MNIST with PyTorch: in one process, or in several with DDP.

    python frameworks/torch_lenet.py --epochs=1
    torchrun --nproc_per_node=2 frameworks/torch_lenet.py --epochs=1

This is the training of "Dive into Deep Learning", section "Training on Multiple GPUs", with
`DistributedDataParallel` over gloo: weights N(0, 0.01²), plain SGD. It needs PyTorch and NumPy, and
the four files of Fashion-MNIST in `$FASHION_MNIST_DIR`. `docs/frameworks.md` has the command that
compares it with the same training in other frameworks.
"""

import os
import pathlib
import sys
import warnings

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import common
import torch_models

import lockstep


def own_part(images: np.ndarray, labels: np.ndarray) -> tuple[Tensor, Tensor]:
    """Returns images `(n, 1, 28, 28)` in [0, 1] and labels: the examples of this process."""
    rank, size = dist.get_rank(), dist.get_world_size()
    images, labels = (np.array_split(array, size)[rank] for array in (images, labels))
    # With a single channel, the pixels (n, 28, 28, 1) and (n, 1, 28, 28) have the same order.
    return torch.tensor(images.reshape(-1, 1, 28, 28)) / 255, torch.tensor(labels)


def add_processes(sums: np.ndarray) -> np.ndarray:
    """Returns the sums over all processes."""
    total = torch.tensor(sums)
    dist.all_reduce(total)
    return total.numpy()


def main() -> None:
    """Trains as one of the processes that torchrun starts, or as the only one."""
    options = common.create_parser(__doc__.splitlines()[0]).parse_args()
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // dist.get_world_size()))
    torch.manual_seed(0)  # Equal initial weights in every process, and in every run.
    network = torch_models.create_model(options.model)
    # Each process uses the statistics of its own part of the batches.
    # PyTorch 2.13 announces another name for this option; earlier versions know only this one.
    warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
    model = DistributedDataParallel(network, broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=common.LEARNING_RATES[options.model])

    def train_step(images: np.ndarray, labels: np.ndarray) -> tuple[float, float]:
        model.train()
        images, labels = own_part(images, labels)
        logits = model(images)
        loss = F.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()  # DDP averages over the processes, whose parts are equal.
        optimizer.step()
        return loss.item() * len(labels), (logits.argmax(1) == labels).sum().item()

    @torch.no_grad()
    def test(images: np.ndarray, labels: np.ndarray) -> tuple[float, float]:
        network.eval()
        images, labels = own_part(images, labels)
        logits = network(images)
        loss = F.cross_entropy(logits, labels, reduction="sum")
        return loss.item(), (logits.argmax(1) == labels).sum().item()

    with lockstep.record(model, optimizer):
        num, is_first = dist.get_world_size(), dist.get_rank() == 0
        common.train(options, num, train_step, test, add_processes, is_first)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
