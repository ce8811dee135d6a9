"""Sets up devices, data and strategies for the experiments."""

import contextlib
import dataclasses
import pathlib
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from app.config import DemoConfig, TrainConfig
from app.demos.registry import find_experiment
from app.devices import device_setup
from app.devices.device_setup import Devices
from app.runtime import console
from app.runtime.progress_bar import StepProgress

if TYPE_CHECKING:  # Not imported before its devices are set up.
    from app.data.dataset import ImageDataset
    from app.training.training_spec import TrainingSpec
    from app.verification.straggler import SendTime
    from app.verification.trace import Trace
    from strategies.base import StepTotals, Strategy
    from strategies.copies import State
    from strategies.observer import Observer

_STEPS_PER_CALL = 20  # So that the progress bar updates and Ctrl-C takes effect.


def set_up(config: DemoConfig) -> Devices:
    """Sets up the requested devices, or the experiment's default number of devices.

    By default, GPUs are used only if there are enough of them.

    Raises:
        DeviceError: GPUs are required and there are too few.
    """
    own = find_experiment(config).num_devices
    asked = config.num_devices or config.num_gpus
    if not asked and config.device == "auto":
        num_gpus = device_setup.count_gpus(config)
        if 0 < num_gpus < own:
            console.say(
                f"{console.count(num_gpus, 'GPU')} here, and {own} devices are needed: logical CPU"
                " devices instead; --device=gpu insists"
            )
        if num_gpus < own:
            config = dataclasses.replace(config, device="cpu", num_devices=own)
    elif not asked and config.device == "cpu":
        config = dataclasses.replace(config, num_devices=own)
    return device_setup.set_up(config.for_training())


def first(prepared: Devices, num_devices: int) -> Devices:
    """Returns the first `num_devices` devices."""
    return dataclasses.replace(prepared, names=prepared.names[:num_devices])


def training(config: DemoConfig, **options: Any) -> TrainConfig:
    """Returns the configuration of a training with `manual` on devices that are set up."""
    return config.for_training(**{"num_devices": None, "num_gpus": None, **options})


def create(
    config: TrainConfig, prepared: Devices, dataset: "ImageDataset"
) -> "tuple[TrainingSpec, Strategy, Any]":
    """Builds what `config` trains; returns the spec, the strategy, and the iterator of its steps.

    Raises:
        ConfigError: a replica would get no example of a batch.
    """
    from app.training.all_reduce_self_test import run_all_reduce_self_test
    from app.training.training_spec import TrainingSpec

    config.check_shards(len(prepared.names), len(dataset.train_images))
    spec = TrainingSpec(config, dataset)
    strategy = spec.build_strategy(prepared)
    run_all_reduce_self_test(strategy)
    return spec, strategy, strategy.distribute(spec.batches())


def make_steps(
    strategy: "Strategy", iterator: Any, num_steps: int, progress: StepProgress | None = None
) -> "StepTotals":
    """Runs optimizer steps, a few per call, and returns their totals."""
    from strategies.base import StepTotals

    totals, done = StepTotals(0.0, 0, 0), 0
    while done < num_steps:
        chunk = min(_STEPS_PER_CALL, num_steps - done)
        totals = totals.plus(strategy.train_steps(iterator, chunk))
        done += chunk
        if progress:
            progress.message(("step", done))
    return totals


def state(strategy: "Strategy") -> "State":
    """Returns the arrays of a strategy's model, without optimizer state."""
    return {k: v for k, v in strategy.state().items() if k.startswith("model/")}


@contextlib.contextmanager
def recorded(
    strategy: "Strategy", iterator: Any, *, num_steps: int, inner: "Observer | None" = None
) -> "Iterator[tuple[Trace, list[list[SendTime]]]]":
    """Runs the first steps of a strategy and records what each replica computes.

    Args:
        strategy: a built strategy that has not trained yet.
        iterator: iterator of its steps.
        num_steps: number of steps.
        inner: another observer, which may modify values.

    Yields:
        The trace, which is deleted afterwards; and for each step and replica, the time at which it
        sent its gradients.
    """
    from app.verification.recorder import Recorder
    from app.verification.trace import Trace

    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "trace"
        times = Recorder(strategy, inner).record(iterator, num_steps=num_steps, path=path)
        with Trace(path) as trace:
            yield trace, times
