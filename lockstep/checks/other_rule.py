"""Compares the optimizer rules of two traces by the effect of each different setting."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from lockstep.arithmetic import are_finite, dense, distance, norm, ratio
from lockstep.oracles.recording import StepPair
from lockstep.oracles.rules import OF_GRADIENTS, OF_UPDATES, Rule, RuleOracle
from lockstep.verdict import Finding

_NO_EFFECT = 1e-6  # Relative to the change; rounding error of an update.
_SMALL_PART = 1e-2
_CAUSES = {
    "decay_placement": "weight_decay_placement",
    "epsilon_placement": "epsilon_placement",
    "corrects_bias": "bias_not_corrected",
}

Rules = dict[str, tuple[Rule, Rule]]  # Weight in the second trace → rules in both.


def compare_rules(pair: StepPair) -> list[Finding] | None:
    """Finds different optimizer settings that change the update of this step.

    Each setting of the first trace's rule replaces that of the second, and the second trace's step
    is recomputed.

    Returns:
        The findings; None if a rule is unknown.
    """
    first, second = pair.first.updater, pair.second.updater
    if not isinstance(first, RuleOracle) or not isinstance(second, RuleOracle):
        return None
    if not are_finite(pair.second.applied(0)):
        return None
    names = {p.second: p.first for p in pair.matching.pairs if p.first in first.rules}
    rules = {
        name: (first.rules[names[name]], rule)
        for name, rule in second.rules.items()
        if name in names
    }
    if not rules:
        return None
    if any(a.family != b.family for a, b in rules.values()):
        families = ["/".join(sorted({each[i].family for each in rules.values()})) for i in (0, 1)]
        text = f"{families[0]} in the first recording, {families[1]} in the second"
        return [pair.found("update", "other_optimizer", text)]
    return list(_differences(pair, second, rules))


def _differences(pair: StepPair, oracle: RuleOracle, rules: Rules) -> Iterator[Finding]:
    for field in dataclasses.fields(Rule):
        name = field.name
        values = {(getattr(a, name), getattr(b, name)) for a, b in rules.values()}
        different = {(x, y) for x, y in values if x != y}
        if not different:
            continue
        if name == "velocity":
            yield from _velocity(pair, rules)
            continue
        effect = _effect(pair, oracle, rules, name)
        if effect <= _NO_EFFECT:
            continue
        x, y = sorted(different, key=str)[0]
        noun = name.replace("_", " ")
        text = f"{noun} {_text(x)} in the first recording, {_text(y)} in the second"
        if name == "learning_rate" and x:
            text += f": {y / x:.6g} times as large"
        cause = _CAUSES.get(name, f"other_{name}")
        # Each framework has a fixed placement of epsilon, without a setting.
        design = cause == "epsilon_placement"
        yield pair.found("update", cause, text, design=design, distance=effect)


def _effect(pair: StepPair, oracle: RuleOracle, rules: Rules, setting: str) -> float:
    """Returns the largest change of an update by a setting of the first trace, relative to it."""
    before, applied = pair.second.named("before")[0], pair.second.applied(0)
    other = oracle.with_rules(
        {n: dataclasses.replace(b, **{setting: getattr(a, setting)}) for n, (a, b) in rules.items()}
    )
    usual, changed = oracle.update(before, applied), other.update(before, applied)
    effects, sizes = {}, {name: norm(applied[name]) for name in rules}
    for name, (a, b) in rules.items():
        apart, size = distance(changed[name], usual[name]), distance(usual[name], before[name])
        effects[name] = ratio(apart, size) if size else float(apart > 0)
        if setting == "decay_placement":
            # With momentum, decay in the gradient affects the next steps, through the state.
            of_state = [
                ratio(distance(changed[n], dense(usual[n])), norm(usual[n]))
                for n in oracle.state_of(name)
            ]
            effects[name] = max([effects[name], *of_state])
        elif setting == "momentum" and not (a.momentum and b.momentum):
            effects[name] = 1.0  # It affects the next steps, even if there is no state before this.
    # Relative to an update of only rounding errors, as of a bias before BatchNorm, it is huge.
    large = [effects[n] for n in rules if sizes[n] >= _SMALL_PART * max(sizes.values())]
    return max(large) if max(large) > _NO_EFFECT else max(effects.values())


def _velocity(pair: StepPair, rules: Rules) -> Iterator[Finding]:
    """Reports different forms of momentum, if the learning rate has changed."""
    if not any(a.momentum for a, _ in rules.values()):
        return
    settings = pair.second.trace.about.settings
    rates = {group.get("learning_rate") for groups in settings for group in groups}
    forms = [rule.velocity for rule in next(iter(rules.values()))]
    if len(rates) > 1 and {OF_GRADIENTS, OF_UPDATES} == set(forms):
        text = (
            f"the velocity is a sum {forms[0]} in the first recording and {forms[1]} in the second,"
            " and the learning rate changes"
        )
        yield pair.found("update", "learning_rate_in_velocity", text, design=True)


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
