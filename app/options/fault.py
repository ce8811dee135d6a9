"""Parses `--inject`: a fault with its parameters."""

import dataclasses
from typing import Any, NamedTuple

from app.options.option import did_you_mean
from app.runtime.errors import ConfigError
from strategies import STRATEGY_OPTIONS

Parameters = dict[str, int | float]


class FaultKind(NamedTuple):
    """Describes a type of fault.

    Attributes:
        text: what the fault does.
        parameters: parameter → default.
        counts: the number, a key of `COUNTED`, that must be several for an effect; "" for none.
        can_begin_later: whether `step=N` delays the fault to step N, from 1.
        strategies: strategies that support the fault; empty for all.
    """

    text: str
    parameters: Parameters
    counts: str
    can_begin_later: bool = False
    strategies: tuple[str, ...] = ()


# Number of a `strategies.layout.Layout` that a fault may count → its unit, how to get more of it.
COUNTED = {
    "num_replicas": ("replicas", "use a strategy with replicas and --num_devices={needed}"),
    "num_shards": ("shards", "use a strategy with replicas and --num_devices={needed}"),
    "num_copies": (
        "copies", "use a strategy with a copy of the weights for each of {needed} replicas"),
    "shards_per_replica": (
        "micro-batches", "use --strategy=pipeline with --micro_batches={needed}, or"
        " --accumulate_steps={needed}"),
    "devices_per_replica": ("devices of a replica", "use --num_devices={needed}"),
}  # fmt: skip
_SYNCS_BATCH_NORM = tuple(name for name, own in STRATEGY_OPTIONS.items() if "batch_norm" in own)

# fmt: off
FAULTS: dict[str, FaultKind] = {
    "drop_gradient": FaultKind(
        "a replica's gradient never reaches the sum", {"replica": 1}, "num_replicas", True),
    "scale_gradient": FaultKind(
        "every gradient is multiplied by a factor", {"factor": 2.0}, "", True),
    "mean_of_means": FaultKind(
        "the mean of the shards' means in place of the mean of the batch", {}, "num_shards", True),
    "same_shard": FaultKind("every replica is given the shard of replica 0", {}, "num_shards"),
    "shuffle_order": FaultKind(
        "a replica takes its shard from another order of examples", {"replica": 1}, "num_replicas"),
    "perturb_weight": FaultKind(
        "a weight of one replica changes outside of the update", {"replica": 1, "step": 3},
        "num_copies"),
    "local_batch_norm": FaultKind(
        "moving statistics are not averaged: replica 0's own are saved", {}, "num_shards"),
    "bf16_all_reduce": FaultKind(
        "gradients are rounded to bfloat16 before they are added", {}, "num_shards", True),
    "slow_replica": FaultKind(
        "a replica takes longer in each step", {"replica": 1, "ms": 50}, "num_replicas"),
    "lost_micro_batch": FaultKind(
        "the gradient of a micro-batch of each replica is never added", {"micro_batch": 1},
        "shards_per_replica", True),
    "divided_twice": FaultKind(
        "gradients are divided by the number of micro-batches once more", {}, "shards_per_replica",
        True),
    "stale_stage": FaultKind(
        "a stage computes with the weights of the step before", {"stage": 1},
        "devices_per_replica", strategies=("pipeline",)),
    "forgotten_backward_sum": FaultKind(
        "each device keeps its own gradient by its channels in place of the sum over the devices",
        {}, "devices_per_replica", strategies=("tensor",)),
    "repeated_bias": FaultKind(
        "biases are added once by each device of a replica", {}, "devices_per_replica",
        strategies=("tensor",)),
    "wrong_shard": FaultKind(
        "gathered weights have the parts of devices 0 and 1 swapped", {}, "num_replicas",
        strategies=("sharded",)),
    "unsynced_batch_norm": FaultKind(
        "BatchNorm normalises each replica's shard separately despite --batch_norm=sync", {},
        "num_replicas", strategies=_SYNCS_BATCH_NORM),
}
# fmt: on

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
        shown = {name: f"{value}".removesuffix(".0") for name, value in self.parameters.items()}
        values = ",".join(f"{name}={value}" for name, value in shown.items())
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
                f"--inject={text}: {name!r} is not a fault"
                f"{did_you_mean(name, FAULTS) or '; use one of ' + ', '.join(FAULTS)}"
            )
        parameters, strategy = dict(FAULTS[name].parameters), None
        allowed = [*parameters]
        if FAULTS[name].can_begin_later:
            allowed.append("step")
        for item in rest.split(",") if rest else []:
            key, _, value = item.partition("=")
            if key == "strategy" and value:
                strategy = value
            elif key in allowed:
                kind = type(parameters.get(key, 0))
                parameters[key] = _number(text, key, value, kind)
            else:
                raise ConfigError(
                    f"--inject={text}: {item!r} is not a parameter of {name}, which has"
                    f" {', '.join([*allowed, 'strategy'])}; for example"
                    f" --inject={cls(name, parameters)}"
                )
        if name == "scale_gradient" and parameters["factor"] == 1:
            raise ConfigError(f"--inject={text} changes nothing; use a factor other than 1")
        return cls(name, parameters, strategy)

    @property
    def kind(self) -> FaultKind:
        """The type of the fault."""
        return FAULTS[self.name]

    @property
    def spec(self) -> str:
        """The fault and all its parameters, in the form that `parse` reads."""
        if self.strategy is None:
            return str(self)
        return f"{self}{',' if self.parameters else ':'}strategy={self.strategy}"

    def can_happen(self, strategy: str, layout: Any) -> bool:
        """Returns whether a strategy supports the fault.

        Args:
            strategy: name of the strategy.
            layout: a strategy or its layout, which has the number that the fault counts; None if
                that is not known.
        """
        enough = not (layout and self.kind.counts) or self._number(layout) >= self._num_needed
        return enough and strategy in (self.kind.strategies or (strategy,))

    def check(self, strategy: str, layout: Any) -> None:
        """Checks that a strategy supports the fault; see `can_happen`.

        Raises:
            ConfigError: it does not, or has too few of the units for the fault to have an effect.
        """
        if self.can_happen(strategy, layout):
            return
        flag, kind, needed = f"--inject={self.spec}", self.kind, self._num_needed
        if kind.strategies and strategy not in kind.strategies:
            raise ConfigError(
                f"{flag} cannot happen in the strategy {strategy}, only in"
                f" {' or '.join(kind.strategies)}; choose one of these or another fault"
            )
        unit, advice = COUNTED[kind.counts]
        raise ConfigError(
            f"{flag} needs at least {needed} {unit}, got {self._number(layout)};"
            f" {advice.format(needed=needed)}"
        )

    def _number(self, layout: Any) -> int:
        return getattr(layout, self.kind.counts)

    @property
    def _num_needed(self) -> int:
        chosen = [self.parameters.get(name, 0) for name in ("replica", "micro_batch", "stage")]
        return max(2, int(max(chosen)) + 1)


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
