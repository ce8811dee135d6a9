"""Names of run directories: a new one, and the path that a flag names."""

import itertools
import pathlib
import time

from app.runtime.errors import OutputError, reason_of


def default_out(kind: str, *models: str) -> str:
    """Returns a new name under `runs/`.

    Args:
        kind: the strategy of a training, or the command.
        *models: names of the models.
    """
    name = "-".join([f"runs/{time.strftime('%Y%m%d-%H%M%S')}", kind, *models])
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    # The name exists where another run began in this second, or the clock was set back.
    return next(name for name in names if not pathlib.Path(name).exists())


def named_path(name: str) -> pathlib.Path:
    """Returns the path that a flag names; `~` is a home directory.

    Raises:
        OutputError: the home directory is unknown.
    """
    try:
        return pathlib.Path(name).expanduser()
    except RuntimeError as error:
        raise OutputError(
            f"{name}: {reason_of(error)}; write the path of the directory in full"
        ) from error
