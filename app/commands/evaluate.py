"""`evaluate`: computes the test accuracy of a run, or classifies images, on any strategy."""

import numpy as np

from app.data.dataset import CLASS_NAMES
from app.data.image_files import load_image_files
from app.devices import device_setup
from app.options import Config
from app.records.caveats import DATASET_CAVEATS
from app.runtime import console
from app.training.run_reader import SavedRun


def run(config: Config) -> float | np.ndarray:
    """Evaluates a run.

    Returns:
        The accuracy over the whole test set, a fraction; with `--images`, the probabilities
        `(N, num_classes)` of the images.
    """
    saved = SavedRun.open(config)
    if config.evaluation.images:
        return _classify(config, saved)
    prepared = device_setup.set_up(saved.config)
    dataset = saved.load_dataset()
    strategy = saved.rebuild(prepared)
    from app.training.evaluation import evaluate

    totals = evaluate(strategy, dataset)
    step = saved.checkpoint.progress.step
    console.say(
        f"{saved.config.training.model} of {config.evaluation.run}, step {step}, on {dataset.name}:"
        f" {totals.correct:,} of {totals.examples:,} right, test loss {totals.loss:.4f}"
    )
    if dataset.name in DATASET_CAVEATS:
        console.warn(DATASET_CAVEATS[dataset.name])
    console.say(f"test acc: {totals.accuracy:.4f} with {strategy.name} on {strategy.devices}")
    return totals.accuracy


def _classify(config: Config, saved: SavedRun) -> np.ndarray:
    """Prints the class and its probability of each image, in the given order."""
    names, images = load_image_files(config.evaluation.images)
    prepared = device_setup.set_up(saved.config)
    strategy = saved.rebuild(prepared)
    probabilities = _softmax(strategy.predict(images))
    rows = [
        [name, CLASS_NAMES[np.argmax(p)], f"{np.max(p):.4f}"]
        for name, p in zip(names, probabilities, strict=True)
    ]
    title = f"{saved.config.training.model} of {config.evaluation.run}, {strategy.name} on"
    console.print_table(f"{title} {strategy.devices}", ["image", "class", "probability"], rows)
    return probabilities


def _softmax(logits: np.ndarray) -> np.ndarray:
    """Returns the probabilities of logits, both of shape `(n, num_classes)`."""
    exponentials = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)
