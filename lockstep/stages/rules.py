"""Compares rules of optimizers, and what a step does to weights and state, with another trace."""

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from lockstep.answer.causes import DETAILS
from lockstep.answer.text import count
from lockstep.answer.verdict import BY_DESIGN, FAULT, Finding
from lockstep.context import Context
from lockstep.explain.average_states import State, why_average
from lockstep.explain.corrections import other_count
from lockstep.explain.decays import other_decay
from lockstep.explain.kept import Change, slots_of
from lockstep.explain.lost_digits import followed_states, lost_digits
from lockstep.explain.other_values import other_values, starts_from_zero
from lockstep.explain.part_updates import from_parts, scaled_by_parts
from lockstep.numeric.arrays import (
    UNITS,
    are_finite,
    dense,
    distance,
    elements_of,
    factor_of,
    norm,
    ratio,
    same_bits,
    unit_of,
)
from lockstep.numeric.sampling import without_sums
from lockstep.oracles.rules import COUNTERS, FORMS, Rule, RuleOracle, detail_of
from lockstep.reference import SAME_START, StepPair

_NO_EFFECT = 1e-6  # Relative to the change; rounding error of an update.
_OF_FRAMEWORKS = ("epsilon_placement", "squares", "betas_in")


_NEAR = 1e-4  # Least relative difference of the elements of gradients whose changes are compared.
_SENSITIVE = 10  # Times this difference, changes are those of other settings.
_MOST = 0.5  # Part of the elements.
_LEAST = 16  # Elements that tell the dtype in which they were kept.
# Settings that choose an implementation, or that only a scheduler uses.
_IMPLEMENTATIONS = {"weights", "foreach", "fused", "capturable", "differentiable", "initial_lr"}


def compare_updates(pair: StepPair) -> Iterator[Finding]:
    """Compares settings of optimizers, and what the step does to weights and their state."""
    of_settings = list(compare_rules(pair))
    yield from of_settings
    frameworks = {step.trace.about.framework for step, _ in pair.both}
    if len(frameworks) > 1 or not (pair.starts_equally and pair.states("after")[0]):
        return
    changes = list(_changes(pair))
    yield from _kept_in_short(pair, changes)
    lost: dict[tuple[str, str], list[str]] = {}
    for cause, text, weight in lost_digits(pair):
        lost.setdefault((cause, text), []).append(weight)
    if not lost:
        for cause, text, weight in followed_states(pair):
            lost.setdefault((cause, text), []).append(weight)
    for (cause, text), names in lost.items():
        yield pair.second.found("update", cause, text, kind="after", tensors=names)
    # Each recording alone is checked where a rule computes the update.
    wrong_alone = {n for f in pair.second.findings if f.stage == "update" for n in f.tensors}
    wrong_alone |= {name for names in lost.values() for name in names}
    known = {*pair.rules(), *(p.first for p in pair.matching.pairs if p.second in wrong_alone)}
    near = {name: each for name, each in _near(pair).items() if name not in known}
    fixed = [x.weight for x in changes if not x.slot and x.weight not in known and _is_fixed(x)]
    applied = pair.gradients.reference_applied, pair.gradients.applied[0]
    if fixed := [name for name in fixed if all(norm(g.get(name, 0)) for g in applied)]:
        text = f"{len(fixed)} weights have a gradient, and only the first recording updates them"
        yield pair.second.found("update", "not_updated", text, kind="after", tensors=fixed)
    allowed = _SENSITIVE * max(_NEAR, pair.tolerance.usual)
    compared = [x for x in changes if x.weight in near and x.weight not in fixed]
    if compared:
        pair.second.mark_checked("update")
    wrong = [x for x in compared if x.differs(near[x.weight], allowed)]
    if wrong and not of_settings:
        yield pair.second.found(
            "update", *_why(pair, wrong, compared, near, allowed),
            kind="after", tensors=dict.fromkeys(x.weight for x in wrong),
        )  # fmt: skip


def _changes(pair: StepPair) -> Iterator[Change]:
    """Yields the weights, and their optimizer state, that both traces have after the step.

    A weight whose state differs before the step, or was not recorded, is left out.
    """
    before, after = (
        [step.named(kind)[0] for step in (pair.first, pair.second)] for kind in ("before", "after")
    )
    for names in pair.matching.pairs:
        slots = {"": names[:2]} | slots_of(pair, *names[:2])
        if any(key not in after[i] for keys in slots.values() for i, key in enumerate(keys)):
            continue
        found = []
        for slot, keys in slots.items():
            # An unknown rule may not be linear, as sums of samples would need.
            new = [elements_of(arrays[key]) for arrays, key in zip(after, keys, strict=True)]
            old = [
                elements_of(a.get(k, np.zeros_like(x)))
                for a, k, x in zip(before, keys, new, strict=True)
            ]
            if new[1].ndim == len(names.transpose):
                old[1], new[1] = (each[1].transpose(names.transpose) for each in (old, new))
            found.append(Change(names.first, slot, old, new))
        if all(distance(*x.before) <= SAME_START * norm(x.before[0]) for x in found):
            yield from found


def _kept_in_short(pair: StepPair, changes: Sequence[Change]) -> Iterator[Finding]:
    """Finds weights or optimizer state that only the second trace keeps in 16 bits."""
    # State of gradients that only the second trace has in 16 bits may have these bits, too.
    applied = pair.matching.to_first(pair.second.applied(0))
    usual = pair.first.applied(0)
    whole = {n for n, g in applied.items() if unit_of(g) <= unit_of(usual.get(n, g))}
    changes = [x for x in changes if x.weight in whole and all(map(np.any, x.after))]
    for slot in dict.fromkeys(x.slot for x in changes if x.slot not in COUNTERS):
        kept = [x for x in changes if x.slot == slot]
        first = max((unit_of(x.after[0]) for x in kept), default=0.0)
        least = min((unit_of(x.after[1]) for x in kept), default=0.0)
        names = [name for name, unit in UNITS.items() if unit == least]
        if names and first < least and sum(np.count_nonzero(x.after[1]) for x in kept) >= _LEAST:
            what = f"optimizer state {slot!r}" if slot else "the weights"
            text = f"{what} of the second recording is kept in {names[0]}"
            yield pair.second.found(
                "update", "reduced_precision", text, kind="after", tensors=[x.weight for x in kept]
            )


def _near(pair: StepPair) -> Mapping[str, np.ndarray]:
    """Returns name of a weight → which elements have nearly equal gradients; most of them."""
    allowed, found = max(_NEAR, pair.tolerance.usual), {}
    for name, first in pair.gradients.reference_applied.items():
        num = pair.first.trace.num_sums(first.shape)
        second = pair.gradients.applied[0][name]
        first, second = (without_sums(array, num) for array in (first, second))
        is_near = np.abs(second - first) <= allowed * np.abs(first)
        if is_near.size and np.mean(is_near) > _MOST:
            found[name] = is_near
    return found


def _is_fixed(change: Change) -> bool:
    """Returns whether the first trace changes a weight, and the second one changes no bit of it."""
    is_changed = norm(change.by[0]) > norm(change.rounding)
    return is_changed and same_bits(change.before[1], change.after[1])


def _why(
    pair: StepPair, wrong: Sequence[Change], compared: Sequence[Change],
    near: Mapping[str, np.ndarray], allowed: float,
) -> tuple[str, str]:  # fmt: skip
    """Returns the cause of different changes, and a sentence."""
    first, second = wrong[0].weight, pair.in_second(wrong[0].weight)
    counted = [x.by for x in wrong if x.slot in COUNTERS]
    if counted and all(one == 1 and several > 1 for one, several in counted):
        text = f"the optimizer counts {counted[0][1]:g} updates in this step, not 1"
        return "updated_twice", text
    settings = settings_of(pair.first, first), settings_of(pair.second, second)
    for name in sorted((settings[0].keys() & settings[1].keys()) - _IMPLEMENTATIONS):
        if settings[0][name] != settings[1][name]:
            cause = detail_of(name) if detail_of(name) in DETAILS else "other_optimizer"
            return cause, text_of(name, settings[0][name], settings[1][name])
    classes = [step.trace.about.optimizer.get("class") for step in (pair.first, pair.second)]
    if classes[0] != classes[1]:
        text = f"{classes[0]} in the first recording, {classes[1]} in the second: other updates"
        return "other_optimizer", text
    weights = [x for x in wrong if not x.slot]
    if why := _of_averages(pair, wrong, compared):
        return why
    if why := starts_from_zero(pair, list(dict.fromkeys(x.weight for x in wrong))):
        return why
    state: dict[str, list[str]] = {}
    for each in (x for x in wrong if x.slot):
        state.setdefault(each.weight, []).append(each.slot)
    changed = {x.weight: (dense(x.before[0]), x.by[0], x.by[1]) for x in weights}
    if why := from_parts(pair, changed, state):
        return why
    if not state:
        of_state = [x for x in compared if x.slot]
        if why := other_count(settings[1], weights, of_state):
            return why
        of_weights = {x.weight: (*changed[x.weight], x.rounding) for x in weights}
        if decay := other_decay(of_weights, "the changes"):
            return decay[:2]
        if text := _only_here(pair, weights):
            return "not_frozen", text
    chosen = [[by * near[x.weight] for by in x.by] for x in weights]
    factor = factor_of([by for _, by in chosen], [by for by, _ in chosen])
    if len(weights) == len(wrong) and not any(
        x.differs(near[x.weight], allowed, factor) for x in compared if not x.slot
    ):
        text = f"each weight changes {factor:.6g} times as much as in the first recording"
        return "other_learning_rate", text
    copied = {x.weight: x.after[1] for x in weights}
    is_copy = [x.weight in copied and same_bits(x.after[1], copied[x.weight]) for x in wrong]
    if all(is_copy) and not any(x.differs(near[x.weight], allowed, factor) for x in weights):
        text = f"{len(weights)} weights change {factor:.6g} times as much as in the first recording"
        return "other_learning_rate", text
    if why := other_values(pair, wrong, compared) or scaled_by_parts(pair, changed):
        return why
    return "unexplained", (
        f"{len({x.weight for x in wrong})} weights or their optimizer state change differently from"
        " equal states and gradients"
    )


def _only_here(pair: StepPair, weights: Sequence[Change]) -> str:
    """Returns a sentence if the first trace updates other weights, and not these; else ""."""
    gradients = pair.gradients.reference_applied
    is_fixed = all(not np.any(x.by[0]) and norm(gradients.get(x.weight, 0)) for x in weights)
    if not is_fixed or not any(not x.slot and np.any(x.by[0]) for x in _changes(pair)):
        return ""
    one = len(weights) == 1
    text = f"{count('weight', len(weights))} {'has a gradient' if one else 'have gradients'}, and"
    return f"{text} only the second recording updates {'it' if one else 'them'}"


def _of_averages(
    pair: StepPair, wrong: Sequence[Change], compared: Sequence[Change]
) -> tuple[str, str] | None:
    """Explains state that is an average of weights; the weights themselves may be its values."""
    slots = {x.slot for x in wrong if x.slot}
    if len(slots) != 1:
        return None
    known = {x.weight: x for x in _changes(pair) if not x.slot}
    own = [x for x in compared if x.slot in slots and x.weight in known]
    weights = {x.weight: known[x.weight] for x in own}
    averages = {x.weight: x for x in own}
    if any(x.weight not in averages for x in wrong) or any(
        x.before[0].shape != weights[x.weight].before[0].shape for x in own
    ):
        return None
    if any(not x.slot and not same_bits(x.after[1], averages[x.weight].after[1]) for x in wrong):
        return None
    found = [
        {name: dense(arrays[side]) for name, arrays in each.items()}
        for own in (averages, weights)
        for each, side in (
            ({n: x.before for n, x in own.items()}, 0),
            ({n: x.after for n, x in own.items()}, 0),
            ({n: x.after for n, x in own.items()}, 1),
        )
    ]
    return why_average(State._make(found))


def compare_rules(pair: StepPair) -> Iterator[Finding]:
    """Finds different optimizer settings that change the update of this step.

    Each setting of the first trace's rule replaces that of the second, and the second trace's step
    is recomputed.
    """
    rules, found = pair.rules(), pair.second.found
    yield from _other_settings(pair, rules)
    if not rules:
        return
    if not are_finite(pair.second.applied(0)):
        return
    pair.second.mark_checked("update")
    families = {(a.family, b.family) for a, b in rules.values()}
    if any(x != y for x, y in families):
        first, second = ("/".join(sorted({each[i] for each in families})) for i in (0, 1))
        text = f"{first} in the first recording, {second} in the second"
        yield found("update", "other_optimizer", text)
        return
    settings = [field.name for field in dataclasses.fields(Rule)]
    if any(
        each.detail == "regularisation_in_the_loss" and each.status == BY_DESIGN
        for each in pair.findings
    ):
        settings = [name for name in settings if name not in ("weight_decay", "decay_placement")]
    for setting in settings:
        values = {(getattr(a, setting), getattr(b, setting)) for a, b in rules.values()}
        different = sorted(((x, y) for x, y in values if x != y), key=str)
        if different and setting == "velocity":
            yield from _velocity(pair, rules)
        elif different and (effects := _effects(pair, rules, setting)):
            # Each framework has its own form of these, without a setting.
            is_design = setting in _OF_FRAMEWORKS
            yield found(
                "update", detail_of(setting), text_of(setting, *different[0]),
                status=BY_DESIGN if is_design else FAULT, tensors=effects if is_design else (),
                distance=max(effects.values()),
            )  # fmt: skip


def _other_settings(pair: StepPair, known: Collection[str]) -> Iterator[Finding]:
    """Compares the settings of optimizers whose updates cannot be computed.

    Weights that are `known` have rules, which are compared.

    Classes alone are not compared: wrappers of an optimizer have its settings and another class.
    """
    if pair.first.trace.about.framework != pair.second.trace.about.framework:
        return
    found: dict[str, str] = {}  # Cause → text.
    used = pair.first.applied(0)
    for names in pair.matching.pairs:
        if known and (names.first in known or names.first not in used):
            continue
        first = settings_of(pair.first, names.first)
        second = settings_of(pair.second, names.second)
        if not (first and second):
            continue
        pair.second.mark_checked("update")
        for setting in (*FORMS, *(field.name for field in dataclasses.fields(Rule))):
            a, b = first.get(setting), second.get(setting)
            if setting in FORMS:
                a, b = bool(a), bool(b)
            if a is None or b is None or _are_equal(a, b):
                continue
            cause = "other_optimizer" if setting in FORMS else detail_of(setting)
            found.setdefault(cause, text_of(setting, a, b))
    for cause, text in found.items():
        yield pair.second.found("update", cause, text)


def settings_of(step: Context, weight: str) -> Mapping[str, Any]:
    """Returns the recorded settings with which a weight is updated; empty if unknown."""
    settings = step.trace.about.settings
    groups = settings[step.position] if settings else ()
    return next((group for group in groups if weight in group.get("weights", (weight,))), {})


def is_left_out(pair: StepPair, weight: str) -> bool:
    """Returns whether the optimizer of the first trace has a weight, and that of the second not."""
    has_settings = all(step.trace.about.settings for step, _ in pair.both)
    step, name = pair.second, pair.in_second(weight)
    # Ranks may each have an optimizer of their own weights.
    abouts = step.trace.of_replica.values() or (step.trace.about,)
    second = any(
        name in group.get("weights", (name,))
        for about in abouts
        for group in (about.settings[step.position] if about.settings else ())
    )
    return has_settings and bool(settings_of(pair.first, weight)) and not second


def _are_equal(first: Any, second: Any) -> bool:
    if isinstance(first, float) or isinstance(second, float):
        return abs(second - first) <= _NO_EFFECT * abs(first)
    return bool(first == second)


def text_of(setting: str, first: Any, second: Any) -> str:
    """Returns the values of a setting in both recordings, in words."""
    shown = [f"{v:g}" if isinstance(v, float) else str(v) for v in (first, second)]
    noun = setting.replace("_", " ")
    text = f"{noun} {shown[0]} in the first recording, {shown[1]} in the second"
    if setting == "learning_rate" and first:
        text += f": {second / first:.6g} times as large"
    return text


def _effects(
    pair: StepPair, rules: Mapping[str, tuple[Rule, Rule]], setting: str
) -> dict[str, float]:
    """Returns name → how much a setting of the first trace changes it, relative to its change.

    The names are those of weights and state in the second trace that it changes.
    """
    step = pair.second.for_rules
    before, applied, oracle = step.named("before")[0], step.applied(0), step.updater
    assert isinstance(oracle, RuleOracle)
    others = {
        pair.in_second(name): dataclasses.replace(b, **{setting: getattr(a, setting)})
        for name, (a, b) in rules.items()
    }
    if setting == "momentum" and not all(a.momentum and b.momentum for a, b in rules.values()):
        return dict.fromkeys(others, 1.0)  # It affects the next steps, even without state yet.
    other, own = (x.update(before, applied) for x in (oracle.with_rules(others), oracle))
    apart = {
        name: ratio(distance(other[name], own[name]), norm(own[name] - dense(before.get(name, 0))))
        for name in (*others, *oracle.tracks)
        if name in own
    }
    return {name: far for name, far in apart.items() if far > _NO_EFFECT}


def _velocity(pair: StepPair, rules: Mapping[str, tuple[Rule, Rule]]) -> Iterator[Finding]:
    """Reports different forms of momentum, if the learning rate has changed."""
    settings = pair.second.trace.about.settings
    rates = {group.get("learning_rate") for groups in settings for group in groups}
    first, second = next(iter(rules.values()))
    if len(rates) > 1 and first.momentum:
        text = (
            f"the velocity is a sum {first.velocity} in the first recording and {second.velocity}"
            " in the second, and the learning rate changes"
        )
        yield pair.second.found("update", "learning_rate_in_velocity", text, status=BY_DESIGN)
