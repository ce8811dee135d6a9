"""The recorder: a block in which steps are recorded, and their description."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from lockstep.data.trace import CLIP_FIRST
from lockstep.recorders.common import (
    DEFAULT_STEPS,
    Path,
    Request,
    rank_path,
    request_of,
    require_models,
)
from lockstep.recorders.keras.description import as_one, computed_in
from lockstep.recorders.keras.optimizers import Optimizers
from lockstep.recorders.keras.steps import StepObserver
from lockstep.recorders.keras.values import replicas_here
from lockstep.recorders.notes import IDS, Notes
from lockstep.recorders.output import Output
from lockstep.recording import NotRecording

_KERNELS = "TF_ENABLE_ONEDNN_OPTS"  # Chooses TensorFlow's kernels on CPUs; only recorded.


class Recorder:
    """Records steps in a `with` block; the end of the block finishes the file.

    Attributes:
        path: the file, as `record` got it.

    Raises:
        ValueError: no hook can run in this training, or `replay` lacks steps or variables.
    """

    def __init__(self, model: Any, optimizer: Any, request: Request) -> None:
        self._model = as_one(model)
        self._optimizers = Optimizers(self._model, optimizer)
        if self._model.compiled and self._model.jit_compile is True:
            raise ValueError(
                f"model {self._model.name} is compiled with jit_compile=True, and XLA does not run"
                " the hooks; compile it with jit_compile=False to record it"
            )
        self.path, self._request, self._notes = request.path, request, Notes()
        name, strategy = request.path, self._model.distribute_strategy
        replicas = replicas_here(strategy)
        if len(replicas) < strategy.num_replicas_in_sync:
            name = rank_path(name, replicas[0] // len(replicas))
        self._observer = StepObserver(self._model, self._optimizers, request, Output(name))

    def wrap(self, step: Callable) -> Callable:
        """Returns a custom loop's replica step with hooks; its arguments are the batch."""
        return partial(self._observer.step, step)

    def __enter__(self) -> "Recorder":
        self._observer.install()
        self._notes.__enter__()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._observer.remove()
        self._notes.__exit__()
        copies, output = self._observer.copies, self._observer.copies.output
        for name, array in copies.arrays():
            output.put(name, array)
        noted = self._notes.take()  # Those of a step, for all replicas here.
        for position, step in enumerate(copies.steps, start=1):
            if (number := step - self._request.first_step) < len(noted):
                output.put(f"{position}/{IDS}/{min(copies.replicas)}/0", noted[number])
        output.close(self._description(error))
        if copies.error:
            raise ValueError(copies.error) from None  # Without the notes of a traced function.
        if error is None and not copies.steps:
            raise ValueError(
                f"{self.path}: no step was recorded; train within the block, and call tf.function"
                " there"
            )

    def _description(self, error: BaseException | None) -> dict[str, Any]:
        observer, optimizers = self._observer, self._optimizers
        copies, replay = observer.copies, observer.replay
        own = observer.about | (optimizers.description() if optimizers.applied else {})
        for index, shape in copies.shapes.items():
            own["variables"][index]["shape"] = shape
        return {
            **self._request.about("keras", error, replay.states if replay else None),
            **own,
            "reduction": "sum",
            "order": CLIP_FIRST,
            "num_replicas": self._model.distribute_strategy.num_replicas_in_sync,
            "replicas": copies.replicas,
            "versions": {
                **{package.__name__: package.__version__ for package in (keras, tf, np)},
                _KERNELS: os.environ.get(_KERNELS, "not set"),
            },
            "steps": copies.steps,
            "trained": copies.num_trained,
            "in_evaluation": [observer.frozen] * len(copies.steps),
            "settings": [optimizers.settings(copies.rates(step)) for step in copies.steps],
            "optimizer": optimizers.about(),
            "computed_in": computed_in(self._model),
            "draws_apart": bool(observer.shards and observer.shards.draws_apart),
        }


def record(
    path: Path | None, model: keras.Model | Sequence[keras.Model],
    optimizer: keras.optimizers.Optimizer | Sequence[keras.optimizers.Optimizer] | None = None, *,
    steps: int | Iterable[int] = DEFAULT_STEPS, replay: Path | None = None,
    permute: int | None = None, names: Mapping[str, str] | None = None,
    sample: int | None = None, start: bool = False, first_step: int = 0, shards: str | None = None,
) -> Recorder | NotRecording:  # fmt: skip
    """Records steps of `model.fit`, or of a custom loop, in a `with` block.

    The file is written as arrays come; an older one is replaced when the block begins. Process 0 of
    several processes writes `….rank0.npz`. `lockstep.assert_same_training` gives path, steps,
    replay and permute in place of those of the script.

    Args:
        path: the file; None to record only what `lockstep run` asks for.
        model: a compiled model, or with `optimizer` any model; under a strategy or not. A loop that
            trains several models passes a list of them.
        optimizer: optimizer of a custom loop, or a list of several.
        steps: number of first steps to record, or numbers of steps, from 0.
        replay: a recording whose weights and statistics are assigned before each step; from a
            recording of Keras also optimizer state (without learning rate), and with as many
            replicas seeds.
        permute: seed for a permutation of each replica's examples in these steps.
        names: name of a variable → its name in `replay`; others are matched by name, else in order,
            by kind and shape.
        sample: the number of elements that are kept of each variable and gradient, with random sums
            of all elements; smaller arrays are whole. 0 for whole arrays. None: as in `replay`,
            else 4,096 above 64 MiB of weights; then the first step alone is recorded by default.
        start: whether a sampled recording has the whole state before its first step, too, which
            `replay` needs.
        first_step: number of the first step of this process, which may resume a training.
        shards: "each" calls the model, on one device, once for each replica's part of the batch in
            `replay`, with its seeds and its number: layers such as BatchNorm and Dropout then
            compute what each replica does.

    Raises:
        ValueError: no hook can run in this training, or `replay` lacks steps or variables.
    """
    require_models(model, keras.Model, "keras.Model")
    request = request_of(
        path, steps=steps, replay=replay, permute=permute, names=names, sample=sample, start=start,
        first_step=first_step, shards=shards,
    )  # fmt: skip
    return Recorder(model, optimizer, request) if request else NotRecording()
