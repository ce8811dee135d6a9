"""Another number of ranks resumes, with the accumulation and the place of the former number.

id = "resume/elastic_accumulation"
framework = "torch"
processes = 2
save_processes = 1
steps = 4
mode = "resume"
references = ["huggingface/transformers#41159", "NVIDIA-NeMo/Megatron-Bridge#5637"]
date = "2025-09"
tags = ["ddp", "accumulation", "recurrent", "embedding", "sgd"]

[wrong.accumulation_steps_of_saved_run]
title = "accumulation steps of the saved run"
place = { node = "examples", step = 2, ranks = "all", tensors = "all" }

[wrong.loss_divided_by_those_of_saved_run]
title = "loss divided by those of the saved run"
place = { node = "loss", step = 2, ranks = "all", tensors = "all" }

[wrong.place_counted_in_batches_of_rank]
title = "place counted in batches of a rank"
place = { node = "examples", step = 2, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cases import harness

BUG = os.environ.get("BUG", "")
SAVE, LOAD = os.environ.get("SAVE"), os.environ.get("LOAD")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
STEPS, HALF, GLOBAL_BATCH, MICRO_BATCH, WORDS = 4, 2, 8, 2, 20


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, 12)
        self.rnn = nn.RNN(12, 16, batch_first=True)
        self.head = nn.Linear(16, 5)

    def forward(self, words):
        return self.head(self.rnn(self.embed(words))[0])


def train_step(model, optimizer, words, accumulation, divisor):
    optimizer.zero_grad()
    for micro in words[RANK::WORLD].split(MICRO_BATCH)[:accumulation]:
        loss = nn.functional.cross_entropy(model(micro).flatten(0, 1), micro.flatten() % 5)
        (loss / divisor).backward()
    optimizer.step()


def main():
    torch.manual_seed(6)
    model = Tagger()
    text = torch.randint(WORDS, (128, 7))
    if WORLD > 1:
        dist.init_process_group("gloo")
    ddp = DistributedDataParallel(model) if WORLD > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.4, momentum=0.9)
    accumulation = divisor = GLOBAL_BATCH // (MICRO_BATCH * WORLD)
    place = 0
    if LOAD:
        state = torch.load(LOAD + ".pt")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        place = state["batches_of_a_rank"] * MICRO_BATCH * state["ranks"]
        if BUG == "accumulation_steps_of_saved_run":
            accumulation = divisor = state["accumulation"]
        elif BUG == "loss_divided_by_those_of_saved_run":
            divisor = state["accumulation"]
        elif BUG == "place_counted_in_batches_of_rank":
            place = state["batches_of_a_rank"] * MICRO_BATCH * WORLD
    size = accumulation * MICRO_BATCH * WORLD
    with harness.training(ddp, optimizer):
        for _ in range(HALF if LOAD else 0, HALF if SAVE else STEPS):
            train_step(ddp, optimizer, text[place : place + size], accumulation, divisor)
            place += size
    if SAVE and RANK == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        batches = place // (MICRO_BATCH * WORLD)
        state |= {"ranks": WORLD, "accumulation": accumulation, "batches_of_a_rank": batches}
        torch.save(state, SAVE + ".pt")
    if WORLD > 1:
        dist.destroy_process_group()


main()
