"""A recorded step, its expected values, and the results of earlier stages."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from .distances import MARGIN, TINY, distance, join_parts, norm
from .findings import BY_DESIGN, FAULT, Finding
from .layers import leaf_layers
from .recorder_imports import Arrays, Recording
from .reference_model import OneDevice, StepResult
from .spread import Spread


class StepContext:
    """A recorded step, the argument of each stage's check.

    Args:
        recording: a recording of any number of replicas.
        position: position of the step in the recording, from 0.
        one: the same model on one device.
        exact: the same model in float64, if available.
        batch: the global batch defined by the dataset, if known.
        checked: stages that were checked in earlier steps; new ones are added.

    Attributes:
        stage: the current stage.
        reference: computes gradients: `exact`, or `one` if they differ by more than rounding.
        own, spread: for each replica, its step on one device and the effect of rounding.
        num_in_float64: number of steps that were computed in float64.
        scales: for each replica, the factors of its data loss and of its regularisation.
        starts: for each replica, the gradient with respect to its predictions, if given.
        used: the examples of each replica, with the targets that it actually used.
        in_inference: replicas that compute in inference mode.
        drawn_as: replica → replica whose random numbers it uses.
        loss_is_wrong, loss_is_unknown, update_is_wrong: results of earlier stages.
    """

    def __init__(
        self, recording: Recording, position: int, one: OneDevice, exact: OneDevice | None = None,
        batch: Arrays | None = None, checked: list[str] | None = None,
    ):  # fmt: skip
        self.recording, self.position, self.arrays = recording, position, recording.steps[position]
        self.one, self.exact, self.reference = one, exact, exact or one
        self.batch, self.checked = batch, [] if checked is None else checked
        self.replicas = range(recording.num_replicas)
        self.kinds = [variable["kind"] for variable in recording.variables]
        self.paths = [variable["name"] for variable in recording.variables]
        self.stage, self.num_in_float64 = "start", 0
        self.own: list[StepResult] = []
        self.spread: list[Spread] = []
        share = 1 / len(self.replicas) if self.has("loss") else 1.0
        self.scales = [(share, share)] * len(self.replicas)
        self.starts: list[Arrays | None] = [None] * len(self.replicas)
        self.used, self.in_inference = list(self.data), set[int]()
        self.drawn_as: dict[int, int] = {}
        self.loss_is_wrong = self.loss_is_unknown = self.update_is_wrong = False

    @property
    def number(self) -> int:
        """The number of the step, from 0."""
        return self.recording.numbers[self.position]

    @property
    def clips_sum(self) -> bool:
        """Whether gradients are clipped after the sum."""
        return self.recording.order == "reduce, clip"

    def per_replica(self, kind: str, step: int | None = None) -> list[Arrays]:
        """Returns arrays of all replicas, in order."""
        arrays = self.arrays if step is None else self.recording.steps[step]
        return [arrays[kind, replica] for replica in self.replicas]

    def joined(self, kind: str, order: Sequence[int] = ()) -> Arrays:
        """Returns the concatenated arrays of all replicas, in order or in the given order."""
        arrays = [self.arrays[kind, replica] for replica in order or self.replicas]
        return [join_parts(parts) for parts in zip(*arrays, strict=True)]

    def has(self, kind: str) -> bool:
        """Returns whether arrays of a kind were recorded in this step."""
        return (kind, 0) in self.arrays

    @property
    def follows(self) -> bool:
        """Whether the previous step was recorded, too."""
        numbers = self.recording.numbers
        return self.position > 0 and numbers[self.position - 1] == self.number - 1

    def earlier(self, kind: str) -> list[Arrays] | None:
        """Returns arrays of all replicas in the last earlier step that has them."""
        for step in reversed(self.recording.steps[: self.position]):
            if all((kind, replica) in step for replica in self.replicas):
                return [step[kind, replica] for replica in self.replicas]
        return None

    @property
    def overflows(self) -> list[int]:
        """The replicas whose gradients overflow in float16, so that the step should be skipped."""
        return [r for r in self.replicas if self.one.scales_loss and not self.own[r].raw]

    @property
    def data(self) -> list[Arrays]:
        """The examples of each replica."""
        return self.per_replica("data")

    @property
    def whole(self) -> Arrays:
        """The examples of all replicas."""
        return [np.concatenate(parts) for parts in zip(*self.data, strict=True)]

    def mark_checked(self) -> None:
        """Adds the current stage to those that could be checked."""
        if self.stage not in self.checked:
            self.checked.append(self.stage)

    def found(self, cause: str, text: str, **where: Any) -> Finding:
        """Returns a finding in the current stage of this step."""
        status = BY_DESIGN if where.pop("design", False) else FAULT
        return Finding(self.stage, status, cause, text, (self.number,), **where)

    @property
    def sizes(self) -> list[int]:
        """The number of examples of each replica."""
        return [len(data[0]) for data in self.data]

    @property
    def synchronizes(self) -> bool:
        """Whether BatchNorm uses the statistics of all replicas, which are then dependent."""
        layers = self.one.layers_with_statistics
        is_one = len(self.replicas) == 1
        return not is_one and any(getattr(layer, "synchronized", False) for layer in layers)

    def without(self, layers: Sequence[keras.layers.Layer], function: Callable[[], Any]) -> Any:
        """Calls a function with these layers in inference mode."""
        one, exact = self.one, self.exact
        if exact is None:
            return one.without(layers, function)
        numbers = {id(layer): number for number, layer in enumerate(leaf_layers(one.model))}
        others = leaf_layers(exact.model)
        same = [others[numbers[id(layer)]] for layer in layers]
        return one.without(layers, lambda: exact.without(same, function))

    def near(
        self, replica: int, actual: Arrays, expected: Arrays, scale: float = 1.0
    ) -> list[bool]:
        """Returns for each gradient whether it is as expected, within rounding."""
        spread = self.spread[replica]
        return [
            distance(a, e) <= MARGIN * max(abs(scale) * own, spread.backward * norm(e)) + TINY
            for a, e, own in zip(actual, expected, spread.gradients, strict=True)
        ]

    def with_seeds_of(self, other: int, state: Arrays) -> Arrays:
        """Returns a state with the initial seeds of another replica."""
        theirs = self.per_replica("before")[other]
        return [
            seed if kind == "seed" else array
            for array, seed, kind in zip(state, theirs, self.kinds, strict=True)
        ]

    @property
    def modal_layers(self) -> list[keras.layers.Layer]:
        """The layers that behave differently in inference."""
        return [*self.one.random_layers, *self.one.layers_with_statistics]

    def times_own(self, r: int) -> float:
        """Returns the factor of a replica's gradients over the computed ones."""
        num = len(self.replicas) if self.has("loss") else 1
        return self.scales[r][0] * (1 if self.recording.whole_loss else num)

    def regular_share(self, r: int) -> float:
        """Returns the fraction of one device's regularisation that a replica adds."""
        own = self.own[r].loss
        if not own or not own[1]:
            return 1 / len(self.replicas)
        return float(np.sum(self.per_replica("loss")[r][1])) / own[1]

    @property
    def kind_sent(self) -> str:
        """The kind of the gradients before the all-reduce."""
        return "clipped" if self.has("clipped") and not self.clips_sum else "raw"

    def updated(self, state: Arrays, sums: Arrays, **changes: Any) -> Arrays:
        """Returns all variables after the optimizer's update; see `OneDevice.update`."""
        clips = self.clips_sum and not self.has("clipped")
        return self.one.update(state, sums, **({"clips": clips} | changes))

    def sums_of(self, replica: int) -> Arrays:
        """Returns the gradients that a replica applies."""
        kinds = ("clipped", "sums", "raw")
        for kind in kinds if self.clips_sum else ("sums", "clipped", "raw"):
            if self.has(kind):
                return self.arrays[kind, replica]
        return []

    def clipping_limits(self) -> str:
        """Returns the thresholds of the optimizer's clipping."""
        names = ("clipnorm", "global_clipnorm", "clipvalue")
        values = {name: getattr(self.one.optimizer, name, None) for name in names}
        return ", ".join(f"{name}={value:g}" for name, value in values.items() if value)
