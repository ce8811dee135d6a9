"""A small GPT whose log-probabilities a trainer and a generator with a cache record.

`record(path, …)` is called by the cases below; `python torch_tokens.py FOLDER` runs them.
"""

import os
import sys

import torch
from torch import nn

from lockstep import compare, record_torch

WORDS, WIDTH, HEADS, LENGTH, PROMPT = 20, 16, 2, 12, 4


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, cache, uses_kernel):
        q, k, v = (
            part.unflatten(2, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, 2)
        )
        if cache is not None:
            k, v = (torch.cat([*old, new], 2) for old, new in zip(cache, (k, v), strict=True))
            cache[0][:], cache[1][:] = [k], [v]
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        if uses_kernel:
            y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        else:
            scores = (q @ k.transpose(2, 3)) * q.shape[3] ** -0.5
            y = scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v
        return self.out(y.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, rate):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH)
        )
        self.dropout = nn.Dropout(rate)

    def forward(self, x, cache, uses_kernel):
        x = x + self.dropout(self.attention(self.norm(x), cache, uses_kernel))
        return x + self.mlp(x)


class Gpt(nn.Module):
    def __init__(self, rate=0.1):
        super().__init__()
        self.tokens, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH + 4, WIDTH)
        self.layers = nn.ModuleList(Layer(rate) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens, position_ids, caches=None, uses_kernel=True):
        x = self.tokens(tokens) + self.places(position_ids)
        for number, layer in enumerate(self.layers):
            x = layer(x, caches[number] if caches else None, uses_kernel)
        return self.head(x)


def network(seed=0):
    torch.manual_seed(seed)
    model = Gpt()
    for p in model.parameters():
        p.data.mul_(2)  # Logits that are not all nearly 0.
    return model.eval()


def tokens_of(seed=0, rows=3):
    return torch.randint(WORDS, (rows, LENGTH), generator=torch.Generator().manual_seed(seed))


def answered(tokens):
    """Returns where tokens are those of the answer, behind the prompt."""
    return (torch.arange(LENGTH) >= PROMPT).expand(len(tokens), -1)


def train(path, model=None, batches=2, **options):
    """Records a forward pass of all positions, as a trainer computes it."""
    model = network() if model is None else model
    with record_torch.record_log_probs(path, model, **options) as recorder, torch.no_grad():
        for number in range(batches):
            tokens = tokens_of(number)
            logits = model(tokens, position_ids=torch.arange(LENGTH)[None], uses_kernel=False)
            recorder.add(tokens, logits=logits.float(), mask=answered(tokens))


def generate(
    path, model=None, temperature=1.0, offset=0, batches=2, order=None, shift=0, change=None,
    **options,
):  # fmt: skip
    """Records one position after another, with a cache, as a generator computes them."""
    model = network() if model is None else model
    with record_torch.record_log_probs(path, model, **options) as recorder, torch.no_grad():
        for number in range(batches):
            tokens = tokens_of(number)
            tokens = tokens if order is None else tokens[order]
            caches, found, done = [([], []) for _ in model.layers], [], 0
            for end in range(PROMPT, LENGTH):
                places = torch.arange(done, end)[None] + offset * (done > 0)
                logits = model(tokens[:, done:end], position_ids=places, caches=caches)[:, -1]
                logits = logits.float() / temperature
                found.append(logits.log_softmax(-1).gather(1, tokens[:, end, None])[:, 0])
                done = end
            log_probs = torch.zeros(len(tokens), LENGTH)
            log_probs[:, PROMPT:] = torch.stack(found, 1)
            log_probs = log_probs.roll(shift, 1)
            recorder.add(tokens, log_probs, mask=answered(tokens))


def in_training():
    return network().train()


class Changed(Attention):
    """Scales scores of attention in another way."""

    def forward(self, x, cache, uses_kernel):
        return super().forward(x, cache, uses_kernel) * 1.01


def changed():
    model = network()
    model.layers[1].attention.__class__ = Changed
    return model


PROGRAMS = {  # Program → what is found; None for nothing.
    "right": ({}, None),
    "other order of rows": ({"order": [2, 0, 1]}, None),
    "old weights": ({"model": lambda: network(1)}, "other_start"),
    "temperature": ({"temperature": 0.7}, "other_outputs"),
    "positions": ({"offset": 1}, "other_outputs"),
    "tokens beside": ({"shift": 1}, "other_outputs"),
    "training mode": ({"model": in_training}, "inference_mode"),
    "bfloat16": ({"model": lambda: network().bfloat16()}, "reduced_precision"),
    "another attention": ({"model": changed}, "other_outputs"),
}


def run():
    train("trainer.npz", modules=True)
    for name, (options, cause) in PROGRAMS.items():
        options = {k: v() if k == "model" else v for k, v in options.items()}
        generate("generator.npz", modules=True, **options)
        verdict = compare("trainer.npz", "generator.npz")
        print(name, "\n", str(verdict), flush=True)
        assert verdict.name == (cause or ""), name
        assert verdict.ok == (cause is None)
        if name == "another attention":
            assert verdict.place.module == "layers.1.attention, forward"
    model = network().bfloat16()
    train("trainer.npz", model)
    updated = network().bfloat16()
    with torch.no_grad():
        updated.head.weight[3] *= 1.02
    for name, options, cause in (
        ("right", {}, None),
        ("temperature", {"temperature": 1.1}, "other_outputs"),
        ("weights", {"model": updated}, "other_start"),
    ):
        generate("generator.npz", **({"model": model} | options))
        verdict = compare("trainer.npz", "generator.npz")
        print("bfloat16 in both:", name, "\n", str(verdict), flush=True)
        assert verdict.name == (cause or ""), name


if __name__ == "__main__":
    os.chdir(sys.argv[1])
    run()
    print("all of tokens", flush=True)
