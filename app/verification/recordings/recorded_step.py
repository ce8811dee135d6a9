"""One recorded step of a script, with its arrays by name."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from app.records.script_trace import Rows, ScriptTrace
from app.verification.recordings.optimizer_rules import Rule, Slots, rule_of

Named = dict[str, np.ndarray]

CLIPPED_FIRST = "clip, reduce"
WEIGHT, STATISTIC, STATE, SEED = "weight", "statistic", "optimizer state", "seed"
# Role → the names that PyTorch, Keras and Optax have for it.
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
        trace: of a script.
        position: of the step among the recorded ones, from 0.

    Attributes:
        number: of the step, as the script counts it, from 0.
    """

    def __init__(self, trace: ScriptTrace, position: int):
        self.trace, self._position = trace, position
        self.number = trace.steps[position]
        self._read: dict[tuple[str, int], list[np.ndarray] | None] = {}

    @property
    def replicas(self) -> range:
        """The numbers of the replicas."""
        return range(self.trace.num_replicas)

    def arrays(self, kind: str, replica: int) -> list[np.ndarray] | None:
        """Returns the arrays of a kind, gradients of rows as whole tables; None without them."""
        key = (kind, replica)
        if key not in self._read:
            found = self.trace.arrays(self._position, kind, replica)
            self._read[key] = (
                None
                if found is None
                else [a.dense() if isinstance(a, Rows) else np.asarray(a) for a in found]
            )
        return self._read[key]

    def of_all(self, kind: str) -> list[list[np.ndarray]] | None:
        """Returns the arrays of a kind of every replica; None if any has none."""
        found = [self.arrays(kind, replica) for replica in self.replicas]
        return None if any(arrays is None for arrays in found) else found  # type: ignore[return-value]

    def state(self, when: str, replica: int, *kinds: str) -> Named:
        """Returns name → variable of these kinds, "before" or "after" the step."""
        arrays = self.arrays(when, replica) or []
        return {
            variable.name: array
            for variable, array in zip(self.trace.variables, arrays, strict=False)
            if variable.kind in kinds
        }

    def gradients(self, kind: str, replica: int) -> Named | None:
        """Returns name of the weight → gradient; None if the kind is not recorded."""
        arrays = self.arrays(kind, replica)
        if arrays is None or len(arrays) != len(self.trace.gradients):
            return None
        return dict(zip(self.trace.gradients, arrays, strict=True))

    def applied(self, replica: int) -> Named | None:
        """Returns the gradients that the optimizer of a replica applies."""
        kinds = ("clipped", "sums", "raw")
        if self.trace.order == CLIPPED_FIRST:
            kinds = ("sums", "clipped", "raw")
        found = (self.gradients(kind, replica) for kind in kinds)
        return next((gradients for gradients in found if gradients is not None), None)

    def whole(self) -> Named | None:
        """Returns the gradients of the whole batch before they are clipped.

        The sum of what the replicas send comes before the one that they receive, which is checked
        on its own.
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
        """Returns the sum or mean over the replicas of what each sends, in float64."""
        sent = self.of_all(kind)
        if sent is None or not self.trace.reduction:
            return None
        divisor = len(sent) if self.trace.reduction == "mean" else 1
        return {
            name: np.sum([a.astype(np.float64) for a in parts], axis=0) / divisor
            for name, *parts in zip(self.trace.gradients, *sent, strict=True)
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
        """Returns over how many forward passes a replica accumulates."""
        return self.trace.micro_batches(self._position, replica)

    @property
    def has_random_layers(self) -> bool:
        """Whether a layer draws random numbers in training."""
        return any(
            "dropout" in str(layer.get("class", "")).lower() and layer.get("rate", 1) != 0
            for layer in self.trace.layers
        )

    def settings(self, replica: int) -> list[Mapping[str, Any]]:
        """Returns the settings of the optimizer's groups."""
        return list(self.trace.settings(self._position, replica))

    def settings_of(self, weight: str, replica: int) -> Mapping[str, Any]:
        """Returns the settings of the group that a weight is in; nothing if it is in none."""
        groups = self.settings(replica)
        named = [group for group in groups if weight in group.get("weights", ())]
        return (named or [group for group in groups if "weights" not in group] or [{}])[0]

    def rule(self, weight: str, replica: int) -> Rule | None:
        """Returns the optimizer's rule for a weight; None if it is not known."""
        return rule_of(self.trace.optimizer, self.settings_of(weight, replica))

    def slots(self, when: str, weight: str, family: str, replica: int) -> Slots | None:
        """Returns the optimizer state of a weight; None if it is not recorded.

        Args:
            when: "before" or "after" the step.
            weight: its name.
            family: of the optimizer, "SGD" or "Adam".
            replica: whose state.
        """
        state, after = self.arrays(when, replica), self.arrays("after", replica)
        if state is None or after is None:
            return None
        found: dict[str, np.ndarray] = {}
        number = None
        for variable, array, later in zip(self.trace.variables, state, after, strict=False):
            if variable.kind != STATE:
                continue
            if variable.slot in _COUNTERS and variable.of in ("", weight) and later.size == 1:
                number = int(later.reshape(()))
            for role, names in _SLOTS[family].items():
                if variable.of == weight and variable.slot in names:
                    found[role] = array.astype(np.float64)
        if family == "Adam" and (number is None or len(found) < 2):
            return None
        return Slots(number=number, **found)
