"""Cases of PyTorch: a small GPT whose log-probabilities a trainer and a generator record."""

import torch
from torch import nn

from lockstep import compare, record_torch

WORDS, WIDTH, LENGTH, PROMPT = 20, 16, 12, 4


class Attention(nn.Module):
    factor = 1.0

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x, cache):
        q, k, v = self.qkv(x).chunk(3, 2)
        if cache is not None:
            k, v = (torch.cat([*old, new], 1) for old, new in zip(cache, (k, v), strict=True))
            cache[:] = [k], [v]
        mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.factor * self.dropout(self.out(y))


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Attention() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens, position_ids, caches=(None, None)):
        x = self.tokens(tokens) + self.places(position_ids)
        for layer, cache in zip(self.layers, caches, strict=True):
            x = x + layer(x, cache)
        return self.head(x)


def network():
    torch.manual_seed(0)
    model = Gpt()
    for p in model.parameters():
        p.data.mul_(2)  # Logits that are not all nearly 0.
    return model.eval()


def changed():
    model = network()
    model.layers[1].factor = 1.01
    return model


def tokens_of(batch):
    return torch.randint(WORDS, (3, LENGTH), generator=torch.Generator().manual_seed(batch))


ANSWERED = (torch.arange(LENGTH) >= PROMPT).expand(3, -1)  # Behind the prompt.


def train(path, model):
    """Records a forward pass of all positions, as a trainer computes it."""
    with record_torch.record_log_probs(path, model, modules=True) as recorder, torch.no_grad():
        for batch in range(2):
            tokens = tokens_of(batch)
            logits = model(tokens, position_ids=torch.arange(LENGTH)[None])
            recorder.add(tokens, logits=logits.float(), mask=ANSWERED)


def generate(path, model, temperature=1.0):
    """Records one position after another, with a cache, as a generator computes them."""
    with record_torch.record_log_probs(path, model, modules=True) as recorder, torch.no_grad():
        for batch in range(2):
            tokens, done = tokens_of(batch), 0
            caches, found = [[[], []] for _ in model.layers], []
            for end in range(PROMPT, LENGTH):
                places = torch.arange(done, end)[None]
                logits = model(tokens[:, done:end], places, caches)[:, -1].float() / temperature
                found.append(logits.log_softmax(-1).gather(1, tokens[:, end, None])[:, 0])
                done = end
            log_probs = torch.zeros(len(tokens), LENGTH)
            log_probs[:, PROMPT:] = torch.stack(found, 1)
            recorder.add(tokens, log_probs, mask=ANSWERED)


PROGRAMS = {  # Program → its model, further options, and what is found; "" for nothing.
    "right": (network, {}, ""),
    "temperature": (network, {"temperature": 0.7}, "other_outputs"),
    "training mode": (lambda: network().train(), {}, "inference_mode"),
    "another attention": (changed, {}, "other_outputs"),
}


def case_log_probs():
    train("trainer.npz", network())
    for name, (model_of, options, cause) in PROGRAMS.items():
        generate("generator.npz", model_of(), **options)
        verdict = compare("trainer.npz", "generator.npz")
        assert (verdict.name, verdict.ok) == (cause, not cause), (name, str(verdict))
        if name == "another attention":
            assert verdict.place.module == "layers.1, forward", str(verdict)
