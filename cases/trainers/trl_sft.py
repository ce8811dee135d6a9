"""The SFTTrainer of TRL divides by the tokens of all ranks only if it is told to count them.

id = "trainers/trl_sft"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
requires = ["trl"]
tags = ["ddp", "accumulation", "loader", "adam", "embedding"]

[wrong.own_tokens]
title = "average_tokens_across_devices=False"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }
"""

import os
import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.trainer_utils import set_seed
from trl import SFTConfig, SFTTrainer

from cases import harness

BUG = os.environ.get("BUG", "")
WORLD = int(os.environ.get("WORLD_SIZE", 1))
BATCH, WORDS = 8, 32


def main():
    set_seed(0)
    words = models.WordLevel({str(word): word for word in range(WORDS)}, unk_token="0")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(words), unk_token="0", pad_token="1", eos_token="2"
    )
    lengths = torch.randint(3, 13, (64,)).tolist()
    rows = [{"input_ids": torch.randint(3, WORDS, (length,)).tolist()} for length in lengths]
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, num_hidden_layers=1, **sizes))
    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(
            folder, max_steps=2, use_cpu=True, bf16=False, report_to="none",
            save_strategy="no", gradient_accumulation_steps=2, max_length=12,
            average_tokens_across_devices=BUG != "own_tokens",
            per_device_train_batch_size=BATCH // WORLD,
        )  # fmt: skip
        dataset = Dataset.from_list(rows)
        trainer = SFTTrainer(model, arguments, train_dataset=dataset, processing_class=tokenizer)
        with harness.training(model):
            trainer.train()


if __name__ == "__main__":
    main()
