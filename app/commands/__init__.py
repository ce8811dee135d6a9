"""One file for each command."""

import importlib
from typing import Any

from app import signals
from app.options import Config


def run_command(config: Config) -> Any:
    """Runs the command of a config and returns its result; a signal ends it, unless deferred."""
    with signals.deferred(signals.check):
        return importlib.import_module(f"app.commands.{config.command}").run(config)
