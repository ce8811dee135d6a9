"""Asserts with pytest that five parallel layouts are the training of one process.

python -m pytest examples/test_same_training.py
"""

import lockstep

SCRIPT = "examples/small_gpt.py"
TWO = "torchrun --standalone --nproc_per_node=2"
LAYOUTS = ("ddp", "fsdp", "tp", "cp", "pp")


def test_two_processes_train_like_one() -> None:
    """Fails with the place where a layout first parts from one process."""
    variants = {layout: f"{TWO} {SCRIPT} {layout}" for layout in LAYOUTS}
    lockstep.assert_same_training(f"python {SCRIPT} one", variants)
