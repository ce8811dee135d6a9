"""Defines the base class of the config classes."""

import dataclasses
from typing import Any, ClassVar, Self

from app.config.names import DISTRIBUTION
from app.config.option import check_values, did_you_mean, options_of
from app.runtime.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Base class of the frozen dataclasses with the options of one command.

    Attributes:
        command: name of the command.
        summary: one line for `--help`.
        examples: command lines for `--help`, without the program and the command.
        first_group: title of the group of options that `--help` shows first.

    Raises:
        ConfigError: a value is invalid, or two options contradict each other.
    """

    command: ClassVar[str]
    summary: ClassVar[str]
    examples: ClassVar[tuple[str, ...]]
    first_group: ClassVar[str] = DISTRIBUTION

    def __new__(cls, *_: Any, **__: Any) -> Self:
        """Raises an error for `Config(…)` itself, which has no options."""
        if cls is Config:
            raise ConfigError(
                "Config has no options of its own; use Config.of(command, …) or the class of a"
                " command, for example TrainConfig(…)"
            )
        return super().__new__(cls)

    def __post_init__(self) -> None:
        check_values(self)
        self.check()

    def check(self) -> None:
        """Checks combinations of options.

        Raises:
            ConfigError: two options contradict each other.
        """

    @classmethod
    def commands(cls) -> dict[str, type["Config"]]:
        """Returns name → class for each command, in the order of `--help`."""
        return {config_class.command: config_class for config_class in Config.__subclasses__()}

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
        config_class = find_command(command)
        names = [each.name for each in options_of(config_class)]
        for name in options:
            if name not in names:
                raise ConfigError(unknown_option(f"--{name}", name, config_class))
        return config_class(**options)

    def flags_for(self, config_class: type["Config"]) -> list[str]:
        """Returns the flags of an equivalent command of the given class.

        Omits options that the command does not have, its defaults, and `--out`.
        """
        given = {
            each: getattr(self, each.name)
            for each in options_of(config_class)
            if each.name != "out" and hasattr(self, each.name)
        }
        return [
            f"--{each.name}={','.join(map(str, value)) if each.is_list else value}"
            for each, value in given.items()
            if value != each.default
        ]

    def result_fields(self) -> dict[str, Any]:
        """Returns the fields that affect the result of a training, without paths and display."""
        fields = {
            each.name: getattr(self, each.name)
            for each in options_of(self)
            if each.metadata.affects_result
        }  # Lists, as read back from a file.
        return {n: list(v) if isinstance(v, tuple) else v for n, v in fields.items()}


def find_command(name: str) -> type[Config]:
    """Returns the config class of a command.

    Raises:
        ConfigError: there is no such command.
    """
    commands = Config.commands()
    if not isinstance(name, str) or name not in commands:
        raise ConfigError(
            f"{name!r} is not a command; use one of {', '.join(commands)}"
            f"{did_you_mean(str(name), commands)}"
        )
    return commands[name]


def unknown_option(shown: str, name: str, config_class: type[Config]) -> str:
    """Returns the error message for an option that a command does not have.

    Args:
        shown: the option as given.
        name: name of the option.
        config_class: config class of the command.
    """
    owners = [
        command
        for command, other in Config.commands().items()
        if name in [each.name for each in options_of(other)]
    ]
    if owners:
        return f"{shown} is not an option of {config_class.command}, only of {', '.join(owners)}"
    known = [each.name for each in options_of(config_class)]
    return f"{shown} is not an option of {config_class.command}{did_you_mean(name, known, '--')}"
