"""Lists the experiments by name, with their options and durations. Does not import TensorFlow."""

import dataclasses
import difflib
import importlib
from collections.abc import Iterable, Set

from app.config import DemoConfig
from app.runtime.errors import ConfigError

_DEVICES = {"num_devices", "num_gpus", "device", "verbosity"}
_DATA = {"dataset", "data_dir", "allow_unverified_data", "seed"}


@dataclasses.dataclass(frozen=True)
class Experiment:
    """Describes one experiment, which a module in `app/demos` runs.

    Attributes:
        text: description for the list.
        duration: duration on a laptop's CPU, in words.
        options: names of the options that the experiment uses.
        num_devices: default number of devices.
        least_devices: smallest useful number of devices.
        module: module of `app/demos` that runs it; "" for the module of the experiment's name.
    """

    text: str
    duration: str
    options: frozenset[str]
    num_devices: int = 2
    least_devices: int = 2
    module: str = ""


def _experiment(
    text: str,
    duration: str,
    options: Set[str] = frozenset(),
    *,
    module: str = "",
    **numbers: int,
) -> Experiment:
    return Experiment(text, duration, frozenset(_DEVICES | options), module=module, **numbers)


# In the order of the two chapters of d2l, then the answers to their exercises.
EXPERIMENTS = {
    "allreduce": _experiment(
        "every device gets the sum of the tensors of all devices", "seconds", {"all_reduce"}
    ),
    "split_batch": _experiment(
        "which rows of a batch go to which device, and how the loss is scaled",
        "seconds",
        num_devices=3,
    ),
    "replicate": _experiment(
        "weight and gradient on each device, before and after one step",
        "10 seconds",
        {"all_reduce", *_DATA},
    ),
    "train": _experiment(
        "LeNet and ResNet-18 on one device and on two: the table of d2l and yours",
        "4 minutes",
        {"all_reduce", "epochs", "num_train_examples", *_DATA},
        module="textbook_table",
    ),
    "scale": _experiment(
        "more devices, a larger batch: what becomes of the learning rate",
        "a minute",
        {"all_reduce", "epochs", "learning_rate", "num_train_examples", *_DATA},
    ),
    "many_devices": _experiment(
        "the same training on 1, 2, 4, 8 and 16 devices",
        "2 minutes",
        {"all_reduce", *_DATA},
        num_devices=16,
    ),
    "slow_replica": _experiment(
        "one device is slower: who waits, and how to divide the work",
        "half a minute",
        {"all_reduce", *_DATA},
    ),
    "predict": _experiment(
        "prediction on several devices: the same probabilities, in order",
        "15 seconds",
        {"num_train_examples", *_DATA},
        module="split_prediction",
    ),
    "pipeline": _experiment(
        "layers on several devices: stages and schedules, bitwise identical to data parallelism",
        "15 seconds",
        _DATA,
        module="pipeline_stages",
    ),
    "tensor": _experiment(
        "channels of each layer on several devices, and the sum in the backward pass",
        "15 seconds",
        _DATA,
        module="tensor_parts",
    ),
    "sharded": _experiment(
        "one part of weights and optimizer state on each device: what is stored and sent",
        "15 seconds",
        _DATA,
        module="sharded_state",
    ),
    "order": _experiment(
        "(a + b) + c is not a + (b + c): the effect of the summation order",
        "half a minute",
        _DATA,
        num_devices=4,
        least_devices=3,
    ),
}


def check_options(name: str, given: Iterable[str]) -> None:
    """Checks that an experiment uses every option of the command line.

    Raises:
        ConfigError: it does not use an option. Unknown experiments are not reported here.
    """
    for option in sorted(given):
        if name in EXPERIMENTS and option not in EXPERIMENTS[name].options:
            owners = [other for other, e in EXPERIMENTS.items() if option in e.options]
            raise ConfigError(
                f"--{option} is not an option of demo {name}, only of"
                f" {', '.join(f'demo {owner}' for owner in owners)}; leave it out"
            )


def find_experiment(config: DemoConfig) -> Experiment:
    """Returns the experiment that `config` names.

    Raises:
        ConfigError: there is no such experiment, or there are too few devices for it.
    """
    name = config.experiment
    if name not in EXPERIMENTS:
        nearest = difflib.get_close_matches(name, EXPERIMENTS, n=1, cutoff=0.5)
        proposal = f"; did you mean {nearest[0]}?" if nearest else ""
        raise ConfigError(
            f"{name!r} is not an experiment; choose one of {', '.join(EXPERIMENTS)}{proposal}"
        )
    experiment = EXPERIMENTS[name]
    asked = config.num_devices or config.num_gpus
    if asked and asked < experiment.least_devices:
        flag = "num_devices" if config.num_devices else "num_gpus"
        raise ConfigError(
            f"demo {name} needs at least {experiment.least_devices} devices, got"
            f" --{flag}={asked}; use --{flag}={experiment.num_devices}"
        )
    return experiment


def run_experiment(config: DemoConfig) -> None:
    """Runs the experiment that `config` names.

    Raises:
        ConfigError: there is no such experiment, or there are too few devices for it.
    """
    module = find_experiment(config).module or config.experiment
    importlib.import_module(f"app.demos.{module}").run(config)
