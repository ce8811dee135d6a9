"""Parses `--inject`: a fault with its parameters."""

import dataclasses
from typing import NamedTuple

from app.runtime.errors import ConfigError
from strategies import STRATEGY_OPTIONS

Parameters = dict[str, int | float]


class _Kind(NamedTuple):
    """Describes a type of fault.

    Attributes:
        text: what the fault does.
        parameters: parameter → default.
        counts: the units, a key of `COUNTED`, of which a training needs several for the fault to
            have an effect.
        strategies: strategies that support the fault; empty for all.
        can_begin_later: whether `step=N` delays the fault to step N, from 1.
    """

    text: str
    parameters: Parameters
    counts: str
    strategies: tuple[str, ...] = ()
    can_begin_later: bool = False


# Units that a fault may need several of → how to get more of them.
COUNTED = {
    "parts": "use a strategy with replicas and --num_devices={needed}",
    "replicas": "use a strategy with replicas and --num_devices={needed}",
    "shards": "use a strategy with replicas and --num_devices={needed}",
    "copies": "use a strategy with a copy of the weights for each of {needed} replicas",
    "micro-batches": "use --strategy=pipeline with --micro_batches={needed}, or"
    " --accumulate_steps={needed}",
    "devices of a replica": "use --num_devices={needed}",
}
_SYNCS_BATCH_NORM = tuple(name for name, own in STRATEGY_OPTIONS.items() if "batch_norm" in own)

FAULT_KINDS: dict[str, _Kind] = {
    "drop_gradient": _Kind(
        "a replica's gradient never reaches the sum",
        {"replica": 1},
        "replicas",
        can_begin_later=True,
    ),
    "scale_gradient": _Kind(
        "every gradient is multiplied by a factor",
        {"factor": 2.0},
        "parts",
        can_begin_later=True,
    ),
    "mean_of_means": _Kind(
        "the mean of the shards' means in place of the mean of the batch",
        {},
        "shards",
        can_begin_later=True,
    ),
    "same_shard": _Kind("every replica is given the shard of replica 0", {}, "shards"),
    "shuffle_order": _Kind(
        "a replica takes its shard from another order of examples", {"replica": 1}, "replicas"
    ),
    "perturb_weight": _Kind(
        "a weight of one replica changes outside of the update", {"replica": 1, "step": 3}, "copies"
    ),
    "local_batch_norm": _Kind(
        "moving statistics are not averaged: replica 0's own are saved", {}, "shards"
    ),
    "bf16_all_reduce": _Kind(
        "gradients are rounded to bfloat16 before they are added",
        {},
        "shards",
        can_begin_later=True,
    ),
    "slow_replica": _Kind(
        "a replica takes longer in each step",
        {"replica": 1, "ms": 50},
        "replicas",
    ),
    "lost_micro_batch": _Kind(
        "the gradient of a micro-batch of each replica is never added",
        {"micro_batch": 1},
        "micro-batches",
        can_begin_later=True,
    ),
    "divided_twice": _Kind(
        "gradients are divided by the number of micro-batches once more",
        {},
        "micro-batches",
        can_begin_later=True,
    ),
    "stale_stage": _Kind(
        "a stage computes with the weights of the step before",
        {"stage": 1},
        "devices of a replica",
        ("pipeline",),
    ),
    "forgotten_backward_sum": _Kind(
        "each device keeps its own gradient by its channels in place of the sum over the devices",
        {},
        "devices of a replica",
        ("tensor",),
    ),
    "repeated_bias": _Kind(
        "biases are added once by each device of a replica",
        {},
        "devices of a replica",
        ("tensor",),
    ),
    "wrong_shard": _Kind(
        "gathered weights have the parts of devices 0 and 1 swapped",
        {},
        "replicas",
        ("sharded",),
    ),
    "unsynced_batch_norm": _Kind(
        "BatchNorm normalises each replica's shard separately despite --batch_norm=sync",
        {},
        "replicas",
        _SYNCS_BATCH_NORM,
    ),
}
# Fault → (what it does, its parameters with their defaults).
FAULTS: dict[str, tuple[str, Parameters]] = {
    name: (kind.text, kind.parameters) for name, kind in FAULT_KINDS.items()
}

MIN_STRAGGLER_STEPS = 5  # To detect a straggler: with fewer steps, chance could slow all of them.


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault to inject.

    Attributes:
        name: a key of `FAULTS`.
        parameters: all parameters of the fault, given or default.
        strategy: the strategy that gets the fault; None for the first that supports it.
    """

    name: str
    parameters: Parameters
    strategy: str | None = None

    def __str__(self) -> str:
        values = ",".join(f"{name}={value:g}" for name, value in self.parameters.items())
        return f"{self.name}:{values}" if values else self.name

    @classmethod
    def parse(cls, text: str) -> "Fault":
        """Parses `NAME` or `NAME:parameter=value,…`.

        Raises:
            ConfigError: there is no such fault or parameter, or the value is invalid.
        """
        name, _, rest = text.partition(":")
        if name not in FAULTS:
            raise ConfigError(
                f"--inject={text}: {name!r} is not a fault; use one of {', '.join(FAULTS)}"
            )
        parameters, strategy = dict(FAULTS[name][1]), None
        for item in rest.split(",") if rest else []:
            key, _, value = item.partition("=")
            if key == "strategy" and value:
                strategy = value
            elif key in parameters:
                parameters[key] = _number(text, key, value, type(parameters[key]))
            elif key == "step" and FAULT_KINDS[name].can_begin_later:
                parameters[key] = _number(text, key, value, int)
            else:
                can_begin = FAULT_KINDS[name].can_begin_later and "step" not in parameters
                known = ", ".join([*parameters, *["step"] * can_begin, "strategy"])
                raise ConfigError(
                    f"--inject={text}: {item!r} is not a parameter of {name}, which has {known};"
                    f" for example --inject={cls(name, parameters)}"
                )
        if name == "scale_gradient" and parameters["factor"] == 1:
            raise ConfigError(f"--inject={text} changes nothing; use a factor other than 1")
        return cls(name, parameters, strategy)

    @property
    def spec(self) -> str:
        """The fault and all its parameters, in the form that `parse` reads."""
        return (
            str(self)
            if self.strategy is None
            else (f"{self}{',' if self.parameters else ':'}strategy={self.strategy}")
        )

    @property
    def counts(self) -> str:
        """The units, a key of `COUNTED`, of which a training needs several for an effect."""
        return FAULT_KINDS[self.name].counts

    def can_happen(self, strategy: str, number: int | None) -> bool:
        """Returns whether a strategy supports the fault.

        Args:
            strategy: name of the strategy.
            number: number of the units that the fault `counts`; None if unknown.
        """
        strategies = FAULT_KINDS[self.name].strategies
        return strategy in (strategies or (strategy,)) and (
            number is None or number >= self._num_needed
        )

    def check(self, strategy: str, number: int | None) -> None:
        """Checks that a strategy supports the fault; see `can_happen`.

        Raises:
            ConfigError: it does not, or has too few of the units for the fault to have an effect.
        """
        if self.can_happen(strategy, number):
            return
        flag, kind = f"--inject={self.spec}", FAULT_KINDS[self.name]
        if kind.strategies and strategy not in kind.strategies:
            raise ConfigError(
                f"{flag} cannot happen in the strategy {strategy}, only in"
                f" {' or '.join(kind.strategies)}; choose one of these or another fault"
            )
        needed = self._num_needed
        raise ConfigError(
            f"{flag} needs at least {needed} {self.counts}, got {number};"
            f" {COUNTED[self.counts].format(needed=needed)}"
        )

    @property
    def _num_needed(self) -> int:
        chosen = [self.parameters.get(name, 0) for name in ("replica", "micro_batch", "stage")]
        return 1 if self.counts == "parts" else max(2, int(max(chosen)) + 1)


def _number(text: str, key: str, value: str, kind: type) -> int | float:
    low = {"factor": 1e-30, "ms": 1}.get(key, 0)
    try:
        number = kind(value)
        if not low <= number <= 1e6:
            raise ValueError
    except ValueError:
        what = "a whole number" if kind is int else "a number"
        bounds = f"from {low} to 1000000" if kind is int else "above 0, up to 1000000"
        raise ConfigError(
            f"--inject={text}: {key} must be {what} {bounds}, got {value!r}"
        ) from None
    return number
