"""What `--inject` names: a fault with its parameters, read before anything is loaded."""

import dataclasses

from app.runtime.errors import ConfigError

# Fault → (what it does, its parameters with their defaults).
FAULTS: dict[str, tuple[str, dict[str, int | float]]] = {
    "drop_gradient": ("a replica's gradient never reaches the sum", {"replica": 1}),
    "scale_gradient": ("every gradient is multiplied by a factor", {"factor": 2.0}),
    "mean_of_means": ("the mean of the replicas' means in place of the mean of the batch", {}),
    "same_shard": ("every replica is given the shard of replica 0", {}),
    "shuffle_order": ("a replica takes its shard from another order of examples", {"replica": 1}),
    "perturb_weight": ("a weight of a replica changes by itself", {"replica": 1, "step": 3}),
    "local_batch_norm": ("moving statistics are not averaged: replica 0's own are saved", {}),
    "bf16_all_reduce": ("gradients are rounded to bfloat16 before they are added", {}),
    "slow_replica": ("a replica takes longer in each step", {"replica": 1, "ms": 50}),
}
_NEEDS_NO_SECOND_REPLICA = {"scale_gradient"}

MIN_STRAGGLER_STEPS = 5  # To tell a slow replica: fewer could all have been disturbed by chance.


@dataclasses.dataclass(frozen=True)
class Fault:
    """One fault, to be injected on purpose.

    Attributes:
        name: a key of `FAULTS`.
        parameters: all that the fault has, given or by default.
        strategy: the one to spoil where several are compared; None for the first that has replicas.
    """

    name: str
    parameters: dict[str, int | float]
    strategy: str | None = None

    def __str__(self) -> str:
        values = ",".join(f"{name}={value:g}" for name, value in self.parameters.items())
        return f"{self.name}:{values}" if values else self.name

    @classmethod
    def parse(cls, text: str) -> "Fault":
        """Reads `NAME` or `NAME:parameter=value,…`.

        Raises:
            ConfigError: there is no such fault or parameter, or the value cannot be meant.
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
            else:
                known = ", ".join([*parameters, "strategy"])
                raise ConfigError(
                    f"--inject={text}: {item!r} is not a parameter of {name}, which has {known};"
                    f" for example --inject={cls(name, parameters)}"
                )
        if name == "scale_gradient" and parameters["factor"] == 1:
            raise ConfigError(f"--inject={text} changes nothing; use a factor other than 1")
        return cls(name, parameters, strategy)

    @property
    def spec(self) -> str:
        """All of it, as `parse` reads it."""
        return (
            str(self)
            if self.strategy is None
            else (f"{self}{',' if self.parameters else ':'}strategy={self.strategy}")
        )

    def check_replicas(self, num_replicas: int) -> None:
        """Checks that there are replicas for it to go wrong on.

        Raises:
            ConfigError: there are too few.
        """
        needed = max(2, self.parameters.get("replica", 0) + 1)
        if self.name not in _NEEDS_NO_SECOND_REPLICA and num_replicas < needed:
            raise ConfigError(
                f"--inject={self.spec} needs at least {needed} replicas, got {num_replicas}; use a"
                f" strategy with replicas and --num_devices={needed}"
            )


def _number(text: str, key: str, value: str, kind: type) -> int | float:
    low = {"replica": 0, "step": 0, "ms": 1}.get(key, 1e-30)
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
