"""As in torchtitan, a loss is a sum divided by the tokens of all ranks, and FSDP does not average.

id = "trainers/torchtitan_llama"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
requires = ["torchtitan", "triton"]
launched = true
tags = ["fsdp2", "adam", "embedding"]

[wrong.own_tokens]
title = "each rank divides by its own number of tokens"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torchtitan.tools import utils

utils.device_type = "cpu"  # Before the next imports; torchtitan takes "cuda" where no GPU is.

from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import llama3_configs, parallelize_llama

from cases import harness

BUG = os.environ.get("BUG", "")
WORDS, LENGTH, BATCH = 2048, 16, 4


def build_model(size):
    """Returns the debug Llama with one layer, parallelized by torchtitan's own function."""
    config = llama3_configs["debugmodel"]("flex")
    config.layers = config.layers[:1]
    config.layers[0].attention.inner_attention = ScaledDotProductAttention.Config()  # On CPUs.
    model = config.build()
    model.init_states()
    dims = ParallelDims(1, size, 1, 1, 1, 1, size, "partial_dtensor")
    model = parallelize_llama(
        model, parallel_dims=dims, training=TrainingConfig(mixed_precision_param="float32"),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        compile_config=CompileConfig(), ac_config=None, dump_folder="",
    )  # fmt: skip
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other sum with a factor.
    return model


def main():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = build_model(size)
    optimizer = torch.optim.AdamW(model.parameters(), 0.001)
    tokens = torch.randint(0, WORDS, (2, BATCH, LENGTH + 1))
    num_tokens = BATCH * LENGTH // (size if BUG == "own_tokens" else 1)
    with harness.training(model, optimizer):
        for rows in tokens:
            x = rows[rank::size]
            logits = model(x[:, :-1]).flatten(0, 1)
            loss = nn.functional.cross_entropy(logits, x[:, 1:].flatten(), reduction="sum")
            (loss / num_tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
