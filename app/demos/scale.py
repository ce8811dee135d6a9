"""`demo scale`: scales the learning rate with the batch on more devices."""

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

from app.config import DemoConfig, TrainConfig
from app.demos import demo_setup, presentation
from app.devices.device_setup import Devices
from app.runtime import console
from app.runtime.progress_bar import StepProgress

if TYPE_CHECKING:  # Not imported before its devices are set up.
    from app.data.dataset import ImageDataset

# Among the learning rates that were tried, the rule is clearest at this one, which is far below
# the largest that works. The output says so.
_NUM_TRAIN_EXAMPLES, _LEARNING_RATE = 12_000, 0.01


class Variant(NamedTuple):
    """One of the trainings that are compared.

    Attributes:
        num_devices: number of devices.
        training: configuration of the training.
        note: changes of batch and learning rate, in words.
    """

    num_devices: int
    training: TrainConfig
    note: str


def run(config: DemoConfig) -> None:
    """Trains LeNet on one device, and with a larger batch at two learning rates."""
    prepared = demo_setup.set_up(config)
    from app.training.training_spec import load_data

    variants = create_variants(config, len(prepared.names))
    dataset = load_data(variants[0].training)
    epochs = variants[0].training.epochs
    presentation.begin(
        f"Each device has a shard of {variants[0].training.global_batch_size}, so"
        f" {len(prepared.names)} devices have a batch {len(prepared.names)} times as large,"
        f" and an epoch has {len(prepared.names)} times fewer steps. Is it still the same"
        " training?",
        prepared,
    )
    console.say(
        f"LeNet on {len(dataset.train_images):,} images of {dataset.name},"
        f" {console.count(epochs, 'epoch')}, recipe fast with a small learning rate"
    )
    presentation.show(
        "test accuracy after each epoch",
        ["devices", "batch", "rate", "", "steps/epoch", *(f"epoch {i + 1}" for i in range(epochs))],
        [_row(variant, *train(variant, prepared, dataset)) for variant in variants],
    )
    _conclude()


def _row(variant: Variant, steps_per_epoch: int, accuracies: list[float]) -> list:
    return [
        variant.num_devices,
        variant.training.global_batch_size,
        f"{variant.training.learning_rate:g}",
        variant.note,
        steps_per_epoch,
        *(f"{accuracy:.4f}" for accuracy in accuracies),
    ]


def _conclude() -> None:
    presentation.end(
        "A gradient averaged over more examples is more exact, not larger: with the same"
        " learning rate each step goes as far as before, and an epoch has fewer steps. So"
        " the training makes less progress in the same number of epochs (last row).",
        "A learning rate that grows with the batch makes up for it (middle row): d2l uses"
        " 0.2 at batch 512 for ResNet-18 and 0.1 at 256. This works after the first epoch"
        " only, and while the larger rate is stable: the closer to the largest stable rate,"
        f" the smaller the gain. {_LEARNING_RATE} is used here because it shows the rule; at"
        " 0.03 and 0.1 the larger rate helped in part, and with the LeNet of d2l, batch and"
        " rate doubled, it was worse.",
        then=[
            "demo scale --learning_rate=0.1",
            "demo scale --num_devices=4 --device=cpu",
            "--batch_size=512 --lr=0.4 --num_devices=2 --device=cpu    (the LeNet of d2l, doubled)",
            "demo many_devices",
        ],
    )


def create_variants(config: DemoConfig, num_devices: int) -> list[Variant]:
    """Returns training on one device, on more with a larger batch and scaled rate, and unscaled."""
    base = demo_setup.training(
        config,
        recipe="fast",
        epochs=config.epochs,
        num_train_examples=config.num_train_examples or _NUM_TRAIN_EXAMPLES,
    )
    size, learning_rate = base.global_batch_size, config.learning_rate or _LEARNING_RATE

    def variant(count: int, learning_rate: float, note: str) -> Variant:
        training = dataclasses.replace(
            base, global_batch_size=size * count, learning_rate=learning_rate
        )
        return Variant(count, training, note)

    return [
        variant(1, learning_rate, ""),
        variant(num_devices, learning_rate * num_devices, f"batch and rate × {num_devices}"),
        variant(num_devices, learning_rate, f"batch × {num_devices}"),
    ]


def train(variant: Variant, prepared: Devices, dataset: "ImageDataset") -> tuple[int, list[float]]:
    """Trains a variant; returns steps per epoch and the test accuracy after each epoch."""
    from app.training.evaluation import evaluate

    devices = demo_setup.first(prepared, variant.num_devices)
    spec, strategy, iterator = demo_setup.create(variant.training, devices, dataset)
    accuracies = []
    with StepProgress(spec.steps_per_epoch) as progress:
        for epoch in range(1, variant.training.epochs + 1):
            progress.start(
                f"{console.count(variant.num_devices, 'device')}, batch"
                f" {variant.training.global_batch_size}, rate {spec.learning_rate:g}, epoch {epoch}"
            )
            demo_setup.make_steps(strategy, iterator, spec.steps_per_epoch, progress)
            accuracies.append(evaluate(strategy, dataset).accuracy)
    return spec.steps_per_epoch, accuracies
