"""The options: one table, the flags and the config of a command, and the rules between options."""

from app.options.config import Config

__all__ = ["Config"]
