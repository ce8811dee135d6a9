"""Trains a small Llama with the Trainer of Transformers.

python -m lockstep run --reference "python examples/trainers/transformers_trainer.py" \
    --variant "torchrun --nproc_per_node=2 examples/trainers/transformers_trainer.py"

`tokens` as argument sets `average_tokens_across_devices=False`: a wrong training.
"""

import os
import sys
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.trainer_utils import set_seed

import lockstep

BATCH, LENGTH = 8, 12


def examples() -> list[dict[str, torch.Tensor]]:
    """Returns sequences of 3 to 12 random tokens, padded; the loss ignores the label -100."""
    tokens = torch.randint(0, 32, (64, LENGTH))
    mask = (torch.arange(LENGTH) < torch.randint(3, LENGTH + 1, (64, 1))).long()
    labels = tokens.where(mask == 1, -100)
    columns = zip(tokens, mask, labels, strict=True)
    return [
        dict(zip(("input_ids", "attention_mask", "labels"), row, strict=True)) for row in columns
    ]


def main(bug: str = "") -> None:
    """Trains for two steps of two micro-batches."""
    set_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, num_hidden_layers=1, **sizes))
    arguments = TrainingArguments(
        tempfile.mkdtemp(), max_steps=2, use_cpu=True, report_to="none", save_strategy="no",
        gradient_accumulation_steps=2, average_tokens_across_devices=bug != "tokens",
        per_device_train_batch_size=BATCH // int(os.environ.get("WORLD_SIZE", "1")),
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=examples())
    with lockstep.record(model):
        trainer.train()


if __name__ == "__main__":
    main(*sys.argv[1:])
