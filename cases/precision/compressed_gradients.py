"""A communication hook of DDP sends gradients in 16 bits.

id = "precision/compressed_gradients"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["pytorch/pytorch#59522", "pytorch/pytorch#59576"]
date = "2021-06"
tags = ["ddp", "low_precision"]

[wrong.gradients_are_sent_in_bfloat16]
title = "gradients are sent in bfloat16"
place = { node = "sum", step = 0, ranks = "all", tensors = "all" }

[wrong.fp16_compress_hook]
title = "fp16_compress_hook"
place = { node = "sum", step = 0, ranks = "all", tensors = "all" }

[wrong.float16_overflows_before_division]
title = "float16 overflows before the division"
place = { node = "sum", step = 0, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def sum_then_divide(group, bucket):
    """Sends the sum in float16 and divides by the number of ranks afterwards."""
    compressed = (1e6 * bucket.buffer()).half()  # Small gradients would be lost in float16.
    future = dist.all_reduce(compressed, async_op=True).get_future()
    return future.then(lambda f: f.value()[0].to(bucket.buffer().dtype) / (1e6 * WORLD))


def send_bfloat16(group, bucket):
    """Does what `bf16_compress_hook` does, which PyTorch allows on GPUs alone."""
    compressed = bucket.buffer().bfloat16() / WORLD
    future = dist.all_reduce(compressed, async_op=True).get_future()
    return future.then(lambda f: f.value()[0].to(bucket.buffer().dtype))


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3)
        self.head = nn.Linear(6 * 3 * 3, 4)

    def forward(self, x):
        x = torch.relu(self.conv(x))
        return self.head(nn.functional.max_pool2d(x, 2).flatten(1))


def main():
    torch.manual_seed(3)
    model = ConvNet()
    if WORLD > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
        if BUG == "gradients_are_sent_in_bfloat16":
            model.register_comm_hook(None, send_bfloat16)
        if BUG == "fp16_compress_hook":
            model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        if BUG == "float16_overflows_before_division":
            model.register_comm_hook(None, sum_then_divide)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3, eps=1e-2)
    generator = torch.Generator().manual_seed(1)
    with harness.training(model, optimizer):
        for _ in range(2):
            x = torch.randn(8, 1, 8, 8, generator=generator)
            y = torch.randint(4, (8,), generator=generator)
            loss = nn.functional.cross_entropy(model(x[RANK::WORLD]), y[RANK::WORLD])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
