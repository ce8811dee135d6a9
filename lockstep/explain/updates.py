"""Predicts the update that a copy would make with a known fault."""

import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from lockstep.context import Context
from lockstep.data.trace import STATE, WEIGHT
from lockstep.explain.hypothesis import Hypothesis
from lockstep.explain.states import with_exchanged_elements
from lockstep.explain.tensors import SHORT, mixed
from lockstep.numeric.arrays import (
    Named,
    add_named,
    all_same_bits,
    dense,
    factor_of,
    scaled_all,
    total_norm,
)
from lockstep.oracles.rules import COUNTERS, IN_GRADIENT, RuleOracle, detail_of

_LIMITS = ("clipnorm", "global_clipnorm", "max_grad_norm")  # Of norms, in settings of optimizers.


def update_hypotheses(
    context: Context, copy: int, expected: Named, wrong: Sequence[str]
) -> Iterator[Hypothesis]:
    """Yields hypotheses about a wrong update of a copy."""
    before, after = context.named("before")[copy], context.named("after")[copy]
    applied = context.applied(copy)
    update, kinds = partial(context.updated, before), context.trace.kinds
    yield "not_updated", "the weights do not change", lambda: before
    for kind, what in ((STATE, "optimizer state does"), (WEIGHT, "weights do")):
        if held := {n: before[n] for n in wrong if kinds[n] == kind and n in before}:
            yield "not_updated", f"the {what} not change", partial(dict, expected | held)
    yield from _with_settings_of_replicas(context, copy, before, applied)
    slots = [n for n in wrong if kinds[n] == STATE and expected[n].ndim]
    if slots:
        zeros = {name: np.zeros_like(expected[name]) for name in slots}
        text = "the optimizer state is 0 after the update"
        yield "zeroed_state", text, partial(dict, expected | zeros)
    yield from _with_other_gradients(context, copy, before, applied, wrong)
    yield from _with_other_states(context, copy, before, applied)
    twice = (
        "updated_twice",
        "the update is made twice",
        lambda: context.updated(update(applied), applied),
    )
    counters = [n for n in context.of_kind(STATE) if n.endswith("iteration") and n in before]
    is_counted_once = any(after[name] == before[name] + 1 for name in counters)
    if not is_counted_once:
        yield twice
    yield from _of_exchanged_parts(context, before, applied, expected)
    assert context.updater is not None
    for cause, text, settings in context.updater.settings():
        yield cause, text, partial(update, applied, **settings)
    yield from _with_fitted_decay(context, copy, expected, wrong)
    yield from _with_fitted_momentum(context, copy, expected, wrong, context.updater.momentum)
    if isinstance(context.updater, RuleOracle):
        yield from _with_fitted_gradients(context, copy, expected)
    for name, rounded in SHORT.items():
        text = f"the weights are rounded to {name} after the update"
        short = {n: rounded(expected[n]) for n in applied}
        yield "reduced_precision", text, partial(dict, expected | short)
    twice_as_far = [(update(applied, rate=2.0, decays=decays), decays) for decays in (True, False)]
    fitted = partial(_with_fitted_numbers, context, copy, expected, twice_as_far)
    yield from fitted(wrong)
    if is_counted_once:  # Without momentum, it is the update with another learning rate.
        yield twice
    for name in wrong if len(wrong) > 1 else ():
        yield from fitted([name])
    yield from _of_one_device(context, copy, expected, twice_as_far, wrong)
    yield from _of_moved_state(expected, slots)
    if not isinstance(context.updater, RuleOracle):  # Those of a rule are fitted above.
        yield from _with_fitted_gradients(context, copy, expected)


def _of_moved_state(expected: Named, slots: Sequence[str]) -> Iterator[Hypothesis]:
    """Yields updates whose state is moved along an axis."""
    for axis in range(max((expected[name].ndim for name in slots), default=0)):
        for shift in (1, -1):
            moved = [name for name in slots if axis < expected[name].ndim]
            rolled = {name: np.roll(expected[name], shift, axis) for name in moved}
            text = f"the optimizer state is moved by {shift} along axis {axis}"
            yield "shifted_state", text, partial(dict, expected | rolled)


def _with_settings_of_replicas(
    context: Context, copy: int, before: Named, applied: Named
) -> Iterator[Hypothesis]:
    """Yields updates with settings of a replica that are not those of replica 0.

    In data parallelism, they apply to the replica's copy of the weights. Where weights are sharded
    and put together for the recording, they apply to the replica's rows: `fully_shard` gives each
    replica equally many, and fewer to the last.
    """
    first = context.updater
    num = context.trace.about.num_replicas
    if not isinstance(first, RuleOracle) or len(context.copies) != num:
        return
    own = [RuleOracle(context.trace, context.position, applied, r) for r in range(num)]
    if not all(each.rules.keys() == first.rules.keys() for each in own):
        return

    def shown(value: Any) -> str:
        return f"{value:g}" if isinstance(value, float) else str(value)

    def of_rows() -> Named:
        of_replicas = [each.update(before, applied) for each in own]
        found = dict(of_replicas[0])
        for name, value in found.items():
            if np.ndim(value) and value is not before.get(name):
                size = -(-len(value) // num)
                rows = [of[name][size * r : size * (r + 1)] for r, of in enumerate(of_replicas)]
                found[name] = np.concatenate(rows)
        return found

    for replica in sorted(range(num), key=lambda r: r != copy):  # Its own settings first.
        if different := first.differences(own[replica]):
            setting = next(iter(different))
            text = "; ".join(
                f"{name.replace('_', ' ')} {shown(a)} on replica 0, {shown(b)} on replica {replica}"
                for name, (a, b) in different.items()
            )
            if replica == copy:
                yield detail_of(setting), text, partial(own[copy].update, before, applied)
            yield detail_of(setting), text, of_rows


def _with_other_gradients(
    context: Context, copy: int, before: Named, applied: Named, wrong: Sequence[str]
) -> Iterator[Hypothesis]:
    """Yields updates with gradients other than those that the copy received."""
    update = partial(context.updated, before)
    num = len(context.shards)
    if num > 1 and context.has(context.kind_sent):
        sent, clips = context.named(context.kind_sent), context.clips_sum
        own = [sent[shard] for shard in context.trace.shards_of(copy)]
        if 0 < len(own) < num:
            text = "the update uses the gradients of this replica, not the sum"
            yield "not_all_reduced", text, lambda: update(add_named(own), clips=clips)
        for other in context.shards:
            name = context.trace.name_of("raw", other)
            text = f"the update uses only the gradients of {name}"
            yield "not_all_reduced", text, partial(update, sent[other], clips=clips)
    # If one copy alone does so, it has another learning rate.
    first, *others = context.named("after")
    is_common = num > 1 and all(all_same_bits(first, other) for other in others)
    for factor in (1 / num, float(num)) if is_common else ():
        cause = "mean_instead_of_sum" if factor < 1 else "scaled_gradient"
        text = f"the update uses {factor:.4g} times the sum"
        yield cause, text, partial(update, scaled_all(applied, factor))
    if context.has("clipped") and context.clips_sum and context.has("sums"):
        text = "the update uses the gradients before clipping"
        yield "clipped_on_one_replica", text, partial(update, context.named("sums")[copy])
    text = "the summed gradients are clipped on this replica"
    yield "clipped_on_one_replica", text, partial(update, applied, clips=True)
    if context.previous and (old := context.previous.applied(copy)):
        text = "the update uses the gradients of the previous step"
        yield "stale_gradient", text, partial(update, old)
    for name in (n for n in wrong if n in applied):
        zero = applied | {name: scaled_all({name: applied[name]}, 0.0)[name]}
        yield "frozen", f"{name} is updated with a gradient of 0", partial(update, zero)


def _with_other_states(
    context: Context, copy: int, before: Named, applied: Named
) -> Iterator[Hypothesis]:
    """Yields updates from an optimizer state or weights that are reset, old or exchanged."""
    slots = [n for n in context.of_kind(STATE) if n in before and before[n].ndim]
    zeros = {name: np.zeros_like(before[name]) for name in slots}
    if slots and any(np.any(before[name]) for name in slots):
        text = "the update starts from an optimizer state of zeros"
        yield "zeroed_state", text, partial(context.updated, before | zeros, applied)
    counters = [
        key
        for key, variable in context.trace.variables.items()
        if key in before and (variable.slot in COUNTERS or key.endswith("iteration"))
    ]
    if counters:
        start = {name: np.zeros_like(before[name]) for name in counters} | zeros
        text = "the update starts from the optimizer state of a first step"
        predict = partial(context.updated, before | start, applied)
        yield "reset_state", text, predict
        after = context.named("after")[copy]
        is_kept = any(np.any(before[name]) for name in zeros)  # Else, only the rate is fitted.
        if is_kept and np.isfinite(rate := _fitted([*applied], before, predict(), after)):
            text += f", with {rate:.4g} times the learning rate of this step"
            yield "reset_state", text, partial(predict, rate=rate)
    if context.previous:
        older = context.previous.named("before")[copy]
        old = {name: older[name] for name in slots if name in older}
        if old:
            text = "the update starts from the optimizer state of the previous step"
            yield "shifted_state", text, partial(context.updated, before | old, applied)
        weights = {name: older[name] for name in applied if name in older}
        text = "the update starts from the weights of the previous step"
        yield "stale_weights", text, partial(context.updated, before | weights, applied)
    by_shape: dict[tuple, list[str]] = {}
    for name in applied:
        by_shape.setdefault(before[name].shape, []).append(name)
    of_weights: dict[str, dict[str, str]] = {}
    for variable in context.trace.about.variables:
        if variable.name in slots:
            of_weights.setdefault(variable.of, {})[variable.slot] = variable.name
    for names in by_shape.values():
        pairs = list(zip(names, [*names[1:], names[0]], strict=True))
        own = [(of_weights.get(a, {}), of_weights.get(b, {})) for a, b in pairs]
        moved = {mine[s]: before[theirs[s]] for mine, theirs in own for s in mine if s in theirs}
        if len(names) > 1 and moved:
            text = f"the update uses the optimizer state of other weights for {names[0]}"
            yield "shifted_state", text, partial(context.updated, before | moved, applied)


def _of_one_device(
    context: Context, copy: int, expected: Named, twice_as_far: Sequence[tuple[Named, bool]],
    wrong: Sequence[str],
) -> Iterator[Hypothesis]:  # fmt: skip
    """Yields updates of which one device's part is not made, or with another learning rate."""
    before, after = context.named("before")[copy], context.named("after")[copy]
    weights = [name for name in wrong if name in before and before[name].ndim]
    slots = [n for n in context.of_kind(STATE) if n in before and before[n].ndim]
    names = list(dict.fromkeys([*weights, *slots]))
    for chosen in (weights, names):
        for part, changed in mixed(context, expected, before, chosen):
            yield "not_updated", f"{part} do not change", partial(dict, expected | changed)
    apart = [dense(after[n]) - dense(expected[n]) for n in names]
    for twice, _ in twice_as_far:
        for part, doubled in mixed(context, expected, twice, names):
            slope = [dense(doubled[n]) - dense(expected[n]) for n in names]
            if np.isfinite(more := _factor(apart, slope)):
                pairs = zip(names, slope, strict=True)
                moved = {n: dense(expected[n]) + more * change for n, change in pairs}
                text = f"{part} are updated with {1 + more:.4g} times the learning rate, or the sum"
                yield "other_learning_rate", text, partial(dict, expected | moved)


def _of_exchanged_parts(
    context: Context, before: Named, applied: Named, expected: Named
) -> Iterator[Hypothesis]:
    """Yields updated weights that are put together wrongly, also in the step before."""
    weights, exchange = context.of_kind(WEIGHT), partial(with_exchanged_elements, context)
    for first, second in itertools.combinations(range(len(context.trace.about.parts)), 2):
        text = f"the updated weights have the elements of devices {first} and {second} exchanged"
        yield "swapped_parts", text, partial(exchange, expected, weights, first, second)

        def again(first: int = first, second: int = second) -> Named:
            held = exchange(before, weights, first, second, back=True)
            return exchange(context.updated(held, applied), weights, first, second)

        yield "swapped_parts", text, again


def _fitted(names: Sequence[str], expected: Named, moved: Named, actual: Named) -> float:
    """Returns the factor x for which expected + x · (moved - expected) is nearest to the actual."""
    return _factor(
        [dense(actual[name]) - dense(expected[name]) for name in names],
        [dense(moved[name]) - dense(expected[name]) for name in names],
    )


def _factor(apart: Sequence[np.ndarray], slope: Sequence[np.ndarray]) -> float:
    """Returns the factor x for which x · slope is nearest; NaN if one number alone gives it.

    Some factor explains any single number.
    """
    return factor_of(apart, slope) if sum(map(np.count_nonzero, slope)) > 1 else np.nan


def _with_fitted_decay(
    context: Context, copy: int, expected: Named, wrong: Sequence[str]
) -> Iterator[Hypothesis]:
    """Yields the update with the weight decay that fits best, if it is linear in it."""
    oracle = context.updater
    if not isinstance(oracle, RuleOracle):
        return
    rules = [oracle.rules[name] for name in wrong if name in oracle.rules]
    if not rules or any(r.family == "Adam" and r.decay_placement == IN_GRADIENT for r in rules):
        return
    before, after = context.named("before")[copy], context.named("after")[copy]
    applied = context.applied(copy)
    decayed = oracle.with_more_decay(1.0).update(before, applied)
    more = _fitted(wrong, expected, decayed, after)
    if np.isfinite(more) and (decay := rules[0].weight_decay + more) > 0:
        text = f"the change is that of a weight decay of {decay:.4g}"
        predict = partial(oracle.with_more_decay(more).update, before, applied)
        yield "other_weight_decay", text, predict


def _with_fitted_gradients(context: Context, copy: int, expected: Named) -> Iterator[Hypothesis]:
    """Yields the update with the factor of all gradients that fits best, as of clipping.

    State that is linear in the gradients gives the factor: that of a rule, or the state of each
    slot in turn, as the whole update has to fit. It is clipping where a limit that the script has
    recorded is the norm.
    """
    oracle = context.updater
    before, after = context.named("before")[copy], context.named("after")[copy]
    applied = context.applied(copy)
    update = partial(context.updated, before)
    twice = update(scaled_all(applied, 2.0))
    slots: dict[str, list[str]] = {}
    for name in oracle.sums if isinstance(oracle, RuleOracle) else context.of_kind(STATE):
        if name in after and name in twice and after[name].ndim:
            slot = "" if isinstance(oracle, RuleOracle) else context.trace.variables[name].slot
            slots.setdefault(slot, []).append(name)
    limits = _recorded_norms(context, copy)
    for names in slots.values():
        factor = 1 + _fitted(names, expected, twice, after)
        if np.isfinite(factor) and factor > 0:
            size = factor * total_norm(applied)
            is_clipped = factor < 1 and any(abs(limit - size) < 1e-4 * size for limit in limits)
            text = f"the optimizer multiplies the gradients by {factor:.4g}, to norm {size:.4g}"
            cause = "other_clipping" if is_clipped else "scaled_gradient"
            yield cause, text, partial(update, scaled_all(applied, factor))


def _recorded_norms(context: Context, copy: int) -> list[float]:
    """Returns the norms to which a script clips gradients, as it has recorded them."""
    calls = [call.split() for call in context.trace.calls(context.position, copy)]
    norms = [float(call[-1]) for call in calls if call[:2] == ["clip", "norm"]]
    about = context.trace.about
    groups = about.settings[context.position] if about.settings else ()
    found = [own.get(name) for own in (about.optimizer, *groups) for name in _LIMITS]
    return norms + [float(norm) for norm in found if isinstance(norm, int | float)]


def _with_fitted_momentum(
    context: Context, copy: int, expected: Named, wrong: Sequence[str], momentum: float
) -> Iterator[Hypothesis]:
    """Yields the update with the momentum that fits best, for SGD with momentum.

    A velocity is linear in the momentum. So is a weight with the look-ahead of Nesterov in a step
    that starts from a velocity of 0, in which the velocity itself is right.
    """
    if not momentum:
        return
    before, after = context.named("before")[copy], context.named("after")[copy]
    twice = context.updated(before, context.applied(copy), momentum=2 * momentum)
    names = [name for name in wrong if context.trace.kinds[name] == STATE] or list(wrong)
    more = _fitted(names, expected, twice, after)
    if np.isfinite(more) and 0 <= (fitted := (1 + more) * momentum) < 1:
        text = f"the change is that of a momentum of {fitted:.4g}"
        predict = partial(context.updated, before, context.applied(copy), momentum=fitted)
        yield "other_momentum", text, predict


def _with_fitted_numbers(
    context: Context, copy: int, expected: Named, twice_as_far: Sequence[tuple[Named, bool]],
    chosen: Sequence[str],
) -> Iterator[Hypothesis]:  # fmt: skip
    """Yields updates with a number that is fitted to some weights: a learning rate, a decay."""
    before, after = context.named("before")[copy], context.named("after")[copy]
    applied = context.applied(copy)
    apart = [dense(after[n]) - dense(expected[n]) for n in chosen]
    for twice, decays in twice_as_far:
        slope = [dense(twice[n]) - dense(expected[n]) for n in chosen]
        rate = 1 + _factor(apart, slope)
        if np.isfinite(rate):
            yield (
                "other_learning_rate",
                f"the learning rate is {rate:.4g} times that of the optimizer",
                partial(context.updated, before, applied, rate=rate, decays=decays),
            )  # fmt: skip
    decayed = {n: dense(g) + dense(before[n]) for n, g in applied.items()}
    if all(dense(g).shape == np.shape(before[n]) for n, g in applied.items()):
        moved = context.updated(before, {n: g.astype(np.float32) for n, g in decayed.items()})
        decay = _factor(apart, [dense(moved[n]) - dense(expected[n]) for n in chosen])
        if np.isfinite(decay) and decay > 0:
            more = {n: dense(g) + decay * dense(before[n]) for n, g in applied.items()}
            short = {n: g.astype(np.float32) for n, g in more.items()}
            text = f"{decay:.3g} times the weight is added to the gradient"
            yield "weight_decay_on_top", text, partial(context.updated, before, short)
    for base in (expected, before) if {*chosen} <= {*before} else (expected,):
        decay = -_factor(apart, [dense(base[n]) for n in chosen])
        if decay > 0:
            less = {n: dense(expected[n]) - decay * dense(base[n]) for n in applied}
            yield (
                "weight_decay_on_top",
                f"a weight decay of {decay:.3g} is applied in addition to the optimizer's update",
                partial(dict, expected | less),
            )  # fmt: skip
