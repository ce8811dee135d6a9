"""Defines the options of a command as one frozen object, made from flags or keyword arguments.

No other module reads flags. Does not import TensorFlow.
"""

import contextlib
import dataclasses
import re
import sys
from collections.abc import Iterator
from typing import Any

from absl import flags

from app import console
from app.errors import ConfigError
from app.faults import Fault
from app.options import rules, table
from app.options.table import COMMANDS, did_you_mean, options_of
from strategies import ALL_REDUCE_ALGORITHMS

_HELP = {"-h", "-?", "-help", "--help", "--helpshort", "--helpfull"}
_DEFAULT_NUMBER = 2  # Of logical CPU devices, and of the workers of a comparison.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The options of one command, nested by group; those that it does not have are defaults.

    Create it with `Config.of`, which checks it.
    """

    command: str
    training: table.Training
    data: table.Data
    distribution: table.Distribution
    output: table.Output
    verification: table.Verification
    arguments: table.Arguments

    @staticmethod
    def of(command: str = "train", **options: Any) -> "Config":
        """Returns the config that the command line would create from these options.

        They are named like the flags; `experiment` and `directories` are the words after `demo` and
        `report`. Raises `ConfigError` as the command line does.
        """
        values = _define_flags(command)
        for name, value in options.items():
            if name not in values:
                raise ConfigError(_unknown_option(name, command))
            if value is not None or values[name].default is not None:
                with _one_line_errors(command):
                    values[name].parse(list(value) if isinstance(value, tuple) else value)
        return _config_of(command, values)

    def for_training(self, strategy: str, **options: Any) -> "Config":
        """Returns the config of a training with one strategy and this command's options.

        Options that the strategy does not have are defaults. `single` has one device; beside
        `multi_worker`, the other strategies have as many devices as all workers together. Only
        the strategy that `--inject` chooses has the fault. `options` replace the command's.
        """
        rows = options_of("train")
        values = {name: value for name, value in self.values().items() if name in rows}
        values |= {"strategy": strategy, "num_workers": None}
        if strategy == rules.SINGLE:
            values["num_gpus"] = None
        elif strategy == rules.MULTI_WORKER:
            values |= {"num_workers": self.num_workers, "num_gpus": self._num_devices_of_worker}
        elif self.has_workers:
            values["num_gpus"] = self.num_devices
        if strategy not in ALL_REDUCE_ALGORITHMS:
            values["all_reduce"] = "auto"
        if strategy not in rules.SYNCHRONIZE_BATCH_NORM:
            values["batch_norm"] = "average"
        if self.fault and strategy != rules.faulty_strategy(self):
            values["inject"] = None
        return Config.of("train", **{**values, **options})

    @property
    def strategies(self) -> tuple[str, ...]:
        """All strategies that the command uses."""
        if "strategies" in options_of(self.command):
            return self.distribution.strategies
        return (self.arguments.strategy or self.distribution.strategy,)

    @property
    def is_comparison(self) -> bool:
        """Whether the command compares strategies on equally many devices."""
        return self.command in ("compare", "verify", "benchmark")

    @property
    def has_workers(self) -> bool:
        """Whether a strategy uses several processes."""
        return rules.MULTI_WORKER in self.strategies

    @property
    def num_workers(self) -> int | None:
        """The number of processes of `multi_worker`; None if it depends on the cluster."""
        default = _DEFAULT_NUMBER if self.is_comparison and self.has_workers else None
        return self.distribution.num_workers or default

    @property
    def num_devices(self) -> int | None:
        """The number of replicas, over all workers; None if the machine or cluster decides."""
        if self.strategies == (rules.SINGLE,):
            return 1
        if not self.has_workers:
            on_cpu = self.distribution.device == "cpu"
            return self.distribution.num_gpus or (_DEFAULT_NUMBER if on_cpu else None)
        of_worker = self._num_devices_of_worker
        return of_worker * self.num_workers if of_worker and self.num_workers else None

    @property
    def _num_devices_of_worker(self) -> int | None:
        default = 1 if self.distribution.device == "cpu" or self.is_comparison else None
        return self.distribution.num_gpus or default

    @property
    def fault(self) -> Fault | None:
        """The fault of `--inject`."""
        return Fault.parse(self.verification.inject) if self.verification.inject else None

    def values(self) -> dict[str, Any]:
        """Returns name → value of the options of the command."""
        rows = options_of(self.command).values()
        return {row.name: getattr(getattr(self, row.group), row.name) for row in rows}

    def changed(self) -> dict[str, Any]:
        """Returns name → value of the options that are not at their default."""
        rows = options_of(self.command)
        return {name: v for name, v in self.values().items() if v != rows[name].default}

    def flags(self, command: str | None = None) -> list[str]:
        """Returns the flags without `--out`; of another `command`, those that it has, too."""
        kept = options_of(command or self.command).keys() - {"out"}
        shown = []
        for name, value in self.changed().items():
            if name in kept:
                text = ",".join(value) if isinstance(value, tuple) else value
                shown.append(f"--{name}" if value is True else f"--{name}={text}")
        return shown

    def result_fields(self) -> dict[str, Any]:
        """Returns the command and the options that affect its result, as read back from JSON."""
        rows, fields = options_of(self.command), dict[str, Any](command=self.command)
        for name, value in self.values().items():
            if rows[name].affects_result:
                fields[name] = list(value) if isinstance(value, tuple) else value
        return fields | ({"inject": self.fault.spec} if self.fault else {})


def parse_command_line(argv: list[str]) -> Config:
    """Converts the command line to a config, or prints the help or the version and exits."""
    flags.FLAGS.mark_as_parsed()  # absl's own flags; the program has no others there.
    is_help = argv[1:2] == ["help"]
    words = argv[2:] if is_help else argv[1:]
    command = words.pop(0) if words and not words[0].startswith("-") else None
    values = _define_flags(command or "train")
    is_help |= not _HELP.isdisjoint(words)
    if is_help or "--version" in words:
        from app.options import help  # Not above, because it is also a program.

        console.say(help.help_text(command) if is_help else help.version_text())
        sys.exit(0)
    command = command or "train"
    with _one_line_errors(command):
        _, *words = values([argv[0], *words])
        if words:
            _parse_words(values, command, words)
    return _config_of(command, values)


def _define_flags(command: str) -> flags.FlagValues:
    """Defines the flags of a command."""
    if command not in COMMANDS:
        advice = did_you_mean(command, COMMANDS)
        raise ConfigError(f"{command!r} is not a command; use one of {', '.join(COMMANDS)}{advice}")
    values = flags.FlagValues()
    for row in options_of(command).values():
        row.define(values)
    return values


def _parse_words(values: flags.FlagValues, command: str, words: list[str]) -> None:
    """Parses the words after the command, the value of an option that has no flag."""
    row = next((row for row in options_of(command).values() if row.is_word), None)
    if row is None:
        raise ConfigError(
            f"{' '.join(words)!r} is not understood; write options as --name=value, after the"
            " command"
        )
    if row.kind is not tuple and len(words) > 1:
        raise ConfigError(f"{command} takes one {row.metavar}, got {' '.join(words)!r}")
    values[row.name].parse(words if row.kind is tuple else words[0])


def _config_of(command: str, values: flags.FlagValues) -> Config:
    """Returns the checked config of parsed flags."""
    groups: dict[str, dict[str, Any]] = {name: {} for name in table.GROUPS}
    for name, row in options_of(command).items():
        groups[row.group][name] = row.checked(values[name].value)
    nested: dict[str, Any] = {name: table.GROUPS[name](**own) for name, own in groups.items()}
    config = Config(command=command, **nested)
    rules.check(config)
    return config


@contextlib.contextmanager
def _one_line_errors(command: str) -> Iterator[None]:
    """Converts errors of absl to errors that name the flag, the value and what is allowed."""
    try:
        yield
    except flags.UnrecognizedFlagError as error:
        raise ConfigError(_unknown_option(error.flagname, command)) from error
    except (flags.Error, ValueError) as error:
        text = str(error).removeprefix("ERROR:: ")
        if value_of := re.match(r"flag --(\w+)=", text):
            # The text ends with the error of absl's parser.
            value = text[value_of.end() :].removesuffix(f": {error.__context__}")
            raise options_of(command)[value_of[1]].refusal(value) from error
        raise ConfigError(f"{text}; see {command} --help") from error


def _unknown_option(name: str, command: str) -> str:
    """Returns the error message for an option that a command does not have."""
    if name in table.REMOVED:
        return f"--{name} is no longer an option; {table.REMOVED[name]}"
    names = [name for row in options_of(command).values() for name in (row.name, row.alias)]
    nearest = did_you_mean(name, names, "--")
    for row in table.TABLE:
        if name in (row.name, row.alias):
            only = nearest or f", only of {', '.join(row.commands)}"
            return f"--{name} is not an option of {command}{only}"
    return f"--{name} is not a flag{nearest or f'; see {command} --help'}"
