"""LoRA adapters of PEFT are trained by the Trainer of Transformers, with a factor of alpha / rank.

id = "trainers/peft_lora"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
requires = ["peft", "transformers", "accelerate"]
tags = ["ddp", "lora", "accumulation", "loader", "adam"]

[wrong.half_of_alpha]
title = "half of lora_alpha"
place = { node = "gradient", step = 0, ranks = "all", tensors = ["*lora_B*"] }
"""

import os
import tempfile

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.trainer_utils import set_seed

from cases import harness

BUG = os.environ.get("BUG", "")
WORLD = int(os.environ.get("WORLD_SIZE", 1))
BATCH, WORDS, LORA_RANK = 8, 32, 4


def main():
    set_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, num_hidden_layers=1, **sizes))
    alpha = LORA_RANK if BUG == "half_of_alpha" else 2 * LORA_RANK
    adapters = LoraConfig(
        r=LORA_RANK, lora_alpha=alpha, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
    )
    model = get_peft_model(model, adapters)
    tokens = torch.randint(0, WORDS, (64, 12))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=2, use_cpu=True, report_to="none", save_strategy="no",
            gradient_accumulation_steps=2, learning_rate=0.01,
            per_device_train_batch_size=BATCH // WORLD,
        )  # fmt: skip
        rows = [{"input_ids": row, "labels": row} for row in tokens]
        trainer = Trainer(model, arguments, train_dataset=rows)
        with harness.training(model):
            trainer.train()


if __name__ == "__main__":
    main()
