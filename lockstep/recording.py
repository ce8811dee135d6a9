"""Records a training in the framework of its model, when `python -m lockstep run` runs it.

with lockstep.record(model, optimizer):
    train(model, optimizer, loader)  # Your loop, unchanged.
"""

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

VARIABLE = "LOCKSTEP_RECORD"  # Has what `python -m lockstep run` asks for, as JSON text.

_WHAT_TO_PASS = (
    "lockstep.record(model, optimizer) in PyTorch, lockstep.record(model) in Keras, or"
    " lockstep.record(train_step, arguments=…, outputs=…) in JAX"
)


class Block(contextlib.ExitStack):
    """A recording: a `with` block, or from `start` to `stop` where a script has no block to indent.

    Without `stop`, as in a script that fails, the recording is unfinished, and says so.
    """

    def __init__(self, recorder: contextlib.AbstractContextManager[Any]) -> None:
        super().__init__()
        self._recorder, self._is_started = recorder, False

    def start(self) -> Any:
        """Begins the recording; returns what `with … as` gives, in JAX the step to call.

        Raises:
            RuntimeError: it has begun before.
        """
        if self._is_started:
            raise RuntimeError("the recording has begun already; call lockstep.record once more")
        self._is_started = True
        return self.enter_context(self._recorder)

    __enter__ = start

    def stop(self) -> None:
        """Ends the recording."""
        self.close()


def record(model: Any = None, optimizer: Any = None, **options: Any) -> Block:
    """Records the training in a `with` block, if the variable `LOCKSTEP_RECORD` says so.

    `python -m lockstep run` and `lockstep.assert_same_training` set it. In any other run, the block
    records nothing and changes nothing, and no recorder is imported.

    Args:
        model: in PyTorch what the training calls, a module, also of DDP or `fully_shard`, or a list
            of several; in Keras the model, or a list of all that a custom loop trains; in JAX the
            training step, from `jax.jit` or `jax.pmap`.
        optimizer: in PyTorch one or several that end a step by their method `step`, or None for all
            that update a weight of the model; in Keras the optimizer of a custom loop; in JAX the
            settings, as in {"class": "SGD", "learning_rate": 0.1}.
        **options: further arguments of the framework's recorder: `record_torch.record`,
            `record_keras.record` or `record_jax.record`.

    Returns:
        A context manager, which also has methods `start` and `stop`. In JAX, `with … as train_step`
        gives the step to call; in Keras, `as recorder` gives an object whose method `wrap` takes
        the step of a custom loop. `start` returns the same.

    Raises:
        ValueError: the model is none of a framework that can be recorded, or an argument is wrong.
    """
    if "path" in options:
        raise ValueError(
            "path: is given by `python -m lockstep run`; leave it out, or call the recorder of the"
            " framework, as in record_torch.record(path, model, optimizer)"
        )
    recorder = _recorder_of(model)
    if recorder == "record_torch" and optimizer is not None:
        require_optimizer(optimizer)
    if recorder == "record_jax":
        _require_places(options)
    if not os.environ.get(VARIABLE):
        return Block(NotRecording(model if recorder == "record_jax" else None))
    given = {} if optimizer is None else {"optimizer": optimizer}
    recorder_of: Callable[..., Any] = importlib.import_module(f"lockstep.{recorder}").record
    return Block(recorder_of(None, model, **given, **options))


def _recorder_of(model: Any) -> str:
    """Returns the name of the module that records a model; imports no framework."""
    keras, torch = sys.modules.get("keras"), sys.modules.get("torch")
    several = model if isinstance(model, list | tuple) and model else [model]
    if keras and all(isinstance(each, keras.Model) for each in several):
        if (backend := keras.backend.backend()) != "tensorflow":
            raise ValueError(
                f"model: Keras has the backend {backend}; set KERAS_BACKEND=tensorflow to record it"
            )
        return "record_keras"
    if torch and all(isinstance(each, torch.nn.Module) for each in several):
        return "record_torch"
    if "jax" in sys.modules and callable(model) and not isinstance(model, type):
        return "record_jax"
    raise ValueError(f"model: {described(model)} cannot be recorded; pass {_WHAT_TO_PASS}")


def require_optimizer(optimizer: Any) -> None:
    """Raises ValueError unless an argument is an optimizer of PyTorch, or several."""
    several = optimizer if isinstance(optimizer, list | tuple) and optimizer else [optimizer]
    if wrong := [
        each for each in several
        if isinstance(each, type) or not callable(getattr(each, "step", None))
    ]:  # fmt: skip
        raise ValueError(
            f"optimizer: {described(wrong[0])} is no optimizer; pass the one whose method step()"
            " ends each step: lockstep.record(model, optimizer)"
        )


def _require_places(options: Mapping[str, Any]) -> None:
    """Raises ValueError unless the places of arrays in a step of JAX are given."""
    if missing := [name for name in ("arguments", "outputs") if name not in options]:
        raise ValueError(
            f"{' and '.join(missing)}: missing; pass where the arrays of the step are, as in"
            ' arguments={"params": 0, "opt_state": 1, "batch": 2},'
            ' outputs={"params": 0, "opt_state": 1, "loss": 2}'
        )


def described(value: Any) -> str:
    """Returns None, or the type of an argument, in words."""
    return "None" if value is None else f"an object of the type {type(value).__name__}"


class NotRecording(contextlib.AbstractContextManager):
    """Stands for the recorder of a training that is not recorded; `step` is that of JAX."""

    def __init__(self, step: Callable[..., Any] | None = None) -> None:
        self._step = step

    def __enter__(self) -> Any:
        return self._step or self

    def __exit__(self, *_: object) -> None:
        pass

    def wrap(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the step of a custom loop of Keras."""
        return step
