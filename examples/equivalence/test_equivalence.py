"""Asserts that ways to train a tiny model, which should be one training, are one training.

    python -m pytest examples/equivalence

Lockstep starts each step of a way from the state of the reference, and compares losses, each
gradient and each update within rounding: two steps are enough.
"""

import pathlib

import lockstep

SCRIPT = pathlib.Path(__file__).with_name("train.py")
TWO = "torchrun --standalone --nproc_per_node=2"
CHECKPOINTING, MICRO_BATCHES, EAGER = "checkpointing=1", "micro_batches=2", "attention=eager"
WAYS = {  # Name → how it is started, and what differs from the reference.
    "checkpointing": ("python", CHECKPOINTING),
    "accumulation": ("python", MICRO_BATCHES),
    "eager attention": ("python", EAGER),
    "ddp": (TWO, ""),
    "ddp, accumulation": (TWO, MICRO_BATCHES),
    "ddp and all three": (TWO, f"{CHECKPOINTING} {MICRO_BATCHES} {EAGER}"),
}


def test_all_ways_are_one_training() -> None:
    """Fails with the place where each way first parts from the reference."""
    variants = {name: f"{start} {SCRIPT} {words}" for name, (start, words) in WAYS.items()}
    lockstep.assert_same_training(f"python {SCRIPT}", variants)
