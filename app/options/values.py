"""Defines the options of a command as one object, and what follows from them."""

import dataclasses
from typing import Any

from app.options import names, table
from app.options.names import MULTI_WORKER, SINGLE
from app.options.option import Option, shown_flag


@dataclasses.dataclass(frozen=True, kw_only=True)
class Values:
    """The options of one command, nested by group; those that it does not have are defaults."""

    command: str
    training: table.Training
    data: table.Data
    distribution: table.Distribution
    cluster: table.Cluster
    output: table.Output
    verification: table.Verification
    benchmark: table.Benchmark
    evaluation: table.Evaluation
    demo: table.Demo
    words: table.Words

    @property
    def strategies(self) -> tuple[str, ...]:
        """All strategies that the command uses."""
        one = "strategies" not in table.options_of(self.command)
        return (self.distribution.strategy,) if one else self.distribution.strategies

    @property
    def own_strategies(self) -> tuple[str, ...]:
        """The strategies of this project, without frameworks."""
        return tuple(name for name in self.strategies if name not in names.FRAMEWORKS)

    @property
    def is_comparison(self) -> bool:
        """Whether the command compares strategies on equally many devices."""
        return self.command in ("compare", "verify")

    @property
    def has_workers(self) -> bool:
        """Whether a strategy uses several processes."""
        return MULTI_WORKER in self.strategies

    @property
    def num_workers(self) -> int | None:
        """The number of processes of such a strategy; None if it depends on the cluster."""
        default = names.DEFAULT_LOCAL_WORKERS if self.is_comparison else None
        return self.cluster.num_workers or default

    @property
    def num_devices_asked(self) -> int | None:
        """The number of devices of each worker; None if it depends on the machine."""
        default = names.DEFAULT_LOGICAL_CPUS if self.distribution.device == "cpu" else None
        if self.strategies == (SINGLE,) and self.command != "benchmark":
            default = 1
        elif self.has_workers:
            default = 1 if self.distribution.device == "cpu" or self.is_comparison else None
        return self.distribution.num_devices or self.distribution.num_gpus or default

    @property
    def num_devices_of_all_workers(self) -> int | None:
        """The total number of devices; None if it depends on the machine or the cluster."""
        asked = self.num_devices_asked
        if not self.has_workers or asked is None:
            return asked
        return asked * self.num_workers if self.num_workers else None

    @property
    def num_framework_replicas(self) -> int:
        """The number of replicas of a training by a framework."""
        return self.num_devices_of_all_workers or names.DEFAULT_LOGICAL_CPUS

    def value(self, option: Option) -> Any:
        """Returns the value of an option."""
        return getattr(getattr(self, option.group), option.name)

    def values(self) -> dict[str, Any]:
        """Returns name → value of the options of the command."""
        return {name: self.value(row) for name, row in table.options_of(self.command).items()}

    def changed(self) -> dict[str, Any]:
        """Returns name → value of the options that are not at their default, in order."""
        rows = table.options_of(self.command)
        return {name: v for name, v in self.values().items() if v != rows[name].default}

    def flags(self, command: str | None = None) -> list[str]:
        """Returns the flags of an equivalent command line, without `--out`.

        Args:
            command: another command; options that it does not have are left out.
        """
        kept = table.options_of(command or self.command).keys() - {"out"}
        return [shown_flag(*item) for item in self.changed().items() if item[0] in kept]

    def result_fields(self) -> dict[str, Any]:
        """Returns the options that affect the result of a training, without paths and display."""
        rows = table.options_of(self.command)
        fields = {row.name: self.value(row) for row in rows.values() if row.affects_result}
        if "inject" in rows:
            fault = self.verification.fault
            fields["inject"] = fault.spec if fault else None
        if self.is_comparison:
            in_order = sorted(self.strategies, key=lambda name: name != SINGLE)
            fields["strategy"] = ",".join(in_order)
            fields["num_replicas"] = self.num_devices_of_all_workers  # For data parallelism.
        # Lists, as read back from a file.
        return {name: list(v) if isinstance(v, tuple) else v for name, v in fields.items()}
