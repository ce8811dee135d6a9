"""The application: everything except the models and the strategies.

As a library: `from app import Config, run`; see `docs/library.md`.
"""

from app.api import run
from app.options import Config
from app.runtime.errors import LockstepError
from lockstep import __version__

__all__ = ["Config", "LockstepError", "__version__", "run"]
