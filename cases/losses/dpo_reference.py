"""Preferences: a policy is compared with a frozen copy by sums of token log-probabilities."""

import copy
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))

WORDS, WIDTH, LENGTH, BETA = 16, 12, 8, 0.5


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens):
        return self.head(self.rnn(self.embed(tokens))[0])


def own(x):
    return x.chunk(WORLD)[RANK]


def wrap(model, **options):
    return DistributedDataParallel(model, **options) if WORLD > 1 else model


def log_probs_of(model, tokens, mask):
    logs = model(tokens[:, :-1]).log_softmax(-1)
    logs = logs.gather(-1, tokens[:, 1:, None])[..., 0] * mask[:, 1:]
    if BUG == "log_probs_are_averaged_over_tokens":
        return logs.sum(-1) / mask[:, 1:].sum(-1)
    return logs.sum(-1)


def get_batch(step):
    g = torch.Generator().manual_seed(step)
    chosen, rejected = (torch.randint(WORDS, (8, LENGTH), generator=g) for _ in range(2))
    lengths = torch.randint(4, LENGTH + 1, (2, 8), generator=g)
    masks = (torch.arange(LENGTH) < lengths[..., None]).float()
    masks[..., :2] = 0  # The prompt.
    return chosen, rejected, masks[0], masks[1]


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    policy = Policy()
    reference = copy.deepcopy(policy).requires_grad_(False).eval()
    if BUG == "reference_is_the_policy":
        reference = policy
    model = wrap(policy)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2)
    with harness.training(model, optimizer):
        for step in range(3):
            chosen, rejected, mask_c, mask_r = (own(x) for x in get_batch(step))
            tokens, mask = torch.cat([chosen, rejected]), torch.cat([mask_c, mask_r])
            with torch.no_grad():
                old_c, old_r = log_probs_of(reference, tokens, mask).chunk(2)
            new_c, new_r = log_probs_of(model, tokens, mask).chunk(2)
            margins = BETA * ((new_c - old_c) - (new_r - old_r))
            loss = -F.logsigmoid(margins).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


main()
