"""Computes the updates of SGD, Adam and AdamW in float64, as in PyTorch, Keras and Optax.

The three frameworks have optimizers with the same names and different updates. A `Rule` has every
setting in which they differ, so that it can express each of them, and a wrong update is found by
changing one setting at a time.

References: `torch.optim.SGD`, `torch.optim.Adam`, `torch.optim.AdamW`; `keras.optimizers.SGD`,
`keras.optimizers.Adam`; `optax.sgd`, `optax.adamw`.
"""

import copy
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from lockstep.arithmetic import EPS, dense, unit_of
from lockstep.trace import STATE, Array, Named, Trace

IN_GRADIENT, IN_WEIGHTS = "added to the gradient", "taken from the weights"
OF_GRADIENTS, OF_UPDATES = "of gradients", "of updates"
AFTER_CORRECTION, BEFORE_CORRECTION = "after bias correction", "before bias correction"
UNDER_ROOT = "under the root"

# Role → its names in PyTorch, Keras and Optax.
_SLOTS: dict[str, dict[str, tuple[str, ...]]] = {
    "SGD": {"velocity": ("momentum_buffer", "momentum", "trace")},
    "Adam": {
        "first_moment": ("exp_avg", "m", "mu", "momentum"),
        "second_moment": ("exp_avg_sq", "v", "nu", "velocity"),
    },
}
_COUNTERS = ("step", "iterations", "iteration", "count")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """The rule of an optimizer, with its settings for one weight in one step.

    Attributes:
        family: "SGD" or "Adam".
        learning_rate: learning rate of this step.
        momentum: momentum of SGD.
        dampening: dampening of SGD in PyTorch.
        nesterov: whether SGD uses Nesterov momentum.
        velocity: what the velocity of SGD sums, `OF_GRADIENTS` (PyTorch, Optax) or `OF_UPDATES`
            (Keras: it contains the learning rates of earlier steps).
        weight_decay: λ.
        decay_placement: `IN_GRADIENT` or `IN_WEIGHTS`.
        beta_1, beta_2: decay rates of Adam.
        epsilon: epsilon of Adam.
        epsilon_placement: where epsilon is added: to the root `AFTER_CORRECTION` of the bias
            (PyTorch, Optax) or `BEFORE_CORRECTION` (Keras), or `UNDER_ROOT`.
        corrects_bias: whether Adam corrects the bias of its moments.
    """

    family: str
    learning_rate: float
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    velocity: str = OF_GRADIENTS
    weight_decay: float = 0.0
    decay_placement: str = IN_WEIGHTS
    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-8
    epsilon_placement: str = AFTER_CORRECTION
    corrects_bias: bool = True


class Slots(NamedTuple):
    """The optimizer state of one weight before a step, in float64.

    Attributes:
        velocity: velocity of SGD, as defined by the rule's `velocity`; None for zero.
        first_moment, second_moment: moments of Adam; None for zero.
        number: number of the update, from 1; None if it is not recorded.
    """

    velocity: np.ndarray | None = None
    first_moment: np.ndarray | None = None
    second_moment: np.ndarray | None = None
    number: int | None = None


def rule_of(optimizer: Mapping[str, Any], settings: Mapping[str, Any]) -> Rule | None:
    """Returns the rule of a recorded optimizer; None for an unknown one.

    Args:
        optimizer: "class" and "framework", as in the trace.
        settings: settings of a weight's parameter group in one step.
    """
    framework = str(optimizer.get("framework", ""))
    family = {"sgd": "SGD", "adam": "Adam", "adamw": "Adam"}.get(
        str(optimizer.get("class", "")).lower()
    )
    if family is None or settings.get("amsgrad") or settings.get("maximize"):
        return None
    is_keras = framework == "keras"
    is_adamw = str(optimizer["class"]).lower() == "adamw"
    given = {
        field.name: settings[field.name]
        for field in dataclasses.fields(Rule)
        if settings.get(field.name) is not None
    }
    in_weights = is_keras or is_adamw
    defaults: dict[str, Any] = {
        "family": family,
        "velocity": OF_UPDATES if is_keras else OF_GRADIENTS,
        "decay_placement": IN_WEIGHTS if in_weights else IN_GRADIENT,
        "epsilon_placement": BEFORE_CORRECTION if is_keras else AFTER_CORRECTION,
    }
    if "learning_rate" not in given:
        return None
    return Rule(**defaults | given)


def updated(
    rule: Rule, weight: Array, gradient: Array, slots: Slots, correction: Sequence[float] = (1, 1)
) -> Named:
    """Applies a rule to one weight, in float64.

    Args:
        rule: rule of the optimizer.
        weight: weight before the step, of any shape.
        gradient: gradient that the optimizer applies, of the same shape.
        slots: optimizer state before the step.
        correction: factors of both betas in the correction of the bias.

    Returns:
        "weight" and the names of the `Slots` that the rule has → value after the step.
    """
    w, g = dense(weight), dense(gradient)
    if rule.decay_placement == IN_GRADIENT:
        g = g + rule.weight_decay * w
    else:
        w = w - rule.learning_rate * rule.weight_decay * w
    if rule.family == "SGD":
        change, after = _sgd(rule, g, slots)
    else:
        change, after = _adam(rule, g, slots, correction)
    return {"weight": w + change, **after}


def _sgd(rule: Rule, gradient: np.ndarray, slots: Slots) -> tuple[np.ndarray, Named]:
    """Returns the change of the weight, and the velocity after it."""
    change = -rule.learning_rate * gradient
    if not rule.momentum:
        return change, {}
    velocity = 0.0 if slots.velocity is None else slots.velocity
    if rule.velocity == OF_UPDATES:
        new = rule.momentum * velocity + change
        return (rule.momentum * new + change if rule.nesterov else new), {"velocity": new}
    kept = 1.0 if slots.velocity is None else 1.0 - rule.dampening
    new = rule.momentum * velocity + kept * gradient
    ahead = gradient + rule.momentum * new
    return -rule.learning_rate * (ahead if rule.nesterov else new), {"velocity": new}


def _adam(
    rule: Rule, gradient: np.ndarray, slots: Slots, correction: Sequence[float]
) -> tuple[np.ndarray, Named]:
    """Returns the change of the weight, and both moments after it."""
    old_first = 0.0 if slots.first_moment is None else slots.first_moment
    old_second = 0.0 if slots.second_moment is None else slots.second_moment
    number = slots.number or 1
    first = rule.beta_1 * old_first + (1 - rule.beta_1) * gradient
    second = rule.beta_2 * old_second + (1 - rule.beta_2) * gradient**2
    first_left = 1 - (correction[0] * rule.beta_1) ** number if rule.corrects_bias else 1.0
    second_left = 1 - (correction[1] * rule.beta_2) ** number if rule.corrects_bias else 1.0
    if rule.epsilon_placement == UNDER_ROOT:
        root = np.sqrt(second / second_left + rule.epsilon)
    elif rule.epsilon_placement == BEFORE_CORRECTION:
        root = (np.sqrt(second) + rule.epsilon) / np.sqrt(second_left)
    else:
        root = np.sqrt(second / second_left) + rule.epsilon
    root = np.where(root == 0, 1.0, root)  # For a gradient of 0 with an epsilon of 0.
    change = -rule.learning_rate / first_left * first / root
    return change, {"first_moment": first, "second_moment": second}


Change = tuple[str, str, dict[str, Any]]  # Cause, text, other settings of the rules.


class RuleOracle:
    """Computes the update of a step by the rule of its optimizer; nothing else.

    Args:
        trace: the trace, which describes the optimizer.
        position: position of the step in the trace, from 0.
        weights: names of the weights that the step updates.

    Attributes:
        rules: name of a weight → its rule; empty if a rule or its state is unknown.
        tracks: keys of the optimizer state that an update changes.
    """

    def __init__(self, trace: Trace, position: int, weights: Iterable[str]):
        self._after = trace.named(position, "after", 0) or {}
        self._slots: dict[str, dict[str, str]] = {}  # Weight → role → key.
        self._counter: dict[str, str] = {}  # Weight → key.
        self._correction: tuple[float, ...] = (1.0, 1.0)
        self.rules: dict[str, Rule] = {}
        settings = trace.about.settings[position] if trace.about.settings else ()
        for weight in weights:
            own = [g for g in settings if weight in g.get("weights", ())]
            of_all = [g for g in settings if "weights" not in g]
            rule = rule_of(trace.about.optimizer, (own or of_all or [{}])[0])
            if rule is None or not self._find_state(trace, weight, rule):
                self.rules = {}
                return
            self.rules[weight] = rule
        self.tracks = {key for roles in self._slots.values() for key in roles.values()}

    def _find_state(self, trace: Trace, weight: str, rule: Rule) -> bool:
        """Finds the optimizer state of a weight; returns whether all of it is recorded."""
        has_state = rule.family == "Adam" or rule.momentum
        roles = _SLOTS[rule.family] if has_state else {}
        for key, variable in zip(trace.keys, trace.about.variables, strict=True):
            if variable.kind != STATE or key not in self._after:
                continue
            is_scalar = np.size(self._after[key]) == 1
            if variable.slot in _COUNTERS and variable.of in ("", weight) and is_scalar:
                self._counter[weight] = key
            for role, names in roles.items():
                if variable.of == weight and variable.slot in names:
                    self._slots.setdefault(weight, {})[role] = key
        is_counted = rule.family == "SGD" or weight in self._counter
        return is_counted and roles.keys() <= self._slots.get(weight, {}).keys()

    def slots(self, weight: str, before: Named) -> Slots:
        """Returns the state of a weight; what the first update creates is 0 before it."""
        found: dict[str, Any] = {
            role: dense(before.get(key, np.zeros_like(self._after[key])))
            for role, key in self._slots.get(weight, {}).items()
        }
        counter = self._counter.get(weight)
        number = None if counter is None else int(np.reshape(before.get(counter, 0), ())) + 1
        return Slots(**found, number=number)

    def state_of(self, weight: str) -> list[str]:
        """Returns the keys of the state of a weight."""
        return list(self._slots.get(weight, {}).values())

    def with_rules(self, rules: Mapping[str, Rule]) -> "RuleOracle":
        """Returns the same oracle with other rules."""
        other = copy.copy(self)
        other.rules = dict(rules)
        return other

    def changed(self, **settings: Any) -> "RuleOracle":
        """Returns the same oracle with other settings of all rules."""
        rules = {n: dataclasses.replace(rule, **settings) for n, rule in self.rules.items()}
        return self.with_rules(rules)

    def update(
        self, before: Named, sums: Named, *, clips: bool = False, rate: float = 1.0,
        decays: bool = True, **settings: Any,
    ) -> Named:  # fmt: skip
        """Returns all variables after the update, in float64; see `Oracle.update`.

        Args:
            before: all variables before the update.
            sums: the gradients.
            clips: has no effect: the rule knows of no clipping.
            rate: factor of the learning rate.
            decays: whether the factor also applies to weight decay.
            **settings: other settings of all rules.
        """
        oracle = self.changed(**settings) if settings else self
        if rate != 1.0:
            rules = {
                name: dataclasses.replace(
                    rule,
                    learning_rate=rate * rule.learning_rate,
                    weight_decay=rule.weight_decay / (1.0 if decays or not rate else rate),
                )
                for name, rule in oracle.rules.items()
            }
            oracle = self.with_rules(rules)
        after = dict(before)
        for key in set(self._counter.values()):
            after[key] = np.asarray(before.get(key, 0)) + 1
        for weight, rule in oracle.rules.items():
            if weight in sums and weight in before:
                slots = self.slots(weight, before)
                new = updated(rule, before[weight], sums[weight], slots, self._correction)
                keys = {"weight": weight, **self._slots.get(weight, {})}
                after |= {keys[role]: value for role, value in new.items() if role in keys}
        return after

    def rounded(self, generator: np.random.Generator) -> "RuleOracle":
        """Returns the same oracle with a bias correction in float32.

        So do Keras and Optax compute it; of 1 - 0.999, few bits are left.
        """
        other = copy.copy(self)
        other._correction = tuple(1 + EPS * generator.choice([-1, 1], 2))
        return other

    @property
    def units(self) -> dict[str, float]:
        """Relative rounding error of each variable's dtype."""
        return {key: unit_of(np.asarray(array)) for key, array in self._after.items()}

    def hypotheses(self) -> Iterator[Change]:
        """Yields updates with one other setting."""
        rules = self.rules.values()
        for decay in dict.fromkeys([0.0, *(2 * rule.weight_decay for rule in rules)]):
            text = f"the change is that of a weight decay of {decay:g}"
            yield "other_weight_decay", text, {"weight_decay": decay}
        for place in (IN_GRADIENT, IN_WEIGHTS):
            text = f"weight decay is {place}"
            yield "weight_decay_placement", text, {"decay_placement": place}
        for nesterov, form in ((True, "with"), (False, "without")):
            text = f"the change is that of momentum {form} the look-ahead of Nesterov"
            yield "other_nesterov", text, {"nesterov": nesterov}
        yield "bias_not_corrected", "the bias is not corrected", {"corrects_bias": False}
        for place in (AFTER_CORRECTION, BEFORE_CORRECTION, UNDER_ROOT):
            text = f"epsilon is added {place}"
            yield "epsilon_placement", text, {"epsilon_placement": place}
