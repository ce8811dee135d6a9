"""The fixed model of a preference loss is the model in training, with its adapters turned off.

id = "adapters/reference_without"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["huggingface/trl#1500", "NVIDIA/NeMo-Aligner#142", "unslothai/unsloth#2736"]
date = "2024-04"
tags = ["lora", "gathered", "embedding", "adam"]

[wrong.reference_has_adapters_too]
title = "the reference has the adapters, too"
place = { node = "outputs", step = 0, ranks = "all", tensors = ["layers.*"] }

[wrong.adapters_of_first_layer_stay_off]
title = "adapters of the first layer stay off"
place = { node = "outputs", step = 0, ranks = "all", tensors = ["layers.0"] }

[wrong.scores_of_reference_are_those_of_words]
title = "scores of the reference are those of the words before"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
WORDS, WIDTH, LORA_RANK, LENGTH, PAIRS, MARGIN = 9, 12, 2, 6, 8, 1.0


class LoraLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(LORA_RANK, WIDTH) / 3)
        self.lora_b = nn.Parameter(torch.randn(WIDTH, LORA_RANK) / 3)
        self.is_on = True

    def forward(self, x):
        y = self.base(x)
        return y + x @ self.lora_a.T @ self.lora_b.T if self.is_on else y


class Model(nn.Module):
    """Predicts the next word from the mean of the words so far."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH).requires_grad_(False)
        self.layers = nn.ModuleList(LoraLayer() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS).requires_grad_(False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            means = x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]
            x = x + torch.tanh(layer(means))
        return self.head(x)


def differences(model, text, is_reference=False):
    """Returns the log-probability of each chosen text less that of the rejected one."""
    words = text[:, 1:]
    if is_reference and BUG == "scores_of_reference_are_those_of_words":
        words = text[:, :-1]
    logs = F.log_softmax(model(text[:, :-1]), -1)
    chosen, rejected = logs.gather(2, words[..., None]).sum((1, 2)).chunk(2)
    return chosen - rejected


def of_reference(model, text):
    if BUG != "reference_has_adapters_too":
        for layer in model.layers:
            layer.is_on = False
    with torch.no_grad():
        found = differences(model, text, is_reference=True)
    stays_off = BUG == "adapters_of_first_layer_stay_off"
    for layer in model.layers[1:] if stays_off else model.layers:
        layer.is_on = True
    return found


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(11)
    model = Model()
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.NAdam(trained, lr=0.02, eps=1e-3)
    with harness.training(model, optimizer):
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            text = torch.randint(WORDS, (2, PAIRS, LENGTH), generator=generator)
            text = text.chunk(WORLD, 1)[RANK].flatten(0, 1)
            reference = of_reference(model, text)
            loss = (differences(model, text) - reference - MARGIN).square().mean()
            loss.backward()
            for weight in trained if WORLD > 1 else []:
                if weight.grad is not None:
                    dist.all_reduce(weight.grad)
                    weight.grad /= WORLD
            optimizer.step()
            optimizer.zero_grad()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
