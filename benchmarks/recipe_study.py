"""Measures the effect of each choice in the recipe `fast`, for LeNet over several seeds.

.venv/bin/python benchmarks/recipe_study.py --seeds=1,2,3,4,5 --epochs=10 --variants=fast,flip
"""

import argparse
import dataclasses
import os
import pathlib
import statistics
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from app.config import TrainConfig
from app.config.names import PRECISIONS
from app.devices import device_setup
from app.training.recipes import RECIPES

# Variant → changes of the recipe and of the configuration.
VARIANTS = {
    "fast": ({}, {}),
    "batch 128": ({}, {"global_batch_size": 128}),
    "rate 0.3": ({"peak_learning_rate": 0.3}, {}),
    "weight decay 1e-3": ({"weight_decay": 1e-3}, {}),
    "weight decay 2e-3": ({"weight_decay": 2e-3}, {}),
    "weight decay 5e-3": ({"weight_decay": 5e-3}, {}),
    "warm-up over a tenth": ({"warmup": 0.1}, {}),
    "label smoothing 0.1": ({"label_smoothing": 0.1}, {}),
    "flips": ({"flip": True}, {}),
    "bfloat16": ({}, {"precision": "mixed_bfloat16"}),
}


def main() -> None:
    """Trains every variant with every seed and prints a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--seeds", default="1,2,3,4,5")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--precision", choices=PRECISIONS, default="float32")
    parser.add_argument("--data_dir")
    options = parser.parse_args()
    base = TrainConfig(
        strategy="single",
        device="cpu",
        recipe="fast",
        precision=options.precision,
        data_dir=options.data_dir,
    )
    prepared = device_setup.set_up(base)
    from app.training.evaluation import evaluate
    from app.training.training_spec import TrainingSpec, load_data

    fast = RECIPES["fast"]["lenet"]
    dataset = load_data(base)
    for name in options.variants.split(","):
        recipe_changes, config_changes = VARIANTS[name]
        RECIPES["fast"]["lenet"] = dataclasses.replace(fast, **recipe_changes)
        accuracies = []
        for seed in options.seeds.split(","):
            config = dataclasses.replace(
                base, seed=int(seed), epochs=options.epochs, **config_changes
            )
            spec = TrainingSpec(config, dataset)
            strategy = spec.build_strategy(prepared)
            strategy.train_steps(strategy.distribute(spec.batches()), spec.num_steps)
            accuracies.append(evaluate(strategy, dataset).accuracy)
        mean, spread = statistics.mean(accuracies), statistics.pstdev(accuracies)
        shown = ", ".join(f"{accuracy:.4f}" for accuracy in accuracies)
        print(f"| {name} | {mean:.4f} | {spread:.4f} | {shown} |", flush=True)


if __name__ == "__main__":
    main()
