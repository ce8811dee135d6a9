"""Trainings of other frameworks, which are verified and compared like strategies."""

import dataclasses
from collections.abc import Iterable
from typing import Any

from app.config.names import DEFAULT_LOGICAL_CPUS, NUM_TRAIN_EXAMPLES
from app.config.split_constraints import shown_flag
from app.runtime.errors import ConfigError

_MODELS = ("lenet", "resnet18")
# What the programs in frameworks/ compute: other values of these options are other trainings.
_ONLY = {"recipe": "d2l", "precision": "float32", "batch_norm": "average", "jit_compile": False}


@dataclasses.dataclass(frozen=True)
class Framework:
    """Describes a training by a program in `frameworks/`.

    Attributes:
        title: name of the framework.
        package: the Python package that the program needs.
        program: file name of the program.
        flags: flags that select the kind of training.
        flag_of_replicas: flag for the number of replicas.
        splits_evenly: whether all replicas have equally many examples.
        syncs_batch_norm: whether BatchNorm normalises over the whole batch.
    """

    title: str
    package: str
    program: str
    flags: tuple[str, ...]
    flag_of_replicas: str
    splits_evenly: bool
    syncs_batch_norm: bool = False


_JAX = ("JAX", "jax", "jax_lenet.py")
FRAMEWORKS = {
    "torch_ddp": Framework(
        "PyTorch", "torch", "torch_lenet.py", (), "processes", splits_evenly=False
    ),
    "jax_jit": Framework(
        *_JAX, ("--mode=jit",), "num_devices", splits_evenly=True, syncs_batch_norm=True
    ),
    "jax_pmap": Framework(*_JAX, ("--mode=pmap",), "num_devices", splits_evenly=True),
}
FRAMEWORK_NAMES = tuple(FRAMEWORKS)


def without_frameworks(strategies: Iterable[str]) -> tuple[str, ...]:
    """Returns the strategies of this project."""
    return tuple(name for name in strategies if name not in FRAMEWORKS)


def check_frameworks(config: Any) -> None:
    """Checks that the frameworks among a command's strategies support its training.

    Raises:
        ConfigError: one does not, or no strategy of this project is compared with them.
    """
    names = [name for name in config.strategies if name in FRAMEWORKS]
    if not names:
        return
    if not without_frameworks(config.strategies):
        raise ConfigError(
            f"--strategies={','.join(names)}: has no strategy to compare with; add single"
        )
    if config.model not in _MODELS:
        raise ConfigError(
            f"--model={config.model} does not run in {names[0]}; use {' or '.join(_MODELS)}"
        )
    for option, value in _ONLY.items():
        if getattr(config, option) != value:
            flag = shown_flag(option, getattr(config, option))
            raise ConfigError(
                f"{flag} does not run in {names[0]}; use --{option}={value}, or leave"
                f" {','.join(names)} out of --strategies"
            )
    if config.num_gpus or config.device == "gpu":
        raise ConfigError(
            f"{names[0]} runs on CPUs here; use --device=cpu --num_devices=N, or leave it out of"
            " --strategies"
        )
    _check_even_split(config, [name for name in names if FRAMEWORKS[name].splits_evenly])


def num_framework_replicas(config: Any) -> int:
    """Returns the number of replicas of a training by a framework."""
    return config.num_devices_of_all_workers or DEFAULT_LOGICAL_CPUS


def _check_even_split(config: Any, names: list[str]) -> None:
    """Checks that the replicas divide each batch evenly, as JAX requires."""
    replicas, size = num_framework_replicas(config), config.global_batch_size
    num_examples = config.num_train_examples or NUM_TRAIN_EXAMPLES
    last = num_examples % size if config.last_batch == "keep" else 0
    if names and size % replicas:
        raise ConfigError(
            f"--global_batch_size={size} does not divide over {replicas} replicas, as {names[0]}"
            f" requires; use --global_batch_size={max(1, size // replicas) * replicas}"
        )
    if names and last % replicas:
        raise ConfigError(
            f"the last batch of {last} examples does not divide over {replicas} replicas, as"
            f" {names[0]} requires; use --last_batch=drop"
        )
