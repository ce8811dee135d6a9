"""The Trainer of Transformers divides by the tokens of all ranks only if it is told to count them.

id = "trainers/transformers_trainer"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
requires = ["transformers", "accelerate"]
tags = ["ddp", "accumulation", "loader", "adam", "embedding"]

[wrong.own_tokens]
title = "average_tokens_across_devices=False"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }
"""

import os
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.trainer_utils import set_seed

from cases import harness

BUG = os.environ.get("BUG", "")
WORLD = int(os.environ.get("WORLD_SIZE", 1))
BATCH, LENGTH = 8, 12


def make_examples():
    """Returns sequences of 3 to 12 random tokens, padded; the loss ignores the label -100."""
    tokens = torch.randint(0, 32, (64, LENGTH))
    mask = (torch.arange(LENGTH) < torch.randint(3, LENGTH + 1, (64, 1))).long()
    labels = tokens.where(mask == 1, -100)
    names = ("input_ids", "attention_mask", "labels")
    columns = zip(tokens, mask, labels, strict=True)
    return [dict(zip(names, row, strict=True)) for row in columns]


def main():
    set_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, num_hidden_layers=1, **sizes))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=2, use_cpu=True, report_to="none", save_strategy="no",
            gradient_accumulation_steps=2, average_tokens_across_devices=BUG != "own_tokens",
            per_device_train_batch_size=BATCH // WORLD,
        )  # fmt: skip
        trainer = Trainer(model, arguments, train_dataset=make_examples())
        with harness.training(model):
            trainer.train()


if __name__ == "__main__":
    main()
