"""`predict`: prints class and probability of images; the batch is split over the replicas."""

import numpy as np

from app.config import PredictConfig
from app.data.dataset import CLASS_NAMES
from app.data.image_files import load_image_files
from app.devices import device_setup
from app.records.caveats import DATASET_CAVEATS
from app.runtime import console
from app.training.run_reader import SavedRun

_NUM_TEST_IMAGES = 10


def run(config: PredictConfig) -> np.ndarray:
    """Prints a row per image, in the given order; returns `(N, num_classes)` probabilities."""
    saved = SavedRun.open(config)
    prepared = device_setup.set_up(saved.config)
    if config.images:
        names, images = load_image_files(config.images)
        header = ["image", "class", "probability"]
        truths = []
    else:
        dataset = saved.load_dataset()
        images, labels = dataset.test_images[:_NUM_TEST_IMAGES], dataset.test_labels
        names = [f"{dataset.name} test image {i}" for i in range(len(images))]
        header = ["image", "class", "probability", "truth"]
        truths = [CLASS_NAMES[label] for label in labels[: len(images)]]
        if dataset.name in DATASET_CAVEATS:
            console.warn(DATASET_CAVEATS[dataset.name])
    from app.training.evaluation import softmax

    strategy = saved.rebuild(prepared)
    probabilities = softmax(strategy.predict(images))
    rows = [
        [name, CLASS_NAMES[np.argmax(p)], f"{np.max(p):.4f}"]
        for name, p in zip(names, probabilities, strict=True)
    ]
    if truths:
        rows = [[*row, truth] for row, truth in zip(rows, truths, strict=True)]
    title = f"{saved.config.model} of {config.run}, {strategy.name} on {strategy.devices}"
    console.print_table(title, header, rows)
    return probabilities
