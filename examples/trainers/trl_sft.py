"""Fine-tunes a small Llama with the SFTTrainer of TRL, from token ids.

python -m lockstep run --reference "python examples/trainers/trl_sft.py" \
    --variant "torchrun --nproc_per_node=2 examples/trainers/trl_sft.py"

`tokens` as argument sets `average_tokens_across_devices=False`: a wrong training.
"""

import os
import sys
import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.trainer_utils import set_seed
from trl import SFTConfig, SFTTrainer

import lockstep

BATCH, WORDS = 8, 32


def main(bug: str = "") -> None:
    """Trains for two steps of two micro-batches, with sequences of 3 to 12 tokens."""
    set_seed(0)
    words = models.WordLevel({str(word): word for word in range(WORDS)}, unk_token="0")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(words), unk_token="0", pad_token="1", eos_token="2"
    )
    lengths = torch.randint(3, 13, (64,)).tolist()
    rows = [{"input_ids": torch.randint(3, WORDS, (length,)).tolist()} for length in lengths]
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, num_hidden_layers=1, **sizes))
    arguments = SFTConfig(
        tempfile.mkdtemp(), max_steps=2, use_cpu=True, bf16=False, report_to="none",
        save_strategy="no", gradient_accumulation_steps=2, max_length=12,
        average_tokens_across_devices=bug != "tokens",
        per_device_train_batch_size=BATCH // int(os.environ.get("WORLD_SIZE", "1")),
    )  # fmt: skip
    dataset = Dataset.from_list(rows)
    trainer = SFTTrainer(model, arguments, train_dataset=dataset, processing_class=tokenizer)
    with lockstep.record(model):
        trainer.train()


if __name__ == "__main__":
    main(*sys.argv[1:])
