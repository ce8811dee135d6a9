"""The application: everything but the architectures and the strategies.

As a library: `from app import Config, run`; see `docs/library.md`.
"""

from app.api import run
from app.config import Config
from app.runtime.errors import LockstepError

__all__ = ["Config", "LockstepError", "run"]
