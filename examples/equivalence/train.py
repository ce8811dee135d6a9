"""Trains a tiny Llama for two steps, in several ways that are the same training.

`python examples/equivalence/train.py attention=eager micro_batches=2 checkpointing=1`. With TRL,
its SFTTrainer trains; without it, a plain loop. Start two processes with `torchrun` for DDP.
"""

import importlib.util
import os
import sys
import tempfile

import torch
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

import lockstep

BATCH, WORDS, LENGTH = 8, 32, 12
RANK, WORLD_SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def train_with_trl(model: LlamaForCausalLM, rows: torch.Tensor, micro_batches: int) -> None:
    """Trains with TRL's SFTTrainer."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = models.WordLevel({str(word): word for word in range(WORDS)}, unk_token="0")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(words), unk_token="0", pad_token="1", eos_token="2"
    )
    arguments = SFTConfig(
        tempfile.mkdtemp(), max_steps=2, use_cpu=True, bf16=False, report_to="none",
        save_strategy="no", learning_rate=0.01, gradient_accumulation_steps=micro_batches,
        per_device_train_batch_size=BATCH // micro_batches // WORLD_SIZE,
        gradient_checkpointing=model.is_gradient_checkpointing,
    )  # fmt: skip
    dataset = Dataset.from_dict({"input_ids": rows.tolist()})
    trainer = SFTTrainer(model, arguments, train_dataset=dataset, processing_class=tokenizer)
    with lockstep.record(model):
        trainer.train()


def train_in_a_loop(model: LlamaForCausalLM, rows: torch.Tensor, micro_batches: int) -> None:
    """Trains in a plain loop, with AdamW."""
    called = model
    if WORLD_SIZE > 1:
        torch.distributed.init_process_group("gloo")
        called = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    with lockstep.record(called, optimizer):
        for batch in rows.split(BATCH):
            for x in batch.chunk(micro_batches):
                x = x[RANK::WORLD_SIZE]
                (called(input_ids=x, labels=x).loss / micro_batches).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


def main(**chosen: str) -> None:
    """Builds the model and trains it."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=WORDS, num_hidden_layers=2, use_cache=False, **sizes)
    config._attn_implementation = chosen.get("attention", "sdpa")
    model = LlamaForCausalLM(config).train()
    rows = torch.randint(3, WORDS, (2 * BATCH, LENGTH))
    if chosen.get("checkpointing"):
        model.gradient_checkpointing_enable({"use_reentrant": False})
    train = train_with_trl if importlib.util.find_spec("trl") else train_in_a_loop
    train(model, rows, int(chosen.get("micro_batches", "1")))


if __name__ == "__main__":
    main(**dict(word.split("=") for word in sys.argv[1:]))
