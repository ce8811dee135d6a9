"""What a command is asked to do: options, each defined once, and their validation."""

from app.config.command_configs import Config

__all__ = ["Config"]
