"""Computes updates in float64: SGD, Adam, AdamW (PyTorch, Keras, Optax), RMSprop, Muon (PyTorch).

The three frameworks have optimizers with the same names and different updates. A `Rule` has every
setting in which they differ, so that it can express each of them, and a wrong update is found by
changing one setting at a time.

References: `torch.optim.SGD`, `torch.optim.Adam`, `torch.optim.AdamW`, `torch.optim.RMSprop`,
`torch.optim.Muon`; `keras.optimizers.SGD`, `keras.optimizers.Adam`; `optax.sgd`, `optax.adamw`.
"""

import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from lockstep.data.trace import STATE, Trace
from lockstep.numeric.arrays import (
    EPS,
    UNITS,
    Array,
    Named,
    Rows,
    blocks,
    computed,
    dense,
    elements_of,
    factor_of,
    norm,
    unit_of,
)

OtherSetting = tuple[str, str, dict[str, Any]]  # Cause, text, other settings of the optimizer.
IN_GRADIENT, IN_WEIGHTS = "added to the gradient", "taken from the weights"
OF_GRADIENTS, OF_UPDATES = "of gradients", "of updates"
AFTER_CORRECTION, BEFORE_CORRECTION = "after bias correction", "before bias correction"
UNDER_ROOT = "under the root"
FORMS = ("amsgrad", "maximize", "centered")  # Settings that make another rule.
_NEAR_SHARE = 0.1  # Of a decay: that of all other rounding is less where the decay can be seen.
OF_SUM, OF_ROWS = "of the sum of its rows", "of each of its rows"

# Role of optimizer state → its names in PyTorch, Keras and Optax.
COUNTERS = ("step", "iterations", "iteration", "count")
_ROLES: dict[str, dict[str, tuple[str, ...]]] = {
    "SGD": {"velocity": ("momentum_buffer", "momentum", "trace")},
    "Adam": {
        "first_moment": ("exp_avg", "m", "mu", "momentum"),
        "second_moment": ("exp_avg_sq", "v", "nu", "velocity"),
        "number": COUNTERS,
    },
    "RMSprop": {"second_moment": ("square_avg",), "velocity": ("momentum_buffer",)},
    "Muon": {"velocity": ("momentum_buffer",)},
}
SLOTS_OF_RULES = {name for of in _ROLES.values() for names in of.values() for name in names}
_FAMILIES = {"sgd": "SGD", "adam": "Adam", "adamw": "Adam", "rmsprop": "RMSprop", "muon": "Muon"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """The rule of an optimizer, with its settings for one weight in one step.

    Attributes:
        family: "SGD", "Adam", "RMSprop" or "Muon".
        learning_rate: learning rate of this step.
        momentum: momentum of SGD, RMSprop and Muon.
        dampening: dampening of SGD in PyTorch.
        nesterov: whether SGD or Muon uses Nesterov momentum.
        velocity: what the velocity of SGD sums, `OF_GRADIENTS` (PyTorch, Optax) or `OF_UPDATES`
            (Keras: it contains the learning rates of earlier steps).
        weight_decay: λ.
        decay_placement: `IN_GRADIENT` or `IN_WEIGHTS`.
        beta_1, beta_2: decay rates of Adam.
        rho: decay rate of RMSprop, alpha in PyTorch.
        epsilon: epsilon of Adam, RMSprop and Muon.
        epsilon_placement: where epsilon is added: to the root `AFTER_CORRECTION` of the bias
            (PyTorch, Optax) or `BEFORE_CORRECTION` (Keras), or `UNDER_ROOT`.
        corrects_bias: whether Adam corrects the bias of its moments.
        corrects_second_bias: whether it corrects that of the second one, too.
        squares: what Adam squares of a gradient of rows that occur several times: `OF_SUM`, or
            `OF_ROWS` (Keras with TensorFlow).
        betas_in: dtype of the betas: PyTorch computes with float32 in the fused kernel of a
            GPU, in which 1 - 0.999 is 1.3e-5 smaller.
        ns_steps: iterations by which Muon makes the singular values of a matrix nearly 1.
        ns_1, ns_2, ns_3: factors of the powers 1, 3 and 5 of the matrix in each.
        rate_of_shape: how Muon's learning rate depends on the shape of a weight, "original" or
            "match_rms_adamw".
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
    rho: float = 0.99
    epsilon: float = 1e-8
    epsilon_placement: str = AFTER_CORRECTION
    corrects_bias: bool = True
    corrects_second_bias: bool = True
    squares: str = OF_SUM
    betas_in: str = "float64"
    ns_steps: int = 5
    ns_1: float = 3.4445
    ns_2: float = -4.775
    ns_3: float = 2.0315
    rate_of_shape: str = "original"

    @property
    def mixes_elements(self) -> bool:
        """Whether the update of an element depends on the gradients of others of its weight."""
        return self.family == "Muon"

    @property
    def betas(self) -> tuple[float, float]:
        """The decay rates that Adam computes with."""
        dtype = np.float32 if self.betas_in == "float32" else np.float64
        return float(dtype(self.beta_1)), float(dtype(self.beta_2))


def rule_of(optimizer: Mapping[str, Any], settings: Mapping[str, Any]) -> Rule | None:
    """Returns the rule of a recorded optimizer; None for an unknown one.

    Args:
        optimizer: "class" and "framework", as in the trace.
        settings: settings of a weight's parameter group in one step.
    """
    name = str(optimizer.get("class", "")).lower()
    family = _FAMILIES.get(name)
    is_known = family is not None and settings.get("learning_rate") is not None
    if not is_known or any(map(settings.get, FORMS)):
        return None
    if family == "RMSprop" and optimizer.get("framework") != "torch":
        return None  # Keras and Optax have other forms of momentum in it.
    if family == "Muon" and not {"ns_steps", "epsilon"} <= settings.keys():
        return None  # Another optimizer of this name.
    is_keras = optimizer.get("framework") == "keras"
    of_framework = {
        "family": family,
        "velocity": OF_UPDATES if is_keras else OF_GRADIENTS,
        "decay_placement": IN_WEIGHTS if is_keras or name in ("adamw", "muon") else IN_GRADIENT,
        "epsilon_placement": BEFORE_CORRECTION if is_keras else AFTER_CORRECTION,
        "squares": OF_ROWS if is_keras else OF_SUM,
    }
    names = [field.name for field in dataclasses.fields(Rule)]
    return Rule(**of_framework | {n: settings[n] for n in names if settings.get(n) is not None})


def updated(
    rule: Rule, weight: Array, gradient: Array, state: Named, correction: Sequence[float] = (1, 1),
    near: Callable[[np.ndarray], np.ndarray] = np.asarray,
) -> Named:  # fmt: skip
    """Applies a rule to one weight, in float64.

    Args:
        rule: rule of the optimizer.
        weight: weight before the step, of any shape.
        gradient: gradient that the optimizer applies, of the same shape.
        state: role → optimizer state before the step: "velocity", which sums what the rule says;
            "first_moment", "second_moment", "number" of updates. What is absent is 0.
        correction: factors of both betas in the correction of the bias.
        near: returns what Muon computes in bfloat16, with other rounding.

    Returns:
        "weight" and the roles that the rule has → value after the step.
    """
    w, g = dense(weight), dense(gradient)
    square = None
    if isinstance(gradient, Rows) and rule.squares == OF_ROWS:
        square = gradient._replace(values=gradient.values.astype(np.float64) ** 2).dense()
    if rule.decay_placement == IN_GRADIENT:
        g = g + rule.weight_decay * w
    else:
        w = w - rule.learning_rate * rule.weight_decay * w
    if rule.family == "SGD":
        change, after = _sgd(rule, g, state)
    elif rule.family == "RMSprop":
        change, after = _rmsprop(rule, g, state)
    elif rule.family == "Muon":
        change, after = _muon(rule, g, state, near)
    else:
        change, after = _adam(rule, g, g**2 if square is None else square, state, correction)
    return {"weight": w + change, "number": dense(state.get("number", 0)) + 1, **after}


def _updated_by_blocks(
    rule: Rule, weight: Array, gradient: Array, state: Named, *others: Any
) -> Named:
    """Returns what `updated` returns, from one block of elements to the next where it may.

    Args:
        rule, weight, gradient, state, *others: the arguments of `updated`.
    """
    shape = np.shape(weight)
    is_plain = (
        not isinstance(gradient, Rows) and np.shape(gradient) == shape and np.size(weight) > 1
    )
    roles = [role for role, array in state.items() if np.ndim(array)]
    is_plain = is_plain and all(np.shape(state[role]) == shape for role in roles)
    if rule.mixes_elements or not is_plain:
        return updated(rule, weight, gradient, {k: dense(a) for k, a in state.items()}, *others)
    found: Named = {}
    start = 0
    for w, g, *own in blocks(weight, gradient, *(state[role] for role in roles)):
        new = updated(rule, w, g, state | dict(zip(roles, own, strict=True)), *others)
        for role, part in new.items():
            if np.ndim(part) == 0:
                found[role] = part
                continue
            found.setdefault(role, np.empty(shape)).reshape(-1)[start : start + w.size] = part
        start += w.size
    return found


def _sgd(rule: Rule, gradient: np.ndarray, state: Named) -> tuple[np.ndarray, Named]:
    """Returns the change of the weight, and the velocity after it."""
    change = -rule.learning_rate * gradient
    if not rule.momentum:
        return change, {}
    velocity = state.get("velocity", 0.0)
    if rule.velocity == OF_UPDATES:
        new = rule.momentum * velocity + change
        return (rule.momentum * new + change if rule.nesterov else new), {"velocity": new}
    kept = 1.0 - rule.dampening if "velocity" in state else 1.0
    new = rule.momentum * velocity + kept * gradient
    ahead = gradient + rule.momentum * new
    return -rule.learning_rate * (ahead if rule.nesterov else new), {"velocity": new}


def _rmsprop(rule: Rule, gradient: np.ndarray, state: Named) -> tuple[np.ndarray, Named]:
    """Returns the change of the weight, and the moment and the velocity after it.

    The velocity is that of SGD with gradients that are divided by the root of the moment.
    """
    second = rule.rho * state.get("second_moment", 0.0) + (1 - rule.rho) * gradient**2
    is_under_root = rule.epsilon_placement == UNDER_ROOT
    root = np.sqrt(second + rule.epsilon) if is_under_root else np.sqrt(second) + rule.epsilon
    root = np.where(root == 0, 1.0, root)  # For a gradient of 0 with an epsilon of 0.
    change, after = _sgd(rule, gradient / root, state)
    return change, {"second_moment": second, **after}


def _muon(
    rule: Rule, gradient: np.ndarray, state: Named, near: Callable[[np.ndarray], np.ndarray]
) -> tuple[np.ndarray, Named]:
    """Returns the change of a matrix, and the velocity after it."""
    new = rule.momentum * state.get("velocity", 0.0) + (1 - rule.momentum) * gradient
    ahead = (1 - rule.momentum) * gradient + rule.momentum * new if rule.nesterov else new
    moved = _orthogonal(rule, ahead, near)
    rows, columns = gradient.shape
    factor = max(1.0, rows / columns) ** 0.5
    if rule.rate_of_shape == "match_rms_adamw":
        factor = 0.2 * max(rows, columns) ** 0.5
    return -rule.learning_rate * factor * moved, {"velocity": new}


def _orthogonal(
    rule: Rule, matrix: np.ndarray, near: Callable[[np.ndarray], np.ndarray]
) -> np.ndarray:
    """Returns a matrix with singular values of nearly 1, by Newton-Schulz iterations."""
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = near(x)
    x = near(x / max(norm(x), rule.epsilon))
    for _ in range(rule.ns_steps):
        square = near(x @ x.T)
        x = near(rule.ns_1 * x + near(rule.ns_2 * square + rule.ns_3 * square @ square) @ x)
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def _adam(
    rule: Rule, gradient: np.ndarray, square: np.ndarray, state: Named, correction: Sequence[float]
) -> tuple[np.ndarray, Named]:
    """Returns the change of the weight, and both moments after it."""
    old_first, old_second = state.get("first_moment", 0.0), state.get("second_moment", 0.0)
    # In NumPy, as a wrong number may overflow.
    number = np.sum(np.ravel(state.get("number", 0.0))[:1]) + 1
    beta_1, beta_2 = rule.betas
    first = beta_1 * old_first + (1 - beta_1) * gradient
    second = beta_2 * old_second + (1 - beta_2) * square
    first_left = 1 - (correction[0] * beta_1) ** number if rule.corrects_bias else 1.0
    second_left = 1.0
    if rule.corrects_bias and rule.corrects_second_bias:
        second_left = 1 - (correction[1] * beta_2) ** number
    if rule.epsilon_placement == UNDER_ROOT:
        root = np.sqrt(second / second_left + rule.epsilon)
    elif rule.epsilon_placement == BEFORE_CORRECTION:
        root = (np.sqrt(second) + rule.epsilon) / np.sqrt(second_left)
    else:
        root = np.sqrt(second / second_left) + rule.epsilon
    root = np.where(root == 0, 1.0, root)  # For a gradient of 0 with an epsilon of 0.
    change = -rule.learning_rate / first_left * first / root
    return change, {"first_moment": first, "second_moment": second}


def _nearest(counters: Sequence[str], others: Sequence[str]) -> str:
    """Returns the counter whose name begins most as that of other state of an optimizer."""
    parts = [key.split("/") for key in others[:1]]

    def num_equal(counter: str) -> int:
        pairs = zip(counter.split("/"), *parts, strict=False)
        return sum(1 for _ in itertools.takewhile(lambda pair: len({*pair}) == 1, pairs))

    return max(counters, key=num_equal)


class RuleOracle:
    """Computes the update of a step by the rule of its optimizer; nothing else.

    Args:
        trace: the trace, which describes the optimizer.
        position: position of the step in the trace, from 0.
        weights: names of the weights that the step updates, with the gradients that it applies.
        replica: the replica whose settings the rules have.

    Attributes:
        rules: name of a weight → its rule; empty if a rule or its state is unknown. Of several
            optimizers, the weights of an unknown one are left out.
        tracks: keys of the optimizer state that an update changes.
        units: relative rounding error of each variable's dtype.
    """

    def __init__(self, trace: Trace, position: int, weights: Named, replica: int = 0):
        about = trace.of_replica.get(replica, trace.about)
        after = trace.named(position, "after", 0) or {}
        self.units = computed(after, lambda key: unit_of(after[key]))
        self._state: dict[str, dict[str, str]] = {}  # Weight → role → key.
        self._correction: tuple[float, ...] = (1.0, 1.0)
        self._near: Callable[[np.ndarray], np.ndarray] = np.asarray
        self.rules: dict[str, Rule] = {}
        settings = about.settings[position] if about.settings else ()
        is_mixed = len({group.get("optimizer") for group in settings}) > 1
        states = [
            (key, variable)
            for key, variable in trace.variables.items()
            if variable.kind == STATE and key in after
        ]
        for weight in weights:
            groups = [group for group in settings if weight in group.get("weights", (weight,))]
            if settings and not groups:
                continue  # The optimizer does not have it.
            own = groups[0] if groups else {}
            kind = {"class": own["optimizer"]} if "optimizer" in own else {}
            rule = rule_of({**about.optimizer, **kind}, own)
            if len(groups) > 1:
                rule = None  # Several optimizers update it, one after the other.
            if rule and rule.mixes_elements and np.ndim(after.get(weight, 0)) != 2:
                rule = None  # Of a sample, its elements alone are known.
            if rule is None and is_mixed:
                continue  # Of several optimizers, one may be unknown.
            if rule is None:
                self.rules = {}
                return
            needed = dict(_ROLES[rule.family])
            if not rule.momentum:
                needed.pop("velocity", None)
            found = self._state[weight] = {}
            for key, variable in states:
                of_all = not variable.of and np.size(after[key]) == 1  # A common counter.
                for role, names in {"number": COUNTERS, **needed}.items():
                    is_own = variable.of == weight or (of_all and role == "number")
                    if variable.slot in names and is_own:
                        found[role] = key
            if "number" in found and not trace.variables[found["number"]].of:
                found["number"] = _nearest(
                    [key for key, v in states if v.slot in COUNTERS and not np.ndim(after[key])],
                    [key for role, key in found.items() if role != "number"],
                )
            if not needed.keys() <= found.keys() and is_mixed:
                del self._state[weight]
                continue
            if not needed.keys() <= found.keys():
                self.rules = {}
                return
            self.rules[weight] = rule
        self.tracks = {
            key for own in self._state.values() for role, key in own.items() if role != "number"
        }
        if about.framework == "jax" and any(rule.weight_decay for rule in self.rules.values()):
            self._read_mask(trace.named(position, "before", 0) or {}, weights, after)

    def _read_mask(self, before: Named, sums: Named, after: Named) -> None:
        """Sets the decay of weights to 0 that are not decayed, beside others that are.

        In JAX, one group of settings describes the whole optimizer, and a mask leaves weights out.
        """

        def elements(named: Named) -> Named:
            return computed(named, lambda name: elements_of(named[name]))

        before, sums, after = map(elements, (before, sums, after))
        shares = {}  # Weight → 0 if it is decayed, 1 if it is not.
        for weight, rule in self.rules.items():
            if rule.weight_decay and weight in sums and weight in before:
                gradient = {weight: sums[weight]}
                decayed = self.update(before, gradient)
                others = self.update(before, gradient, weight_decay=0.0)
                keys = [weight, *(self.tracks & {*self._state[weight].values()})]
                gaps = [dense(after[key]) - decayed[key] for key in keys]
                effects = [others[key] - decayed[key] for key in keys]
                shares[weight] = factor_of(gaps, effects)
        if any(abs(share) < _NEAR_SHARE for share in shares.values()):
            left_out = [w for w, share in shares.items() if abs(share - 1) < _NEAR_SHARE]
            own = {w: dataclasses.replace(self.rules[w], weight_decay=0.0) for w in left_out}
            self.rules |= own

    def differences(self, other: "RuleOracle") -> dict[str, tuple[Any, Any]]:
        """Returns setting → its value here and in another oracle, for those that differ."""
        pairs = [(rule, other.rules[weight]) for weight, rule in self.rules.items()]
        return {
            field.name: (getattr(own, field.name), getattr(theirs, field.name))
            for field in dataclasses.fields(Rule)
            for own, theirs in pairs
            if getattr(own, field.name) != getattr(theirs, field.name)
        }

    @property
    def is_linear(self) -> bool:
        """Whether all updates are linear in weights, gradients and state."""
        return all(rule.family == "SGD" for rule in self.rules.values())

    @property
    def sums(self) -> set[str]:
        """Keys of the optimizer state that is linear in the gradients."""
        roles = {"SGD": "velocity", "Adam": "first_moment", "Muon": "velocity"}
        own = [(self._state[weight], roles.get(r.family)) for weight, r in self.rules.items()]
        return {keys[role] for keys, role in own if role in keys}

    def update(
        self, before: Named, sums: Named, *, rate: float = 1.0, decays: bool = True, **settings: Any
    ) -> Named:
        """Returns all variables after the update, in float64.

        Args:
            before: all variables before the update.
            sums: the gradients.
            rate: factor of the learning rate.
            decays: whether the factor also applies to weight decay.
            **settings: other settings of all rules.
        """
        after = before | {}
        for weight, rule in self.rules.items():
            if weight not in sums or weight not in before:
                continue
            changed = dataclasses.replace(rule, **settings)
            changed = dataclasses.replace(
                changed,
                learning_rate=rate * changed.learning_rate,
                weight_decay=changed.weight_decay / (1.0 if decays or not rate else rate),
            )
            keys = self._state[weight]
            state = {role: before[key] for role, key in keys.items() if key in before}
            given = before[weight], sums[weight], state, self._correction, self._near
            new = _updated_by_blocks(changed, *given)
            after = after | {key: new[role] for role, key in keys.items() if role in new}
            after[weight] = new["weight"]
        return after

    def rounded(self, generator: np.random.Generator) -> "RuleOracle":
        """Returns the same oracle with a bias correction in float32, and other rounding of Muon.

        So do Keras and Optax compute it; of 1 - 0.999, few bits are left.
        """

        def near(matrix: np.ndarray) -> np.ndarray:
            signs = generator.choice([-0.5, 0.5], matrix.shape)
            return np.asarray(matrix * (1 + UNITS["bfloat16"] * signs))

        other = copy.copy(self)
        other._correction = tuple(1 + EPS * generator.choice([-1, 1], 2))  # noqa: SLF001
        other._near = near  # noqa: SLF001
        return other

    @property
    def momentum(self) -> float:
        """The momentum of SGD or RMSprop, if all weights have the same; else 0."""
        found = {rule.momentum for rule in self.rules.values()}
        return found.pop() if len(found) == 1 else 0.0

    def settings(self) -> Iterator[OtherSetting]:
        """Yields other settings with which the optimizer may have made a wrong update."""
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
        text = "the bias of the second moment is not corrected"
        yield "bias_not_corrected", text, {"corrects_second_bias": False}
        for place in (AFTER_CORRECTION, BEFORE_CORRECTION, UNDER_ROOT):
            text = f"epsilon is added {place}"
            yield "epsilon_placement", text, {"epsilon_placement": place}
