"""A small language model with DDP: micro-batches, clipping, AdamW with groups, a schedule."""

import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from cases import harness
from cases.programs.launch import start

VOCABULARY, BLOCK, WIDTH, HEADS = 11, 6, 8, 2
MICRO_BATCH_SIZE, ACCUMULATION_STEPS = 3, 8  # The latter over all processes.
MAX_STEPS, WARMUP_STEPS, LEARNING_RATE, GRADIENT_CLIP = 4, 2, 0.01, 0.2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.Linear(WIDTH, 3 * WIDTH)
        self.projection = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.attention(self.ln_1(x)).split(WIDTH, dim=2)
        q, k, v = (z.view(b, t, HEADS, c // HEADS).transpose(1, 2) for z in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(y.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.ln_2(x))


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(BLOCK, WIDTH)
        self.block = Block()
        self.ln = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.tokens.weight = self.head.weight  # Tied.

    def forward(self, tokens, targets):
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        logits = self.head(self.ln(self.block(x)))
        return F.cross_entropy(logits.view(-1, VOCABULARY), targets.view(-1), ignore_index=-1)


def get_batch(number):
    """Returns the micro-batch of this number."""
    generator = torch.Generator().manual_seed(number)
    data = torch.randint(VOCABULARY, (MICRO_BATCH_SIZE, BLOCK + 1), generator=generator)
    return data[:, :-1], data[:, 1:].contiguous()


def get_learning_rate(step):
    if step < WARMUP_STEPS:
        return LEARNING_RATE * (step + 1) / (WARMUP_STEPS + 1)
    ratio = (step - WARMUP_STEPS) / (MAX_STEPS - WARMUP_STEPS)
    return LEARNING_RATE * (0.1 + 0.45 * (1 + math.cos(math.pi * ratio)))


def configure_optimizer(model, rank):
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.95), eps=1e-8)


def main(rank, world_size):
    raw_model = LanguageModel()
    optimizer = configure_optimizer(raw_model, rank)
    is_ddp = world_size > 1
    model = DistributedDataParallel(raw_model) if is_ddp else raw_model
    accumulation_steps = ACCUMULATION_STEPS // world_size
    with harness.training(model, optimizer):
        for step in range(3):
            for group in optimizer.param_groups:
                group["lr"] = get_learning_rate(step)
            for micro_step in range(accumulation_steps):
                number = (step * accumulation_steps + micro_step) * world_size + rank
                x, y = get_batch(number)
                if is_ddp:
                    model.require_backward_grad_sync = micro_step == accumulation_steps - 1
                loss = model(x, y) / accumulation_steps
                loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_CLIP)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


if __name__ == "__main__":
    start(main)
