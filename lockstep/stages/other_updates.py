"""Compares optimizer rules and moving statistics of a step with those of another trace."""

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from lockstep.answer.verdict import BY_DESIGN, Finding
from lockstep.context import Context
from lockstep.data.trace import STATISTIC
from lockstep.numeric.arrays import (
    EPS,
    MARGIN,
    TINY,
    Array,
    Named,
    are_finite,
    dense,
    distance,
    factor_of,
    is_far,
    norm,
    ratio,
    relative_norm,
    same_bits,
)
from lockstep.oracles.rules import Rule, RuleOracle, detail_of
from lockstep.reference import StepPair
from lockstep.stages.statistics import is_of_norm

_NO_EFFECT = 1e-6  # Relative to the change; rounding error of an update.
_FORMS = ("amsgrad", "maximize")  # Settings that make another rule.
_CLOSE = 1e-4
_OTHER_SHARE = 1e-3  # Momentum settings are short numbers.

# --- Rules of optimizers -------------------------------------------------------------------------


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
    pair.second.mark_checked()
    families = {(a.family, b.family) for a, b in rules.values()}
    if any(x != y for x, y in families):
        first, second = ("/".join(sorted({each[i] for each in families})) for i in (0, 1))
        text = f"{first} in the first recording, {second} in the second"
        yield found("other_optimizer", text)
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
        elif different and (effect := _effect(pair, rules, setting)) > _NO_EFFECT:
            yield found(
                detail_of(setting), text_of(setting, *different[0]),
                # Each framework has a fixed placement of epsilon, without a setting.
                design=setting == "epsilon_placement", distance=effect,
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
        pair.second.mark_checked()
        for setting in (*_FORMS, *(field.name for field in dataclasses.fields(Rule))):
            a, b = first.get(setting), second.get(setting)
            if setting in _FORMS:
                a, b = bool(a), bool(b)
            if a is None or b is None or _are_equal(a, b):
                continue
            cause = "other_optimizer" if setting in _FORMS else detail_of(setting)
            found.setdefault(cause, text_of(setting, a, b))
    for cause, text in found.items():
        yield pair.second.found(cause, text)


def settings_of(step: Context, weight: str) -> Mapping[str, Any]:
    """Returns the recorded settings with which a weight is updated; empty if unknown."""
    settings = step.trace.about.settings
    groups = settings[step.position] if settings else ()
    return next((group for group in groups if weight in group.get("weights", (weight,))), {})


def is_left_out(pair: StepPair, weight: str) -> bool:
    """Returns whether the optimizer of the first trace has a weight, and that of the second not."""
    has_settings = all(step.trace.about.settings for step, _ in pair.both)
    second = settings_of(pair.second, pair.in_second(weight))
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


def _effect(pair: StepPair, rules: Mapping[str, tuple[Rule, Rule]], setting: str) -> float:
    """Returns how much a setting of the first trace changes an update, relative to its change."""
    if setting == "momentum" and not all(a.momentum and b.momentum for a, b in rules.values()):
        return 1.0  # It affects the next steps, even if there is no state before this one.
    before, applied = pair.second.named("before")[0], pair.second.applied(0)
    oracle = pair.second.updater
    assert isinstance(oracle, RuleOracle)
    others = {
        pair.in_second(name): dataclasses.replace(b, **{setting: getattr(a, setting)})
        for name, (a, b) in rules.items()
    }
    changes = []
    for each in (oracle.with_rules(others), oracle):
        after = each.update(before, applied)
        names = [*others, *oracle.tracks]
        changes.append({n: dense(after[n]) - dense(before.get(n, 0)) for n in names})
    of_weights = [{name: change[name] for name in others} for change in changes]
    # With momentum, some settings affect the next steps alone, through the state.
    return max(relative_norm(*of_weights), relative_norm(*changes))


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
        yield pair.second.found("learning_rate_in_velocity", text, design=True)


# --- Moving statistics of BatchNorm --------------------------------------------------------------


def compare_statistics(pair: StepPair) -> Iterator[Finding]:
    """Compares the statistics after a step that starts from equal ones."""
    before, (first, second) = pair.states("before")[0], pair.states("after")
    names = [n for n in pair.first.of_kind(STATISTIC) if n in before and n in second]
    names = [name for name in names if before[name].dtype.kind == "f"]
    if not (names and pair.computes_the_same):
        return
    pair.second.mark_checked()
    changes = [{n: dense(after[n]) - dense(before[n]) for n in names} for after in (first, second)]
    far = {n: ratio(distance(changes[1][n], changes[0][n]), norm(changes[0][n])) for n in names}
    for finding in _why_statistics(pair, before, *changes):
        apart = max(far[name] for name in finding.tensors)
        yield dataclasses.replace(finding, distance=apart, allowed=pair.tolerance.of_batch)


def _why_statistics(
    pair: StepPair, before: Named, first: Named, second: Named
) -> Iterator[Finding]:
    """Explains different changes of statistics.

    Args:
        pair: the step.
        before: the statistics before it.
        first, second: the changes of all statistics in both traces.
    """
    found, allowed = pair.second.found, max(pair.tolerance.of_batch, _CLOSE)
    others: dict[str, tuple[float, float]] = {}  # Different shares of a batch in the average.
    batches: dict[str, tuple[Array, Array, float]] = {}  # Of both; difference by rounding.
    for name, own in first.items():
        other, old = second[name], dense(before[name])
        shares = _share(pair.first, name), _share(pair.second, pair.in_second(name))
        if not all(shares):
            shares = 1.0, 1.0
        rounding = MARGIN * EPS * (norm(old) + max(norm(own), norm(other))) + TINY
        if abs(shares[1] - shares[0]) > _OTHER_SHARE * shares[0] and norm(other - own) > rounding:
            others[name] = shares
        batches[name] = old + own / shares[0], old + other / shares[1], rounding / min(shares)
    if others:
        shares = next(iter(others.values()))
        text = (
            f"{shares[0]:.4g} of each batch is added to the moving statistics in the first"
            f" recording, and {shares[1]:.4g} in the second"
        )
        yield found("other_batch_norm_momentum", text, tensors=others)
    left = [n for n, (a, b, by) in batches.items() if distance(b, a) > allowed * norm(a) + by]
    means = {_layer_of(name) for name in left if not _is_variance(name)}
    # If the mean of a layer differs, its batch differs.
    variances = [n for n in left if _is_variance(n) and _layer_of(n) not in means]
    if text := _unbiased(pair, [batches[name] for name in variances]):
        frameworks = {step.trace.about.framework for step, _ in pair.both}
        design = len(frameworks) > 1  # Each framework has its own form.
        yield found("unbiased_variance", text, tensors=variances, design=design)
        left = [name for name in left if name not in variances]
    if not left:
        return
    of_norm = [name for name in left if _is_of_norm(pair.first, name)]
    scale = factor_of([second[n] for n in left], [first[n] for n in left])
    scaled = {name: scale * first[name] for name in left}
    is_scaled = abs(scale - 1) > _OTHER_SHARE and not any(
        is_far(second[name], change, _CLOSE) for name, change in scaled.items()
    )
    if is_scaled and not others and of_norm == left:
        text = f"each statistic changes {scale:.4g} times as much as in the first recording"
        yield found("other_batch_norm_momentum", text, tensors=left)
        return
    for step, which in pair.both if of_norm == left and not pair.has_same_shards else ():
        names, after = step.of_kind(STATISTIC), step.named("after")
        if any(not same_bits(after[0][n], other[n]) for other in after[1:] for n in names):
            text = f"each replica of the {which} recording has the statistics of its own examples"
            is_fault = _normalises_all(pair, left)
            if is_fault:
                text += ", and gradients are those of layers that normalise the whole batch"
            yield found("local_statistics", text, tensors=left, design=not is_fault)
            return
    text = f"{len(left)} moving statistics differ"
    yield pair.explained(found("other_statistics", text, tensors=left))


def _normalises_all(pair: StepPair, names: Sequence[str]) -> bool:
    """Returns whether gradients show that statistics of other replicas are known to each one.

    Of a trace without layers, nothing else tells whether BatchNorm is synchronised.
    """
    last = [name.replace("/", ".").split(".")[-1].lower() for name in names]
    is_norm = all("mean" in name or "var" in name for name in last)
    is_known = not pair.second.trace.about.layers
    return bool(is_norm and is_known) and pair.are_gradients_right


def _is_of_norm(step: Context, name: str) -> bool:
    """Returns whether a statistic belongs to a layer that normalises, or to an unknown one."""
    layers = [layer for layer in step.trace.about.layers if name in layer.get("weights", ())]
    return is_of_norm(layers[0] if layers else None)


def _share(step: Context, name: str) -> float:
    """Returns the weight with which the statistic of a batch is added; 0 if it is unknown.

    It is 0.1 for a momentum of 0.1 in PyTorch and of 0.9 in Keras.
    """
    layers = [layer for layer in step.trace.about.layers if "BatchNorm" in str(layer.get("class"))]
    own = [layer for layer in layers if name in layer.get("weights", ())]
    for layer in own or layers:
        if isinstance(momentum := layer.get("momentum"), float):
            return max(0.0, 1 - momentum if layer["class"] == "BatchNormalization" else momentum)
    return 0.0


def _is_variance(name: str) -> bool:
    return "var" in name.replace("/", ".").split(".")[-1].lower()


def _layer_of(name: str) -> str:
    return name.replace("/", ".").rpartition(".")[0]


def _unbiased(pair: StepPair, variances: Sequence[tuple[Array, Array, float]]) -> str:
    """Explains variances by n / (n - 1); n is at least the number of examples.

    Args:
        pair: the step.
        variances: variances of a batch in both traces, and the difference that rounding can cause.
    """
    times = []
    for first, second, slack in variances:
        factor = factor_of([second], [first])
        allowed = 20 * _CLOSE * norm(second) + slack
        if not factor > 0 or distance(second, factor * first) > allowed:
            return ""
        times.append(max(factor, 1 / factor))
    smallest = max(2, min(size for step, _ in pair.both for size in step.sizes))
    if not times or max(times) > smallest / (smallest - 1) * 1.01:
        return ""
    first, second, _ = variances[int(np.argmax(times))]
    return (
        f"the variance of a batch is up to {max(times):.6g} times as large in the"
        f" {'second' if norm(second) > norm(first) else 'first'} recording: n / (n - 1), the"
        " unbiased one"
    )
