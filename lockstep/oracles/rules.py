"""Computes the updates of SGD, Adam and AdamW in float64, as in PyTorch, Keras and Optax.

The three frameworks have optimizers with the same names and different updates. A `Rule` has every
setting in which they differ, so that it can express each of them, and a wrong update is found by
changing one setting at a time.

References: `torch.optim.SGD`, `torch.optim.Adam`, `torch.optim.AdamW`; `keras.optimizers.SGD`,
`keras.optimizers.Adam`; `optax.sgd`, `optax.adamw`.
"""

import copy
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from lockstep.arithmetic import TINY, dense, unit_of
from lockstep.trace import STATE, Named, Trace

IN_GRADIENT, IN_WEIGHTS = "added to the gradient", "taken from the weights"
OF_GRADIENTS, OF_UPDATES = "of gradients", "of updates"
AFTER_CORRECTION, BEFORE_CORRECTION = "after bias correction", "before bias correction"
UNDER_ROOT = "under the root"

ROUNDINGS = 32  # Of the terms of an update; the longest rule has about 12 operations.
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


class Sized(NamedTuple):
    """A computed array, and the sum of the magnitudes of all terms added to get it.

    The sum of magnitudes bounds the rounding error.
    """

    value: np.ndarray
    size: np.ndarray


def updated(rule: Rule, weight: np.ndarray, gradient: np.ndarray, slots: Slots) -> dict[str, Sized]:
    """Applies a rule to one weight, in float64.

    Args:
        rule: rule of the optimizer.
        weight: weight before the step, of any shape.
        gradient: gradient that the optimizer applies, of the same shape.
        slots: optimizer state before the step.

    Returns:
        "weight" and the names of the `Slots` that the rule has → value after the step.
    """
    w, g = weight.astype(np.float64), gradient.astype(np.float64)
    if rule.decay_placement == IN_GRADIENT:
        decay = rule.weight_decay * w
        sent = Sized(g + decay, np.abs(g) + np.abs(decay))
        kept = Sized(w, np.abs(w))
    else:
        decay = rule.learning_rate * rule.weight_decay * w
        sent = Sized(g, np.abs(g))
        kept = Sized(w - decay, np.abs(w) + np.abs(decay))
    apply = _sgd if rule.family == "SGD" else _adam
    change, after = apply(rule, sent, slots)
    return {"weight": Sized(kept.value + change.value, kept.size + change.size), **after}


def _sgd(rule: Rule, gradient: Sized, slots: Slots) -> tuple[Sized, dict[str, Sized]]:
    """Returns the change of the weight, and the velocity after it."""
    rate, sizes = rule.learning_rate, Sized(gradient.size, gradient.size)
    if not rule.momentum:
        return Sized(-rate * gradient.value, rate * sizes.size), {}
    velocity = slots.velocity
    old = Sized(np.zeros_like(gradient.value), np.zeros_like(gradient.value))
    if velocity is not None:
        old = Sized(velocity, np.abs(velocity))
    changes, news = [], []
    for of_old, of_gradient, sign in (
        (old.value, gradient.value, -1.0),
        (old.size, gradient.size, 1.0),
    ):
        if rule.velocity == OF_UPDATES:
            new = rule.momentum * of_old + sign * rate * of_gradient
            ahead = rule.momentum * new + sign * rate * of_gradient
            changes.append(ahead if rule.nesterov else new)
        else:
            kept = 1.0 if velocity is None else 1.0 - rule.dampening
            new = rule.momentum * of_old + kept * of_gradient
            ahead = of_gradient + rule.momentum * new
            changes.append(sign * rate * (ahead if rule.nesterov else new))
        news.append(new)
    return Sized(*changes), {"velocity": Sized(*news)}


def _adam(rule: Rule, gradient: Sized, slots: Slots) -> tuple[Sized, dict[str, Sized]]:
    """Returns the change of the weight, and both moments after it."""
    zero, number, g = np.zeros_like(gradient.value), slots.number or 1, gradient.value
    old = zero if slots.first_moment is None else slots.first_moment
    first = Sized(
        rule.beta_1 * old + (1 - rule.beta_1) * g,
        rule.beta_1 * np.abs(old) + (1 - rule.beta_1) * gradient.size,
    )
    old = zero if slots.second_moment is None else slots.second_moment
    second = rule.beta_2 * old + (1 - rule.beta_2) * g * g
    first_left = 1 - rule.beta_1**number if rule.corrects_bias else 1.0
    second_left = 1 - rule.beta_2**number if rule.corrects_bias else 1.0
    if rule.epsilon_placement == UNDER_ROOT:
        root = np.sqrt(second / second_left + rule.epsilon)
    elif rule.epsilon_placement == BEFORE_CORRECTION:
        root = (np.sqrt(second) + rule.epsilon) / np.sqrt(second_left)
    else:
        root = np.sqrt(second / second_left) + rule.epsilon
    root = np.where(root == 0, 1.0, root)  # For a gradient of 0 with an epsilon of 0.
    scale = rule.learning_rate / first_left / root
    rounded = 1.0
    if rule.corrects_bias:
        rounded += _rounding_of_correction(rule.beta_1, number)
        rounded += _rounding_of_correction(rule.beta_2, number) / 2  # Under the root.
    sizes = rule.beta_2 * np.abs(old) + (1 - rule.beta_2) * gradient.size**2
    after = {"first_moment": first, "second_moment": Sized(second, sizes)}
    return Sized(-scale * first.value, rounded * scale * first.size), after


def _rounding_of_correction(beta: float, number: int) -> float:
    """Returns the error of 1 - beta ** number in float32, relative, in `ROUNDINGS` units.

    Keras and Optax compute it in float32, where 1 - 0.999 has few bits left: beta is rounded by a
    quarter of a unit, and the power by at most one.
    """
    error = 1 + number * beta ** (number - 1) / 4
    return error / (1 - beta**number) / ROUNDINGS if beta < 1 else 0.0


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

    def _updated(self, before: Named, sums: Named) -> Iterator[tuple[str, Sized]]:
        for weight, rule in self.rules.items():
            if weight not in sums or weight not in before:
                continue
            slots = self.slots(weight, before)
            after = updated(rule, dense(before[weight]), dense(sums[weight]), slots)
            keys = {"weight": weight, **self._slots.get(weight, {})}
            yield from ((keys[role], value) for role, value in after.items() if role in keys)

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
        counters = {key: np.asarray(before.get(key, 0)) + 1 for key in set(self._counter.values())}
        new = {key: sized.value for key, sized in oracle._updated(before, sums)}
        return {**before, **counters, **new}

    def bounds(self, before: Named, sums: Named) -> Named:
        """Returns how far rounding can move each element after the update."""
        return {
            key: ROUNDINGS * unit_of(np.asarray(self._after.get(key, sized.value))) * sized.size
            + TINY
            for key, sized in self._updated(before, sums)
        }

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
