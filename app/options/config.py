"""Creates the config of a command: its options, checked."""

import dataclasses
from typing import Any

from app.options import names, rules, table
from app.options.names import MULTI_WORKER, SINGLE
from app.options.option import Option, did_you_mean
from app.options.values import Values
from app.runtime.errors import ConfigError
from strategies import OPTIONS_OF_SOME, has_option


class Config(Values):
    """The options of one command, nested by group, which do not contradict each other.

    Create it with `Config.of`.
    """

    @staticmethod
    def of(command: str = "train", **options: Any) -> "Config":
        """Returns the config that the command line would create from these options.

        Args:
            command: name of the command.
            **options: named like the flags; `experiment` and `directories` for the words after
                `demo` and `report`.

        Raises:
            ConfigError: the command or an option does not exist, a value is invalid, or two options
                contradict each other.
        """
        check_command(command)
        rows = table.options_of(command)
        for name in options:
            if name not in rows:
                raise ConfigError(unknown_option(name, command))
        values = {name: rows[name].parse(value) for name, value in options.items()}
        for row in rows.values():
            if row.required and row.name not in values:
                raise ConfigError(f"{row.flag} is required; write {row.flag}={row.placeholder}")
        if values.get("case"):
            values.setdefault("strategies", (names.KERAS_FIT,))
            if not values.get("thorough"):
                values.setdefault("steps", names.CASE_STEPS)
        return _create(command, rows, values)

    def for_training(self, strategy: str, **options: Any) -> "Config":
        """Returns the config of a training with one strategy and this command's options.

        Options that the strategy does not have, and lists of values to try, are at their defaults.
        `single` has one device with all cores; a framework gets the config of `single`.

        Args:
            strategy: strategy of the training.
            **options: values that replace the command's.
        """
        strategy = SINGLE if strategy in names.FRAMEWORKS else strategy
        dtype = table.options_of("verify")["communication_dtype"]
        rows = table.options_of("train") | {dtype.name: dtype}
        values = {
            name: self.value(row)
            for name, row in table.options_of(self.command).items()
            if name in rows and rows[name].group == row.group
        }
        values |= self._devices_beside_workers(strategy)
        values |= {name: rows[name].parse(value) for name, value in options.items()}
        without = {name for name in OPTIONS_OF_SOME if not has_option(strategy, name)}
        if strategy == SINGLE:
            without |= {"num_devices", "num_gpus"}
        values = {name: value for name, value in values.items() if name not in without}
        return _create("train", rows, {**values, "strategy": strategy})

    def replace(self, **options: Any) -> "Config":
        """Returns the config with other values of some options.

        Raises:
            ConfigError: two options contradict each other.
        """
        rows = {row.name: row for row in reversed(table.TABLE)} | table.options_of(self.command)
        changed: dict[str, Any] = {}
        for name, value in options.items():
            group = changed.get(rows[name].group, getattr(self, rows[name].group))
            changed[rows[name].group] = dataclasses.replace(group, **{name: value})
        return _checked(dataclasses.replace(self, **changed))

    def on_one_machine(self) -> "Config":
        """Returns a single-process training on as many devices as the strategies use.

        Prefers a strategy with an all-reduce, whose dtype determines the tolerance.
        """
        parallel = [name for name in self.own_strategies if name not in (SINGLE, MULTI_WORKER)]
        parallel.sort(key=lambda name: not has_option(name, "all_reduce"))
        if self.has_workers and not (parallel and has_option(parallel[0], "all_reduce")):
            return self.for_training("manual", inject=None, all_reduce="auto")
        return self.for_training((*parallel, SINGLE)[0], inject=None)

    def _devices_beside_workers(self, strategy: str) -> dict[str, Any]:
        """Returns the device options of a compared strategy that differ from the flags.

        Beside `multi_worker`, the other strategies have as many devices on one machine as its
        workers have in total.
        """
        is_own = self.is_comparison and strategy == MULTI_WORKER
        values: dict[str, Any] = {"num_workers": self.num_workers if is_own else None}
        if not (self.is_comparison and self.has_workers) or strategy == SINGLE:
            return values
        number = self.num_devices_asked if is_own else self.num_devices_of_all_workers
        name = "num_gpus" if self.distribution.num_gpus else "num_devices"
        return {**values, name: number, "num_devices": number}


def _create(command: str, rows: dict[str, Option], values: dict[str, Any]) -> Config:
    """Returns the checked config of a command with these values; other options are defaults."""
    groups: dict[str, dict[str, Any]] = {name: {} for name in table.GROUPS}
    for name, value in values.items():
        groups[rows[name].group][name] = value
    nested = {name: table.GROUPS[name](**fields) for name, fields in groups.items()}
    return _checked(Config(command=command, **nested))


def _checked(config: Config) -> Config:
    """Returns the config, if its options do not contradict each other."""
    rules.check(config)
    if config.is_comparison and not config.verification.case:
        for name in config.own_strategies:  # Each with its own number of devices.
            config.for_training(name, inject=None)
    return config


def check_command(name: str) -> None:
    """Checks that there is such a command.

    Raises:
        ConfigError: there is none.
    """
    if name not in table.COMMANDS:
        known = table.COMMANDS
        raise ConfigError(
            f"{name!r} is not a command; use one of {', '.join(known)}{did_you_mean(name, known)}"
        )


def unknown_option(name: str, command: str) -> str:
    """Returns the error message for an option that a command does not have."""
    if name in table.REMOVED:
        return f"--{name} is no longer an option; {table.REMOVED[name]}"
    owners = [other for other in table.COMMANDS if name in table.options_of(other)]
    if owners:
        return f"--{name} is not an option of {command}, only of {', '.join(owners)}"
    known = table.options_of(command)
    return f"--{name} is not an option of {command}{did_you_mean(name, known, '--')}"
