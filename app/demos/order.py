"""`demo order`: what the order in which gradients are added changes."""

import numpy as np

from app import console
from app.config import Config
from app.demos import stage, telling
from app.progress import StepProgress

_STEPS = 20


def run(config: Config) -> int:
    """Adds real gradients in several orders, and trains with each of them; returns 0."""
    prepared = stage.set_up(config)
    from app.job import load_data

    telling.begin(
        "Computers round every sum. So (a + b) + c need not be a + (b + c), and an all-reduce that"
        " adds in another order gives other last digits. Here with the gradients of LeNet's first"
        f" step, and with what {_STEPS} steps make of it.",
        prepared,
    )
    training = stage.training(config, recipe="fast", epochs=1)
    dataset = load_data(training)
    gradients = first_gradients(training, prepared, dataset)
    _show_one_number(gradients, prepared.names)
    rows = compare_orders(training, prepared, dataset)
    telling.show(
        "weights after training, against those of manual with sum_on_one, which adds in order 0,"
        " 1, 2, …",
        ["trained by", "", "weights that differ", "by at most", "ULPs", "that differ", "by at most",
         "ULPs"],
        rows,
    )  # fmt: skip
    telling.end(
        then=[
            "verify --strategies=manual,mirrored --num_devices=4 --device=cpu --steps=5",
            "compare --num_devices=4 --device=cpu --recipe=fast --epochs=1",
        ],
    )
    return 0
