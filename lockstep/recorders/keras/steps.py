"""Observes the step of a replica: its examples, outputs, losses, gradients and state."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import keras
import tensorflow as tf
from keras import tree

from lockstep.recorders.common import Hooks, Request
from lockstep.recorders.keras.copies import NOT_WRAPPED, Copies, Step
from lockstep.recorders.keras.description import is_frozen, size_of_weights
from lockstep.recorders.keras.optimizers import OPTIMIZERS, Optimizers, parts_of
from lockstep.recorders.keras.private import (
    hook_update,
    is_in_branch,
    layers_of,
    regularisation,
)
from lockstep.recorders.keras.replay import Replay
from lockstep.recorders.keras.shards import ShardRunner
from lockstep.recorders.keras.values import leaves, permuted, replica_id, tensor_of
from lockstep.recorders.output import Output

_CALL = "call the model with a batch before the block"
_GRADIENTS = ("raw", "clipped", "sums")


class StepObserver:
    """Copies what the steps of replicas compute, in hooks of the model and of its optimizers.

    Args:
        model: the model.
        optimizers: those that the steps apply.
        request: the steps to record, and the recording to start them from.
        output: the file to which arrays are written as they come.

    Attributes:
        about: what the steps tell of the description.
        copies: what was copied.
        replay: assigns the states of the other recording; None without one.
        shards: calls the model for each part of the batch; None to call it as it is.
        frozen: names of the layers in evaluation mode.
    """

    def __init__(
        self, model: keras.Model, optimizers: Optimizers, request: Request, output: Output
    ) -> None:
        self._model, self._optimizers, self._hooks = model, optimizers, Hooks()
        self._request, self._seed = request, request.permute
        self.about: dict[str, Any] = {"variables": [], "gradients": []}
        self.copies = Copies(request, self.about, output)
        self.replay = Replay(request, self.copies.fail) if request.replay else None
        self.shards = None
        if request.shards and self.replay:
            self.shards = ShardRunner(model, self.replay.states, self.copies)
        self.frozen = list[str]()
        self._is_built = False  # Whether the weights that a call creates were asked for.

    def install(self) -> None:
        """Replaces methods of the model, the optimizers' classes and the tape."""
        hook = self._hooks.hook
        hook(self._model, "train_step", self.step)
        hook(self._model, "compute_loss", self._compute_loss)
        for own in OPTIMIZERS:
            hook(own, "apply", self._apply)
            hook(own, "scale_loss", self._scale_loss)
        hook(tf.GradientTape, "gradient", self._gradient)
        if self.shards:
            self.shards.install(self._hooks)
        self._model.train_function = None  # One that is traced already has no hooks.

    def remove(self) -> None:
        """Restores what `install` has replaced."""
        self._hooks.close()
        self._model.train_function = None

    # The step.

    def step(self, inner: Callable, *data: Any) -> Any:
        """Runs a step. AutoGraph converts this method, and so `inner`, as without a recorder."""
        data = self._begin_step(inner, data)
        try:
            result = inner(*data)
            self._keep_result()
        finally:
            self.copies.end()
        return result

    @tf.autograph.experimental.do_not_convert
    def _begin_step(self, inner: Callable, data: Any) -> Any:
        """Copies what is known before a step; returns its examples."""
        if not self._is_built:
            self._is_built = True
            self._require_weights(inner, data)
        for optimizer in self._optimizers.known_before_a_step():
            self._add(optimizer)
        self._request.choose_sample(size_of_weights(self._model))
        step = self.copies.begin(leaves(data), len(self._model.variables))
        self._keep_state(step)
        if self._seed is not None:
            data = permuted(data, step.number, [self._seed, replica_id()])
        self.copies.keep("data", leaves(data))
        self.frozen = [layer.name for layer in layers_of(self._model) if is_frozen(layer)]
        return data

    def _require_weights(self, inner: Callable, data: Sequence[Any]) -> None:
        """Creates the weights of a model that `fit` calls for the first time."""
        is_called = type(self._model).call is not keras.Model.call
        layers = layers_of(self._model) if is_called else self._model.layers
        unbuilt = [layer.name for layer in layers if not layer.built]
        if not unbuilt:
            return
        if getattr(inner, "__self__", None) is not self._model or not is_called:
            self.copies.fail(f"{unbuilt[0]} has no weights yet; {_CALL}")
        batch = data[0] if len(data) == 1 else data
        x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)

        def zeros(leaf: tf.Tensor) -> tf.Tensor:
            return tf.zeros((1, *leaf.shape[1:]), leaf.dtype)

        def build(strategy: tf.distribute.Strategy) -> None:
            with tf.init_scope():
                self._model(tree.map_structure(zeros, x))

        tf.distribute.get_replica_context().merge_call(build)

    def _keep_state(self, step: Step) -> None:
        """Copies the state before a step, as far as it is known and not copied yet."""
        state, parts = self._state, self._optimizers.parts
        if step.num_kept == len(state):
            return
        places = range(step.num_kept, len(state))
        added = [state[place] for place in places]
        self.about |= self._optimizers.description()
        if self.replay:
            self.copies.keep("replaced", added, places)
            self.replay.assign(state, self.about["variables"], step.number, step.num_kept)
        self.copies.keep("before", added, places)
        if self._request.keeps_start:
            self.copies.keep("start", added, places)
        rates = [part.learning_rate for part in parts[step.num_rates :]]
        self.copies.keep("learning_rate", rates, range(step.num_rates, len(parts)))
        step.num_kept, step.num_rates = len(state), len(parts)

    @property
    def _state(self) -> list[Any]:
        """Variables of the model, then those of the optimizers."""
        return [*self._model.variables, *self._optimizers.variables]

    @tf.autograph.experimental.do_not_convert
    def _keep_result(self) -> None:
        step = self.copies.step
        if step and (late := len(self._model.variables) - step.num_variables):
            self.copies.fail(f"{self._model.name} creates {late} variables in a step; {_CALL}")
        self.copies.keep("after", self._state)

    # Losses.

    def _compute_loss(self, inner: Callable, *args: Any, **kwargs: Any) -> tf.Tensor:
        loss = inner(*args, **kwargs)
        names = ("x", "y", "y_pred", "sample_weight", "training")
        call = {**dict(zip(names, args, strict=False)), **kwargs}
        if call.get("training", True):
            self.copies.keep("y_pred", leaves(call["y_pred"]))
            self.copies.keep("loss", [loss, regularisation(self._model)])
        return loss

    def _gradient(self, inner: Callable, tape: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
        """Records the scalar whose gradient a step takes, which a loss scale would multiply."""
        weights = {id(variable.value) for variable in self._model.trainable_variables}
        sources = {id(tensor_of(x)) for x in tree.flatten((args, kwargs))}
        step = self.copies.step if weights & sources else None
        is_plain = tf.is_tensor(target) and target.shape.rank == 0
        if step and is_plain and not step.is_scaled:
            self.copies.left_out |= {"objective"} if step.num_losses else set()
            step.num_losses += 1
            self.copies.keep("objective", [target, regularisation(self._model)])
        return inner(tape, target, *args, **kwargs)

    def _scale_loss(self, inner: Callable, optimizer: Any, loss: Any) -> Any:
        scaled = inner(optimizer, loss)
        if scaled is not loss and (step := self.copies.step):
            step.is_scaled = True
        return scaled

    # Updates.

    @tf.autograph.experimental.do_not_convert
    def _apply(
        self, inner: Callable, optimizer: Any, gradients: Any, weights: Any = None,
        trainable_variables: Any = None,
    ) -> Any:  # fmt: skip
        """Copies the state of an optimizer before its first update in a step."""
        weights = trainable_variables if weights is None else weights
        weights = weights if weights is None else list(weights)
        step = self.copies.step
        if not step and self._optimizers.trains(weights or ()):
            raise ValueError(NOT_WRAPPED)
        if step:
            if not self._optimizers.has(optimizer):
                self._add_applied(optimizer, weights)
            self._keep_state(step)
        return inner(optimizer, gradients, weights)

    def _add_applied(self, optimizer: keras.optimizers.Optimizer, weights: Any) -> None:
        """Adds an optimizer that a step applies for the first time."""
        if is_in_branch():
            self.copies.fail(
                f"the optimizer {optimizer.name} is applied in a condition or a loop; pass"
                " it, or the list of all, and call its build(weights) before the block"
            )
        if not optimizer.built and weights is not None:
            self._optimizers.build(optimizer, weights)
        if not self._optimizers.has(optimizer):  # Another replica may have added it.
            self._add(optimizer)

    def _add(self, optimizer: keras.optimizers.Optimizer) -> None:
        self._optimizers.applied.append(optimizer)
        for part in parts_of(optimizer):
            apply = partial(self._apply_gradients, part)
            hook_update(self._hooks, part, apply, self._clip_gradients, self._all_reduce)

    def _apply_gradients(
        self, optimizer: Any, inner: Callable, gradients: Sequence, variables: Sequence
    ) -> Any:
        names = {id(tensor_of(v)): v.path for v in self._model.variables}
        found = [names.get(id(tensor_of(v)), "") for v in variables]
        if (step := self.copies.step) is None:
            if any(found):
                raise ValueError(NOT_WRAPPED)
            return inner(gradients, variables)  # It trains another model.
        if "" in found:
            own = variables[found.index("")]
            self.copies.fail(
                f"a step updates {getattr(own, 'path', own.name)}, which {self._model.name} does"
                " not have; pass a list of all models that it trains"
            )
        self._optimizers.updates(optimizer, found)
        known = self.about["gradients"]
        known += [name for name in dict.fromkeys(found) if name not in known]
        step.places = [known.index(name) for name in found]
        for index, gradient in zip(step.places, gradients, strict=True):
            if step.applied.setdefault(index, gradient) is not gradient:
                self.copies.left_out |= {f"{kind}/{index}" for kind in _GRADIENTS}
        self.copies.keep("raw", gradients, step.places)
        return inner(gradients, variables)

    def _clip_gradients(self, inner: Callable, gradients: Sequence) -> Any:
        clipped = inner(gradients)
        if step := self.copies.step:
            self.copies.keep("clipped", clipped, step.places)
        return clipped

    def _all_reduce(self, inner: Callable, pairs: Sequence) -> Any:
        reduced = list(inner(pairs))
        if step := self.copies.step:
            self.copies.keep("sums", [gradient for gradient, _ in reduced], step.places)
        return reduced
