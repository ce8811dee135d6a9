"""Records a training with the Trainer of Hugging Face Transformers, in one process and in two.

    python examples/record_hf_trainer.py one.npz
    torchrun --nproc_per_node=2 examples/record_hf_trainer.py two.npz one.npz
    lockstep one.npz two.npz

The second run starts each recorded step from the state in the first recording. The sequences have
different lengths. With `tokens` as last argument, each process divides its loss by its own number
of tokens, and DDP averages the quotients: the mean of means is not the mean over all tokens.
"""

import contextlib
import os
import sys
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import set_seed

from lockstep import record_torch

BATCH, LENGTH, NUM_PROCESSES = 8, 12, int(os.environ.get("WORLD_SIZE", "1"))


def examples() -> list[dict[str, torch.Tensor]]:
    """Returns sequences of random tokens, padded; the loss ignores the label -100."""
    tokens = torch.randint(0, 32, (64, LENGTH))
    lengths = torch.randint(3, LENGTH + 1, (64, 1))
    is_token = torch.arange(LENGTH) < lengths
    labels = tokens.where(is_token, -100)
    columns = zip(tokens, is_token.long(), labels, strict=True)
    names = "input_ids", "attention_mask", "labels"
    return [dict(zip(names, row, strict=True)) for row in columns]


def main(path: str, replay: str | None = None, bug: str = "") -> None:
    """Trains for four steps of two micro-batches and writes the recording to `path`."""
    set_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, num_hidden_layers=1, **sizes))
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as recording:

        class Start(TrainerCallback):
            """Starts the recording."""

            def on_train_begin(self, *_: object, **__: object) -> None:
                model, optimizer = trainer.model_wrapped, trainer.optimizer
                recorder = record_torch.record(path, model, optimizer, steps=3, replay=replay)
                recording.enter_context(recorder)

        arguments = TrainingArguments(
            folder, max_steps=4, use_cpu=True, gradient_accumulation_steps=2, report_to="none",
            per_device_train_batch_size=BATCH // NUM_PROCESSES, save_strategy="no",
            average_tokens_across_devices=bug != "tokens",
        )  # fmt: skip
        trainer = Trainer(model, arguments, train_dataset=examples(), callbacks=[Start()])
        trainer.train()


if __name__ == "__main__":
    main(*sys.argv[1:])
