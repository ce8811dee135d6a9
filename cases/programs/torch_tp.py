"""A small GPT with tensor parallelism written by hand, like Megatron-LM, and DDP over "dp"."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from cases import harness
from cases.programs.gpt_parts import (
    BATCH,
    HEADS,
    LAYERS,
    LENGTH,
    VOCABULARY,
    WIDTH,
    cross_entropy,
    get_batch,
)
from cases.programs.launch import DEVICE, start

SEED, BFLOAT16, DROPOUT = 0, False, 0.0
SEQUENCE_PARALLEL, PARALLEL_LOSS = False, False
LEARNING_RATE, MAX_NORM = 0.01, 0.5
DIMS = {
    "inputs": "b[dp] s",
    "*.wqkv.weight": "3*o[tp] i",
    "*.up.weight": "o[tp] i",
    "*.up.bias": "o[tp]",
    "*.wo.weight": "o i[tp]",
    "*.down.weight": "o i[tp]",
    "tokens.weight": "v[tp] d",
}


class TensorParallel:
    """The rank among the ranks of tensor parallelism, and their collectives."""

    def __init__(self, mesh):
        self.group, self.size, self.rank = mesh.get_group(), mesh.size(), mesh.get_local_rank()

    def reduce(self, x, op=dist.ReduceOp.SUM):
        x = x.clone()
        dist.all_reduce(x, op, self.group)
        return x

    def gather(self, x, dim):
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous(), self.group)
        return torch.cat(parts, dim)

    def split(self, x, dim):
        return x.chunk(self.size, dim)[self.rank]


class Copy(torch.autograd.Function):
    """Before a column-parallel layer: the gradient is summed."""

    @staticmethod
    def forward(ctx, x, tp):
        ctx.tp = tp
        return x

    @staticmethod
    def backward(ctx, gradient):
        return ctx.tp.reduce(gradient), None


class Reduce(torch.autograd.Function):
    """After a row-parallel layer: the partial sums are added."""

    @staticmethod
    def forward(ctx, x, tp):
        return tp.reduce(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Gather(torch.autograd.Function):
    """Gathers the last dimension; each rank computes the same with it."""

    @staticmethod
    def forward(ctx, x, tp):
        ctx.tp = tp
        return tp.gather(x, -1)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.tp.split(gradient, -1), None


class GatherSequence(torch.autograd.Function):
    """Before a column-parallel layer, of sequence parallelism."""

    @staticmethod
    def forward(ctx, x, tp):
        ctx.tp = tp
        return tp.gather(x, 1)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.tp.split(ctx.tp.reduce(gradient), 1), None


class ScatterSequence(torch.autograd.Function):
    """After a row-parallel layer, of sequence parallelism: the partial sums are added."""

    @staticmethod
    def forward(ctx, x, tp):
        ctx.tp = tp
        return tp.split(tp.reduce(x), 1)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.tp.gather(gradient, 1), None


def enter(x, tp):
    return GatherSequence.apply(x, tp) if SEQUENCE_PARALLEL else Copy.apply(x, tp)


def leave(x, tp):
    return ScatterSequence.apply(x, tp) if SEQUENCE_PARALLEL else Reduce.apply(x, tp)


def weight(*shape):
    return torch.randn(shape) * 0.25


class ColumnParallel(nn.Module):
    """Each rank computes a part of the outputs; `blocks` matrices are fused."""

    def __init__(self, tp, size, blocks=1, has_bias=False):
        super().__init__()
        self.tp = tp
        parts = [tp.split(weight(size, WIDTH), 0) for _ in range(blocks)]
        self.weight = nn.Parameter(torch.cat(parts))
        self.bias = nn.Parameter(tp.split(weight(size), 0).clone()) if has_bias else None

    def forward(self, x):
        return F.linear(enter(x, self.tp), self.weight, self.bias)


class RowParallel(nn.Module):
    """Each rank has a part of the inputs, and computes a summand of the outputs."""

    def __init__(self, tp, size):
        super().__init__()
        self.tp = tp
        self.weight = nn.Parameter(tp.split(weight(WIDTH, size), 1).clone())
        self.bias = nn.Parameter(weight(WIDTH))

    def forward(self, x):
        y = F.linear(x, self.weight)
        return leave(y, self.tp) + self.bias


class VocabularyParallelEmbedding(nn.Module):
    """Each rank has the embeddings of a part of the tokens."""

    def __init__(self, tp):
        super().__init__()
        self.tp = tp
        self.weight = nn.Parameter(tp.split(weight(VOCABULARY, WIDTH), 0).clone())

    def forward(self, tokens):
        own = tokens - self.tp.rank * len(self.weight)
        is_own = (own >= 0) & (own < len(self.weight))
        x = F.embedding(own.where(is_own, 0), self.weight) * is_own.unsqueeze(2)
        return leave(x, self.tp)


class Attention(nn.Module):
    def __init__(self, tp):
        super().__init__()
        self.wqkv, self.wo = ColumnParallel(tp, WIDTH, blocks=3), RowParallel(tp, WIDTH)

    def forward(self, x):
        heads = self.wqkv(x).unflatten(2, (3, -1, WIDTH // HEADS))
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, tp):
        super().__init__()
        self.up = ColumnParallel(tp, 2 * WIDTH, has_bias=True)
        self.down = RowParallel(tp, 2 * WIDTH)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, tp):
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(WIDTH), Attention(tp)
        self.feed_forward_norm, self.feed_forward = nn.LayerNorm(WIDTH), FeedForward(tp)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x):
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))


class GPT(nn.Module):
    """The embedding is the weight of the head."""

    def __init__(self, tp):
        super().__init__()
        self.tp = tp
        self.tokens = VocabularyParallelEmbedding(tp)
        self.positions = nn.Parameter(weight(LENGTH, WIDTH))
        self.layers = nn.ModuleList(Block(tp) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens):
        positions = self.tp.split(self.positions, 0) if SEQUENCE_PARALLEL else self.positions
        x = self.tokens(tokens) + positions
        for layer in self.layers:
            x = layer(x)
        logits = F.linear(enter(self.norm(x), self.tp), self.tokens.weight)
        return logits if PARALLEL_LOSS else Gather.apply(logits, self.tp)


def parallel_cross_entropy(logits, targets, tp):
    """The cross-entropy of logits that are split over the vocabulary."""
    logits = logits.float()
    logits = logits - tp.reduce(logits.detach().amax(-1), dist.ReduceOp.MAX).unsqueeze(2)
    total = Reduce.apply(logits.exp().sum(-1), tp)
    own = targets - tp.rank * logits.shape[-1]
    is_own = (own >= 0) & (own < logits.shape[-1])
    picked = logits.gather(2, own.where(is_own, 0).unsqueeze(2)).squeeze(2) * is_own
    return (total.log() - Reduce.apply(picked, tp)).mean()


def is_split(name):
    """Whether each rank has another part of a weight."""
    is_row_parallel = name.endswith(("wo.weight", "down.weight"))
    return is_row_parallel or any(part in name for part in ("wqkv", "up", "tokens"))


def finish_gradients(model, tp):
    """Sums the gradients of weights that saw a part of the sequence only."""
    for name, p in model.named_parameters():
        if SEQUENCE_PARALLEL and not is_split(name):
            dist.all_reduce(p.grad, group=tp.group)


def clip_gradients(model, tp):
    squares = {name: p.grad.square().sum() for name, p in model.named_parameters()}
    of_parts = sum(square for name, square in squares.items() if is_split(name))
    of_copies = sum(square for name, square in squares.items() if not is_split(name))
    norm = (tp.reduce(of_parts) + of_copies).sqrt()
    nn.utils.clip_grads_with_norm_(model.parameters(), MAX_NORM, norm)


def main(rank, world_size):
    torch.manual_seed(SEED)
    tp_size = min(world_size, 2)
    mesh = init_device_mesh(DEVICE, (world_size // tp_size, tp_size), mesh_dim_names=("dp", "tp"))
    tp, dp_rank, dp_size = TensorParallel(mesh["tp"]), rank // tp_size, world_size // tp_size
    model = raw_model = GPT(tp)
    if dp_size > 1:
        model = DistributedDataParallel(raw_model, process_group=mesh["dp"].get_group())
    parameters = [p for p in raw_model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, eps=1e-5, weight_decay=0.1)
    with harness.training(model, optimizer, mesh=mesh, dims=DIMS, modules=True):
        for step in range(3):
            batch = get_batch(step, SEED)
            own = slice(dp_rank * BATCH // dp_size, (dp_rank + 1) * BATCH // dp_size)
            tokens, targets = batch[0][own], batch[2][own]
            with torch.autocast(DEVICE, torch.bfloat16, enabled=BFLOAT16):
                logits = model(tokens)
            if PARALLEL_LOSS:
                loss = parallel_cross_entropy(logits, targets, tp)
            else:
                loss = cross_entropy(logits, targets)
            loss.backward()
            finish_gradients(raw_model, tp)
            clip_gradients(raw_model, tp)
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    start(main)
