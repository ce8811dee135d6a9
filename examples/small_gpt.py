"""Trains a small GPT in PyTorch in several parallel layouts, and records two steps of each.

    python examples/small_gpt.py one
    torchrun --nproc_per_node=2 examples/small_gpt.py tp
    torchrun --nproc_per_node=4 examples/small_gpt.py fsdp_tp

Layouts: "ddp", "fsdp" (FSDP2), "tp" (tensor and sequence parallelism with DTensor), "cp" (context
parallelism: each process has two chunks of every sequence), "pp" (a pipeline of two stages), and
"fsdp_tp". `examples/test_same_training.py` asserts that all are the same training.
"""

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

from lockstep import record_torch

VOCABULARY, LENGTH, WIDTH, HEADS, BATCH = 64, 32, 64, 4, 8
AXES = {"ddp": "dp", "fsdp": "dp", "tp": "tp", "fsdp_tp": "dp tp", "cp": "cp", "pp": "pp"}


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.wo = nn.Linear(WIDTH, WIDTH, bias=False)
        self.context: ContextParallel | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Returns a tensor of the shape of `x`, (batch, length, width)."""
        heads = (w(x).unflatten(2, (-1, WIDTH // HEADS)) for w in (self.wq, self.wk, self.wv))
        q, k, v = (z.transpose(1, 2) for z in heads)
        if self.context:
            k, v = Gather.apply(k, self.context.mesh), Gather.apply(v, self.context.mesh)
            y = scaled_dot_product_attention(q, k, v, attn_mask=self.context.mask)
        else:
            y = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and a two-layer network, each with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Returns a tensor of the shape of `x`, (batch, length, width)."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Predicts the next token at each position; stages of a pipeline lack some of the modules."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens: nn.Module | None = nn.Embedding(VOCABULARY, WIDTH)
        self.positions: nn.Module | None = nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleDict({"0": Block(), "1": Block()})
        self.norm: nn.Module | None = nn.LayerNorm(WIDTH)
        self.head: nn.Module | None = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Returns logits, (batch, length, vocabulary), of tokens, (batch, length)."""
        if self.tokens and self.positions:
            x = self.tokens(x) + self.positions(positions)
        for layer in self.layers.values():
            x = layer(x)
        return self.head(self.norm(x)) if self.norm and self.head else x


class Gather(torch.autograd.Function):
    """Gathers the keys or values of all processes; their gradients are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh) -> Tensor:
        """Returns the parts, (batch, heads, length, width), process after process."""
        ctx.mesh, parts = mesh, [torch.empty_like(x) for _ in range(mesh.size())]
        dist.all_gather(parts, x.contiguous(), mesh.get_group())
        return torch.cat(parts, 2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Returns the gradient of this process' part."""
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.mesh.get_group())
        return gradient.chunk(ctx.mesh.size(), 2)[ctx.mesh.get_local_rank()], None


class ContextParallel:
    """Attention over sequences of which each process has two chunks, in zigzag order."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh, self.size = mesh, mesh.size()
        orders = [self.split(torch.arange(LENGTH), rank, 0) for rank in range(self.size)]
        self.mask = orders[mesh.get_local_rank()].unsqueeze(1) >= torch.cat(orders)

    def split(self, x: Tensor, rank: int, dim: int = 1) -> Tensor:
        """Returns the first chunk of process 0 and the last, and so on: equal work for all."""
        chunks = x.chunk(2 * self.size, dim)
        return torch.cat([chunks[rank], chunks[2 * self.size - 1 - rank]], dim)


def split_weights(model: GPT, mesh: DeviceMesh) -> None:
    """Applies tensor parallelism, and sequence parallelism between attention and networks."""
    split = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
    embedding = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    plan = {"tokens": embedding, "positions": embedding, "norm": SequenceParallel()}
    plan["head"] = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    for name in ("layers.0", "layers.1"):
        plan |= {f"{name}.norm{number}": SequenceParallel() for number in (1, 2)}
        plan |= {f"{name}.{part}": PrepareModuleInput(**split) for part in ("attention", "mlp")}
        for part in ("attention.wq", "attention.wk", "attention.wv", "mlp.0"):
            plan[f"{name}.{part}"] = ColwiseParallel()
        for part in ("attention.wo", "mlp.2"):
            plan[f"{name}.{part}"] = RowwiseParallel(output_layouts=Shard(1))
    parallelize_module(model, mesh, plan)


def parallelize(model: GPT, layout: str, mesh: DeviceMesh) -> nn.Module:
    """Returns what the training calls in a layout: `model`, or a wrapper of it."""
    if layout.endswith("tp"):
        split_weights(model, mesh["tp"])
    if layout.startswith("fsdp"):
        for block in model.layers.values():
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    if layout == "cp":
        for block in model.layers.values():
            block.attention.context = ContextParallel(mesh)
    if layout == "pp" and mesh.get_local_rank() == 0:
        del model.layers["1"]
        model.norm = model.head = None
    elif layout == "pp":
        del model.layers["0"]
        model.tokens = model.positions = None
    return DistributedDataParallel(model) if layout in ("ddp", "cp") else model


def run_pipeline(stage: nn.Module, mesh: DeviceMesh, batch: tuple[Tensor, Tensor, Tensor]) -> None:
    """Computes the gradients of a stage in two micro-batches, and clips them."""
    tokens, positions, targets = batch
    rank, group = mesh.get_local_rank(), mesh.get_group()
    pipeline = PipelineStage(stage, rank, mesh.size(), torch.device("cpu"), group=group)
    schedule = ScheduleGPipe(pipeline, n_microbatches=2, loss_fn=loss_of)
    if rank == 0:
        schedule.step(tokens, positions=positions)
    else:
        schedule.step(target=targets, positions=positions)
    total = sum(p.grad.square().sum() for p in stage.parameters())  # Over all stages.
    dist.all_reduce(total, group=group)
    nn.utils.clip_grads_with_norm_(stage.parameters(), 1.0, total.sqrt())


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Returns the mean cross-entropy over all positions."""
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


def main(layout: str = "one") -> None:
    """Trains for two steps."""
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.manual_seed(0)
    data = torch.randint(VOCABULARY, (2, BATCH, LENGTH + 1))
    model = parallel_model = GPT()
    mesh, num_parts, part = None, 1, 0  # Data parallel parts of a batch, and the own one.
    if layout != "one":
        dist.init_process_group("gloo")
        axes = tuple(AXES[layout].split())
        sizes = (world_size // 2, 2) if len(axes) == 2 else (world_size,)
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=axes)
        parallel_model = parallelize(model, layout, mesh)
        if "dp" in axes:
            num_parts, part = mesh["dp"].size(), mesh["dp"].get_local_rank()
    optimizer = torch.optim.AdamW(parallel_model.parameters(), lr=1e-3, weight_decay=0.1)
    dims = "b s[cp:zigzag]" if layout == "cp" else ""  # How the inputs are split.
    recorded = record_torch.record(
        "gpt.npz", parallel_model, optimizer, steps=2, mesh=mesh, dims=dims
    )
    with recorded:
        for chunk in data:
            own = chunk[part::num_parts]
            batch = own[:, :-1], torch.arange(LENGTH).expand(len(own), -1), own[:, 1:]
            if layout == "cp":
                context = ContextParallel(mesh)
                batch = tuple(context.split(x, rank) for x in batch)
            optimizer.zero_grad()
            if layout == "pp":
                run_pipeline(model, mesh, batch)
            else:
                tokens, positions, targets = batch
                loss_of(parallel_model(tokens, positions), targets).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    if layout != "one":
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
