"""Names run directories."""

import itertools
import pathlib
import time

from app.runtime.errors import OutputError, reason_of


def default_out(kind: str, *models: str) -> str:
    """Returns a new name under `runs/`.

    Args:
        kind: strategy of a training, or name of the command.
        *models: names of the models.
    """
    name = "-".join([f"runs/{time.strftime('%Y%m%d-%H%M%S')}", kind, *models])
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    # The name exists if another run started in the same second, or the clock was set back.
    return next(name for name in names if not pathlib.Path(name).exists())


def named_path(name: str) -> pathlib.Path:
    """Returns the path for the value of a flag; expands `~`.

    Raises:
        OutputError: the home directory is unknown.
    """
    try:
        return pathlib.Path(name).expanduser()
    except RuntimeError as error:
        raise OutputError(
            f"{name}: {reason_of(error)}; write the path of the directory in full"
        ) from error
