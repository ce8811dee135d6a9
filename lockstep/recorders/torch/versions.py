"""Says which versions of PyTorch can be recorded, and which of their names are observed."""

import re
from typing import Any

import torch

OLDEST, OLDEST_SHARDED = (2, 6), (2, 8)


def version() -> tuple[int, ...]:
    """Returns the first two numbers of PyTorch's version."""
    return tuple(map(int, re.findall(r"\d+", str(torch.__version__))[:2]))


def check_version() -> None:
    """Raises an error if this PyTorch is older than the oldest one that can be recorded."""
    if version() < OLDEST:
        required = ".".join(map(str, OLDEST))
        raise ImportError(f"record_torch: PyTorch {torch.__version__}, needs {required} or newer")


def check_sharded(what: str) -> None:
    """Raises an error if this PyTorch is too old for FSDP2 or pipelines."""
    if version() < OLDEST_SHARDED:
        required = ".".join(map(str, OLDEST_SHARDED))
        raise ValueError(f"model: {what} of PyTorch {torch.__version__}; needs {required} or newer")


def check_observed(owner: Any, name: str) -> None:
    """Checks that PyTorch has a function that the recorder observes.

    Raises:
        RuntimeError: it does not, so that a call would not be seen.
    """
    if not hasattr(owner, name):
        where = getattr(owner, "__name__", "")
        raise RuntimeError(
            f"record_torch: PyTorch {torch.__version__} has no {where}.{name}, which is observed;"
            " use another version of PyTorch, or update Lockstep"
        )
