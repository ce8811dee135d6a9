"""Provides the arrays of one recorded step of a script by name."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from app.records.script_trace import Array, Rows, ScriptTrace
from app.verification.recordings.optimizer_rules import Rule, Slots, rule_of

Named = dict[str, np.ndarray]

CLIPPED_FIRST = "clip, reduce"
WEIGHT, STATISTIC, STATE, SEED = "weight", "statistic", "optimizer state", "seed"
# Role → its names in PyTorch, Keras and Optax.
_SLOTS: dict[str, dict[str, tuple[str, ...]]] = {
    "SGD": {"velocity": ("momentum_buffer", "momentum", "trace")},
    "Adam": {
        "first_moment": ("exp_avg", "m", "mu", "momentum"),
        "second_moment": ("exp_avg_sq", "v", "nu", "velocity"),
    },
}
_COUNTERS = ("step", "iterations", "iteration", "count")


class RecordedStep:
    """One step of a trace.

    Args:
        trace: a recording of a script.
        position: position of the step among the recorded steps, from 0.

    Attributes:
        number: number of the step in the script, from 0.
    """

    def __init__(self, trace: ScriptTrace, position: int):
        self.trace, self._position = trace, position
        self.number = trace.steps[position]
        self._read: dict[tuple[str, int], list[np.ndarray | None] | None] = {}

    @property
    def replicas(self) -> range:
        """The replica ids."""
        return range(self.trace.num_replicas)

    def arrays(self, kind: str, replica: int) -> list[np.ndarray] | None:
        """Returns the arrays of a kind that exist; None if the kind is not recorded."""
        found = self._all(kind, replica)
        return None if found is None else [array for array in found if array is not None]

    def _all(self, kind: str, replica: int) -> list[np.ndarray | None] | None:
        """Returns the arrays of a kind, with None for those that do not exist."""
        key = (kind, replica)
        if key not in self._read:
            found = self.trace.arrays(self._position, kind, replica)
            self._read[key] = None if found is None else [_whole(array) for array in found]
        return self._read[key]

    def release(self) -> None:
        """Frees the arrays that were read; they are read again on demand."""
        self._read.clear()

    def has(self, kind: str) -> bool:
        """Returns whether every replica has arrays of a kind."""
        return all(self._all(kind, replica) is not None for replica in self.replicas)

    def state(self, when: str, replica: int, *kinds: str) -> Named:
        """Returns name → variable of these kinds, "before" or "after" the step."""
        arrays = self._all(when, replica) or []
        return {
            variable.name: array
            for variable, array in zip(self.trace.variables, arrays, strict=False)
            if variable.kind in kinds and array is not None
        }

    def gradients(self, kind: str, replica: int) -> Named | None:
        """Returns name of the weight → gradient; None if the kind is not recorded."""
        arrays = self._all(kind, replica)
        if arrays is None:
            return None
        pairs = zip(self.trace.gradients, arrays, strict=True)
        return {name: array for name, array in pairs if array is not None}

    def gradients_of_all(self, kind: str) -> list[Named] | None:
        """Returns name → gradient for each replica, for weights with a gradient on all of them."""
        found = [self.gradients(kind, replica) for replica in self.replicas]
        known = [gradients for gradients in found if gradients is not None]
        if len(known) < len(found):
            return None
        return [
            {name: own[name] for name in own if all(name in other for other in known)}
            for own in known
        ]

    def applied(self, replica: int) -> Named | None:
        """Returns the gradients that the optimizer of a replica applies."""
        kinds = ("clipped", "sums", "raw")
        if self.trace.order == CLIPPED_FIRST:
            kinds = ("sums", "clipped", "raw")
        found = (self.gradients(kind, replica) for kind in kinds)
        return next((gradients for gradients in found if gradients is not None), None)

    def whole(self) -> Named | None:
        """Returns the gradients of the whole batch before clipping.

        Prefers the sum of the sent gradients to the received one, which is checked separately.
        """
        if self.trace.num_replicas > 1:
            if (sent := self.reduced("raw")) is not None:
                return sent
            kinds: tuple[str, ...] = ("sums", "clipped")
        else:
            kinds = ("raw", "sums", "clipped")
        found = (self.gradients(kind, 0) for kind in kinds)
        return next((gradients for gradients in found if gradients is not None), None)

    def reduced(self, kind: str) -> Named | None:
        """Returns the sum or mean of the sent values over the replicas, in float64."""
        sent = self.gradients_of_all(kind)
        if sent is None or not self.trace.reduction:
            return None
        divisor = len(sent) if self.trace.reduction == "mean" else 1
        return {
            name: np.sum([own[name].astype(np.float64) for own in sent], axis=0) / divisor
            for name in sent[0]
        }

    def num_examples(self, replica: int) -> int | None:
        """Returns the number of examples of a replica; None if they are not recorded."""
        data = self.arrays("data", replica)
        count = self.micro_batches(replica)
        if not data or data[0].ndim == 0:
            return None
        leaves = len(data) // count
        return sum(len(data[i * leaves]) for i in range(count))

    def micro_batches(self, replica: int) -> int:
        """Returns the number of forward passes whose gradients a replica accumulates."""
        return self.trace.micro_batches(self._position, replica)

    @property
    def has_random_layers(self) -> bool:
        """Whether a layer uses random numbers in training."""
        return any(
            "dropout" in str(layer.get("class", "")).lower() and layer.get("rate", 1) != 0
            for layer in self.trace.layers
        )

    def settings(self, replica: int) -> list[Mapping[str, Any]]:
        """Returns the settings of the optimizer's parameter groups."""
        return list(self.trace.settings(self._position, replica))

    def settings_of(self, weight: str, replica: int) -> Mapping[str, Any]:
        """Returns the settings of a weight's parameter group; empty without one."""
        groups = self.settings(replica)
        named = [group for group in groups if weight in group.get("weights", ())]
        return (named or [group for group in groups if "weights" not in group] or [{}])[0]

    def rule(self, weight: str, replica: int) -> Rule | None:
        """Returns the optimizer's rule for a weight; None if unknown."""
        return rule_of(self.trace.optimizer, self.settings_of(weight, replica))

    def slots(self, when: str, weight: str, family: str, replica: int) -> Slots | None:
        """Returns the optimizer state of a weight; None if it is not recorded.

        Args:
            when: "before" or "after" the step.
            weight: name of the weight.
            family: family of the optimizer, "SGD" or "Adam".
            replica: replica id.
        """
        state, after = self._all(when, replica), self._all("after", replica)
        if state is None or after is None:
            return None
        found: dict[str, np.ndarray] = {}
        number = None
        for variable, array, later in zip(self.trace.variables, state, after, strict=False):
            if variable.kind != STATE or later is None:
                continue
            if variable.slot in _COUNTERS and variable.of in ("", weight) and later.size == 1:
                number = int(later.reshape(()))
            if array is None:  # Created by the first update.
                array = np.zeros_like(later)
            for role, names in _SLOTS[family].items():
                if variable.of == weight and variable.slot in names:
                    found[role] = array.astype(np.float64)
        if family == "Adam" and (number is None or len(found) < 2):
            return None
        return Slots(number=number, **found)


def _whole(array: Array | None) -> np.ndarray | None:
    """Converts a gradient of rows to a dense gradient."""
    if isinstance(array, Rows):
        return array.dense()
    return None if array is None else np.asarray(array)
