"""The application: everything but the architectures and the strategies.

As a library: `from app import Config, run`; see `docs/library.md`.
"""

from app.config import Config
from app.errors import LockstepError
from app.library import run

__all__ = ["Config", "LockstepError", "run"]
