"""The optimizers that the steps of a training apply."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from lockstep.data.trace import STATE
from lockstep.recorders.keras.description import described_layers, described_variables
from lockstep.recorders.keras.private import weight_decay_of, weights_of
from lockstep.recorders.keras.values import tensor_of

# The base class, and the wrappers, which have methods of their own; older versions lack the last.
_WRAPPERS = ("Optimizer", "LossScaleOptimizer", "MultiOptimizer")
OPTIMIZERS = tuple(
    getattr(keras.optimizers, name) for name in _WRAPPERS if hasattr(keras.optimizers, name)
)


class Optimizers:
    """The optimizers that a step applies, in their order: others have no part in the training.

    Args:
        model: the model.
        optimizer: those of a custom loop, one or several; None for the compiled one.

    Attributes:
        given: those that the script has named.
        applied: those that a step applies, as far as they are known.

    Raises:
        ValueError: there is none, or one is no optimizer.
    """

    def __init__(self, model: keras.Model, optimizer: Any) -> None:
        self._model, self._compiled = model, getattr(model, "optimizer", None)
        if optimizer is None and self._compiled is None:
            raise ValueError(
                f"model {model.name} is not compiled; call model.compile first, or pass the"
                " optimizer of a custom loop"
            )
        several = isinstance(optimizer, list | tuple)
        self.given: list[Any] = [*optimizer] if several else [optimizer or self._compiled]
        for each in self.given:
            if not isinstance(each, keras.optimizers.Optimizer):
                raise ValueError(f"optimizer: {each!r} is no optimizer of Keras")
        self.applied: list[keras.optimizers.Optimizer] = []
        self._updated: dict[int, list[str]] = {}  # By the identity of an optimizer.

    @property
    def parts(self) -> list[keras.optimizers.Optimizer]:
        """The optimizers that update weights: those in a wrapper, not the wrapper."""
        return [part for each in self.applied for part in parts_of(each)]

    @property
    def variables(self) -> list[keras.Variable]:
        """The variables of the optimizers that a step applies."""
        return [variable for each in self.applied for variable in each.variables]

    def known_before_a_step(self) -> list[keras.optimizers.Optimizer]:
        """Builds optimizers that a step is known to apply; returns those that are new."""
        is_compiled = len(self.given) == 1 and self.given[0] is self._compiled
        is_compiled &= type(self._model).train_step is keras.Model.train_step
        found = []
        for each in self.given:
            # A loss is scaled before the gradients are applied, by a variable.
            if not each.built and len(self.given) == 1 and (is_compiled or scales_loss(each)):
                self.build(each, self._model.trainable_variables)
            # A model with a step of its own may have others than the compiled one.
            is_known = is_compiled or each is not self._compiled
            if each.built and is_known and not any(each is other for other in self.applied):
                found.append(each)
        return found

    def build(self, optimizer: keras.optimizers.Optimizer, weights: Sequence[Any]) -> None:
        """Creates the variables of an optimizer outside of the traced function."""

        def build(strategy: tf.distribute.Strategy) -> None:
            with tf.init_scope(), keras.name_scope(optimizer.name, caller=optimizer):
                if not optimizer.built:
                    optimizer.build(weights)

        tf.distribute.get_replica_context().merge_call(build)

    def has(self, optimizer: keras.optimizers.Optimizer) -> bool:
        """Returns whether a step is known to apply an optimizer, itself or in a wrapper."""
        return any(optimizer is each for each in (*self.applied, *self.parts))

    def updates(self, part: keras.optimizers.Optimizer, names: Sequence[str]) -> None:
        """Notes that an optimizer updates weights."""
        own = self._updated.setdefault(id(part), [])
        own += [name for name in names if name not in own]

    def _updated_by(self, part: keras.optimizers.Optimizer) -> list[Any]:
        """Returns the weights that an optimizer updates; all that it has before its first step."""
        weights = weights_of(part)
        own = self._updated.get(id(part))
        is_only = len(self.parts) == 1
        return [w for w in weights if is_only or own is None or w.path in own]

    def description(self) -> dict[str, Any]:
        """Describes the variables of the model and of the optimizers, and the layers."""
        updated = [weight.path for part in self.parts for weight in weights_of(part)]
        of_model = described_variables(self._model, updated)
        layouts = {each["name"]: each["layout"] for each in of_model}
        return {
            "layers": described_layers(self._model),
            "variables": [*of_model, *self._described_state(layouts)],
        }

    def _described_state(self, layouts: Mapping[str, str]) -> Iterator[dict[str, str]]:
        """Yields the description of each variable of the optimizers, given the weights' layouts.

        `Optimizer.add_variable_from_reference` writes the path of the weight into the name of its
        state. That of a weight which another optimizer updates belongs to none.
        """
        parts = [(part, {id(v) for v in part.variables}) for part in self.parts]
        for variable in self.variables:
            owners = (part for part, own in parts if id(variable) in own)
            weights = [w.path for part in owners for w in self._updated_by(part)]
            starts = {f"{weight.replace('/', '_')}_": weight for weight in weights}
            start = max(filter(variable.name.startswith, starts), key=len, default="")
            of, slot = starts.get(start, ""), variable.name.removeprefix(start)
            layout = layouts.get(of, "")
            yield {"name": variable.path, "kind": STATE, "of": of, "slot": slot, "layout": layout}

    def about(self) -> dict[str, Any]:
        """Returns class and settings of the first optimizer."""
        first = [*self.parts, *self.given][0]
        return {"class": type(first).__name__, "framework": "keras", **constants_of(first)}

    def settings(self, rates: Mapping[str, float]) -> list[dict[str, Any]]:
        """Returns groups of weights with the settings of their optimizer in a step.

        `rates` has the learning rates by the number of the optimizer.
        """
        groups, parts = [], self.parts
        for index, part in enumerate(parts):
            weights: dict[float, list[str]] = {}  # By weight decay.
            for weight in self._updated_by(part):
                weights.setdefault(weight_decay_of(part, weight), []).append(weight.path)
            own = {**constants_of(part), "learning_rate": rates.get(str(index))}
            kind = {"optimizer": type(part).__name__} if len(parts) > 1 else {}
            groups += [{**own, "weight_decay": d, "weights": w, **kind} for d, w in weights.items()]
        return groups

    def trains(self, weights: Sequence[Any]) -> bool:
        """Returns whether the model has some of these weights."""
        own = {id(tensor_of(variable)) for variable in self._model.variables}
        return any(id(tensor_of(weight)) in own for weight in weights)


def constants_of(optimizer: keras.optimizers.Optimizer) -> dict[str, Any]:
    """Returns the settings of an optimizer that are numbers."""
    config = optimizer.get_config().items()
    return {name: value for name, value in config if isinstance(value, bool | int | float)}


def scales_loss(optimizer: keras.optimizers.Optimizer) -> bool:
    """Returns whether an optimizer scales the loss by a variable."""
    return isinstance(optimizer, keras.optimizers.LossScaleOptimizer)


def parts_of(optimizer: keras.optimizers.Optimizer) -> list[keras.optimizers.Optimizer]:
    """Returns the optimizers that update weights, with unscaled gradients: those in a wrapper."""
    if isinstance(optimizer, OPTIMIZERS[2:]):
        return [part for part in optimizer.optimizers if part.built]
    return [optimizer.inner_optimizer if scales_loss(optimizer) else optimizer]
