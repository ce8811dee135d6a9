"""Trains LoRA adapters of PEFT on a small Llama with the Trainer of Transformers.

python -m lockstep run --reference "python examples/trainers/peft_lora.py" \
    --variant "torchrun --nproc_per_node=2 examples/trainers/peft_lora.py"

`alpha` as argument sets `lora_alpha` to the rank, not to twice the rank: a wrong training.
"""

import os
import sys
import tempfile

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.trainer_utils import set_seed

import lockstep

BATCH, WORDS, RANK = 8, 32, 4


def main(bug: str = "") -> None:
    """Trains for two steps of two micro-batches."""
    set_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, num_hidden_layers=1, **sizes))
    alpha = RANK if bug == "alpha" else 2 * RANK
    adapters = LoraConfig(
        r=RANK, lora_alpha=alpha, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
    )
    model = get_peft_model(model, adapters)
    tokens = torch.randint(0, WORDS, (64, 12))
    arguments = TrainingArguments(
        tempfile.mkdtemp(), max_steps=2, use_cpu=True, report_to="none", save_strategy="no",
        gradient_accumulation_steps=2, learning_rate=0.01,
        per_device_train_batch_size=BATCH // int(os.environ.get("WORLD_SIZE", "1")),
    )  # fmt: skip
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    trainer = Trainer(model, arguments, train_dataset=rows)
    with lockstep.record(model):
        trainer.train()


if __name__ == "__main__":
    main(*sys.argv[1:])
