"""The options: one table; flags, help and config of each command come from it."""

from app.options.config import Config, parse_command_line

__all__ = ["Config", "parse_command_line"]
