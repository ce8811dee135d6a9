"""Records what Keras' `fit` computes on each replica, and compares it with one device.

This file is standalone: copy it next to your script. It needs TensorFlow, Keras 3 and NumPy.

    from lockstep_keras import Recorder, compare

    with Recorder(model, steps=3) as record:   # Compiled under `strategy.scope()`.
        model.fit(dataset)
    print(compare(record, build_model()))      # The same builder, called outside of the scope.
    record.save("trace.npz")                   # A file of plain arrays.

`Recorder` hooks methods of the model and the optimizer instances, not of their classes, and removes
the hooks at the end of the block. For each step and replica it records, in this order: the examples
and all variables; the predictions and the loss; the gradients before clipping, after clipping and
after the all-reduce; all variables again. Training with the hooks is bitwise identical to training
without them.

`compare` takes the second model, on one device without a strategy, as the definition of a training
step. It starts each step from the recorded state and computes each stage from the recorded inputs
of that stage. A wrong stage therefore does not make later stages wrong, and a fault is found even
after a difference that is by design. Tolerances for rounding are computed: the step is repeated
with its examples in other orders and with weights changed by one unit in the last place.
"""

import collections
import contextlib
import dataclasses
import itertools
import json
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, BinaryIO

import keras
import numpy as np
import tensorflow as tf
from keras import tree
from keras.src.backend import get_keras_mask, set_keras_mask  # Masks have no public access.

CLEAN, BY_DESIGN, FAULT = "clean", "by design", "fault"

STAGES = {
    "start": "weights and optimizer state before the step: equal on all replicas",
    "random numbers": "seeds of random layers: different on each replica",
    "examples": "every example of the global batch is on one replica, with its target",
    "forward": "each replica's predictions for its examples",
    "loss": "the sum of the replicas' losses: equal to the loss of the whole batch",
    "regularisation": "the sum of `model.losses` over the replicas: equal to that of one device",
    "gradients": "each replica's gradients of its loss, before clipping",
    "clipping": "the sum of the gradients after clipping: equal to the clipped sum",
    "all-reduce": "the gradients that each replica receives: the sum of those sent",
    "update": "weights and optimizer state after the update",
    "statistics": "moving statistics and seeds after the step",
    "agreement": "weights and optimizer state after the step: equal on all replicas",
    "evaluation": "loss and metrics of `evaluate`: every example is counted once",
}

REMEDIES = {
    "same_random_numbers": "use a different seed on each replica: derive it from"
    " `tf.distribute.get_replica_context().replica_id_in_sync_group`",
    "clipped_before_the_sum": "clip after the sum: remove clipnorm, global_clipnorm and clipvalue"
    " from the optimizer, and clip in a custom train_step after"
    " `tf.distribute.get_replica_context().all_reduce`",
    "scalar_loss_not_divided": "return one loss per example, of shape (batch,), which Keras divides"
    " by the number of replicas; or divide the scalar loss by the number of replicas",
    "weighted_mean_of_means": "divide by the weights of the whole batch: use the default reduction"
    " with sample_weight, or reduction='sum' divided by a constant that all replicas share; with"
    " masks, use batches that have equally many unmasked steps on each replica",
    "mean_of_means": "use batch sizes that are divisible by the number of replicas"
    " (drop_remainder=True for the last batch), or reduction='sum' divided by the global batch"
    " size",
    "regulariser_repeated": "divide regularisation losses by the number of replicas"
    " (`tf.nn.scale_regularization_loss`)",
    "regulariser_missing": "add `model.losses` to the loss of the step",
    "not_all_reduced": "sum the gradients over the replicas before the update: call"
    " `optimizer.apply` within `strategy.run`, which all-reduces them, or all-reduce them in the"
    " step",
    "mean_instead_of_sum": "sum the gradients of losses that are divided by the global batch size;"
    " do not average the gradients again",
    "lost_replica": "include every replica in the all-reduce of every variable",
    "stale_gradient": "send the gradients of the current step: clear buffers with gradients of the"
    " previous step",
    "reduced_precision": "all-reduce the gradients in float32",
    "sparsified": "send all elements of each gradient, or accept that this is a different training",
    "quantised": "send gradients without quantisation, or accept that this is a different training",
    "scaled_gradient": "divide the loss by the global batch size exactly once",
    "labels_shifted": "shuffle and batch inputs and targets together, in one dataset",
    "predictions_out_of_order": "join predictions in the order in which the batch was split",
    "same_examples": "give each replica a different part of the batch: shard the data set by"
    " replica",
    "lost_examples": "split each batch so that every example reaches exactly one replica",
    "repeated_examples": "split each batch so that every example reaches exactly one replica",
    "other_examples": "use the same data set, seed and order in all runs",
    "inference_mode": "call the model with training=True in the training step",
    "frozen": "make the loss depend on the variable, or set trainable=False on every replica",
    "other_learning_rate": "use one learning rate on all replicas, and advance its schedule once"
    " per step",
    "clipped_on_one_replica": "clip on all replicas, after the sum",
    "overflow_not_skipped": "use mixed_bfloat16, which needs no loss scaling; Keras checks only the"
    " gradients of replica 0 for overflow",
    "not_finite": "look at the first step with numbers that are NaN or infinite: its examples, the"
    " loss, the learning rate",
    "weight_decay_on_top": "apply weight decay once: in the optimizer or in the loss",
    "schedule_stepped_too_often": "advance `optimizer.iterations` once per update",
    "rows_summed_first": "accept that this is a different training, or use an optimizer that is"
    " linear in the gradient, such as SGD",
    "not_updated": "apply the summed gradients on every replica",
    "update_not_seen": "apply gradients with `model.optimizer.apply`",
    "other_loss": "compile the same loss in all runs",
    "other_metric": "sum totals and counts over all replicas in the metric, and divide afterwards",
    "other_evaluation": "count every example once: do not pad batches, and average over examples",
    "random_evaluation": "draw random numbers only in training: use the `training` argument of"
    " `call`",
    "diverged_replicas": "create and restore variables within the strategy's scope, so that they"
    " have equal values on all replicas",
    "not_restored": "save every variable, and restore it on every replica",
    "changed_on_its_own": "look for code that assigns to the variable outside the update; if there"
    " is none, test the memory of the machine",
    "local_statistics": "normalise over the whole batch with"
    " `BatchNormalization(synchronized=True)`, and average its moving statistics over the replicas",
    "not_a_sum_over_examples": "gather the model's outputs from all replicas before the loss is"
    " computed, or accept that this is a different training",
    "mixes_examples": "gather the layer's inputs from all replicas, or accept that this is a"
    " different training",
    "unexplained": "compare the arrays of the saved recording with those of one device",
}

Arrays = list[Any]  # Of `np.ndarray` and `Sparse`.
EPS = float(np.finfo(np.float32).eps)
TINY = float(np.finfo(np.float32).tiny)
# A few repetitions underestimate the largest effect of rounding.
MARGIN = 8
NOTHING_BUT_ROUNDING = 0.1  # An array with a larger relative spread is rounding error only.


class Sparse(collections.namedtuple("Sparse", "values indices rows")):
    """A gradient of some rows of a table, as `tf.IndexedSlices`."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """A difference from one device, in one stage.

    Attributes:
        stage: a key of `STAGES`.
        status: `BY_DESIGN` or `FAULT`.
        cause: a key of `REMEDIES`.
        text: one sentence with the numbers.
        steps: numbers of the steps with this difference, from 1.
        replicas: the replicas with this difference; empty for all replicas together.
        tensors: paths of the variables concerned; empty if no variable is.
        distance: the largest relative difference.
        allowed: the largest relative difference that rounding can cause.
    """

    stage: str
    status: str
    cause: str
    text: str
    steps: tuple[int, ...]
    replicas: tuple[int, ...] = ()
    tensors: tuple[str, ...] = ()
    distance: float = 0.0
    allowed: float = 0.0

    @property
    def remedy(self) -> str:
        """How to fix the fault."""
        return REMEDIES[self.cause]

    def __str__(self) -> str:
        where = _count("step", self.steps)
        if self.replicas:
            where += f", {_count('replica', self.replicas)}"
        if self.tensors:
            shown = ", ".join(self.tensors[:3])
            more = f" and {len(self.tensors) - 3} more" if len(self.tensors) > 3 else ""
            where += f", {shown}{more}"
        lines = [f"{self.status.upper()}: {self.cause.replace('_', ' ')} ({where})"]
        lines.append(f"why     {self.text}")
        lines.append(f"remedy  {self.remedy}")
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class Report:
    """The result of comparing every stage of every recorded step.

    Attributes:
        num_steps: number of steps checked.
        num_replicas: number of replicas of the recording.
        findings: all differences, in the order of the stages.
        checked: the stages that could be checked.
        tolerance: how the tolerances were computed.
    """

    num_steps: int
    num_replicas: int
    findings: list[Finding]
    checked: list[str]
    tolerance: str

    @property
    def faults(self) -> list[Finding]:
        """The findings with status `FAULT`."""
        return [finding for finding in self.findings if finding.status == FAULT]

    def status(self, stage: str) -> str:
        """Returns "clean", "by design", "fault" or "not checked"."""
        found = {f.status for f in self.findings if f.stage == stage}
        if found:
            return FAULT if FAULT in found else BY_DESIGN
        return CLEAN if stage in self.checked else "not checked"

    @property
    def verdict(self) -> str:
        """One sentence that says whether this is the training of one device."""
        faults, by_design = (
            ", ".join(
                dict.fromkeys(f.cause.replace("_", " ") for f in self.findings if f.status == s)
            )
            for s in (FAULT, BY_DESIGN)
        )
        if faults:
            return f"not the training that the model defines on one device: {faults}"
        if by_design:
            return (
                f"different by design from the training on one device: {by_design}; no fault found"
            )
        return "the training that the model defines on one device: no fault found"

    def __str__(self) -> str:
        counts = (
            f"{_number_of('step', self.num_steps)} on {_number_of('replica', self.num_replicas)}"
        )
        lines = [f"{counts}: {self.verdict}"]
        if self.num_replicas == 1:
            lines.append(
                "only one replica: faults between replicas cannot appear; create two devices first,"
                " with tf.config.set_logical_device_configuration"
            )
        lines.append(f"tolerances: {self.tolerance}")
        for stage, what in STAGES.items():
            if (status := self.status(stage)) == "not checked":
                continue
            lines.append(f"  {stage:<15} {status:<10} {what}")
            for finding in self.findings:
                if finding.stage == stage:
                    lines += [f"      {line}" for line in str(finding).splitlines()]
        return "\n".join(lines)


class Recording:
    """What was recorded: plain arrays, step by step and replica by replica.

    Attributes:
        num_replicas: of the strategy.
        steps: for each step, (kind, replica) → arrays. The kinds are "data", "before", "y_pred",
            "mask", "loss" (data loss and regularisation), "raw", "clipped", "sums" and "after".
        numbers: of the steps, from 1; some may be left out.
        variables: path and kind ("weight", "statistic", "seed" or "optimizer state") of each array
            of "before" and "after".
        gradients: paths of the weights that "raw", "clipped" and "sums" belong to.
        structure: of "data", as `to_json` describes it.
        predicted: of "y_pred", likewise.
        whole_loss: the loss is computed once, of the predictions of all replicas, and each goes
            back from its part of the gradient with respect to these.
        clips_sum: gradients are clipped after the sum; "clipped" then comes after "sums", or is
            missing where the optimizer adds up the sums of several steps before.
    """

    def __init__(self, num_replicas: int):
        self.num_replicas = num_replicas
        self.steps: list[dict[tuple[str, int], Arrays]] = []
        self.numbers: list[int] = []
        self.variables: list[tuple[str, str]] = []
        self.gradients: list[str] = []
        self.structure: Any = None
        self.predicted: Any = None
        self.whole_loss = self.clips_sum = False

    def seeds_drawn(self) -> set[int]:
        """Returns which of `variables` are seeds that a step has drawn from."""
        return {
            index
            for step in self.steps
            for index, (_, kind) in enumerate(self.variables)
            if kind == "seed" and not _same(step["before", 0][index], step["after", 0][index])
        }

    def save(self, path: str) -> None:
        """Writes an `.npz` file; see `write`."""
        with open(path, "wb") as file:
            self.write(file)

    def write(self, file: BinaryIO) -> None:
        """Writes arrays `STEP/KIND/REPLICA/INDEX`, and "about", a JSON text, in `.npz` format."""
        arrays: dict[str, Any] = {}
        for number, step in enumerate(self.steps, start=1):
            for (kind, replica), values in step.items():
                for index, value in enumerate(values):
                    name = f"{number}/{kind}/{replica}/{index}"
                    parts = value._asdict() if isinstance(value, Sparse) else {"": value}
                    for part, array in parts.items():
                        arrays[f"{name}/{part}" if part else name] = np.asarray(array)
        about = {name: value for name, value in vars(self).items() if name != "steps"}
        about |= {"format": "lockstep recording 1", "num_steps": len(self.steps)}
        np.savez(file, **arrays, about=np.array(json.dumps(about)))

    @classmethod
    def load(cls, path: str | BinaryIO) -> "Recording":
        """Reads what `save` has written.

        Raises:
            ValueError: the file is no recording.
        """
        with np.load(path, allow_pickle=False) as file:
            if "about" not in file:
                raise ValueError(f"{path} is not a recording; pass a file that Recorder.save wrote")
            about = json.loads(str(file["about"]))
            recording = cls(about["num_replicas"])
            recording.steps = [{} for _ in range(about["num_steps"])]
            recording.variables = [tuple(pair) for pair in about["variables"]]
            for name in vars(recording).keys() - {"steps", "variables"}:
                setattr(recording, name, about[name])
            parts: dict[tuple, dict[str, np.ndarray]] = {}
            for name in file.files:
                if name != "about":
                    number, kind, replica, index, *part = name.split("/")
                    key = int(number), kind, int(replica), int(index)
                    parts.setdefault(key, {})["".join(part)] = file[name]
        for number, kind, replica, index in sorted(parts):
            part = parts[number, kind, replica, index]
            value = part[""] if "" in part else Sparse(**part)
            recording.steps[number - 1].setdefault((kind, replica), []).append(value)
        return recording


class Hooks:
    """Replaces methods of instances in a `with` block: their classes stay as they are."""

    def __init__(self) -> None:
        self._owners: list[tuple[Any, str, Any]] = []

    def hook(self, owner: Any, name: str, wrapper: Callable) -> None:
        """Lets `owner.name(...)` call `wrapper(inner, ...)`, `inner` being the method."""
        inner, hidden = getattr(owner, name), vars(owner).get(name)
        object.__setattr__(owner, name, lambda *args, **kwargs: wrapper(inner, *args, **kwargs))
        self._owners.append((owner, name, hidden))

    def __enter__(self) -> "Hooks":
        return self

    def __exit__(self, *error: object) -> None:
        while self._owners:
            owner, name, hidden = self._owners.pop()
            vars(owner).pop(name, None)
            if hidden is not None:  # Another hook, which was there before.
                object.__setattr__(owner, name, hidden)


class Recorder(Hooks, Recording):
    """Records the steps of `model.fit` in a `with` block; see the top of this file.

    Args:
        model: compiled, under a strategy or not.
        steps: how many steps to record, from the first one of the block on; or their numbers,
            from 1.

    Raises:
        ValueError: the model is not compiled, or is compiled by XLA or with several optimizers,
            where no hook can run.
    """

    def __init__(self, model: keras.Model, steps: int | Collection[int] = 3):
        Hooks.__init__(self)
        Recording.__init__(self, model.distribute_strategy.num_replicas_in_sync)
        if getattr(model, "optimizer", None) is None:
            raise ValueError(f"model {model.name} is not compiled; call model.compile first")
        if model.jit_compile is True:
            raise ValueError(
                f"model {model.name} is compiled with jit_compile=True, and XLA does not run the"
                " hooks; compile it with jit_compile=False to record it"
            )
        if isinstance(model.optimizer, getattr(keras.optimizers, "MultiOptimizer", ())):
            raise ValueError(
                f"model {model.name} is compiled with a MultiOptimizer, whose optimizers no hook"
                " sees; record it with one optimizer at a time, for all weights"
            )
        self._model = model
        self._wanted = range(1, steps + 1) if isinstance(steps, int) else steps
        self._kept: dict[tuple[int, str, int], Arrays] = {}
        self._num_seen: collections.Counter[int] = collections.Counter()
        self._number: dict[int, tf.Tensor] = {}  # Of the step that a replica is in.

    def write(self, file: BinaryIO) -> None:
        """See `Recording.write`."""
        self.recording().write(file)

    def recording(self) -> Recording:
        """Returns what was recorded, without the hooks."""
        recording = Recording(self.num_replicas)
        vars(recording).update({name: getattr(self, name) for name in vars(recording)})
        return recording

    def __enter__(self) -> "Recorder":
        model, optimizer = self._model, _inner(self._model.optimizer)
        self.hook(model, "train_step", self._train_step)
        self.hook(model, "compute_loss", self._compute_loss)
        self.hook(optimizer, "_backend_apply_gradients", self._apply_gradients)
        self.hook(optimizer, "_clip_gradients", self._clip_gradients)
        self.hook(optimizer, "_all_reduce_sum_gradients", self._all_reduce)
        model.train_function = None  # One that is traced already has no hooks.
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__()
        self._model.train_function = None
        numbers = sorted({step for step, *_ in self._kept})
        self.numbers = numbers
        self.steps = [{} for _ in numbers]
        for (step, kind, replica), arrays in self._kept.items():
            self.steps[numbers.index(step)][kind, replica] = arrays

    def _keep(self, kind: str, values: Sequence[Any]) -> None:
        """Keeps tensors of this replica, when they are computed."""
        context = tf.distribute.get_replica_context()
        replica = int(tf.get_static_value(context.replica_id_in_sync_group))
        sparse = [isinstance(value, tf.IndexedSlices) for value in values]
        flat: list[tf.Tensor] = []
        for value, is_sparse in zip(values, sparse, strict=True):
            slices = [value.values, value.indices, value.dense_shape[0]] if is_sparse else [value]
            flat += map(_to_numpy_dtype, slices)

        def keep(number: Any, *arrays: np.ndarray) -> np.int64:
            if kind == "data":  # The first of a step; some kinds may be missing in it.
                self._num_seen[replica] += 1
                number = np.int64(self._num_seen[replica])
            if number in self._wanted:
                copies = iter(map(plain_copy, arrays))  # Buffers are used again.
                self._kept[int(number), kind, replica] = [
                    Sparse(next(copies), next(copies), int(next(copies)))
                    if is_sparse
                    else next(copies)
                    for is_sparse in sparse
                ]
            return np.int64(number)

        # TensorFlow orders what is in a `cond`, as a LossScaleOptimizer's update is, by its inputs.
        number = tf.constant(0, tf.int64) if kind == "data" else self._number[replica]
        kept = tf.numpy_function(keep, [number, *flat], tf.int64)
        if kind == "data":
            self._number[replica] = kept

    def _train_step(self, inner: Callable, data: Any) -> Any:
        model = self._model
        state = [*model.variables, *model.optimizer.variables]
        self.variables = kinds_of_variables(model)
        self.structure = to_json(data)
        self._keep("data", leaves(data))
        self._keep("before", [tf.convert_to_tensor(variable.value) for variable in state])
        logs = inner(data)
        self._keep("after", [tf.convert_to_tensor(variable.value) for variable in state])
        return logs

    def _compute_loss(self, inner: Callable, *args: Any, **kwargs: Any) -> tf.Tensor:
        loss = inner(*args, **kwargs)
        call = dict(zip(("x", "y", "y_pred", "sample_weight", "training"), args, strict=False))
        call |= kwargs
        if call.get("training", True):
            y_pred = call["y_pred"]
            self.predicted = to_json(y_pred)
            self._keep("y_pred", leaves(y_pred))
            self._keep("mask", [_mask(p) for p in leaves(y_pred)])
            self._keep("loss", [loss, regularisation(self._model)])
        return loss

    def _apply_gradients(self, inner: Callable, gradients: Sequence, variables: Sequence) -> Any:
        pairs = [(g, v) for g, v in zip(gradients, variables, strict=True) if g is not None]
        self.gradients = [getattr(v, "path", v.name) for _, v in pairs]
        self._keep("raw", [g for g, _ in pairs])
        return inner(gradients, variables)

    def _clip_gradients(self, inner: Callable, gradients: Sequence) -> Any:
        clipped = inner(gradients)
        self._keep("clipped", [g for g in clipped if g is not None])
        return clipped

    def _all_reduce(self, inner: Callable, pairs: Sequence) -> Any:
        reduced = list(inner(pairs))
        self._keep("sums", [g for g, _ in reduced if g is not None])
        return reduced


# --- Structures and arrays -----------------------------------------------------------------------


def leaves(structure: Any) -> list[Any]:
    """Returns the leaves of a nest, without None."""
    return [leaf for leaf in tree.flatten(structure) if leaf is not None]


def to_json(structure: Any) -> Any:
    """Describes a nest of tuples, lists and dicts: leaves are numbers, in the order of `leaves`."""
    numbers = iter(range(len(tree.flatten(structure))))
    numbered = tree.map_structure(lambda x: None if x is None else next(numbers), structure)

    def describe(nest: Any) -> Any:
        if isinstance(nest, Mapping):
            return {"dict": {key: describe(value) for key, value in nest.items()}}
        if isinstance(nest, (tuple, list)):
            kind = "list" if isinstance(nest, list) else "tuple"
            return {kind: [describe(value) for value in nest]}
        return nest

    return describe(numbered)


def from_json(description: Any, values: Sequence[Any]) -> Any:
    """Returns the nest that `to_json` describes, with these leaves."""
    if isinstance(description, dict):
        ((kind, content),) = description.items()
        if kind == "dict":
            return {key: from_json(value, values) for key, value in content.items()}
        built = [from_json(value, values) for value in content]
        return built if kind == "list" else tuple(built)
    return None if description is None else values[description]


def plain_copy(array: Any) -> np.ndarray:
    """Returns a copy of an array; strings, which are objects of Python, as bytes of one length."""
    copy = np.array(array)
    return copy.astype(np.bytes_) if copy.dtype == object else copy


def dense(value: Any) -> np.ndarray:
    """Returns a gradient as one array, in float64."""
    if not isinstance(value, Sparse):
        return np.asarray(value, np.float64)
    out = np.zeros((int(value.rows), *value.values.shape[1:]))
    np.add.at(out, value.indices, value.values)
    return out


def add(values: Sequence[Any]) -> Any:
    """Adds gradients of replicas; sparse ones are joined, as `tf.distribute` does."""
    if isinstance(values[0], Sparse):
        rows = np.concatenate([value.values for value in values])
        return Sparse(rows, np.concatenate([v.indices for v in values]), values[0].rows)
    return np.add.reduce([np.asarray(value) for value in values])


def distance(actual: Any, expected: Any) -> float:
    """Returns ‖actual − expected‖, infinite where shapes or the places of NaN and inf differ."""
    a, b = dense(actual), dense(expected)
    if a.shape != b.shape:
        return np.inf
    finite = np.isfinite(a) & np.isfinite(b)
    if np.any(np.isfinite(a) != np.isfinite(b)):
        return np.inf
    return float(np.linalg.norm((a - b)[finite]))


def norm(value: Any) -> float:
    """Returns the Euclidean norm of all finite elements."""
    array = dense(value)
    return float(np.linalg.norm(array[np.isfinite(array)]))


def is_finite(values: Arrays) -> bool:
    """Tells whether no element is NaN or infinite."""
    return all(bool(np.all(np.isfinite(dense(value)))) for value in values)


def regularisation(model: keras.Model) -> tf.Tensor:
    """Returns what `model.losses` add to the loss of this replica."""
    losses = [model._aggregate_additional_loss(loss) for loss in model.losses]
    return tf.add_n(losses) if losses else tf.zeros(())


def kinds_of_variables(model: keras.Model) -> list[tuple[str, str]]:
    """Returns path and kind of each variable of a model and its optimizer, in their order."""
    weights = {id(variable) for variable in model.trainable_variables}
    found = []
    for variable in model.variables:
        kind = "weight" if id(variable) in weights else "statistic"
        if not _is_float(variable):
            kind = "seed"
        found.append((variable.path, kind))
    return found + [(variable.path, "optimizer state") for variable in model.optimizer.variables]


def _numpy_dtype(dtype: str) -> np.dtype:
    return np.dtype("float32" if dtype == "bfloat16" else dtype)


def _unit_of(dtype: str) -> float:
    """Returns the largest step between numbers near 1."""
    return {"bfloat16": 2.0**-7, "float16": 2.0**-10}.get(dtype, EPS)


def _to_numpy_dtype(tensor: Any) -> tf.Tensor:
    """Casts bfloat16, which NumPy cannot save, to float32."""
    tensor = tf.convert_to_tensor(tensor)
    return tf.cast(tensor, tf.float32) if tensor.dtype == tf.bfloat16 else tensor


def _inner(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """Returns the optimizer within a `LossScaleOptimizer`, which unscales before it."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def _mask(prediction: Any) -> tf.Tensor:
    mask = get_keras_mask(prediction)
    return tf.zeros(()) if mask is None else mask


def _number_of(noun: str, number: int) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _count(name: str, numbers: Sequence[int]) -> str:
    return f"{name}{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


# --- One device ----------------------------------------------------------------------------------


@dataclasses.dataclass
class StepResult:
    """A training step on one device, without the update.

    Attributes:
        y_pred: leaves of the predictions, if the step calls `compute_loss`.
        loss: of the data, and regularisation, likewise.
        raw: gradients before clipping.
        after: all variables after it; only statistics and seeds have changed.
    """

    y_pred: Arrays
    loss: tuple[float, float] | None
    raw: Arrays
    after: Arrays


class OneDevice:
    """The definition of a training: a compiled model without a strategy, and its own `train_step`.

    Args:
        model: compiled, made outside of any strategy's scope.
        recording: whose states and examples it takes.
        is_float64: it was built `in_float64`.

    Raises:
        ValueError: it is another model than the one that was recorded.
    """

    def __init__(self, model: keras.Model, recording: Recording, is_float64: bool = False):
        if tf.distribute.has_strategy() or model.distribute_strategy.num_replicas_in_sync > 1:
            raise ValueError("build the second model outside of the strategy's scope")
        self.model, self._recording, self._is_float64 = model, recording, is_float64
        self.optimizer = _inner(model.optimizer)
        self.scales_loss = self.optimizer is not model.optimizer
        first = recording.steps[0]["data", 0]
        x, _, _ = self._unpack([array[:1] for array in first])
        if not model.built or not model.variables:
            model(x)
        if not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        self.state = [*model.variables, *model.optimizer.variables]
        self._check_same_model()
        drawn = recording.seeds_drawn()
        self.random_layers = [
            layer
            for layer in _leaf_layers(model)
            if any(index in drawn for index, v in enumerate(self.state) if _is_seed_of(layer, v))
        ]
        self.layers_with_statistics = [
            layer
            for layer in _leaf_layers(model)
            if any(_is_float(variable) for variable in layer.non_trainable_variables)
        ]

    def _check_same_model(self) -> None:
        shapes = [tuple(variable.shape) for variable in self.state]
        recorded = [array.shape for array in self._recording.steps[0]["before", 0]]
        for index, (own, other) in enumerate(zip(shapes, recorded, strict=False)):
            if own != other:
                path, _ = self._recording.variables[index]
                raise ValueError(
                    f"variable {path} has shape {other} in the recording and {own} in the model"
                    f" {self.model.name}; build the model that was recorded"
                )
        if len(shapes) != len(recorded):
            raise ValueError(
                f"the recording has {len(recorded)} variables and the model {self.model.name}"
                f" {len(shapes)}; build and compile the model that was recorded"
            )

    @property
    def unit(self) -> float:
        """The largest step between numbers near 1 in what the layers compute in."""
        return max([EPS, *(_unit_of(layer.compute_dtype) for layer in _leaf_layers(self.model))])

    @property
    def units(self) -> list[float]:
        """The same of each variable."""
        return [_unit_of(variable.dtype) for variable in self.state]

    def load(self, state: Arrays) -> None:
        """Assigns all variables."""
        for variable, array in zip(self.state, state, strict=True):
            variable.assign(tf.cast(array, variable.dtype))

    def step(
        self, state: Arrays, data: Arrays, *, scales: tuple[float, float] = (1.0, 1.0),
        starts: Arrays | None = None,
    ) -> StepResult:  # fmt: skip
        """Runs the model's own `train_step` from a state, without the update.

        Args:
            state: all variables.
            data: leaves of the examples.
            scales: factors of the data loss and of regularisation.
            starts: what the backward pass starts from, in place of the gradient of the data loss
                with respect to each prediction.
        """
        got = StepResult([], None, [], [])

        def compute_loss(inner: Callable, *args: Any, **kwargs: Any) -> tf.Tensor:
            loss, regular = inner(*args, **kwargs), regularisation(self.model)
            y_pred = kwargs["y_pred"] if "y_pred" in kwargs else args[2]
            regular = tf.cast(regular, loss.dtype)
            got.y_pred = [np.array(_to_numpy_dtype(p)) for p in leaves(y_pred)]
            got.loss = float(tf.reduce_sum(loss) - regular), float(regular)
            data_loss = loss - regular
            if starts is not None:
                pairs = zip(leaves(y_pred), starts, strict=True)
                parts = [tf.reduce_sum(p * tf.cast(start, p.dtype)) for p, start in pairs]
                data_loss = tf.add_n([tf.cast(part, loss.dtype) for part in parts])
            return scales[0] * data_loss + scales[1] * regular

        def apply(inner: Callable, grads: Sequence, *args: Any, **kwargs: Any) -> None:
            got.raw = [_to_numpy(g) for g in grads if g is not None]

        self.load(state)
        precision = in_float64() if self._is_float64 else contextlib.nullcontext()
        with Hooks() as hooks, precision:
            hooks.hook(self.model, "compute_loss", compute_loss)
            hooks.hook(self.optimizer, "apply", apply)
            self.model.train_step(from_json(self._recording.structure, self._tensors(data)))
        got.after = self._read()
        return got

    def loss(
        self, state: Arrays, data: Arrays, y_pred: Arrays, masks: Arrays, *, weighted: bool = True
    ) -> float:
        """Returns the loss of given predictions, without regularisation.

        Args:
            state: all variables.
            data: leaves of the examples.
            y_pred: leaves of the predictions.
            masks: one for each of them; scalars for none.
            weighted: take sample weights and masks into account.
        """
        predictions = [tf.constant(array) for array in y_pred]
        return float(self._loss_of(state, data, predictions, masks, weighted))

    def loss_gradients(self, state: Arrays, data: Arrays, y_pred: Arrays, masks: Arrays) -> Arrays:
        """Returns the gradient of that loss with respect to each of the predictions."""
        predictions = [tf.constant(array) for array in y_pred]
        with tf.GradientTape() as tape:
            tape.watch(predictions)
            loss = self._loss_of(state, data, predictions, masks, True)
        zero = tf.UnconnectedGradients.ZERO
        return [g.numpy() for g in tape.gradient(loss, predictions, unconnected_gradients=zero)]

    def _loss_of(
        self, state: Arrays, data: Arrays, predictions: list[tf.Tensor], masks: Arrays,
        weighted: bool,
    ) -> tf.Tensor:  # fmt: skip
        x, y, sample_weight = self._unpack(data)
        self.load(state)
        if self.model.losses:
            self.model(x, training=True)  # Activity regularisers.
        predictions = [tf.identity(prediction) for prediction in predictions]
        for prediction, mask in zip(predictions, masks, strict=True):
            if mask.ndim and weighted:
                set_keras_mask(prediction, tf.constant(mask))
        loss = self.model.compute_loss(
            x=x,
            y=y,
            y_pred=from_json(self._recording.predicted, predictions),
            sample_weight=sample_weight if weighted else None,
        )
        return tf.reduce_sum(loss) - tf.cast(regularisation(self.model), loss.dtype)

    def clip(self, gradients: Arrays) -> Arrays:
        """Returns gradients as the optimizer clips them."""
        return [_to_numpy(g) for g in self.optimizer._clip_gradients(list(map(_to_tf, gradients)))]

    def update(
        self, state: Arrays, sums: Arrays, *, clips: bool = False, rate: float = 1.0,
        decays: bool = True,
    ) -> Arrays:  # fmt: skip
        """Returns all variables after the optimizer's update with these gradients.

        Args:
            state: before it.
            sums: gradients of the weights that `Recording.gradients` names.
            clips: clip them first.
            rate: a factor of the learning rate.
            decays: weight decay is with the changed learning rate, too.
        """
        self.load(state)
        names = self._recording.gradients
        paths = [path for path, _ in self._recording.variables]
        variables = [self.state[paths.index(name)] for name in names]
        with Hooks() as hooks:
            if not clips:
                hooks.hook(self.optimizer, "_clip_gradients", lambda inner, grads: grads)
            if rate != 1.0 and decays:
                name = "_get_current_learning_rate"
                hooks.hook(self.optimizer, name, lambda inner: rate * inner())
            elif rate != 1.0:
                name = "_backend_update_step"
                hooks.hook(self.optimizer, name, lambda inner, g, v, own: inner(g, v, rate * own))
            self.optimizer.apply(list(map(_to_tf, sums)), variables)
        return self._read()

    def without(self, layers: Sequence[keras.layers.Layer], function: Callable[[], Any]) -> Any:
        """Returns what `function` does while these layers work as in inference."""

        def inference(inner: Callable, *args: Any, **kwargs: Any) -> Any:
            return inner(*args, **{**kwargs, "training": False})

        with Hooks() as hooks:
            for layer in layers:
                if layer._call_has_training_arg:
                    hooks.hook(layer, "call", inference)
            return function()

    def step_in_float32(
        self, state: Arrays, data: Arrays, scales: tuple[float, float],
        starts: Arrays | None = None,
    ) -> StepResult | None:  # fmt: skip
        """Runs a step with layers in float32 that compute in bfloat16 or float16.

        Random layers stay as they are, they would draw other numbers; and so do layers that are
        made of them, as an LSTM with dropout is.

        Returns:
            The step; None where layers cannot be in float32.
        """

        def is_random(layer: keras.layers.Layer) -> bool:
            return any(part in self.random_layers for part in layer._flatten_layers())

        layers = [
            layer
            for layer in self.model._flatten_layers()
            if type(layer.dtype_policy) is keras.DTypePolicy
            and layer.compute_dtype != layer.variable_dtype == "float32"
            and (isinstance(layer, keras.Model) or not is_random(layer))
        ]
        policies = [layer.dtype_policy for layer in layers]
        try:
            for layer in layers:
                layer.dtype_policy = "float32"
            return self.step(state, data, scales=scales, starts=starts)
        except Exception:  # Of the user's code, which may be made for another dtype.
            return None
        finally:
            for layer, policy in zip(layers, policies, strict=True):
                layer.dtype_policy = policy

    def _unpack(self, data: Arrays) -> tuple[Any, Any, Any]:
        nest = from_json(self._recording.structure, self._tensors(data))
        return keras.utils.unpack_x_y_sample_weight(nest)

    def _tensors(self, data: Arrays) -> list[tf.Tensor]:
        tensors = [tf.constant(array) for array in data]
        if not self._is_float64:
            return tensors
        return [tf.cast(t, tf.float64) if t.dtype.is_floating else t for t in tensors]

    def _read(self) -> Arrays:
        return [np.array(_to_numpy_dtype(variable.value)) for variable in self.state]


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    """Lets Keras build and run models in float64 in a `with` block."""
    floatx, policy = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    try:
        yield
    finally:
        keras.config.set_floatx(floatx)
        keras.config.set_dtype_policy(policy)


@contextlib.contextmanager
def as_replica(number: int) -> Iterator[None]:
    """Lets a step on one device see the number of a replica, in a group that is still of one."""
    with tf.distribute.ReplicaContext(tf.distribute.get_strategy(), number):
        yield


def build_in_float64(
    build: Callable[[], keras.Model], recording: Recording, one: OneDevice
) -> tuple[OneDevice | None, str]:
    """Returns the same model in float64, None where there is none, and why not."""
    if one.random_layers:
        return None, "the model has random layers"
    if one.unit > EPS:
        return None, "the model does not compute in float32"
    try:
        with in_float64():
            model = build()
            exact = OneDevice(model, recording, is_float64=True)
        first = recording.steps[0]
        exact.step(first["before", 0], first["data", 0])
    except Exception as error:  # Of the user's code, which may be made for float32.
        return None, f"{type(error).__name__} in float64"
    with_weights = [layer for layer in _leaf_layers(model) if layer.weights]
    if any(layer.compute_dtype != "float64" for layer in with_weights):
        return None, "the model sets its own dtype"
    return exact, ""


def _is_seed_of(layer: keras.layers.Layer, variable: keras.Variable) -> bool:
    return any(generator.state is variable for generator in layer._seed_generators)


def _is_float(variable: keras.Variable) -> bool:
    return bool(np.issubdtype(_numpy_dtype(variable.dtype), np.floating))


def _leaf_layers(model: keras.Model) -> list[keras.layers.Layer]:
    return [layer for layer in model._flatten_layers(include_self=False) if not layer._layers]


def _to_tf(gradient: Any) -> Any:
    if not isinstance(gradient, Sparse):
        return tf.constant(gradient)
    shape = (int(gradient.rows), *gradient.values.shape[1:])
    return tf.IndexedSlices(tf.constant(gradient.values), tf.constant(gradient.indices), shape)


def _to_numpy(gradient: Any) -> Any:
    if not isinstance(gradient, tf.IndexedSlices):
        return np.array(_to_numpy_dtype(gradient))
    values, indices = np.array(_to_numpy_dtype(gradient.values)), gradient.indices.numpy()
    return Sparse(values, indices, int(gradient.dense_shape[0]))


# --- Comparison ----------------------------------------------------------------------------------


def compare(
    record: Recording,
    model: keras.Model | Callable[[], keras.Model],
    *,
    batches: Sequence[Any] = (),
    on_step: Callable[[int], None] = lambda step: None,
) -> Report:
    """Checks every stage of every recorded step against one device.

    Args:
        record: a `Recorder` after its `with` block, or a `Recording` that was loaded.
        model: compiled by the same code, outside of the strategy's scope; or a function that
            builds it: the expected values are then computed in float64, where the model can be.
        batches: the global batch of each step, as the data set defines it; none to take what the
            replicas were given.
        on_step: called after each step.

    Raises:
        ValueError: nothing was recorded, or of another model.
    """
    if not record.steps:
        raise ValueError(
            "nothing was recorded; call model.fit, or model.train_step, within the `with` block"
        )
    if isinstance(model, keras.Model):
        one, exact, why_not = OneDevice(model, record), None, ""
    else:
        one = OneDevice(model(), record)
        exact, why_not = build_in_float64(model, record, one)
    comparison = Comparison(record, one, exact)
    found: list[Finding] = []
    for step in range(len(record.steps)):
        batch = leaves(batches[step]) if step < len(batches) else None
        found += comparison.check(step, batch)
        on_step(step + 1)
    return Report(
        len(record.steps),
        record.num_replicas,
        _merged(found),
        comparison.checked,
        comparison.tolerance + (f" (not float64: {why_not})" if why_not else ""),
    )


def compare_evaluation(
    logs: Mapping[str, float],
    model: keras.Model,
    states: Sequence[Sequence[np.ndarray]],
    dataset: tf.data.Dataset,
) -> list[Finding]:
    """Compares loss and metrics of `evaluate` under a strategy with those of one device.

    Args:
        logs: of `model.evaluate(..., return_dict=True)` under the strategy.
        model: compiled by the same code, outside of the strategy's scope.
        states: of each replica, the model's variables and then its optimizer's, in the evaluation.
        dataset: the batches that were to be evaluated, each example once.
    """

    def evaluate(state: Sequence[np.ndarray], batches: tf.data.Dataset) -> dict[str, float]:
        variables = [*model.variables, *model.optimizer.variables]
        for variable, array in zip(variables, state, strict=True):
            variable.assign(tf.cast(array, variable.dtype))
        with warnings.catch_warnings():
            # Keras warns at the end of a data set of unknown size, such as a shard.
            warnings.filterwarnings("ignore", message="Your input ran out of data")
            return model.evaluate(batches, verbose=0, return_dict=True)

    logs, expected = _numbers(logs), _numbers(evaluate(states[0], dataset))
    drawn = [
        variable.path
        for variable, array in zip(model.variables, states[0], strict=False)
        if not _is_float(variable) and not _same(np.asarray(variable), array)
    ]
    apart = {n: _ratio(abs(logs[n] - value), abs(value)) for n, value in expected.items()}
    allowed = MARGIN * 16 * EPS  # Of means over some thousand numbers, in another order.
    wrong = [name for name, by in apart.items() if not by <= allowed]
    if not wrong:
        return []
    text = "; ".join(f"{n} is {logs[n]:.6g}, one device has {expected[n]:.6g}" for n in wrong)
    # A metric that is added up wrongly leaves the loss right; other examples change both.
    status, cause = FAULT, "other_evaluation" if "loss" in wrong else "other_metric"
    if "loss" in wrong and not all(map(_same, states[0], states[-1])):
        shards = _shards_of(dataset, len(states))
        sizes = [sum(len(leaves(batch)[0]) for batch in shard) for shard in shards]
        losses = [
            evaluate(state, shard)["loss"] if size else 0.0
            for state, shard, size in zip(states, shards, sizes, strict=True)
        ]
        local = float(np.average(losses, weights=sizes))
        if _ratio(abs(logs["loss"] - local), abs(local)) <= allowed:
            status, cause = BY_DESIGN, "local_statistics"
            text += "; each replica evaluates with different moving statistics"
    if drawn:  # Replicas, and other orders of examples, draw other numbers.
        status, cause = BY_DESIGN, "random_evaluation"
        text += f"; the evaluation draws random numbers from {drawn[0]}"
    by = max(apart[name] for name in wrong)
    return [Finding("evaluation", status, cause, text, (1,), (), tuple(wrong), by, allowed)]


def _numbers(logs: Mapping[str, Any]) -> dict[str, float]:
    """Returns all numbers in logs; of a metric with several, each by itself."""
    found: dict[str, float] = {}
    for name, value in logs.items():
        numbers = np.ravel(value)
        names = [name] if len(numbers) == 1 else [f"{name}[{i}]" for i in range(len(numbers))]
        found |= dict(zip(names, map(float, numbers), strict=True))
    return found


def _shards_of(dataset: tf.data.Dataset, num_replicas: int) -> list[tf.data.Dataset]:
    """Cuts each batch into one part for each replica, as `MirroredStrategy` does."""

    def part(replica: int, *batch: Any) -> Any:
        size = -(-tf.shape(leaves(batch)[0])[0] // num_replicas)
        cut = tree.map_structure(lambda leaf: leaf[replica * size : (replica + 1) * size], batch)
        return cut if len(cut) > 1 else cut[0]

    parts = [dataset.map(partial(part, replica)) for replica in range(num_replicas)]
    return [shard.filter(lambda *batch: tf.shape(leaves(batch)[0])[0] > 0) for shard in parts]


def _merged(findings: Sequence[Finding]) -> list[Finding]:
    """Puts findings of the same cause together over steps, replicas and tensors."""
    merged: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        merged.setdefault((finding.stage, finding.cause), []).append(finding)
    order = list(STAGES)
    return [
        dataclasses.replace(
            same[0],
            steps=tuple(sorted({s for f in same for s in f.steps})),
            replicas=tuple(sorted({r for f in same for r in f.replicas})),
            tensors=tuple(dict.fromkeys(t for f in same for t in f.tensors)),
            distance=max(f.distance for f in same),
        )
        for _, same in sorted(merged.items(), key=lambda item: order.index(item[0][0]))
    ]


@dataclasses.dataclass
class Spread:
    """How far rounding carries the forward and the backward pass of a shard.

    Attributes:
        forward: relative, of predictions and loss.
        backward: relative, of gradients as a whole.
        gradients: absolute, of each gradient.
    """

    forward: float
    backward: float
    gradients: list[float]


@dataclasses.dataclass(frozen=True)
class Losses:
    """Data losses of a step, without regularisation.

    Attributes:
        taken: for each replica, as recorded.
        own: for each replica, as one device has it for the recorded predictions.
        whole: of the global batch, likewise.
        plain: `own` without weights and masks.
        plain_whole: `whole`, likewise.
        sizes: examples of each replica.
        allowed: relative distance that rounding may make.
    """

    taken: list[float]
    own: list[float]
    whole: float
    plain: list[float]
    plain_whole: float
    sizes: list[int]
    allowed: float

    @property
    def size(self) -> float:
        """What distances are relative to: of numbers that are not NaN or infinite."""
        whole, *taken = (abs(x) if np.isfinite(x) else 0.0 for x in (self.whole, *self.taken))
        return max(whole, sum(taken), TINY)

    @property
    def apart(self) -> float:
        """The relative distance of the replicas' sum from the loss of the whole batch."""
        return abs(sum(self.taken) - self.whole) / self.size

    @property
    def are_right(self) -> bool:
        """Whether the replicas' losses add up to that of the whole batch."""
        return self._near(sum(self.taken), self.whole) and not self.odd

    @property
    def odd(self) -> list[int]:
        """The replicas whose loss is no share of the loss of their own examples."""
        shares = [s for s, own in enumerate(self.own) if not self.is_share(s, own)]
        # A step of one's own may weigh its examples in any way, as long as the sum is right.
        regular = len(shares) == len(self.own) and self._near(sum(self.taken), self.whole)
        return [] if regular else shares

    def is_share(self, r: int, loss: float) -> bool:
        """Tells whether a replica has taken this loss: once, or its part of the batch."""
        shares = 1.0, 1 / len(self.own), self.sizes[r] / sum(self.sizes)
        return any(self._near(self.taken[r], share * loss) for share in shares)

    @property
    def common_factor(self) -> float | None:
        """By what all replicas have multiplied their part in the loss; None where it differs."""
        num = len(self.own)
        if not all(self.own) or not np.isfinite(self.own).all():
            return None
        factors = [t * num / o for t, o in zip(self.taken, self.own, strict=True)]
        same = np.allclose(factors, factors[0], self.allowed, 0)
        return factors[0] if same and factors[0] > 0 else None

    def repeated(self, regular: float) -> float | None:
        """Returns how many times too often regularisation is in the replicas' data losses.

        Args:
            regular: what it is on one device.

        Returns:
            None where it does not explain each replica's loss; -1 where it is missing.
        """
        if not regular:
            return None
        extra, num = (sum(self.taken) - self.whole) / regular, len(self.own)
        shares = [size / sum(self.sizes) for size in self.sizes], [1 / num] * num
        fits = [
            all(
                self._near(taken, share * own + extra * regular / num)
                for taken, share, own in zip(self.taken, part, self.own, strict=True)
            )
            for part in shares
        ]
        is_whole = abs(extra - round(extra)) < 1e-3 and round(extra) != 0
        return extra if any(fits) and is_whole else None

    def why(self) -> tuple[str, str]:
        """Returns cause and text of a sum that is not the loss of the whole batch."""
        num, sizes, total = len(self.own), self.sizes, sum(self.sizes)
        taken, whole = sum(self.taken), self.whole
        by_size = sum(o * n / total for o, n in zip(self.own, sizes, strict=True))
        once = all(self._near(t, o) for t, o in zip(self.taken, self.own, strict=True))
        mean = self._near(taken, sum(self.own) / num) and not self.odd
        plain_sum = sum(o * n / total for o, n in zip(self.plain, sizes, strict=True))
        is_plain = abs(plain_sum - self.plain_whole) <= self.allowed * max(
            abs(self.plain_whole), TINY
        )
        each = ", ".join(f"{o:.6g}" for o in self.own)
        if once and self._near(by_size, whole):
            return "scalar_loss_not_divided", (
                f"the replicas' losses ({each}) are not divided by the number of replicas, {num}:"
                f" their sum is {taken:.6g}, the loss of the whole batch is {whole:.6g}, so the"
                f" gradients are {taken / whole:.4g} times too large"
            )
        if mean and len(set(sizes)) > 1 and self._near(by_size, whole):
            return "mean_of_means", (
                f"the replicas have {'/'.join(map(str, sizes))} examples; the mean of their means"
                f" is {taken:.6g}, the mean over all examples is {whole:.6g}"
            )
        if (mean or once) and is_plain and not self._near(by_size, whole):
            return "weighted_mean_of_means", (
                "each replica divides by the sum of the weights, or unmasked steps, of its"
                f" examples: the mean of the replicas' losses ({each}) is {taken:.6g}, the weighted"
                f" mean of the whole batch is {whole:.6g}"
            )
        if (mean or once) and not is_plain:
            return "not_a_sum_over_examples", (
                f"the loss of a batch is not the mean of its examples' losses: it is {whole:.6g}"
                f" for the whole batch and {each} for the shards"
            )
        factor = self.common_factor
        if factor is not None and self._near(by_size, whole):
            often = ": they are divided by the number of replicas twice"
            return "scaled_gradient", (
                f"each replica's loss and gradients are {factor:.4g} times the replica's share of"
                f" those of the batch{often if abs(factor * num - 1) < 1e-3 else ''}"
            )
        return "other_loss", (
            f"the replicas' losses ({', '.join(f'{t:.6g}' for t in self.taken)}) add up to"
            f" {taken:.6g}; the compiled loss of their predictions is {each}, and {whole:.6g} for"
            " the whole batch"
        )

    def _near(self, number: float, other: float) -> bool:
        if not np.isfinite(other):
            return not np.isfinite(number)
        return bool(abs(number - other) <= self.allowed * self.size)


class Comparison:
    """Checks the steps of a recording, one after another, stage by stage.

    Args:
        recording: of any number of replicas.
        one: the same model on one device.
        exact: the same in float64, if there is one.

    Attributes:
        checked: the stages that were checked so far.
    """

    def __init__(self, recording: Recording, one: OneDevice, exact: OneDevice | None = None):
        self._recording, self._one, self._exact = recording, one, exact
        self._reference = exact or one
        self._num_in_float64 = 0
        self._replicas = range(recording.num_replicas)
        self._kinds = [kind for _, kind in recording.variables]
        self._paths = [path for path, _ in recording.variables]
        self.checked: list[str] = []

    def check(self, step: int, batch: Arrays | None = None) -> Iterator[Finding]:
        """Yields what is not as on one device in a step, from 0, stage by stage."""
        self._step, self._arrays, self._batch = step, self._recording.steps[step], batch
        self._stage = "start"
        if not all(is_finite(before) for before in self._all("before")):
            yield self._found(
                "not_finite",
                "the step starts from weights that are NaN or infinite, so it cannot be compared",
                design=True,
            )
            return
        num = len(self._replicas)
        share = 1 / num if self._has("loss") else 1.0
        self._scales = [(share, share)] * num
        self._starts: list[Arrays | None] = [None] * num
        if self._recording.whole_loss and self._has("y_pred"):
            self._scales = [(1.0, size / sum(self._sizes())) for size in self._sizes()]
            self._starts = self._starts_of_the_whole()
        if self._synchronizes:
            self._compute_together()
        else:
            self._own, self._spread = [], []
            self._reference = self._exact or self._one
            for r in self._replicas:
                with as_replica(r):
                    own, spread = self._measure(
                        self._all("before")[r], self._data[r], self._scales[r], self._starts[r]
                    )
                self._own.append(own)
                self._spread.append(spread)
        self._loss_is_wrong = self._loss_is_unknown = self._update_is_wrong = False
        self._used, self._in_inference = list(self._data), set[int]()
        self._drawn_as: dict[int, int] = {}
        stages = {
            "start": self._start,
            "random numbers": self._random_numbers,
            "examples": self._examples,
            "forward": self._forward,
            "loss": self._loss,
            "regularisation": self._regularisation,
            "gradients": self._gradients,
            "clipping": self._clipping,
            "all-reduce": self._all_reduce,
            "update": self._update,
            "statistics": self._statistics,
            "agreement": self._agreement,
        }
        for stage, function in stages.items():
            self._stage = stage
            yield from function()

    @property
    def tolerance(self) -> str:
        """How the tolerances were found."""
        spread = "spread over orders of summation and weights changed by one unit in the last place"
        if not self._num_in_float64:
            return spread
        return f"float64 on one device and the difference of float32 from it; {spread}"

    # The pieces that the stages are made of.

    def _starts_of_the_whole(self) -> list[Arrays | None]:
        """Returns for each replica what it goes back from: its part of the whole loss' gradient."""
        joined = [_join(parts) for parts in zip(*self._all("y_pred"), strict=True)]
        masks = [_join(parts) for parts in zip(*self._all("mask"), strict=True)]
        return self._dealt(self._one, self._all("before")[0], self._whole, joined, masks)

    def _dealt(
        self, one: OneDevice, state: Arrays, data: Arrays, y_pred: Arrays, masks: Arrays
    ) -> list[Arrays | None]:
        """Returns the rows of each replica of the gradient with respect to the predictions."""
        gradients = one.loss_gradients(state, data, y_pred, masks)
        ends = np.cumsum(self._sizes())[:-1]
        return [list(part) for part in zip(*(np.split(g, ends) for g in gradients), strict=True)]

    def _measure(
        self, state: Arrays, data: Arrays, scales: tuple[float, float],
        starts: Arrays | None = None,
    ) -> tuple[StepResult, Spread]:  # fmt: skip
        """Returns a step on one device, in float64 if it can be, and the spread of float32."""
        own = self._one.step(state, data, scales=scales, starts=starts)
        spread = self._spread_of(own, state, data, scales, starts)
        if self._exact is None:
            return own, spread
        exact = self._exact.step(state, data, scales=scales, starts=starts)
        if len(exact.raw) != len(own.raw):
            self._reference = self._one
            return own, spread
        forward = _relative(own.y_pred, exact.y_pred)
        backward = _relative_norm(own.raw, exact.raw)
        if forward > MARGIN * spread.forward or backward > MARGIN * spread.backward:
            self._reference = self._one  # Something else than rounding: the code asks for dtypes.
            return own, spread
        self._num_in_float64 += 1
        apart = [distance(a, e) for a, e in zip(own.raw, exact.raw, strict=True)]
        gradients = [max(a, g) for a, g in zip(apart, spread.gradients, strict=True)]
        result = dataclasses.replace(exact, after=own.after)
        return result, Spread(
            max(forward, spread.forward), max(backward, spread.backward), gradients
        )

    def _without(self, layers: Sequence[keras.layers.Layer], function: Callable[[], Any]) -> Any:
        """Returns what `function` does while these layers work as in inference."""
        one, exact = self._one, self._exact
        if exact is None:
            return one.without(layers, function)
        numbers = {id(layer): number for number, layer in enumerate(_leaf_layers(one.model))}
        others = _leaf_layers(exact.model)
        same = [others[numbers[id(layer)]] for layer in layers]
        return one.without(layers, lambda: exact.without(same, function))

    def _all(self, kind: str, step: int | None = None) -> list[Arrays]:
        """Returns arrays of all replicas, in their order."""
        arrays = self._arrays if step is None else self._recording.steps[step]
        return [arrays[kind, replica] for replica in self._replicas]

    def _has(self, kind: str) -> bool:
        return (kind, 0) in self._arrays

    @property
    def _follows(self) -> bool:
        """Whether the step before was recorded, too."""
        numbers, step = self._recording.numbers, self._step
        return step > 0 and numbers[step] == numbers[step - 1] + 1

    def _earlier(self, kind: str) -> list[Arrays] | None:
        """Returns arrays of all replicas in the last step before that has them."""
        for step in reversed(self._recording.steps[: self._step]):
            if all((kind, replica) in step for replica in self._replicas):
                return [step[kind, replica] for replica in self._replicas]
        return None

    @property
    def _overflows(self) -> list[int]:
        """The replicas whose gradients overflow in float16, so that the step should be skipped."""
        return [r for r in self._replicas if self._one.scales_loss and not self._own[r].raw]

    @property
    def _data(self) -> list[Arrays]:
        return self._all("data")

    @property
    def _whole(self) -> Arrays:
        return [np.concatenate(parts) for parts in zip(*self._data, strict=True)]

    def _checks(self) -> None:
        if self._stage not in self.checked:
            self.checked.append(self._stage)

    def _found(self, cause: str, text: str, **where: Any) -> Finding:
        status = BY_DESIGN if where.pop("design", False) else FAULT
        return Finding(self._stage, status, cause, text, (self._step + 1,), **where)

    def _sizes(self) -> list[int]:
        return [len(data[0]) for data in self._data]

    @property
    def _synchronizes(self) -> bool:
        """Whether BatchNorm takes the statistics of all replicas, so that none works alone."""
        layers = self._one.layers_with_statistics
        is_one = len(self._replicas) == 1
        return not is_one and any(getattr(layer, "synchronized", False) for layer in layers)

    def _compute_together(self) -> None:
        """Computes the whole batch in one, and deals out its predictions."""
        state, data = self._all("before")[0], self._whole
        whole = self._one.step(state, data)
        spread = self._spread_of(whole, state, data, (1.0, 1.0))
        ends = np.cumsum(self._sizes())[:-1]
        shards = list(zip(*(np.split(p, ends) for p in whole.y_pred), strict=True))
        self._own = [
            StepResult(list(shard), whole.loss, whole.raw, whole.after) for shard in shards
        ]
        self._spread = [spread] * len(self._replicas)

    def _spread_of(
        self, own: StepResult, state: Arrays, data: Arrays, scales: tuple[float, float],
        starts: Arrays | None = None,
    ) -> Spread:  # fmt: skip
        """Repeats a step in another order, and from weights one unit in the last place off."""
        one, generator = self._one, np.random.default_rng(self._step)
        repeated = []
        for _ in range(2):
            near = [
                array * (1 + one.unit * generator.choice([-1, 1], array.shape)).astype(array.dtype)
                if kind in ("weight", "statistic")
                else array
                for array, kind in zip(state, self._kinds, strict=True)
            ]
            repeated.append(one.step(near, data, scales=scales, starts=starts))
        num = len(data[0])
        aligned = all(len(p) == num for p in own.y_pred if p.ndim)
        if not one.random_layers and aligned and num > 1:
            order = generator.permutation(num)
            moved = None if starts is None else [start[order] for start in starts]
            result = one.step(state, [array[order] for array in data], scales=scales, starts=moved)
            back = np.argsort(order)
            result.y_pred = [p[back] for p in result.y_pred]
            if not self._is_another_step(result, own, repeated):
                repeated.append(result)
        # A sum in bfloat16 may stop growing at the same number in all of these repetitions.
        fine = one.step_in_float32(state, data, scales, starts) if one.unit > EPS else None
        if fine and not self._is_another_step(fine, own, repeated):
            repeated.append(fine)
        forward = backward = one.unit
        gradients = [0.0] * len(own.raw)
        size = np.sqrt(sum(norm(g) ** 2 for g in own.raw))
        for result in repeated:
            for a, b in zip(result.y_pred, own.y_pred, strict=True):
                forward = max(forward, _ratio(distance(a, b), norm(b)))
            if len(result.raw) != len(own.raw):  # Of a step that overflowed.
                continue
            apart = [distance(a, b) for a, b in zip(result.raw, own.raw, strict=True)]
            gradients = [max(a, b) for a, b in zip(gradients, apart, strict=True)]
            backward = max(backward, _ratio(np.sqrt(sum(a**2 for a in apart)), size))
        for far, gradient in zip(gradients, own.raw, strict=True):
            if (ratio := _ratio(far, norm(gradient))) < NOTHING_BUT_ROUNDING:
                backward = max(backward, ratio)
        return Spread(forward, backward, gradients)

    def _is_another_step(
        self, result: StepResult, own: StepResult, near: Sequence[StepResult]
    ) -> bool:
        """Tells whether a step depends on the order of its examples by more than rounding.

        Args:
            result: of the examples in another order.
            own: of the step.
            near: of the step from weights that are one unit in the last place off.
        """

        def apart(other: StepResult) -> tuple[float, float]:
            if len(other.raw) != len(own.raw):  # Of a step that overflowed.
                return _relative(other.y_pred, own.y_pred), 0.0
            return _relative(other.y_pred, own.y_pred), _relative_norm(other.raw, own.raw)

        usual = np.max([apart(other) for other in near], axis=0)
        return bool(np.any(np.array(apart(result)) > 100 * np.maximum(usual, self._one.unit)))

    def _near(
        self, replica: int, actual: Arrays, expected: Arrays, scale: float = 1.0
    ) -> list[bool]:
        """Tells of each gradient whether it is as expected, within rounding."""
        spread = self._spread[replica]
        return [
            distance(a, e) <= MARGIN * max(abs(scale) * own, spread.backward * norm(e)) + TINY
            for a, e, own in zip(actual, expected, spread.gradients, strict=True)
        ]

    # The stages.

    def _start(self) -> Iterator[Finding]:
        self._checks()
        before = self._all("before")
        for index, kind in enumerate(self._kinds):
            if kind in ("weight", "optimizer state") and self._step == 0:
                yield from self._other_bits(before, index, "before the first step")
        if self._follows:
            after = self._all("after", self._step - 1)
            for index, path in enumerate(self._paths):
                changed = [
                    r for r in self._replicas if not _same(before[r][index], after[r][index])
                ]
                if changed:
                    yield self._found(
                        "changed_on_its_own",
                        f"{path} changed between two steps",
                        replicas=tuple(changed), tensors=(path,),
                    )  # fmt: skip

    def _random_numbers(self) -> Iterator[Finding]:
        seeds = sorted(self._recording.seeds_drawn())
        if not seeds or len(self._replicas) == 1:
            return
        self._checks()
        before = self._all("before")
        equal = {
            i: [r for r in self._replicas[1:] if _same(before[r][i], before[0][i])] for i in seeds
        }
        looking = [r for r in self._replicas[1:] if any(r in e for e in equal.values())]
        looking = [r for r in looking if self._looks_at_number(r)]
        same = [
            i for i in seeds
            if any(r not in looking or not self._looks_at_number(r, i) for r in equal[i])
        ]  # fmt: skip
        if same:
            one = self._one
            names = ", ".join([
                layer.name for layer in one.random_layers
                if any(_is_seed_of(layer, one.state[i]) for i in same)
            ][:3])  # fmt: skip
            yield self._found(
                "same_random_numbers",
                f"{len(same)} of {len(seeds)} seed generators ({names or 'of the model'}) have the"
                " same state on several replicas, which draw the same masks for different examples",
                replicas=tuple(self._replicas), tensors=tuple(self._paths[i] for i in same),
            )  # fmt: skip

    def _looks_at_number(self, r: int, index: int | None = None) -> bool:
        """Tells whether random numbers of replica r depend on its number, not on the seed alone.

        Its step with the number 0 is then another one.

        Args:
            r: the replica.
            index: of a seed in the state; the layers that draw from other ones are switched off.
        """
        one, state = self._one, self._all("before")[r]

        def differs() -> bool:
            results = []
            for number in (r, 0):
                with as_replica(number):
                    results.append(one.step(state, self._data[r]))
            (mine, first), spread = results, self._spread[r]
            if mine.y_pred:
                return _relative(mine.y_pred, first.y_pred) > MARGIN * spread.forward
            return _relative_norm(mine.raw, first.raw) > MARGIN * spread.backward

        if index is None:
            return differs()
        others = [v for v in one.random_layers if not _is_seed_of(v, one.state[index])]
        return one.without(others, differs)

    def _examples(self) -> Iterator[Finding]:
        if self._batch is None:
            return
        self._checks()
        inputs = len(leaves(self._one._unpack(self._batch)[0]))
        given, asked = _row_hashes(self._whole), _row_hashes(self._batch)
        missing, extra = asked - given, given - asked
        if not missing and not extra:
            return
        x_given, x_asked = _row_hashes(self._whole[:inputs]), _row_hashes(self._batch[:inputs])
        sizes, num = "/".join(map(str, self._sizes())), len(self._batch[0])
        if x_given == x_asked:
            yield self._found(
                "labels_shifted",
                f"{sum(extra.values())} of {num} inputs have a different target than in the data"
                " set",
            )
            return
        shards = [_row_hashes(data) for data in self._data]
        everywhere = shards[0]
        if len(shards) > 1 and all(shard == everywhere for shard in shards):
            yield self._found(
                "same_examples",
                f"all {len(shards)} replicas received the same {len(self._data[0][0])} examples",
                replicas=tuple(self._replicas),
            )
        elif extra and all(hashed in asked for hashed in extra):
            yield self._found(
                "repeated_examples",
                f"the replicas received {sum(extra.values())} examples twice and"
                f" {sum(missing.values())} not at all; shards of {sizes}, batch of {num}",
            )
        elif extra:
            yield self._found(
                "other_examples",
                f"{sum(extra.values())} of {sum(given.values())} examples are not in this batch of"
                " the data set",
            )
        else:
            yield self._found(
                "lost_examples",
                f"no replica received {sum(missing.values())} of {num} examples; shards of {sizes}",
            )

    def _forward(self) -> Iterator[Finding]:
        if not self._has("y_pred"):
            return
        self._checks()
        one = self._one
        for r in self._replicas:
            allowed = MARGIN * self._spread[r].forward
            apart = _relative(self._all("y_pred")[r], self._own[r].y_pred)
            if apart > allowed:
                with as_replica(r):
                    cause, text = self._why_forward(r, allowed)
                if cause == "inference_mode":
                    self._in_inference.add(r)
                elif cause == "same_random_numbers":
                    self._drawn_as[r] = self._whose_numbers(r, allowed)
                yield self._found(cause, text, replicas=(r,), distance=apart, allowed=allowed)
        if len(self._replicas) == 1:
            return
        allowed = MARGIN * max(spread.forward for spread in self._spread)
        if self._synchronizes or self._mixing(one.random_layers) <= allowed:
            return
        statistics = [layer.name for layer in one.layers_with_statistics]
        off = (*one.random_layers, *one.layers_with_statistics)
        gradient = self._gradient_apart()
        if statistics and self._mixing(off) <= allowed:
            yield self._found(
                "local_statistics",
                f"{', '.join(statistics[:3])} normalise{'s' * (len(statistics) == 1)} over each"
                " replica's examples, not over the whole batch, whose gradient differs by"
                f" {gradient:.1%}. In inference mode, shards and batch agree",
                design=True, tensors=tuple(statistics), distance=gradient,
            )  # fmt: skip
        else:
            yield self._found(
                "mixes_examples",
                "the prediction for an example depends on other examples of its shard; the gradient"
                f" of the whole batch differs by {gradient:.1%}",
                design=True, distance=gradient,
            )  # fmt: skip

    def _mixing(self, off: Sequence[keras.layers.Layer]) -> float:
        """Returns how far predictions by shard are from those of the whole batch."""
        one, before = self._one, self._all("before")[0]

        def apart() -> float:
            shards = [one.step(before, data).y_pred for data in self._data]
            joined = [np.concatenate(parts) for parts in zip(*shards, strict=True)]
            return _relative(joined, one.step(before, self._whole).y_pred)

        return self._without(off, apart)

    def _gradient_apart(self) -> float:
        """Returns how far the summed gradients of the shards are from that of the whole batch."""
        one, before, num = self._one, self._all("before")[0], sum(self._sizes())
        shards = [
            one.step(before, data, scales=(size / num, 1 / len(self._replicas))).raw
            for data, size in zip(self._data, self._sizes(), strict=True)
        ]
        whole = one.step(before, self._whole).raw
        if any(len(shard) != len(whole) for shard in shards):  # One of them overflows.
            return np.nan
        return _relative_norm([add(g) for g in zip(*shards, strict=True)], whole)

    def _why_forward(self, replica: int, allowed: float) -> tuple[str, str]:
        """Explains predictions that are not those of the replica's own examples."""
        one, y_pred = self._one, self._all("y_pred")[replica]
        state, data = self._all("before")[replica], self._data[replica]
        layers = [*one.random_layers, *one.layers_with_statistics]
        if layers:
            result = self._without(layers, lambda: one.step(state, data))
            if _relative(y_pred, result.y_pred) <= allowed:
                return "inference_mode", "the predictions are those of the model in inference mode"
        if (other := self._whose_numbers(replica, allowed)) != replica:
            return "same_random_numbers", f"predictions are those with the seeds of replica {other}"
        if self._follows:
            old = self._all("before", self._step - 1)[replica]
            if _relative(y_pred, one.step(old, data).y_pred) <= allowed:
                return "stale_gradient", "the predictions are those of the previous step's weights"
        for other in self._replicas:
            if other != replica and self._sizes()[other] == len(data[0]):
                result = one.step(state, self._data[other])
                if _relative(y_pred, result.y_pred) <= allowed:
                    text = f"the predictions are those for the examples of replica {other}"
                    return "same_examples", text
        return "unexplained", "one device makes other predictions for the same examples"

    def _whose_numbers(self, r: int, allowed: float) -> int:
        """Returns the replica whose seeds explain the predictions of replica r, else r itself."""
        state, data = self._all("before")[r], self._data[r]
        for other in self._replicas if self._one.random_layers else ():
            result = self._one.step(self._with_seeds_of(other, state), data)
            if _relative(self._all("y_pred")[r], result.y_pred) <= allowed:
                return other
        return r

    def _with_seeds_of(self, other: int, state: Arrays) -> Arrays:
        """Returns a state with the seeds that another replica starts from."""
        theirs = self._all("before")[other]
        return [
            seed if kind == "seed" else array
            for array, seed, kind in zip(state, theirs, self._kinds, strict=True)
        ]

    def _losses(self) -> "Losses":
        """Returns the recorded data losses, and those of the recorded predictions."""
        one, before = self._one, self._all("before")
        y_pred, masks = self._all("y_pred"), self._all("mask")

        def of_shards(weighted: bool) -> list[float]:
            return [
                one.loss(before[r], self._used[r], y_pred[r], masks[r], weighted=weighted)
                for r in self._replicas
            ]

        joined = [_join(parts) for parts in zip(*y_pred, strict=True)]
        joined_masks = [_join(parts) for parts in zip(*masks, strict=True)]
        whole = [np.concatenate(parts) for parts in zip(*self._used, strict=True)]

        def of_batch(weighted: bool) -> float:
            return one.loss(before[0], whole, joined, joined_masks, weighted=weighted)

        return Losses(
            [float(np.sum(loss[0]) - np.sum(loss[1])) for loss in self._all("loss")],
            of_shards(True), of_batch(True), of_shards(False), of_batch(False), self._sizes(),
            MARGIN * max(8 * EPS, one.unit if one.unit > EPS else 0.0),
        )  # fmt: skip

    def _loss(self) -> Iterator[Finding]:
        if not self._has("loss"):
            return
        self._checks()
        losses = self._losses()
        if self._recording.whole_loss:
            yield from self._whole_loss(losses)
            return
        if not losses.are_right:
            for r in losses.odd:
                yield from self._shifted_targets(r, losses)
            losses = self._losses()
        num = len(self._replicas)
        if not losses.are_right and (extra := self._repeated_regularisation(losses)) is not None:
            for r, size in enumerate(losses.sizes):
                self._scales[r] = size / sum(losses.sizes), self._regular_share(r) + extra / num
            yield dataclasses.replace(
                self._found(
                    "regulariser_repeated" if extra > 0 else "regulariser_missing",
                    f"the replicas' losses contain {1 + extra:.4g} times the regularisation of one"
                    " device",
                    distance=losses.apart, allowed=losses.allowed,
                ),
                stage="regularisation",
            )  # fmt: skip
            return
        for r, (taken, own) in enumerate(zip(losses.taken, losses.own, strict=True)):
            # Gradients are checked for the loss that each replica has, whatever it is.
            self._scales[r] = taken / own if own else 1 / num, self._regular_share(r)
        if not losses.are_right:
            self._loss_is_wrong = True
            cause, text = losses.why()
            self._loss_is_unknown = cause == "other_loss"
            yield self._found(
                cause, text, design=cause == "not_a_sum_over_examples", distance=losses.apart,
                allowed=losses.allowed,
                replicas=tuple(losses.odd) if self._loss_is_unknown else (),
            )  # fmt: skip

    def _whole_loss(self, losses: "Losses") -> Iterator[Finding]:
        """Checks a loss that is computed once for all replicas."""
        self._scales = [(1.0, self._regular_share(r)) for r in self._replicas]
        if losses.apart <= losses.allowed:
            return
        self._loss_is_wrong = True
        taken = sum(losses.taken)
        self._loss_is_unknown = True
        cause, text = "other_loss", f"the predictions of all replicas have {losses.whole:.6g}"
        for name, why, loss, starts in self._loss_hypotheses(losses):
            if abs(loss - taken) <= losses.allowed * losses.size:
                self._loss_is_unknown, cause, text = False, name, why
                self._starts = starts()  # Gradients are checked for the loss that there is.
                break
        yield self._found(
            cause, f"the loss of the whole batch is {taken:.6g}: {text}",
            distance=losses.apart, allowed=losses.allowed,
        )  # fmt: skip

    def _loss_hypotheses(
        self, losses: "Losses"
    ) -> Iterator[tuple[str, str, float, Callable[[], list[Arrays | None]]]]:
        """Yields (cause, text, loss of the whole batch, what the replicas would go back from)."""
        one, before, whole = self._one, self._all("before")[0], self._whole
        y_pred, masks = self._all("y_pred"), self._all("mask")
        num, sizes = len(self._replicas), losses.sizes
        joined_masks = [_join(parts) for parts in zip(*masks, strict=True)]

        def of_shards(shares: Sequence[float]) -> list[Arrays | None]:
            arrays = zip(self._data, y_pred, masks, shares, strict=True)
            return [
                [share * g for g in one.loss_gradients(before, data, own, mask)]
                for data, own, mask, share in arrays
            ]

        def own(shares: Sequence[float]) -> float:
            return sum(share * loss for share, loss in zip(shares, losses.own, strict=True))

        by_size = [size / sum(sizes) for size in sizes]
        plain = sum(s * loss for s, loss in zip(by_size, losses.plain, strict=True))
        is_plain = abs(plain - losses.plain_whole) <= losses.allowed * max(
            abs(losses.plain_whole), TINY
        )
        each = (
            f"({', '.join(f'{loss:.6g}' for loss in losses.own)}), on one device {losses.whole:.6g}"
        )
        cause = "weighted_mean_of_means" if is_plain else "not_a_sum_over_examples"
        text = f"it is the mean of the losses of the replicas' own examples {each}"
        yield cause, text, own(by_size), partial(of_shards, by_size)
        equal = [1 / num] * num
        yield (
            "mean_of_means",
            f"{text}; shards differ in size",
            own(equal),
            partial(of_shards, equal),
        )
        joined = [_join(parts) for parts in zip(*y_pred, strict=True)]
        inputs = len(leaves(one._unpack(whole)[0]))
        for shift in (1, -1):
            moved = whole[:inputs] + [np.roll(array, shift, axis=0) for array in whole[inputs:]]
            loss = one.loss(before, moved, joined, joined_masks)
            yield (
                "labels_shifted", "it is that of targets shifted by one example", loss,
                partial(self._dealt, one, before, moved, joined, joined_masks),
            )  # fmt: skip
        orders = itertools.permutations(range(num)) if num < 5 else [range(num)[::-1]]
        for order in orders:
            other = [_join([y_pred[r][i] for r in order]) for i in range(len(joined))]
            others = [_join([masks[r][i] for r in order]) for i in range(len(joined))]
            yield (
                "predictions_out_of_order",
                f"it is that of predictions joined in the order of replicas"
                f" {', '.join(map(str, order))}", one.loss(before, whole, other, others),
                partial(self._dealt, one, before, whole, other, others),
            )  # fmt: skip

    def _repeated_regularisation(self, losses: "Losses") -> float | None:
        """Returns how many times too often regularisation is in the losses; None for not at all."""
        regular = [own.loss[1] for own in self._own if own.loss]
        return losses.repeated(float(np.mean(regular))) if regular else None

    def _shifted_targets(self, r: int, losses: "Losses") -> Iterator[Finding]:
        """Finds out whether a replica's loss is that of targets that belong to other inputs."""
        data, arrays = self._data[r], self._arrays
        inputs = len(leaves(self._one._unpack(data)[0]))
        for shift in (1, -1):
            moved = data[:inputs] + [np.roll(array, shift, axis=0) for array in data[inputs:]]
            loss = self._one.loss(
                arrays["before", r][:], moved, arrays["y_pred", r], arrays["mask", r]
            )
            if losses.is_share(r, loss):
                self._used[r] = moved
                yield self._found(
                    "labels_shifted",
                    "the loss is that of targets shifted by one example relative to the inputs",
                    replicas=(r,),
                )
                return

    def _regular_share(self, r: int) -> float:
        """Returns which part of the regularisation of one device a replica adds."""
        own = self._own[r].loss
        if not own or not own[1]:
            return 1 / len(self._replicas)
        return float(np.sum(self._all("loss")[r][1])) / own[1]

    def _regularisation(self) -> Iterator[Finding]:
        losses = [own.loss for own in self._own if own.loss]
        if not self._has("loss") or not losses:
            return
        taken = sum(float(np.sum(loss[1])) for loss in self._all("loss"))
        if not taken and not any(regular for _, regular in losses):
            return
        self._checks()
        weights = self._sizes() if self._recording.whole_loss else None
        expected = float(np.average([regular for _, regular in losses], weights=weights))
        apart = abs(taken - expected) / max(abs(expected), TINY)
        allowed = MARGIN * max(8 * EPS, *(spread.forward for spread in self._spread))
        if apart > allowed:
            factor = taken / expected if expected else np.inf
            cause = "regulariser_repeated" if factor > 1 else "regulariser_missing"
            mean = float(np.mean([regular for _, regular in losses]))
            if weights and abs(taken - mean) <= allowed * max(abs(mean), TINY):
                cause = "mean_of_means"  # Of activity regularisers.
            yield self._found(
                cause, f"the replicas add {factor:.4g} times the regularisation of one device",
                distance=apart, allowed=allowed,
            )  # fmt: skip

    def _expected_gradients(
        self, r: int, *, state: Arrays | None = None, data: Arrays | None = None,
        scales: tuple[float, float] | None = None, starts: Arrays | None = None,
    ) -> Arrays:  # fmt: skip
        """Returns what a replica should send: gradients of its part in the loss that it has."""
        layers = self._modal_layers if r in self._in_inference else []
        has_loss = self._has("loss")
        if r in self._drawn_as:
            state = self._with_seeds_of(self._drawn_as[r], state or self._all("before")[r])
        with as_replica(r):
            result = self._without(
                layers,
                lambda: self._reference.step(
                    state or self._all("before")[r], data or self._used[r],
                    scales=(scales or self._scales[r]) if has_loss else (1.0, 1.0),
                    starts=starts or self._starts[r],
                ),
            )  # fmt: skip
        if has_loss:
            return result.raw
        factor, of_regular = self._scales[r]
        gradients = [_scaled(g, factor) for g in result.raw]
        if factor == of_regular:
            return gradients
        regular = self._regular_gradients(state or self._all("before")[r], data or self._used[r])
        return [
            g if not np.any(part) else dense(g) + (of_regular - factor) * part
            for g, part in zip(gradients, regular or [], strict=True)
        ]

    @property
    def _modal_layers(self) -> list[keras.layers.Layer]:
        """The layers that work in another way in inference."""
        return [*self._one.random_layers, *self._one.layers_with_statistics]

    def _gradients(self) -> Iterator[Finding]:
        if not self._has("raw") or self._overflows or self._loss_is_unknown:
            return
        if odd := self._not_finite():
            yield self._found(
                "not_finite",
                "gradients are NaN or infinite, on one device too: nothing to compare with",
                replicas=odd, design=True,
            )  # fmt: skip
            return
        if self._sums_in_the_step():
            yield from self._gradients_of_the_whole()
            return
        self._checks()
        if not self._has("loss"):
            self._scales = [
                self._two_factors(r, factor) for r, factor in enumerate(self._factors_that_fit())
            ]
        if self._synchronizes:
            yield from self._gradients_together()
            return
        for r in self._replicas:
            actual, expected = self._all("raw")[r], self._expected_gradients(r)
            if len(actual) != len(expected):
                yield self._found(
                    "frozen",
                    f"{len(actual)} weights have a gradient, {len(expected)} on one device",
                    replicas=(r,),
                )
                continue
            near = self._near(r, actual, expected, self._times_own(r))
            if wrong := [i for i, is_near in enumerate(near) if not is_near]:
                yield from self._why_gradients(r, actual, expected, wrong)
        if not self._recording.whole_loss:
            yield from self._additive()

    def _not_finite(self) -> tuple[int, ...]:
        """Returns the replicas whose gradients are NaN or infinite, as they are on one device."""
        return tuple(
            r
            for r, (raw, own) in enumerate(zip(self._all("raw"), self._own, strict=True))
            if not is_finite(raw) and not is_finite(own.raw)
        )

    def _gradients_together(self) -> Iterator[Finding]:
        """Checks the sum of what the replicas send against the gradients of the whole batch."""
        if self._loss_is_wrong:
            return
        total = [add(gradients) for gradients in zip(*self._all("raw"), strict=True)]
        expected = self._own[0].raw
        near = self._near(0, total, expected)
        if wrong := [i for i, is_near in enumerate(near) if not is_near]:
            yield from self._scaled_or_reduced(0, total, expected, wrong)

    def _sums_in_the_step(self) -> bool:
        """Tells whether the step sums gradients itself: equal ones, of examples that differ."""
        raw, data = self._all("raw"), self._used
        elsewhere = self._synchronizes or self._recording.whole_loss
        if elsewhere or self._in_inference or not any(map(norm, raw[0])):
            return False
        if not all(len(o) == len(raw[0]) and all(map(_same, o, raw[0])) for o in raw[1:]):
            return False
        if all(all(map(_same, other, data[0])) for other in data[1:]):
            return False
        for r in self._replicas:
            own = self._own[r].raw
            if len(own) != len(raw[0]):
                return False
            factor = _factor(raw[0], own)
            scaled = [_scaled(g, factor) for g in own]
            # Of one replica's examples only, or of a loss that does not depend on examples.
            if np.isfinite(factor) and all(self._near(r, raw[0], scaled, factor)):
                return False
        return bool(self._modal_layers) or self._loss_is_wrong or self._is_of_the_whole()

    def _is_of_the_whole(self) -> bool:
        """Tells whether the replicas' gradients together are some multiple of the whole batch's."""
        total, whole, limits = self._total_and_whole()
        factor = _factor(total, whole)
        return len(total) == len(whole) and all(
            distance(t, _scaled(w, factor)) <= abs(factor) * limit
            for t, w, limit in zip(total, whole, limits, strict=True)
        )

    def _total_and_whole(self) -> tuple[Arrays, Arrays, list[float]]:
        """What all replicas send, the gradients of the whole batch, and how far they may be off."""
        state = self._all("before")[0]
        data = [np.concatenate(parts) for parts in zip(*self._used, strict=True)]
        whole, spread = self._measure(state, data, (1.0, 1.0))
        limits = [
            MARGIN * max(own, spread.backward * norm(g)) + TINY
            for own, g in zip(spread.gradients, whole.raw, strict=True)
        ]
        return [add(g) for g in zip(*self._all("raw"), strict=True)], whole.raw, limits

    def _gradients_of_the_whole(self) -> Iterator[Finding]:
        """Checks gradients that the step has summed, where the whole batch is comparable."""
        if self._modal_layers or self._loss_is_wrong:
            return
        self._checks()
        total, whole, limits = self._total_and_whole()
        apart = [distance(t, w) for t, w in zip(total, whole, strict=True)]
        if wrong := [i for i, limit in enumerate(limits) if apart[i] > limit]:
            yield self._found(
                "scaled_gradient",
                "the train_step sums the gradients over the replicas; the sum of what they then"
                f" send adds up to {_factor(total, whole):.4g} times the gradient of the whole"
                " batch",
                tensors=tuple(self._recording.gradients[i] for i in wrong),
                distance=_relative_norm(total, whole),
            )  # fmt: skip

    def _times_own(self, r: int) -> float:
        """Returns how large the gradients of a replica are, over those that were computed of it."""
        num = len(self._replicas) if self._has("loss") else 1
        return self._scales[r][0] * (1 if self._recording.whole_loss else num)

    def _factors_that_fit(self) -> list[float]:
        """Returns the replicas' factors; where none fits, the median of those that do."""
        factors, fits = self._factors_sent(), []
        for r, factor in enumerate(factors):
            actual, expected = self._all("raw")[r], [_scaled(g, factor) for g in self._own[r].raw]
            self._scales[r] = factor, factor
            if len(actual) == len(expected) and any(self._near(r, actual, expected, factor)):
                fits.append(r)
        usual = float(np.median([factors[r] for r in fits])) if fits else 1 / len(factors)
        return [factor if r in fits else usual for r, factor in enumerate(factors)]

    def _factors_sent(self) -> list[float]:
        """Returns by what each replica has multiplied the gradients of its own examples.

        Where a step does not show its loss, this is the one thing that tells; the sum over the
        replicas says whether it is right. The median over the tensors: some may be wrong.
        """
        found = []
        for raw, own in zip(self._all("raw"), self._own, strict=True):
            weights = np.array([norm(g) for g in own.raw])
            factors = np.array([_factor([a], [e]) for a, e in zip(raw, own.raw, strict=False)])
            usable = np.isfinite(factors) & (weights > NOTHING_BUT_ROUNDING * weights.mean())
            usual = float(np.median(factors[usable])) if usable.any() else 0.0
            found.append(usual or 1 / len(self._replicas))
        return found

    def _two_factors(self, r: int, factor: float) -> tuple[float, float]:
        """Returns the factors of a replica's data loss and of its regularisation.

        They are taken to be one, unless two of them explain more tensors: a step may divide the
        data loss by the global batch, and the regularisation by the number of replicas.
        """
        actual, own = self._all("raw")[r], self._own[r].raw
        regular = self._regular_gradients(self._all("before")[r], self._data[r])
        if not regular or not len(actual) == len(own) == len(regular):
            return factor, factor
        if not is_finite(actual) or not is_finite(own):
            return factor, factor
        rest = [dense(o) - part for o, part in zip(own, regular, strict=True)]
        arrays = [
            [dense(array).ravel() for array in three]
            for three in zip(actual, rest, regular, strict=True)
        ]
        fits = [_two_factors_of(*three) for three in arrays]
        if not any(fits):
            return factor, factor
        usual = np.median([fit[0] for fit in fits if fit])
        # Some tensors may be wrong, and tell nothing of the others' factors.
        chosen = [
            three for three, fit in zip(arrays, fits, strict=True)
            if fit and abs(fit[0] - usual) <= 1e-3 * abs(usual)
        ]  # fmt: skip
        joined = [np.concatenate(parts) for parts in zip(*chosen, strict=True)]
        if not joined or not (fit := _two_factors_of(*joined)) or not np.isfinite(fit[1]):
            return factor, factor

        def num_near(a: float, b: float) -> int:
            expected = [a * data + b * part for data, part in zip(rest, regular, strict=True)]
            return sum(self._near(r, actual, expected, max(abs(a), abs(b))))

        return fit if num_near(*fit) > num_near(factor, factor) else (factor, factor)

    def _why_gradients(
        self, r: int, actual: Arrays, expected: Arrays, wrong: Sequence[int]
    ) -> Iterator[Finding]:
        """Explains gradients of a replica, tensor by tensor."""
        left = list(wrong)
        for cause, text, compute in self._gradient_hypotheses(r):
            if not left:
                return
            candidate = compute()
            if len(candidate) != len(actual):
                continue
            near = self._near(r, actual, candidate, self._times_own(r))
            told = self._near(r, expected, candidate, self._times_own(r))
            if explained := [i for i in left if near[i] and not told[i]]:
                yield self._gradient_finding(
                    cause, f"the gradients are {text}", r, actual, expected, explained
                )
                left = [i for i in left if i not in explained]
        yield from self._scaled_or_reduced(r, actual, expected, left)

    def _gradient_hypotheses(self, r: int) -> Iterator[tuple[str, str, Callable[[], Arrays]]]:
        """Yields (cause, text, gradients that a replica would then send)."""
        one, num, scales = self._one, len(self._replicas), self._scales[r]
        zeros = [_scaled(g, 0.0) for g in self._all("raw")[r]]
        yield "frozen", "0", lambda: zeros
        if old := self._earlier("raw"):
            yield "stale_gradient", "those of the previous step", lambda: old[r]
        if self._follows:
            state = self._all("before", self._step - 1)[r]
            yield (
                "stale_gradient", "those for the weights of the previous step",
                lambda: self._expected_gradients(r, state=state),
            )  # fmt: skip
        if self._has("loss"):
            for factor in (num, 0):
                cause = "regulariser_repeated" if factor else "regulariser_missing"
                part = scales[0], scales[1] * factor
                yield (
                    cause, f"those of a loss that contains regularisation {factor} times",
                    partial(self._expected_gradients, r, scales=part),
                )  # fmt: skip
        if self._modal_layers:
            yield (
                "inference_mode", "those of the model in inference mode",
                lambda: self._without(self._modal_layers, lambda: self._expected_gradients(r)),
            )  # fmt: skip
        for other in self._replicas if one.random_layers else ():
            if other != r:
                state = self._with_seeds_of(other, self._all("before")[r])
                yield (
                    "same_random_numbers", f"those with the seeds of replica {other}",
                    partial(self._expected_gradients, r, state=state),
                )  # fmt: skip
        data = self._used[r]
        inputs = len(leaves(one._unpack(data)[0]))
        for shift in (1, -1):
            moved = data[:inputs] + [np.roll(array, shift, axis=0) for array in data[inputs:]]
            yield (
                "labels_shifted", "those for targets shifted by one example",
                partial(self._expected_gradients, r, data=moved),
            )  # fmt: skip
        for other in self._replicas:
            if other != r:
                yield (
                    "same_examples", f"those for the examples of replica {other}",
                    partial(
                        self._expected_gradients, r, data=self._data[other],
                        starts=self._starts[other],
                    ),
                )  # fmt: skip

    def _scaled_or_reduced(
        self, r: int, actual: Arrays, expected: Arrays, left: Sequence[int]
    ) -> Iterator[Finding]:
        """Explains gradients tensor by tensor; those with the same explanation together."""
        groups: dict[tuple[str, str], list[int]] = {}
        for i in left:
            limit = MARGIN * max(
                self._spread[r].gradients[i] * abs(self._times_own(r)),
                self._spread[r].backward * norm(expected[i]),
            )
            groups.setdefault(
                _why_tensor(actual[i], expected[i], limit, len(self._replicas)), []
            ).append(i)
        for (cause, text), indices in groups.items():
            yield self._gradient_finding(cause, text, r, actual, expected, indices)

    def _gradient_finding(
        self,
        cause: str,
        text: str,
        r: int,
        actual: Arrays,
        expected: Arrays,
        indices: Sequence[int],
    ) -> Finding:
        apart = max(_ratio(distance(actual[i], expected[i]), norm(expected[i])) for i in indices)
        return self._found(
            cause, text, replicas=(r,), distance=apart,
            tensors=tuple(self._recording.gradients[i] for i in indices),
            allowed=MARGIN * self._spread[r].backward,
        )  # fmt: skip

    def _additive(self) -> Iterator[Finding]:
        """Compares the sum over the replicas with the gradient of the whole batch."""
        if len(self._replicas) == 1 or self._loss_is_wrong:
            return
        before = self._all("before")[0]
        data = [np.concatenate(parts) for parts in zip(*self._used, strict=True)]
        regular = (1.0, sum(scale for _, scale in self._scales) if self._has("loss") else 1.0)

        def sums_and_whole() -> tuple[list[Arrays], StepResult]:
            shards = [self._expected_gradients(r, state=before) for r in self._replicas]
            return shards, self._reference.step(before, data, scales=regular)

        shards, result = self._without(self._modal_layers, sums_and_whole)
        whole = result.raw
        if any(len(shard) != len(whole) for shard in shards):  # One of them overflows.
            return
        sums = [add(g) for g in zip(*shards, strict=True)]
        backward = max(spread.backward for spread in self._spread)
        # The shards' gradients may cancel each other, their rounding errors do not.
        sizes = [sum(map(norm, parts)) for parts in zip(*shards, strict=True)]
        limits = [
            MARGIN * max(sum(s.gradients[i] for s in self._spread), backward * size) + TINY
            for i, size in enumerate(sizes)
        ]  # fmt: skip
        apart = [distance(a, b) for a, b in zip(sums, whole, strict=True)]
        if any(a > limit for a, limit in zip(apart, limits, strict=True)):
            spread = self._without(
                self._modal_layers, partial(self._spread_of, result, before, data, regular)
            )
            limits = [limit + MARGIN * g for limit, g in zip(limits, spread.gradients, strict=True)]
        wrong = [i for i, limit in enumerate(limits) if apart[i] > limit]
        if wrong:
            cause, text = self._why_not_additive(sums, whole, limits, wrong)
            found = self._found(
                cause, text, tensors=tuple(self._recording.gradients[i] for i in wrong),
                distance=_relative_norm(sums, whole), design=cause == "not_a_sum_over_examples",
            )  # fmt: skip
            # Losses may be equal by chance where their gradients are not.
            is_loss = cause == "weighted_mean_of_means"
            yield dataclasses.replace(found, stage="loss") if is_loss else found

    def _why_not_additive(
        self, sums: Arrays, whole: Arrays, limits: Sequence[float], wrong: Sequence[int]
    ) -> tuple[str, str]:
        """Explains why the replicas' gradients do not add up to that of the whole batch."""
        num, sizes, before = len(self._replicas), self._sizes(), self._all("before")[0]

        def are_whole(candidate: Arrays) -> bool:
            return all(distance(candidate[i], whole[i]) <= limits[i] for i in wrong)

        if not self._has("loss") and len(set(sizes)) > 1:
            total = sum(sizes)
            if are_whole(self._weighted([size / total for size in sizes])):
                text = f"shards of {'/'.join(map(str, sizes))} examples have equal weights"
                return "mean_of_means", text
        if (weights := self._weights_of_shards()) and are_whole(self._weighted(weights)):
            shown = "/".join(f"{weight:.3g}" for weight in weights)
            text = (
                "shards have equal weights; their shares of the sample weights, or unmasked steps,"
                f" are {shown}"
            )
            return "weighted_mean_of_means", text
        factor = _factor(sums, whole)
        if all(
            distance(sums[i], _scaled(whole[i], factor)) <= abs(factor) * limits[i] for i in wrong
        ):
            times = (
                f"the sum of the gradients over {num} replicas is {factor:.4g} times the gradient"
                " of the whole batch"
            )
            if factor < 1:
                return "scaled_gradient", f"{times}: the loss is divided more than once"
            return (
                "scalar_loss_not_divided",
                f"{times}: the loss is the mean over a replica's examples, not divided by the"
                " number of replicas",
            )
        if regular := self._regular_gradients(before):
            extra = _factor(
                [dense(sums[i]) - dense(whole[i]) for i in wrong], [regular[i] for i in wrong]
            )
            if all(
                distance(sums[i], dense(whole[i]) + extra * regular[i]) <= limits[i] for i in wrong
            ):
                return (
                    "regulariser_repeated" if extra > 0 else "regulariser_missing",
                    f"the replicas' gradients contain {1 + extra:.4g} times the regularisation of"
                    " one device",
                )
        return (
            "not_a_sum_over_examples",
            f"the gradient of the whole batch differs by {_relative_norm(sums, whole):.1%} from the"
            " sum over the shards, also on one device",
        )

    def _weights_of_shards(self) -> list[float]:
        """Returns the shares of the shards' sample weights, or of their unmasked steps."""
        if not self._has("mask"):
            return []
        sums = []
        for r in self._replicas:
            arrays = [mask for mask in self._all("mask")[r] if mask.ndim]
            arrays += [np.asarray(w) for w in leaves(self._one._unpack(self._used[r])[2])]
            sums.append(sum(float(np.sum(array)) for array in arrays))
        return [number / sum(sums) for number in sums] if sum(sums) else []

    def _weighted(self, weights: Sequence[float]) -> Arrays:
        """Returns the shards' gradients, each multiplied by a weight, and summed."""
        before, regular = self._all("before")[0], 1 / len(self._replicas)
        shares = []
        for r, (data, weight) in enumerate(zip(self._used, weights, strict=True)):
            if len(data[0]) == 0:
                continue
            has_loss = self._has("loss")
            scales = (weight, regular) if has_loss else (1.0, 1.0)
            with as_replica(r):
                step = partial(self._reference.step, before, data, scales=scales)
                raw = self._without(self._modal_layers, step).raw
            shares.append(raw if has_loss else [_scaled(g, weight) for g in raw])
        return [add(g) for g in zip(*shares, strict=True)]

    def _regular_gradients(self, state: Arrays, data: Arrays | None = None) -> Arrays | None:
        """Returns the gradients of `model.losses`, None where there are none."""
        if not self._one.model.losses:
            return None
        one, x = self._one, self._one._unpack(data or self._whole)[0]
        one.load(state)
        with tf.GradientTape() as tape:
            one.model(x, training=False)
            regular = regularisation(one.model)
        weights = [one.state[self._paths.index(path)] for path in self._recording.gradients]
        gradients = tape.gradient(regular, [weight.value for weight in weights])
        return [
            np.zeros(weight.shape) if g is None else dense(_to_numpy(g))
            for weight, g in zip(weights, gradients, strict=True)
        ]

    def _clipping(self) -> Iterator[Finding]:
        if not self._has("clipped") or not self._has("raw") or self._overflows:
            return
        self._checks()
        one, num = self._one, len(self._replicas)
        clips_sum = self._recording.clips_sum
        raw, clipped = self._all("sums" if clips_sum else "raw"), self._all("clipped")
        alone = [one.clip(gradients) for gradients in raw]
        wrong_on = {
            r: [i for i, (c, a) in enumerate(zip(clipped[r], alone[r], strict=True)) if _far(c, a)]
            for r in self._replicas
        }
        odd = [r for r in self._replicas if wrong_on[r]]
        for r in odd:
            yield from self._why_clipped(r, raw[r], alone[r], wrong_on[r])
        if num == 1 or odd or clips_sum:
            return
        total = [add(g) for g in zip(*raw, strict=True)]
        sent = [add(g) for g in zip(*clipped, strict=True)]
        expected = one.clip(total)
        if wrong := [i for i, (s, e) in enumerate(zip(sent, expected, strict=True)) if _far(s, e)]:
            norms = ", ".join(f"{_total_norm(g):.4g}" for g in raw)
            yield self._found(
                "clipped_before_the_sum",
                f"{self._limits() or 'clipping'} is applied on each replica (norms {norms}), not to"
                f" the sum (norm {_total_norm(total):.4g}): the sum of the clipped gradients has"
                f" norm {_total_norm(sent):.4g}, the clipped sum has {_total_norm(expected):.4g}",
                tensors=tuple(self._recording.gradients[i] for i in wrong),
                distance=_relative_norm(sent, expected), allowed=1e-5,
            )  # fmt: skip

    def _limits(self) -> str:
        """Returns the thresholds of the optimizer's clipping."""
        names = ("clipnorm", "global_clipnorm", "clipvalue")
        values = {name: getattr(self._one.optimizer, name, None) for name in names}
        return ", ".join(f"{name}={value:g}" for name, value in values.items() if value)

    def _why_clipped(
        self, r: int, raw: Arrays, alone: Arrays, wrong: Sequence[int]
    ) -> Iterator[Finding]:
        """Explains gradients that are not as the optimizer clips those of the replica."""
        clipped, num = self._all("clipped")[r], len(self._replicas)
        names = self._recording.gradients
        if text := _threshold([clipped[i] for i in wrong], [raw[i] for i in wrong]):
            expected = self._limits() or "no clipping"
            yield self._found(
                "clipped_on_one_replica",
                f"the gradients are clipped to {text} before the sum; the optimizer has {expected}",
                replicas=(r,), tensors=tuple(names[i] for i in wrong),
                distance=_relative_norm(clipped, alone),
            )  # fmt: skip
            return
        for i in wrong:
            cause, text = _why_tensor(clipped[i], alone[i], 0.0, num)
            apart = _ratio(distance(clipped[i], alone[i]), norm(alone[i]))
            yield self._found(
                cause, f"after clipping, {text}", replicas=(r,), tensors=(names[i],), distance=apart
            )

    @property
    def _kind_sent(self) -> str:
        """The kind of gradients that go into the all-reduce."""
        return "clipped" if self._has("clipped") and not self._recording.clips_sum else "raw"

    def _updated(self, state: Arrays, sums: Arrays, **changes: Any) -> Arrays:
        """Returns all variables after the optimizer's update; see `OneDevice.update`."""
        clips = self._recording.clips_sum and not self._has("clipped")
        return self._one.update(state, sums, **({"clips": clips} | changes))

    def _sums_of(self, replica: int) -> Arrays:
        """Returns the gradients that a replica applies."""
        kinds = ("clipped", "sums", "raw")
        for kind in kinds if self._recording.clips_sum else ("sums", "clipped", "raw"):
            if self._has(kind):
                return self._arrays[kind, replica]
        return []

    def _all_reduce(self) -> Iterator[Finding]:
        if not self._has("raw") or len(self._replicas) == 1 or self._overflows:
            return
        self._checks()
        sent, sent_before = self._all(self._kind_sent), self._earlier(self._kind_sent)
        received = self._all("sums") if self._has("sums") else sent
        sums_before = self._earlier("sums")
        clips = self._recording.clips_sum and self._limits()
        clipped = [self._one.clip(gradients) for gradients in sent] if clips else []
        for r in self._replicas:
            groups: dict[tuple[str, str, tuple[int, ...]], list[int]] = {}
            known: list[np.ndarray] = []
            tensors = list(enumerate(zip(received[r], *sent, strict=True)))
            units = [self._one.units[self._paths.index(p)] for p in self._recording.gradients]
            # Few elements do not tell by what factors they are summed; large tensors do.
            for i, (got, *parts) in sorted(tensors, key=lambda item: -np.size(dense(item[1][0]))):
                if _within(got, add(parts), _sum_bound(parts, units[i])):
                    continue
                if clipped and _within(
                    got, add([c[i] for c in clipped]), MARGIN * _sum_bound(parts)
                ):
                    text = f"{self._limits()} is applied on each replica, not to the sum"
                    groups.setdefault(("clipped_before_the_sum", text, ()), []).append(i)
                    continue
                before = []
                if sent_before:
                    old = [g[i] for g in sent_before]
                    before.append((add(old), _sum_bound(old)))
                if sums_before:
                    before.append((sums_before[r][i], _sum_bound([sums_before[r][i]])))
                is_shared = all(_same(other[i], got) for other in received)
                why = _why_sum(None if is_shared else r, got, parts, before, known)
                groups.setdefault(why, []).append(i)
            for (cause, text, lost), indices in groups.items():
                yield self._found(
                    cause, text, replicas=lost or (r,),
                    tensors=tuple(self._recording.gradients[i] for i in sorted(indices)),
                )  # fmt: skip

    def _update(self) -> Iterator[Finding]:
        if self._one.scales_loss and (self._overflows or not self._has("raw")):
            yield from self._skipped_update()
            return
        if not self._sums_of(0):
            yield from self._unseen_update()
            return
        self._checks()
        one, checked = self._one, {}
        own = {id(variable) for variable in one.optimizer.variables}
        watched = [
            i for i, (kind, variable) in enumerate(zip(self._kinds, one.state, strict=True))
            if kind == "weight" or id(variable) in own
        ]  # fmt: skip
        for r in self._replicas:
            before, sums, after = self._all("before")[r], self._sums_of(r), self._all("after")[r]
            key = tuple(_bytes(a) for a in [*(before[i] for i in watched), *sums])
            if key not in checked:
                checked[key] = self._updated(before, sums), self._bounds(before, sums)
            expected, bounds = checked[key]
            if wrong := [i for i in watched if not _within(after[i], expected[i], bounds[i])]:
                self._update_is_wrong = True
                yield from self._why_update(r, expected, bounds, wrong)
        yield from self._rows_summed_first()

    def _rows_summed_first(self) -> Iterator[Finding]:
        """Finds out whether an update with rows of an embedding is another one than with sums.

        One device hands the optimizer the gradient of a table row by row, several for a token that
        comes several times. Strategies of our own send the sum of these rows.
        """
        sums, raws = list(self._sums_of(0)), [own.raw for own in self._own]
        rows = [i for i, g in enumerate(raws[0]) if isinstance(g, Sparse)]
        if not self._recording.whole_loss or not rows or isinstance(sums[rows[0]], Sparse):
            return
        before, summed = self._all("before")[0], list(sums)
        for i in rows:
            joined = add([raw[i] for raw in raws])
            clipped = _ratio(norm(sums[i]), norm(joined))  # What clipping has left of it.
            values = (joined.values * clipped).astype(sums[i].dtype)
            sums[i] = joined._replace(values=values)
        expected, other = self._updated(before, summed), self._updated(before, sums)
        bounds, names = self._bounds(before, summed), self._recording.gradients
        tables = [self._paths.index(names[i]) for i in rows]
        apart = [i for i in tables if not _within(other[i], expected[i], bounds[i])]
        if not apart:
            return
        distances = [
            _ratio(distance(other[i], expected[i]), distance(expected[i], before[i])) for i in apart
        ]
        yield self._found(
            "rows_summed_first",
            "the gradient of an embedding has one row for each token; the rows of a token are"
            " summed before the update, and Keras' optimizer takes them one by one: the update is"
            f" {max(distances):.1%} another one",
            design=True, tensors=tuple(self._paths[i] for i in apart), distance=max(distances),
        )  # fmt: skip

    def _unseen_update(self) -> Iterator[Finding]:
        """Says that a step changes weights without the optimizer, so that little can be checked."""
        pairs = list(zip(self._all("before"), self._all("after"), strict=True))
        changed = [
            i
            for i, kind in enumerate(self._kinds)
            if kind == "weight" and not all(_same(before[i], after[i]) for before, after in pairs)
        ]
        if changed:
            self._checks()
            yield self._found(
                "update_not_seen",
                "weights change, and the compiled optimizer was given no gradients: gradients,"
                " all-reduce and update could not be checked",
                tensors=tuple(self._paths[i] for i in changed), design=True,
            )  # fmt: skip

    def _skipped_update(self) -> Iterator[Finding]:
        """Checks a step that one device skips, or that was skipped, as gradients overflowed."""
        self._checks()
        overflows = self._overflows
        if self._has("raw"):
            self._update_is_wrong = True
            yield self._found(
                "overflow_not_skipped",
                f"gradients overflow on replica {', '.join(map(str, overflows))} but not on replica"
                " 0, the only one that Keras checks: the step is not skipped and applies infinite"
                " gradients",
                replicas=tuple(overflows),
            )
            return
        if not overflows and self._one.step(self._all("before")[0], self._whole).raw:
            yield self._found(
                "not_updated", "the step is skipped although gradients overflow on no replica"
            )
        for r in self._replicas:
            before, after = self._all("before")[r], self._all("after")[r]
            if changed := [
                self._paths[i]
                for i, kind in enumerate(self._kinds)
                if kind == "weight" and not _same(before[i], after[i])
            ]:
                yield self._found(
                    "changed_on_its_own", "weights change in a skipped step",
                    replicas=(r,), tensors=tuple(changed),
                )  # fmt: skip

    def _bounds(self, before: Arrays, sums: Arrays) -> Arrays:
        """Returns how far rounding may carry each element of the optimizer's update.

        The update is repeated from gradients and states that are one unit in the last place off.
        """
        generator, units = np.random.default_rng(self._step), self._one.units
        units_of_sums = [units[self._paths.index(path)] for path in self._recording.gradients]
        base = self._updated(before, sums)
        apart = [np.zeros(array.shape) for array in base]

        def size(array: Any) -> np.ndarray:
            return np.abs(np.where(np.isfinite(array), dense(array), 0))

        for _ in range(3):

            def near(array: Any, unit: float) -> Any:
                if isinstance(array, Sparse):
                    return array._replace(values=near(array.values, unit))
                if not np.issubdtype(array.dtype, np.floating):
                    return array
                return array * (1 + unit * generator.choice([-1, 1], array.shape)).astype(
                    array.dtype
                )

            kinds = zip(before, self._kinds, units, strict=True)
            # A schedule's step and a factor that is multiplied up stay what they are.
            state = [near(a, u) if kind != "seed" and a.ndim else a for a, kind, u in kinds]
            moved_on = self._updated(state, list(map(near, sums, units_of_sums)))
            for i, array in enumerate(moved_on):
                moved = np.abs(dense(array) - dense(base[i]))
                apart[i] = np.maximum(apart[i], np.where(np.isfinite(moved), moved, 0))
        return [
            MARGIN * (a + np.sqrt(np.mean(a**2)) + unit * (size(b) + size(o))) + TINY
            for a, b, o, unit in zip(apart, base, before, units, strict=True)
        ]

    def _why_update(
        self, r: int, expected: Arrays, bounds: Arrays, wrong: Sequence[int]
    ) -> Iterator[Finding]:
        """Explains an update that is not that of the optimizer."""
        before, after, paths = self._all("before")[r], self._all("after")[r], self._paths
        steps = [i for i in wrong if paths[i].endswith("iteration")]
        if steps:
            made = int(after[steps[0]]) - int(before[steps[0]])
            yield self._found(
                "schedule_stepped_too_often",
                f"`iterations` advances by {made} in one step, so a learning rate schedule runs"
                f" {made} times as fast", tensors=(paths[steps[0]],), replicas=(r,),
            )  # fmt: skip
        left = [i for i in wrong if i not in steps]
        while left:
            weights = [i for i in left if self._kinds[i] == "weight"] or left
            cause, text, explained = self._why_weights(r, expected, bounds, weights)
            apart = max(_ratio(distance(after[i], expected[i]), norm(expected[i])) for i in left)
            yield self._found(
                cause, text, replicas=(r,), tensors=tuple(paths[i] for i in explained),
                distance=apart,
            )  # fmt: skip
            if self._kinds[left[0]] == "optimizer state" or cause != "changed_on_its_own":
                # A wrong weight may come from its wrong state: one explanation for both.
                left = [i for i in left if i not in explained and self._kinds[i] == "weight"]
            else:
                left = [i for i in left if i not in explained]

    def _why_weights(
        self, r: int, expected: Arrays, bounds: Arrays, wrong: Sequence[int]
    ) -> tuple[str, str, list[int]]:
        """Returns cause, text and the variables that they explain: as many as one cause can."""
        after = self._all("after")[r]
        tried = [*self._update_hypotheses(r), *self._changes_of_update(r, expected, wrong)]
        for cause, text, compute in tried:
            candidate = compute()
            explained = [
                i for i in wrong
                if _within(after[i], candidate[i], bounds[i])
                and not _within(expected[i], candidate[i], bounds[i])
            ]  # fmt: skip
            if explained:
                return cause, text, explained
        few = {
            i: int(np.sum(~(np.abs(dense(after[i]) - dense(expected[i])) <= bounds[i])))
            for i in wrong
        }
        rare = [i for i in wrong if few[i] <= max(1, np.size(after[i]) // 100)]
        if rare:
            count = sum(few[i] for i in rare)
            text = f"{count} elements differ from the update, all other elements are right"
            return "changed_on_its_own", text, rare
        return (
            "unexplained", "the optimizer makes a different update with these gradients",
            list(wrong),
        )  # fmt: skip

    def _update_hypotheses(self, r: int) -> Iterator[tuple[str, str, Callable[[], Arrays]]]:
        """Yields (cause, text, all variables that the optimizer would then leave)."""
        num = len(self._replicas)
        before, sums = self._all("before")[r], self._sums_of(r)
        yield "not_updated", "the weights do not change", lambda: before
        if self._has("sums") and num > 1:
            own, clips = self._all(self._kind_sent)[r], self._recording.clips_sum
            text = "the update uses the gradients of this replica, not the sum"
            yield "not_all_reduced", text, lambda: self._updated(before, own, clips=clips)
        for factor, cause in ((1 / num, "mean_instead_of_sum"), (num, "scaled_gradient")):
            scaled = [_scaled(g, factor) for g in sums]
            text = f"the update uses {factor:.4g} times the sum"
            yield cause, text, partial(self._updated, before, scaled)
        text = "the summed gradients are clipped on this replica"
        yield "clipped_on_one_replica", text, lambda: self._updated(before, sums, clips=True)
        olds = (self._earlier(kind) for kind in ("sums", "clipped", "raw"))
        if old := next((old for old in olds if old), None):
            text = "the update uses the gradients of the previous step"
            yield "stale_gradient", text, lambda: self._updated(before, old[r])

    def _changes_of_update(
        self, r: int, expected: Arrays, wrong: Sequence[int]
    ) -> Iterator[tuple[str, str, Callable[[], Arrays]]]:
        """Yields hypotheses with a number that is fitted: another learning rate, a decay."""
        before, after = self._all("before")[r], self._all("after")[r]
        sums = self._sums_of(r)
        twices = [self._updated(before, sums, rate=2.0, decays=decays) for decays in (True, False)]
        for chosen in [wrong, *([i] for i in wrong if len(wrong) > 1)]:
            apart = [dense(after[i]) - dense(expected[i]) for i in chosen]
            for twice, decays in zip(twices, (True, False), strict=True):
                slope = [dense(twice[i]) - dense(expected[i]) for i in chosen]
                rate = 1 + _factor(apart, slope)
                if np.isfinite(rate):
                    yield (
                        "other_learning_rate",
                        f"the learning rate is {rate:.4g} times that of the optimizer",
                        partial(self._updated, before, sums, rate=rate, decays=decays),
                    )  # fmt: skip
            for base in (expected, before):
                decay = -_factor(apart, [dense(base[i]) for i in chosen])
                if decay > 0:
                    less = [
                        dense(e) - decay * dense(b) for e, b in zip(expected, base, strict=True)
                    ]
                    yield (
                        "weight_decay_on_top",
                        f"a weight decay of {decay:.3g} is applied in addition to the optimizer's"
                        " update", partial(list, less),
                    )  # fmt: skip

    def _statistics(self) -> Iterator[Finding]:
        indices = [i for i, kind in enumerate(self._kinds) if kind in ("statistic", "seed")]
        if not indices:
            return
        self._checks()
        for r in self._replicas:
            after, before, own = self._all("after")[r], self._all("before")[r], self._own[r].after
            allowed = MARGIN * self._spread[r].forward
            wrong = [
                i for i in indices
                if not _same(after[i], own[i])
                and (self._kinds[i] == "seed" or _far(after[i], own[i], allowed))
            ]  # fmt: skip
            stay = all(_same(after[i], before[i]) for i in wrong)
            if self._synchronizes and wrong:
                yield self._found(
                    "local_statistics",
                    "the layer is synchronized, but its moving statistics are those of one"
                    " replica's examples, not of the whole batch",
                    replicas=(r,), tensors=tuple(self._paths[i] for i in wrong),
                )  # fmt: skip
                continue
            if wrong and not (stay and r in self._in_inference):
                yield self._found(
                    "inference_mode" if stay else "unexplained",
                    "moving statistics and seeds do not change in the training step" if stay
                    else "moving statistics or seeds differ from those of one device for the"
                    " replica's examples",
                    replicas=(r,), tensors=tuple(self._paths[i] for i in wrong),
                )  # fmt: skip

    def _agreement(self) -> Iterator[Finding]:
        if len(self._replicas) == 1:
            return
        self._checks()
        after, before = self._all("after"), self._all("before")
        for index, kind in enumerate(self._kinds):
            if kind in ("weight", "optimizer state"):
                # What was apart before, or was made with other sums, has been told.
                told = not all(_same(before[r][index], before[0][index]) for r in self._replicas)
                if not told and not self._updates_differ():
                    yield from self._other_bits(after, index, "after the step")

    def _updates_differ(self) -> bool:
        """Tells whether other sums, or a wrong update, have made the replicas' bits differ."""
        sums = [self._sums_of(r) for r in self._replicas]
        same = all(_same(a, b) for other in sums[1:] for a, b in zip(other, sums[0], strict=True))
        return self._update_is_wrong or not same

    def _other_bits(self, per_replica: list[Arrays], index: int, when: str) -> Iterator[Finding]:
        first = per_replica[0][index]
        other = [r for r in self._replicas if not _same(per_replica[r][index], first)]
        if other:
            apart = max(distance(per_replica[r][index], first) for r in other)
            yield self._found(
                "diverged_replicas",
                f"{when}, these replicas have other values than replica 0",
                replicas=tuple(other), tensors=(self._paths[index],),
                distance=_ratio(apart, norm(first)),
            )  # fmt: skip


def _threshold(clipped: Arrays, raw: Arrays) -> str:
    """Returns to which norm or value gradients were clipped, "" if to none."""
    arrays = [(dense(c), dense(r)) for c, r in zip(clipped, raw, strict=True)]
    largest = max(float(np.max(np.abs(c), initial=0)) for c, _ in arrays)
    if largest and all(
        np.allclose(c, np.clip(r, -largest, largest), rtol=1e-5, atol=0) for c, r in arrays
    ):
        return f"values of {largest:.4g}"
    factors = [_factor([c], [r]) for c, r in arrays]
    if any(_far(c, f * r) or not 0 < f < 1 for (c, r), f in zip(arrays, factors, strict=True)):
        return ""
    norms = [norm(c) for c, _ in arrays]
    if len(arrays) > 1 and np.ptp(norms) <= 1e-5 * max(norms):
        return f"norm {norms[0]:.4g} each"
    if np.ptp(factors) <= 1e-5 * max(factors):
        return f"norm {float(np.linalg.norm(norms)):.4g}"
    return ""


def _sum_bound(parts: Sequence[Any], unit: float = EPS) -> np.ndarray:
    """Returns how far the order of summation may carry each element, in a dtype of this unit."""
    size = np.sum([np.abs(dense(part)) for part in parts], axis=0)
    return (len(parts) + 1) * unit * size + TINY


def _why_sum(
    r: int | None,
    got: Any,
    parts: Sequence[Any],
    before: Sequence[tuple],
    known: list[np.ndarray],
) -> tuple[str, str, tuple[int, ...]]:
    """Explains a sum that is none: cause, text, and replicas if others than the one that has it.

    Args:
        r: the replica that has it, None where all have it.
        got: the sum.
        parts: what each replica has sent.
        before: sums of the step before, and how far rounding may carry them.
        known: factors of the replicas in the sums of other tensors; new ones are added.
    """
    num, sums, bound = len(parts), dense(got), _sum_bound(parts)
    if sums.shape != bound.shape:
        return "unexplained", f"the sum has shape {sums.shape}, not {bound.shape}", ()
    if np.any(sums) and any(_within(got, old, limit) for old, limit in before):
        return "stale_gradient", "the sum is that of the previous step", ()
    rows = np.stack([dense(part).ravel() for part in parts])
    simple = [np.full(num, 1 / num), *([] if r is None else [np.eye(num)[r]])]
    fitted = [np.linalg.lstsq(rows.T, sums.ravel(), rcond=None)[0]] if sums.size > num else []
    for factors in [*simple, *known, *fitted]:
        limit = MARGIN * max(1, float(np.abs(factors).max())) * bound
        if _within(got, np.tensordot(factors, rows, 1).reshape(sums.shape), limit):
            known.append(factors)
            return _why_factors(r, np.where(np.abs(factors) < 1e-3, 0, factors))
    for cause, text, candidate in _reduced_sums(parts):
        if _within(got, candidate, bound):
            return cause, text, ()
    if text := _sum_of_some(sums, rows, bound):
        return "sparsified", text, ()
    return *_why_tensor(got, add(parts), 0.0, num), ()


def _why_factors(r: int | None, factors: np.ndarray) -> tuple[str, str, tuple[int, ...]]:
    """Explains a sum of the replicas' gradients times these factors."""
    num = len(factors)
    if np.allclose(factors, 1 / num, rtol=1e-3):
        text = f"the gradients are averaged over {num} replicas, not summed"
        return "mean_instead_of_sum", text, ()
    if r is not None and factors[r] and not np.any(np.delete(factors, r)):
        times = "" if abs(factors[r] - 1) < 1e-3 else f", multiplied by {factors[r]:.4g}"
        text = f"it is the gradient of this replica, not the sum over {num} replicas{times}"
        return "not_all_reduced", text, ()
    odd = tuple(int(q) for q in np.flatnonzero(np.abs(factors - 1) > 1e-3))
    if not np.any(factors):
        return "lost_replica", "the sum is 0", ()
    if odd and not any(factors[q] for q in odd):
        lost = ", ".join(map(str, odd))
        return "lost_replica", f"the sum does not contain the gradient of replica {lost}", odd
    shown = ", ".join(f"{factor:.{4 if odd else 8}g}" for factor in factors)
    text = f"the sum contains the replicas' gradients multiplied by {shown}"
    return "scaled_gradient", text, odd if len(odd) < num else ()


def _reduced_sums(parts: Sequence[Any]) -> Iterator[tuple[str, str, np.ndarray]]:
    """Yields (cause, text, sum) of gradients that are sent in fewer bits."""
    arrays = [dense(part) for part in parts]

    def rounded(array: np.ndarray, dtype: tf.DType) -> np.ndarray:
        return tf.cast(tf.cast(tf.constant(array, tf.float32), dtype), tf.float32).numpy()

    for dtype in (tf.bfloat16, tf.float16):
        short = [rounded(array, dtype) for array in arrays]
        text = f"gradients are rounded to {dtype.name}"
        yield "reduced_precision", f"{text} before the sum", np.add.reduce(short, dtype=np.float64)
        added = short[0]
        for array in short[1:]:
            added = rounded(added + array, dtype)
        yield "reduced_precision", f"{text} and summed in it", added
        whole = rounded(np.sum(arrays, axis=0), dtype)
        yield "reduced_precision", f"the sum is rounded to {dtype.name}", whole
    for levels in (127, 128, 7):
        scales = [float(np.max(np.abs(array), initial=0)) / levels or 1.0 for array in arrays]
        sent = [np.round(a / scale) * scale for a, scale in zip(arrays, scales, strict=True)]
        bits = levels.bit_length() + 1 if levels & 1 else levels.bit_length()
        yield "quantised", f"gradients are quantised to {bits} bits", np.sum(sent, axis=0)
    signs = [np.sign(array) * np.mean(np.abs(array)) for array in arrays]
    yield "quantised", "gradients are quantised to their signs", np.sum(signs, axis=0)


def _sum_of_some(sums: np.ndarray, rows: np.ndarray, bound: np.ndarray) -> str:
    """Tells whether each element is the sum of some replicas' elements, "" if not."""
    flat, limit, num = sums.ravel(), bound.ravel(), len(rows)
    if num > 8:
        return ""
    full, found = np.abs(rows.sum(axis=0) - flat) <= limit, np.zeros(flat.shape, bool)
    for subset in range(1 << num):
        chosen = [q for q in range(num) if subset >> q & 1]
        found |= np.abs(rows[chosen].sum(axis=0) - flat) <= limit
    if not found.all():
        return ""
    return f"in {np.mean(~full):.0%} of the elements, the part of some replicas is 0"


def _why_tensor(actual: Any, expected: Any, limit: float, num_replicas: int) -> tuple[str, str]:
    """Explains one wrong gradient without those of other replicas and tensors."""
    a, e = dense(actual), dense(expected)
    if a.shape != e.shape:
        return "unexplained", f"the gradient has shape {a.shape}, not {e.shape}"
    if not np.any(a):
        return "frozen", "all elements of the gradient are 0"
    limit = max(limit, 64 * EPS * float(np.linalg.norm(e)))
    factor = _factor([a], [e])
    if np.linalg.norm(a - factor * e) <= abs(factor) * limit:
        known = {
            1 / num_replicas: " (1 / number of replicas)",
            num_replicas: " (the number of replicas)",
        }
        why = next((text for k, text in known.items() if abs(factor / k - 1) < 1e-3), "")
        return (
            "scaled_gradient",
            f"the gradient is {factor:.4g} times as large as it should be{why}",
        )
    kept = a != 0
    if np.mean(kept) < 0.9 and np.linalg.norm((a - e)[kept]) <= limit:
        return (
            "sparsified",
            f"{np.mean(~kept):.0%} of the gradient's elements are 0, all others are right",
        )
    for name, bits in (("bfloat16", 16), ("float16", 13)):
        if _has_short_mantissa(a, bits) and np.linalg.norm(a - e) <= 2.0 ** (
            bits - 23
        ) * np.linalg.norm(e):
            return "reduced_precision", f"the gradient is rounded to {name}"
    if len(np.unique(a)) <= min(256, a.size // 4):
        return "quantised", f"the {a.size} elements have only {len(np.unique(a))} different values"
    apart = _ratio(float(np.linalg.norm(a - e)), float(np.linalg.norm(e)))
    return (
        "unexplained",
        f"the relative difference is {apart:.2g}; no scale, shift, other examples, previous step,"
        " regularisation, precision or lost element explains it",
    )


def _has_short_mantissa(array: np.ndarray, bits: int) -> bool:
    """Tells whether the last `bits` bits of the mantissa are 0 in all numbers, as float32."""
    numbers = array.astype(np.float32)
    return bool(np.all(numbers == array)) and not np.any(
        numbers.view(np.uint32) & ((1 << bits) - 1)
    )


def _at(arrays: Arrays, indices: Sequence[int], values: Sequence[np.ndarray]) -> Arrays:
    changed = list(arrays)
    for index, value in zip(indices, values, strict=True):
        changed[index] = value
    return changed


def _scaled(value: Any, factor: float) -> Any:
    if isinstance(value, Sparse):
        return value._replace(values=(value.values * factor).astype(value.values.dtype))
    return (np.asarray(value) * factor).astype(np.asarray(value).dtype)


def _factor(actual: Sequence[Any], expected: Sequence[Any]) -> float:
    """Returns the factor that brings `expected` nearest to `actual`, over all arrays."""
    dots = sum(float(np.vdot(dense(a), dense(e))) for a, e in zip(actual, expected, strict=True))
    squares = sum(norm(e) ** 2 for e in expected)
    return dots / squares if squares else np.nan


def _two_factors_of(
    actual: np.ndarray, first: np.ndarray, second: np.ndarray
) -> tuple[float, float] | None:
    """Returns (a, b) with `a * first + b * second` nearest to `actual`.

    NaN for b where `second` is 0 everywhere, None where both vectors are nearly parallel.
    """
    sizes = norm(first), norm(second)
    if not sizes[1]:
        return (_factor([actual], [first]), np.nan) if sizes[0] else None
    if not sizes[0] or abs(np.vdot(first, second)) > 0.99 * sizes[0] * sizes[1]:
        return None
    columns = np.stack([first / sizes[0], second / sizes[1]], axis=1)
    (a, b), *_ = np.linalg.lstsq(columns, actual, rcond=None)
    return float(a / sizes[0]), float(b / sizes[1])


def _ratio(apart: float, size: float) -> float:
    return 0.0 if apart == 0 else float(apart / max(size, TINY))


def _relative(actual: Arrays, expected: Arrays) -> float:
    """Returns the largest relative distance of two arrays."""
    return max(
        (_ratio(distance(a, e), norm(e)) for a, e in zip(actual, expected, strict=True)),
        default=0.0,
    )


def _relative_norm(actual: Arrays, expected: Arrays) -> float:
    """Returns the relative distance of all arrays together."""
    apart = sum(distance(a, e) ** 2 for a, e in zip(actual, expected, strict=True))
    return _ratio(apart**0.5, _total_norm(expected))


def _total_norm(values: Arrays) -> float:
    return float(np.sqrt(sum(norm(value) ** 2 for value in values)))


def _far(actual: Any, expected: Any, allowed: float = 1e-5) -> bool:
    return distance(actual, expected) > allowed * norm(expected) + TINY


def _within(actual: Any, expected: Any, bounds: np.ndarray) -> bool:
    """Tells whether each element is as near as its bound, or is not finite in both."""
    a, e = dense(actual), dense(expected)
    if a.shape != e.shape:
        return False
    finite = np.isfinite(a) | np.isfinite(e)
    return bool(np.all((np.abs(a - e) <= bounds)[finite]))


def _bytes(value: Any) -> bytes:
    parts = value[:2] if isinstance(value, Sparse) else [value]
    return b"".join(np.asarray(part).tobytes() for part in parts)


def _same(a: Any, b: Any) -> bool:
    return _bytes(a) == _bytes(b)


def _join(parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts) if parts[0].ndim else parts[0]


def _row_hashes(arrays: Arrays) -> collections.Counter:
    """Counts the rows of arrays that belong together."""
    rows = zip(*([np.asarray(row).tobytes() for row in array] for array in arrays), strict=True)
    return collections.Counter(hash(row) for row in rows)
