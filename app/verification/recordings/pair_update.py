"""Compares the optimizer rules of two recordings by the effect of each different setting."""

import dataclasses
from collections.abc import Iterator

import numpy as np

from app.verification.recordings.optimizer_rules import OF_GRADIENTS, OF_UPDATES, Rule, Slots
from app.verification.recordings.step_pair import StepPair
from app.verification.recordings.trace_arrays import TINY
from app.verification.recordings.trace_finding import TraceFinding, fault
from app.verification.recordings.update_check import Update, updates_of
from lockstep.verdict import BY_DESIGN

_NO_EFFECT = 1e-6  # Relative to the change; rounding error of an update.
_SMALL_PART = 1e-2
_CAUSES = {
    "decay_placement": "weight_decay_placement",
    "epsilon_placement": "epsilon_placement",
    "corrects_bias": "bias_not_corrected",
}


def compare_rules(pair: StepPair) -> list[TraceFinding] | None:
    """Finds different optimizer settings that change the update of this step.

    Each setting of the first recording's rule replaces that of the second, and the second
    recording's step is recomputed.

    Returns:
        The findings; None if a rule is unknown.
    """
    first, second = updates_of(pair.first, 0), updates_of(pair.second, 0)
    if first is None or second is None:
        return None
    rules = {update.name: update.rule for update in first}
    named = [(rules[name], update) for name, update in _in_first(pair, second) if name in rules]
    if any(a.family != b.rule.family for a, b in named):
        families = sorted({a.family for a, _ in named}), sorted({b.rule.family for _, b in named})
        text = (
            f"{'/'.join(families[0])} in the first recording, {'/'.join(families[1])} in the second"
        )
        return [fault("update", "other_optimizer", text, pair.number)]
    return list(_differences(pair, named))


def _in_first(pair: StepPair, updates: list[Update]) -> Iterator[tuple[str, Update]]:
    """Yields updates of the second recording with the names of the first."""
    for update in updates:
        for name in pair.in_first({update.name: update.gradient}):
            yield name, update


def _differences(pair: StepPair, named: list[tuple[Rule, Update]]) -> Iterator[TraceFinding]:
    for field in dataclasses.fields(Rule):
        values = {(getattr(a, field.name), getattr(b.rule, field.name)) for a, b in named}
        different = {(x, y) for x, y in values if x != y}
        if not different:
            continue
        if field.name == "velocity":
            yield from _velocity(pair, named)
            continue
        effects = {
            update.name: _effect(update, field.name, getattr(rule, field.name))
            for rule, update in named
        }
        # Relative to an update of only rounding errors, as of a bias before BatchNorm, it is huge.
        of_large = max(effects[name] for name in _large(named))
        effect = of_large if of_large > _NO_EFFECT else max(effects.values())
        if effect <= _NO_EFFECT:
            continue
        x, y = sorted(different, key=str)[0]
        noun = field.name.replace("_", " ")
        text = f"{noun} {_text(x)} in the first recording, {_text(y)} in the second"
        if field.name == "learning_rate" and x:
            text += f": {y / x:.6g} times as large"
        cause = _CAUSES.get(field.name, f"other_{field.name}")
        finding = fault("update", cause, text, pair.number, distance=effect)
        # Each framework has a fixed placement of epsilon, without a setting.
        is_choice = cause == "epsilon_placement"
        yield dataclasses.replace(finding, status=BY_DESIGN) if is_choice else finding


def _large(named: list[tuple[Rule, Update]]) -> list[str]:
    """Returns the names of the weights whose gradients are not small relative to the largest."""
    sizes = {update.name: _norm(update.gradient) for _, update in named}
    return [name for name, size in sizes.items() if size >= _SMALL_PART * max(sizes.values())]


def _effect(update: Update, setting: str, value: object) -> float:
    """Returns the change of an update by a setting, relative to its norm."""
    other = dataclasses.replace(update.rule, **{setting: value})  # type: ignore[arg-type]
    usual = update.expected_change(update.rule)
    if setting == "decay_placement" and len(state := update.expected_state(update.rule)):
        # With momentum, decay in the gradient affects the next steps, through the state.
        changed = [x - y for x, y in zip(update.expected_state(other), state, strict=True)]
        of_state = max(map(_norm, changed)) / max(*map(_norm, state), TINY)
        if of_state > _NO_EFFECT:
            return of_state
    if setting == "momentum" and not update.rule.momentum and update.slots.velocity is None:
        zero = np.zeros_like(usual)
        update = dataclasses.replace(update, slots=Slots(velocity=zero, number=update.slots.number))
    size, apart = _norm(usual), _norm(update.expected_change(other) - usual)
    return apart / size if size else float(apart > 0)


def _norm(array: np.ndarray) -> float:
    return float(np.linalg.norm(array))


def _velocity(pair: StepPair, named: list[tuple[Rule, Update]]) -> Iterator[TraceFinding]:
    """Reports different forms of momentum, if the learning rate has changed."""
    if not any(rule.momentum for rule, _ in named):
        return
    rates = {
        group.get("learning_rate")
        for position in range(len(pair.second.trace.steps))
        for group in pair.second.trace.settings(position, 0)
    }
    if len(rates) > 1 and {OF_GRADIENTS, OF_UPDATES} == {
        named[0][0].velocity,
        named[0][1].rule.velocity,
    }:
        yield TraceFinding(
            "update",
            BY_DESIGN,
            "learning_rate_in_velocity",
            f"the velocity is a sum {named[0][0].velocity} in the first recording and"
            f" {named[0][1].rule.velocity} in the second, and the learning rate changes",
            (pair.number,),
        )


def _text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
