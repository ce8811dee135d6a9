"""Parses `--inject`: a fault with its parameters. `app/training/injection.py` injects it."""

import dataclasses
import difflib

from app.errors import ConfigError

Parameters = dict[str, int | float]


# Fault → its parameters, with their defaults. Each is seen in real distributed programs.
FAULTS: dict[str, Parameters] = {
    "drop_gradient": {"replica": 1},  # A replica's gradient never reaches the sum.
    "scale_gradient": {"factor": 2.0},  # Every gradient is multiplied by a factor.
    "mean_of_means": {},  # The mean of the shards' means replaces the mean of the batch.
    "same_shard": {},  # Every replica is given the shard of replica 0.
    "reset_optimizer_state": {"step": 3},  # After a step, as in a resume that forgets it.
    "perturb_weight": {"replica": 1, "step": 3},  # Of one replica, outside of the update.
}
_EFFECTIVE_ON_ONE_REPLICA = ("scale_gradient", "reset_optimizer_state")


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault to inject."""

    name: str
    parameters: Parameters  # Given or default.
    strategy: str | None = None  # That gets the fault; None for the first with replicas.

    def __str__(self) -> str:
        shown = {name: f"{value}".removesuffix(".0") for name, value in self.parameters.items()}
        values = ",".join(f"{name}={value}" for name, value in shown.items())
        return f"{self.name}:{values}" if values else self.name

    @property
    def spec(self) -> str:
        """The fault and all its parameters, in the form that `parse` reads."""
        if self.strategy is None:
            return str(self)
        return f"{self}{',' if self.parameters else ':'}strategy={self.strategy}"

    @property
    def step(self) -> int:
        """The step that the fault begins with, or that it follows; 0 for the start."""
        return int(self.parameters.get("step", 0))

    @classmethod
    def parse(cls, text: str) -> "Fault":
        """Parses `NAME` or `NAME:parameter=value,…`; raises `ConfigError`."""
        name, _, rest = text.partition(":")
        if name not in FAULTS:
            nearest = difflib.get_close_matches(name, FAULTS, n=1)
            advice = f"did you mean {nearest[0]}?" if nearest else f"use one of {', '.join(FAULTS)}"
            raise ConfigError(f"--inject={text}: {name!r} is not a fault; {advice}")
        parameters, strategy = dict(FAULTS[name]), None
        allowed = list(parameters)
        if name != "same_shard" and "step" not in allowed:  # A fault that can begin later.
            allowed.append("step")
        for item in rest.split(",") if rest else []:
            key, _, value = item.partition("=")
            if key == "strategy" and value:
                strategy = value
            elif key in allowed:
                parameters[key] = _number(text, key, value)
            else:
                raise ConfigError(
                    f"--inject={text}: {item!r} is not a parameter of {name}, which has"
                    f" {', '.join([*allowed, 'strategy'])}; for example"
                    f" --inject={cls(name, parameters)}"
                )
        if name == "scale_gradient" and parameters["factor"] == 1:
            raise ConfigError(f"--inject={text} changes nothing; use a factor other than 1")
        return cls(name, parameters, strategy)

    def check(self, num_replicas: int | None) -> None:
        """Raises `ConfigError` if the fault has no effect on so many replicas; None if unknown."""
        fewest = 1 if self.name in _EFFECTIVE_ON_ONE_REPLICA else 2
        needed = max(fewest, int(self.parameters.get("replica", 0)) + 1)
        if num_replicas is not None and num_replicas < needed:
            raise ConfigError(
                f"--inject={self.spec} needs at least {needed} replicas, got {num_replicas}; use a"
                f" strategy with replicas and --num_gpus={needed}"
            )


def _number(text: str, key: str, value: str) -> int | float:
    kind, low = (float, 1e-30) if key == "factor" else (int, 1 if key == "step" else 0)
    try:
        number = kind(value)
        if not low <= number <= 1e6:
            raise ValueError
    except ValueError:
        what = "a number above 0" if kind is float else f"a whole number from {low}"
        raise ConfigError(
            f"--inject={text}: {key} must be {what}, up to 1000000, got {value!r}"
        ) from None
    return number
