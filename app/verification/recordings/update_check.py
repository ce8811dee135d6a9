"""Checks the update of each weight against the optimizer's rule, and explains mismatches."""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from app.verification.recordings.optimizer_rules import (
    AFTER_CORRECTION,
    BEFORE_CORRECTION,
    IN_GRADIENT,
    IN_WEIGHTS,
    ROUNDINGS,
    UNDER_ROOT,
    Rule,
    Slots,
    updated,
)
from app.verification.recordings.recorded_step import WEIGHT, RecordedStep
from app.verification.recordings.trace_arrays import TINY, all_finite, same_bits, unit_of
from app.verification.recordings.trace_finding import TraceFinding, fault


@dataclasses.dataclass(frozen=True)
class Update:
    """The recorded update of one weight.

    Attributes:
        name: name of the weight.
        rule: rule of its optimizer.
        before, after: the weight, of any shape.
        gradient: the applied gradient.
        slots: optimizer state before the step.
        slots_after: optimizer state after the step.
    """

    name: str
    rule: Rule
    before: np.ndarray
    after: np.ndarray
    gradient: np.ndarray
    slots: Slots
    slots_after: Slots

    def follows(self, rule: Rule) -> bool:
        """Returns whether weight and state after the step follow from a rule, within rounding."""
        expected = updated(rule, self.before, self.gradient, self.slots)
        unit = unit_of(self.after)
        for name, (value, size) in expected.items():
            actual = self.after if name == "weight" else getattr(self.slots_after, name)
            bound = ROUNDINGS * unit * size + TINY
            if actual is not None and not np.all(np.abs(actual - value) <= bound):
                return False
        return True

    def change(self) -> np.ndarray:
        """Returns the recorded change, in float64."""
        return self.after.astype(np.float64) - self.before.astype(np.float64)

    def expected_change(self, rule: Rule) -> np.ndarray:
        """Returns the change of the weight by a rule, in float64."""
        return updated(rule, self.before, self.gradient, self.slots)["weight"].value - self.before

    def expected_state(self, rule: Rule) -> list[np.ndarray]:
        """Returns the optimizer state after the step by a rule."""
        expected = updated(rule, self.before, self.gradient, self.slots)
        return [sized.value for name, sized in expected.items() if name != "weight"]


def updates_of(step: RecordedStep, replica: int) -> list[Update] | None:
    """Returns the updates of all weights with a gradient; None if a rule or state is unknown."""
    gradients = step.applied(replica)
    if gradients is None or not all_finite(list(gradients.values())):
        return None
    before, after = step.state("before", replica, WEIGHT), step.state("after", replica, WEIGHT)
    updates = []
    for name, gradient in gradients.items():
        rule = step.rule(name, replica)
        slots = step.slots("before", name, rule.family, replica) if rule else None
        later = step.slots("after", name, rule.family, replica) if rule else None
        if rule is None or slots is None or later is None or name not in before:
            return None
        weight = before[name], after[name]
        updates.append(Update(name, rule, *weight, gradient, slots, later))
    return updates


def check_update(step: RecordedStep) -> list[TraceFinding] | None:
    """Checks the updates of all replicas; returns None if the rule is unknown."""
    found = []
    for replica in step.replicas:
        if (updates := updates_of(step, replica)) is None:
            return None
        wrong = [update for update in updates if not update.follows(update.rule)]
        if wrong:
            cause, text = _why(wrong)
            names = tuple(update.name for update in wrong)
            text = f"{len(wrong)} of {len(updates)} weights: {text}"
            found.append(
                fault("update", cause, text, step.number, replicas=(replica,), tensors=names)
            )
    return found


def _why(wrong: Sequence[Update]) -> tuple[str, str]:
    """Returns the cause of updates that do not follow their rule, and a sentence."""
    if all(same_bits(update.before, update.after) for update in wrong):
        return "not_updated", "the weights have not changed"
    for cause, text, rules in _hypotheses(wrong):
        if all(update.follows(rule) for update, rule in zip(wrong, rules, strict=True)):
            return cause, text
    return "unexplained_update", "the change follows neither the optimizer's rule nor a known other"


def _hypotheses(wrong: Sequence[Update]) -> Iterator[tuple[str, str, list[Rule]]]:
    """Yields causes, sentences and the rules that would explain the updates."""

    def rules(**changes: object) -> list[Rule]:
        return [dataclasses.replace(update.rule, **changes) for update in wrong]  # type: ignore[arg-type]

    for decay in {0.0, *(2 * update.rule.weight_decay for update in wrong)}:
        yield (
            "other_weight_decay",
            f"the change is that of a weight decay of {decay:g}",
            rules(weight_decay=decay),
        )
    for placement in (IN_GRADIENT, IN_WEIGHTS):
        yield (
            "weight_decay_placement",
            f"weight decay is {placement}",
            rules(decay_placement=placement),
        )
    for is_nesterov in (True, False):
        form = "with" if is_nesterov else "without"
        yield (
            "other_nesterov",
            f"the change is that of momentum {form} the look-ahead of Nesterov",
            rules(nesterov=is_nesterov),
        )
    yield "bias_not_corrected", "the bias is not corrected", rules(corrects_bias=False)
    for place in (AFTER_CORRECTION, BEFORE_CORRECTION, UNDER_ROOT):
        yield "epsilon_placement", f"epsilon is added {place}", rules(epsilon_placement=place)
    # Last: in a first step with momentum, Nesterov is equivalent to a larger learning rate.
    if (scale := _factor_of_change(wrong)) is not None:
        scaled = [
            dataclasses.replace(u.rule, learning_rate=u.rule.learning_rate * scale) for u in wrong
        ]
        rate = wrong[0].rule.learning_rate
        yield (
            "other_learning_rate",
            f"the change is that of a learning rate of {rate * scale:.6g}, and the optimizer has"
            f" {rate:.6g}",
            scaled,
        )


def _factor_of_change(wrong: Sequence[Update]) -> float | None:
    """Returns the factor between the changes and those of the rule, without weight decay."""
    pairs = [
        (update.change().ravel(), update.expected_change(update.rule).ravel()) for update in wrong
    ]
    size = sum(float(expected @ expected) for _, expected in pairs)
    scale = sum(float(actual @ expected) for actual, expected in pairs) / size if size else np.nan
    if not np.isfinite(scale) or scale <= 0:
        return None
    # Configured factors are short numbers; the change itself is rounded.
    rounded = float(f"{scale:.4g}")
    return rounded if abs(rounded - scale) < 1e-5 * scale else scale
