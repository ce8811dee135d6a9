"""The connectionist loss of speech divides by lengths, of utterances that are no even split.

id = "losses/speech_lengths"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["pytorch/pytorch#19838", "modelscope/FunASR#1157"]
date = "2019-04"
tags = ["recurrent", "sgd"]

[wrong.mean_of_rank_utterances]
title = "the mean of the rank's utterances"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.divided_by_rank_symbols]
title = "divided by the rank's symbols"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.frames_of_padding_are_counted]
title = "frames of padding are counted"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
FEATURES, SYMBOLS = 6, 7
FRAMES = torch.tensor([10, 12, 9, 11, 10, 24, 20, 22])
LENGTHS = torch.tensor([2, 3, 1, 2, 3, 7, 5, 6])
# Buckets of equal duration: five short utterances are as long as three others.
OWN = slice(0, 8) if WORLD == 1 else (slice(0, 5), slice(5, 8))[RANK]


class Recogniser(nn.Module):
    """Frames to the chances of symbols, of which number 0 is the blank."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(FEATURES, 16, 3, padding=1)
        self.rnn, self.head = nn.RNN(16, 16, batch_first=True), nn.Linear(16, SYMBOLS)

    def forward(self, speech):
        x = F.relu(self.conv(speech.mT)).mT
        return self.head(self.rnn(x)[0])


def loss_of(logits, symbols, frames, lengths):
    if BUG == "frames_of_padding_are_counted":
        frames = torch.full_like(frames, logits.shape[1])
    log_chances = logits.log_softmax(-1).transpose(0, 1)
    if BUG == "mean_of_rank_utterances":
        return F.ctc_loss(log_chances, symbols, frames, lengths, reduction="mean")
    losses = F.ctc_loss(log_chances, symbols, frames, lengths, reduction="none")
    if BUG == "divided_by_rank_symbols":
        return losses.sum() / lengths.sum()
    return WORLD * (losses / lengths).sum() / len(FRAMES)


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = Recogniser()
    weights = list(model.parameters())
    speech = torch.randn(2, 8, 24, FEATURES) * (torch.arange(24) < FRAMES[:, None])[..., None]
    symbols = torch.randint(1, SYMBOLS, (2, 8, 7))
    optimizer = torch.optim.SGD(weights, lr=0.05, momentum=0.8)
    with harness.training(model, optimizer):
        for step in range(2):
            optimizer.zero_grad()
            logits = model(speech[step, OWN])
            loss_of(logits, symbols[step, OWN], FRAMES[OWN], LENGTHS[OWN]).backward()
            if WORLD > 1:
                flat = torch.cat([weight.grad.flatten() for weight in weights])
                dist.all_reduce(flat)
                parts = (flat / WORLD).split([weight.numel() for weight in weights])
                for weight, part in zip(weights, parts, strict=True):
                    weight.grad.copy_(part.view_as(weight))
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
