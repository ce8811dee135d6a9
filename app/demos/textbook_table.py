"""`demo train`: compares LeNet and ResNet-18 on one device and on several with d2l's results."""

import pathlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from app.config import DemoConfig, TrainConfig
from app.config.names import NUM_TRAIN_EXAMPLES
from app.config.training_configs import training_config
from app.demos import presentation, textbook_figures
from app.performance import interval
from app.performance.case import Case, Sample
from app.performance.rounds import measure
from app.records.history import Summary, load_required_summary
from app.records.run_naming import default_out, named_path
from app.runtime import console
from app.runtime.errors import TrainingFailedError
from app.runtime.progress_bar import StepProgress
from app.runtime.training_process import train_in_child_process

_ROUNDS = 5
# Batch of ResNet-18 per device: d2l's on GPUs; on a CPU one step of it takes seconds.
_RESNET_SHARD, _RESNET_SHARD_ON_CPU = 256, 64


class Run(NamedTuple):
    """A finished training of LeNet.

    Attributes:
        path: directory of the run.
        summary: summary of the run.
    """

    path: pathlib.Path
    summary: Summary


def run(config: DemoConfig) -> None:
    """Trains LeNet on one device and on several, measures both models, and prints the table.

    Raises:
        TrainingFailedError: a training did not finish; the program exits with its exit code.
    """
    epochs = config.epochs
    presentation.begin(
        "d2l trains LeNet, then ResNet-18, on one GPU and on two. Here LeNet is trained"
        f" for {console.count(epochs, 'epoch')} (in d2l: {textbook_figures.EPOCHS}) on one"
        " device and on several, each in its own process; then the speed of both models is"
        " measured."
    )
    trainings = lenet_trainings(config)
    runs = [_train(training, number) for number, training in enumerate(trainings, start=1)]
    cases = create_cases(config, runs)
    with StepProgress(1) as progress:
        samples = measure(cases, repeats=_ROUNDS, progress=progress).samples
    print_results(runs, samples)


def lenet_trainings(config: DemoConfig) -> list[TrainConfig]:
    """Returns the trainings of LeNet: on one device, and on the requested (or all) devices."""
    base = config.for_training()
    several = config.num_devices or config.num_gpus
    return [_on(base, 1), base if several is None else _on(base, several)]


def create_cases(config: DemoConfig, runs: Sequence[Run]) -> list[Case]:
    """Returns the cases to measure: both models on as many devices as LeNet was trained on."""
    counts = sorted({run.summary.num_replicas for run in runs})
    on_gpus = "GPU" in runs[0].summary.devices[0]
    shard = _RESNET_SHARD if on_gpus else _RESNET_SHARD_ON_CPU
    base = config.for_training(
        device="gpu" if on_gpus else "cpu",
        num_gpus=None,
        last_batch="drop",
        num_train_examples=None,  # The time of a step does not depend on it.
        epochs=1,
    )
    cases = [Case(_on(base, count)) for count in counts]
    return cases + [
        Case(_on(base, count, model="resnet18", global_batch_size=shard * count))
        for count in counts
    ]


def _on(config: TrainConfig, num_devices: int, **options: Any) -> TrainConfig:
    """Returns a training on some of the devices, selected with the same flags."""
    if config.num_gpus:
        return training_config(config, "manual", num_gpus=num_devices, num_devices=None, **options)
    return training_config(config, "manual", num_devices=num_devices, **options)


def _train(training: TrainConfig, number: int) -> Run:
    path = named_path(f"{default_out(training.strategy, training.model)}-{number}")
    exit_code = train_in_child_process(["train", *training.flags_for(TrainConfig)], path)
    if exit_code:
        raise TrainingFailedError(training.strategy, exit_code)
    console.say()
    return Run(path, load_required_summary(path))


def print_results(runs: Sequence[Run], samples: Sequence[Sample]) -> None:
    """Prints the tables and the conclusions."""
    resnets = [s for s in samples if s.case.config.model == "resnet18"]
    simulated = runs[-1].summary.simulated_devices
    console.say()
    _show_beside_the_textbook(_title(runs[0].summary), map(_lenet_row, runs), "lenet", simulated)
    _show_beside_the_textbook(
        "ResNet-18, timed for some steps but not trained, sec/epoch extrapolated to"
        f" {NUM_TRAIN_EXAMPLES:,} images; in d2l: batch 256 on one GPU, 512 on two",
        map(_resnet_row, resnets),
        "resnet18",
        simulated,
    )
    presentation.show(
        f"images a second, medians of {_ROUNDS} rounds in turn, with 95 % intervals",
        ["model", "devices", "batch", "images/s", "times as fast as on one"],
        [
            [
                s.case.config.model,
                s.facts.num_replicas,
                s.facts.global_batch_size,
                presentation.whole(interval.median(s.rates)),
                _ratio(s, samples),
            ]
            for s in samples
        ],
        simulated=simulated,
    )
    _conclude(runs, resnets)


def _show_beside_the_textbook(title: str, own: Iterable[list], model: str, simulated: bool) -> None:
    header = ["program", "on", "test acc", "sec/epoch"]
    presentation.show(title, header, [*own, *_textbook_rows(model)], simulated=simulated)


def _title(summary: Summary) -> str:
    num_images = summary.num_train_examples
    images = "all" if num_images == NUM_TRAIN_EXAMPLES else "a subset of"
    return (
        f"LeNet, batch {summary.global_batch_size}, learning rate {summary.learning_rate:g}; yours:"
        f" {console.count(summary.epochs, 'epoch')} of {images} {num_images:,} images"
        f" ({summary.dataset})"
    )


def _lenet_row(run: Run) -> list:
    summary = run.summary
    return [
        f"yours, {summary.epochs} epochs",
        _devices(summary.devices),
        f"{summary.test_accuracy:.2f}",
        f"{summary.epoch_sec:.1f}",
    ]


def _resnet_row(s: Sample) -> list:
    return [
        f"yours, batch {s.facts.global_batch_size}",
        _devices(s.facts.devices),
        "not trained",
        f"{NUM_TRAIN_EXAMPLES / interval.median(s.rates).value:.0f} projected",
    ]


def _conclude(runs: Sequence[Run], resnets: Sequence[Sample]) -> None:
    first, last = runs[0].summary, runs[-1].summary
    if last.num_replicas == 1:
        presentation.say(
            "TensorFlow can train on one device of this machine only, so nothing was compared;"
            " --device=cpu --num_devices=2 uses logical CPU devices."
        )
    sec = textbook_figures.EPOCHS * NUM_TRAIN_EXAMPLES / interval.median(resnets[-1].rates).value
    needed = f"{sec / 3600:.1f} hours" if sec > 3600 else f"{sec / 60:.0f} minutes"
    accuracies = [s.test_accuracy for s in (first, last) if s.test_accuracy is not None]
    apart = abs(accuracies[0] - accuracies[-1])
    presentation.end(
        f"Accuracy: with the same batch, one device and {last.num_replicas} devices make"
        f" the same training within rounding (here {apart:.4f} apart after"
        f" {console.count(first.epochs, 'epoch')}). Your accuracies are comparable with"
        f" those of d2l only with --epochs={textbook_figures.EPOCHS}.",
        "Speed: in d2l, LeNet trained by hand is slower on two GPUs than on one: a step of"
        " so small a network ends before a second GPU makes up for the all-reduce."
        " ResNet-18 has more work in each step, and on two GPUs a batch twice as large."
        + (
            " Your devices share one processor: they show that it works, and nothing of speed."
            if last.simulated_devices
            else ""
        ),
        then=[
            f"demo train --epochs={textbook_figures.EPOCHS}    (the number of epochs of d2l)",
            "--model=resnet18 --batch_size=512 --num_devices=2"
            f"    (all of ResNet-18's: about {needed} here)",
            f"predict --run={runs[-1].path}",
            "benchmark --strategies=manual,mirrored --num_devices=1,2",
        ],
    )


def _ratio(sample: Sample, everything: Sequence[Sample]) -> str:
    """Returns the speed-up over the same model on one device; "" for that case itself."""
    base = next(s for s in everything if s.case.config.model == sample.case.config.model)
    return "" if base is sample else str(interval.ratio(sample.rates, base.rates))


def _textbook_rows(model: str) -> list[list[str]]:
    return [
        [
            f"d2l, {figure.program}, {textbook_figures.EPOCHS} epochs",
            f"its {console.count(figure.num_gpus, 'GPU')}",
            f"{figure.accuracy:.2f}",
            f"{figure.epoch_sec:g}",
        ]
        for figure in textbook_figures.FIGURES
        if figure.model == model
    ]


def _devices(names: Sequence[str]) -> str:
    return ", ".join(name.removeprefix("/device:") for name in names)
