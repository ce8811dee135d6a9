"""Writes the weights and batches from which a program of another framework trains.

Functions with a `send` argument run in a separate process.
"""

import dataclasses
import pathlib
from collections.abc import Callable

import numpy as np

from app.options import Config
from app.verification.recorded import Recorded

START_FILE, BATCHES_FILE = "start.npz", "batches.npz"


@dataclasses.dataclass(frozen=True)
class TrainingFiles:
    """The files of a training, and their contents.

    Attributes:
        start: initial weights and statistics, by Keras name.
        batches: images, labels and the order of the examples of each epoch.
        recorded: a recording with everything that is independent of the framework.
        steps_per_epoch: batches per epoch.
    """

    start: pathlib.Path
    batches: pathlib.Path
    recorded: Recorded
    steps_per_epoch: int


def write_training_files(
    send: Callable[[tuple], None], config: Config, num_steps: int | None, folder: pathlib.Path
) -> TrainingFiles:
    """Writes initial weights, images and orders of a training to `folder`.

    Args:
        send: called with `("warning", text)`.
        config: options of the training.
        num_steps: number of steps to train; None for all epochs.
        folder: output folder.
    """
    from app.verification.tasks import recorded_as, set_up

    devices, spec = set_up(send, config, None)
    from app.data.input_pipeline import epoch_order  # Imports TensorFlow.

    model = spec.build_model()
    num_epochs = (
        config.training.epochs if num_steps is None else -(-num_steps // spec.steps_per_epoch)
    )
    dataset = spec.dataset
    order = [
        epoch_order(dataset.num_train_examples, config.training.seed, e)[0]
        for e in range(num_epochs)
    ]
    start, batches = folder / START_FILE, folder / BATCHES_FILE
    np.savez(start, **{v.path: v.numpy() for v in model.variables if v.dtype == "float32"})
    np.savez(
        batches,
        images=dataset.train_images,
        labels=dataset.train_labels,
        order=np.stack(order),
        test_images=dataset.test_images,
        test_labels=dataset.test_labels,
    )
    has_batch_norm = any("/moving_" in variable.path for variable in model.variables)
    recorded = dataclasses.replace(recorded_as(spec, devices), has_batch_norm=has_batch_norm)
    return TrainingFiles(start, batches, recorded, spec.steps_per_epoch)
