"""What a program of the data set calls, so that any tool can watch its training.

A program trains in `with harness.training(model, optimizer):`. The variable `CASES_TOOL` names the
module of `cases.tools` whose `training` and, if it has them, `keep`, `module` and `note` are
called: `lockstep` by default. Another tool needs one such file, and no change of a program.

    BUG         mistake to make; empty for the right program
    RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT   as `torchrun` sets them (PyTorch)
    DEVICES     number of devices of one process (JAX, Keras)
    SAVE, LOAD  path of the checkpoint that the first run saves, and the second one resumes from
"""

import contextlib
import importlib
import os
from typing import Any

# A process hangs now and then if DDP's reducer, and with it the last reference to its gloo group,
# is deleted while a thread of gloo waits for Python's lock. Models therefore live until the end.
_ALIVE: list[Any] = []
_TOOL = importlib.import_module(f"cases.tools.{os.environ.get('CASES_TOOL', 'lockstep')}")


def training(
    model: Any, optimizer: Any = None, **facts: Any
) -> contextlib.AbstractContextManager[Any]:
    """Watches the training in a `with` block.

    Args:
        model: the module or model, or a list of several (PyTorch, Keras), or training step (JAX).
        optimizer: one or several (PyTorch, a custom loop of Keras); settings (JAX).
        **facts: what a program knows of itself: `others`, further modules by name,
            `mesh`, `dims`, `names` and `modules` (PyTorch); `arguments` and `outputs`, where a step
            has its arrays, and `pmap` (JAX), as in `lockstep.record`. A tool may ignore them.

    Returns:
        A context manager. In JAX, `as train_step` gives the step to call; in Keras, `as watched`
        gives an object whose `wrap(step)` returns the step of a custom loop.
    """
    _ALIVE.append(model)
    return _TOOL.training(model, optimizer, **facts)


def keep(kind: str, value: Any, *specs: Any) -> Any:
    """Shows an array of a JAX step to the tool, as "raw" gradients or "y_pred"; returns it."""
    return _TOOL.keep(kind, value, *specs) if hasattr(_TOOL, "keep") else value


def module(name: str, value: Any) -> Any:
    """Shows an output of a part of a JAX model to the tool; returns it."""
    return _TOOL.module(name, value) if hasattr(_TOOL, "module") else value


def note(kind: str, values: Any) -> None:
    """Tells the tool the identities of the examples that a step is about to get: kind "ids"."""
    if hasattr(_TOOL, "note"):
        _TOOL.note(kind, values)
