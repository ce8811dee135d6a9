"""Trains the models in full with recipe `fast`, and prints their test accuracies.

    make accuracy                       one to two hours; the same command again resumes
    make accuracy ARGS=--only=lenet     one model

Each training is an ordinary `main.py train`, with a run directory of its own under `--out`.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]
# Model → flags and number of seeds.
TRAININGS = {
    "lenet": ("--epochs=10 --global_batch_size=128", 5),
    "resnet18": ("--epochs=10", 1),
}
COMMON = (
    "--recipe=fast --precision=mixed_bfloat16 --dataset=fashion_mnist --device=cpu --num_devices=2"
)


def accuracy_of(model: str, flags: str, seed: int, out: pathlib.Path) -> float:
    """Trains, or reads the result of a finished training; returns the test accuracy."""
    path = out / f"{model}-seed{seed}"
    words = f"{COMMON} {flags} --model={model} --seed={seed} --out={path}".split()
    done = subprocess.run([sys.executable, ROOT / "main.py", "train", *words], check=False)
    if done.returncode:
        sys.exit(done.returncode)
    return json.loads((path / "summary.json").read_text(encoding="utf-8"))["test_accuracy"]


def main() -> None:
    """Trains each model with each seed, and prints a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=TRAININGS)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/accuracy"))
    options = parser.parse_args()
    if not os.environ.get("FASHION_MNIST_DIR"):
        sys.exit("error: $FASHION_MNIST_DIR is not set; set it to the folder with the four files")
    lines = ["| model | flags | mean | each seed |", "| --- | --- | --- | --- |"]
    for model in [options.only] if options.only else TRAININGS:
        flags, num_seeds = TRAININGS[model]
        found = [accuracy_of(model, flags, seed, options.out) for seed in range(num_seeds)]
        each = ", ".join(f"{accuracy:.4f}" for accuracy in found)
        lines.append(f"| {model} | `{flags}` | {statistics.mean(found):.4f} | {each} |")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
