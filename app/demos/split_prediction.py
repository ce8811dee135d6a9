"""`demo predict`: predicts on several devices, with equal results in input order."""

from typing import TYPE_CHECKING

import numpy as np

from app.config import DemoConfig, TrainConfig
from app.demos import demo_setup, presentation
from app.devices.device_setup import Devices
from app.runtime import console
from app.runtime.progress_bar import StepProgress

if TYPE_CHECKING:  # Not imported before its devices are set up.
    from app.data.dataset import ImageDataset
    from strategies.base import Strategy

_NUM_TRAIN_EXAMPLES = 6000
_NUM_SHOWN = 5


def run(config: DemoConfig) -> None:
    """Trains briefly, then predicts on one device and on all devices."""
    prepared = demo_setup.set_up(config)
    from app.data.dataset import CLASS_NAMES
    from app.training.evaluation import softmax
    from app.training.training_spec import load_data

    training = demo_setup.training(
        config,
        recipe="fast",
        epochs=1,
        num_train_examples=config.num_train_examples or _NUM_TRAIN_EXAMPLES,
    )
    dataset = load_data(training)
    presentation.begin(
        "A prediction needs no communication: each device classifies its part of the"
        " images, and the parts are concatenated in order.",
        prepared,
    )
    many, one = train_then_copy(training, prepared, dataset)
    shown = dataset.test_images[:_NUM_SHOWN]
    few, few_on_one = (softmax(strategy.predict(shown)) for strategy in (many, one))
    names = _device_of_each(len(shown), prepared.names)
    presentation.show(
        f"{_NUM_SHOWN} test images, LeNet after an epoch of {len(dataset.train_images):,} images",
        ["image", "classified on", "class", "truth", "probability", "on one device", "same bits?"],
        [
            [
                i,
                names[i],
                CLASS_NAMES[few[i].argmax()],
                CLASS_NAMES[dataset.test_labels[i]],
                f"{few[i].max():.6f}",
                f"{few_on_one[i].max():.6f}",
                _same_bits(few[i], few_on_one[i]),
            ]
            for i in range(len(shown))
        ],
    )
    _show_short_shards(many, one, dataset.test_images)
    _compare_all(many, one, dataset)


def train_then_copy(
    training: TrainConfig, prepared: Devices, dataset: "ImageDataset"
) -> "tuple[Strategy, Strategy]":
    """Trains an epoch on all devices; returns that strategy, and a copy of it on the first device.

    Both have the same weights.
    """
    spec, many, iterator = demo_setup.create(training, prepared, dataset)
    with StepProgress(spec.num_steps) as progress:
        progress.start("training briefly, so that there is a model to predict with", spec.num_steps)
        demo_setup.make_steps(many, iterator, spec.num_steps, progress)
    console.say()
    _, one, _ = demo_setup.create(training, demo_setup.first(prepared, 1), dataset)
    one.load_state(many.state())
    return many, one


def _show_short_shards(many: "Strategy", one: "Strategy", images: np.ndarray) -> None:
    """Predicts batches of several sizes, some smaller than the number of devices."""
    from strategies.collectives import shard_sizes

    rows = []
    for num_images in sorted({1, many.num_replicas, many.num_replicas + 1, 101}):
        logits, expected = (s.predict(images[:num_images]) for s in (many, one))
        sizes = shard_sizes(num_images, many.num_replicas)
        right = np.array_equal(logits.argmax(axis=1), expected.argmax(axis=1))
        rows.append(
            [
                num_images,
                " ".join(map(str, sizes)),
                len(logits),
                "the same" if right else "OTHERS",
                f"{np.abs(logits - expected).max():.2g}",
            ]
        )
    presentation.show(
        "batches that do not divide evenly",
        ["images", "on each device", "predictions", "classes, against one device", "logits apart"],
        rows,
    )


def _compare_all(many: "Strategy", one: "Strategy", dataset: "ImageDataset") -> None:
    """Compares the predictions of all test images and prints the conclusion."""
    from app.training.evaluation import softmax

    images = dataset.test_images
    probabilities, expected = (softmax(s.predict(images)) for s in (many, one))
    num_same = sum(_same_bits(p, e) == "yes" for p, e in zip(probabilities, expected, strict=True))
    num_classes = int(np.sum(probabilities.argmax(axis=1) == expected.argmax(axis=1)))
    accuracy = np.mean(probabilities.argmax(axis=1) == dataset.test_labels)
    apart = np.abs(probabilities - expected).max()
    presentation.end(
        f"All {len(images):,} test images: the same class on {many.num_replicas} devices as"
        f" on one for {num_classes:,} of them (accuracy {accuracy:.4f}), bitwise identical"
        f" logits for {num_same:,}; the largest difference of a probability is {apart:.2g}."
        " Where logits differ slightly, a matrix product with another number of rows added"
        " in another order: that is rounding, not an error.",
        "A device with an empty shard gets one blank image, whose result is dropped: some"
        " kernels fail on empty input. In training this would change BatchNorm's"
        " statistics, so a batch smaller than the number of devices is refused there.",
        then=[
            "--recipe=fast --epochs=1 --out=runs/first",
            "predict --run=runs/first --num_devices=4 --device=cpu",
            "demo order",
        ],
    )


def _same_bits(a: np.ndarray, b: np.ndarray) -> str:
    return "yes" if a.tobytes() == b.tobytes() else "no"


def _device_of_each(num_images: int, names: list[str]) -> list[str]:
    """Returns the device that classifies each image of a batch."""
    from strategies.collectives import shard_sizes

    sizes = shard_sizes(num_images, len(names))
    return [name for name, size in zip(names, sizes, strict=True) for _ in range(size)]
