"""Rows of the node `state'`: the updates that a copy would make with a known fault."""

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from lockstep.context import Context
from lockstep.data.trace import STATE, WEIGHT
from lockstep.explain.rows import Row, computed
from lockstep.explain.states import with_exchanged_elements
from lockstep.explain.tensors import SHORT, mixed
from lockstep.numeric.arrays import (
    TINY,
    UNITS,
    Named,
    add_named,
    all_same_bits,
    dense,
    factor_of,
    same_bits,
    scaled_all,
    total_norm,
    unit_of,
)
from lockstep.oracles.rules import COUNTERS, IN_GRADIENT, RuleOracle, detail_of

_BETAS = "beta_1", "beta_2"
_TELLING = 8  # Elements that tell the dtype in which they were kept.
_LIMITS = ("clipnorm", "global_clipnorm", "max_grad_norm")  # Of norms, in settings of optimizers.


class _Update:
    """The update of a copy: what it starts from, applies and leaves, and what is right.

    Args:
        context: the step.
        copy: the copy.
        expected: the variables after the right update.
        wrong: names of those that are not right.
    """

    def __init__(self, context: Context, copy: int, expected: Named, wrong: Sequence[str]):
        self.context, self.copy, self.expected, self.wrong = context, copy, expected, wrong
        self.before, self.after = (context.named(kind)[copy] for kind in ("before", "after"))
        self.applied = context.applied(copy)
        states = [name for name in context.of_kind(STATE) if name in self.before]
        self.slots = [name for name in states if self.before[name].ndim]  # Without counters.

    def variant(
        self, state: Named | None = None, gradients: Named | None = None, **settings: Any
    ) -> Named:
        """Returns the update with another state, other gradients or other settings."""
        before = self.before if state is None else self.before | state
        applied = self.applied if gradients is None else gradients
        return self.context.updated(before, applied, **settings)

    def row(self, detail: str, text: str, **changes: Any) -> Row:
        """Returns the row of a variant."""
        return computed(detail, text, self.variant, **changes)

    def leaves(self, detail: str, text: str, values: Named) -> Row:
        """Returns the row of the right update with other values of some variables."""
        return computed(detail, text, lambda: self.expected | values)

    def factor(self, names: Sequence[str], moved: Named, base: Named | None = None) -> float:
        """Returns the factor x for which expected + x · (moved - expected) is nearest.

        It is NaN if one number alone gives it: some factor explains any single number.
        """
        base = self.expected if base is None else base
        slope = [dense(moved[name]) - dense(base[name]) for name in names]
        apart = [dense(self.after[name]) - dense(base[name]) for name in names]
        return factor_of(apart, slope) if sum(map(np.count_nonzero, slope)) > 1 else np.nan


def update_rows(
    context: Context, copy: int, expected: Named, wrong: Sequence[str]
) -> Iterator[Row]:
    """Yields rows of a wrong update of a copy, the most specific first; see `_Update`."""
    update, updater = _Update(context, copy, expected, wrong), context.updater
    is_rule = isinstance(updater, RuleOracle)
    yield from _of_values(update)
    yield from _of_replicas(update)
    if state := _wrong_state(update):
        zeros = {name: np.zeros_like(array) for name, array in state.items()}
        yield update.leaves("zeroed_state", "the optimizer state is 0 after the update", zeros)
    yield from _of_gradients(update)
    yield from _of_states(update)
    counters = [n for n in context.of_kind(STATE) if n.endswith("iteration") and n in update.before]
    is_counted_once = any(update.after[name] == update.before[name] + 1 for name in counters)
    twice = computed(
        "updated_twice", "the update is made twice", lambda: update.variant(update.variant())
    )
    if not is_counted_once:
        yield twice
    yield from _of_exchanged_parts(update)
    yield from _of_parts(update)
    assert updater is not None
    for cause, text, settings in updater.settings():
        yield update.row(cause, text, **settings)
    if is_rule:
        yield from _of_short_numbers(update)
    yield from _of_solved_settings(update)
    if is_rule:
        yield from _of_scaled_gradients(update)
    for name, rounded in SHORT.items():
        text = f"the weights are rounded to {name} after the update"
        short = {n: rounded(expected[n]) for n in update.applied}
        yield update.leaves("reduced_precision", text, short)
    ahead = {name: update.before[name] + 1 for name in counters}
    for more in ({}, {"weight_decay": 0.0}) if is_counted_once else ():  # One that is not ahead.
        text = "the learning rate is that of the next step"
        yield update.row("other_learning_rate", text, state=ahead, **more)
    far = [(update.variant(rate=2.0, decays=decays), decays) for decays in (True, False)]
    yield from _of_solved_numbers(update, far, wrong)
    if is_counted_once:  # Without momentum, it is the update with another learning rate.
        yield twice
    for name in wrong if len(wrong) > 1 else ():
        yield from _of_solved_numbers(update, far, [name])
    yield from _of_one_device(update, [moved for moved, _ in far])
    yield from _of_moved_state(update)
    if not is_rule:  # Those of a rule come before.
        yield from _of_scaled_gradients(update)


# --- Values that are left ------------------------------------------------------------------------


def _of_values(update: _Update) -> Iterator[Row]:
    """Yields updates that are not made."""
    before, kinds = update.before, update.context.trace.kinds
    yield computed("not_updated", "the weights do not change", lambda: before)
    for kind, what in ((STATE, "optimizer state does"), (WEIGHT, "weights do")):
        if held := {n: before[n] for n in update.wrong if kinds[n] == kind and n in before}:
            yield update.leaves("not_updated", f"the {what} not change", held)


def _wrong_state(update: _Update) -> Named:
    """Returns the state that is not right, as it should be."""
    expected, kinds = update.expected, update.context.trace.kinds
    return {n: expected[n] for n in update.wrong if kinds[n] == STATE and expected[n].ndim}


def _of_moved_state(update: _Update) -> Iterator[Row]:
    """Yields updates whose state is moved along an axis."""
    arrays = _wrong_state(update)
    for axis in range(max((array.ndim for array in arrays.values()), default=0)):
        for shift in (1, -1):
            moved = {n: np.roll(a, shift, axis) for n, a in arrays.items() if axis < a.ndim}
            text = f"the optimizer state is moved by {shift} along axis {axis}"
            yield update.leaves("shifted_state", text, moved)


def _of_one_device(update: _Update, far: Sequence[Named]) -> Iterator[Row]:
    """Yields updates of which one device's part is not made, or with another learning rate."""
    context, before, expected = update.context, update.before, update.expected
    weights = [name for name in update.wrong if name in before and before[name].ndim]
    names = list(dict.fromkeys([*weights, *update.slots]))
    for chosen in (weights, names):
        for part, changed in mixed(context, expected, before, chosen):
            yield update.leaves("not_updated", f"{part} do not change", changed)
    for twice in far:
        for part, doubled in mixed(context, expected, twice, names):
            if np.isfinite(more := update.factor(names, doubled)):
                moved = {n: (1 - more) * dense(expected[n]) + more * doubled[n] for n in names}
                text = f"{part} are updated with {1 + more:.4g} times the learning rate, or the sum"
                yield update.leaves("other_learning_rate", text, moved)


# --- Other gradients and states ------------------------------------------------------------------


def _of_gradients(update: _Update) -> Iterator[Row]:
    """Yields updates with gradients other than those that the copy received."""
    context, applied, row = update.context, update.applied, update.row
    num = len(context.shards)
    if num > 1 and context.has(context.kind_sent):
        sent, clips = context.named(context.kind_sent), context.clips_sum
        own = [sent[shard] for shard in context.trace.shards_of(update.copy)]
        if 0 < len(own) < num:
            text = "the update uses the gradients of this replica, not the sum"
            yield row("not_all_reduced", text, gradients=add_named(own), clips=clips)
        for other in context.shards:
            text = f"the update uses only the gradients of {context.trace.name_of('raw', other)}"
            yield row("not_all_reduced", text, gradients=sent[other], clips=clips)
    # If one copy alone does so, it has another learning rate.
    first, *others = context.named("after")
    is_common = num > 1 and all(all_same_bits(first, other) for other in others)
    for factor in (1 / num, float(num)) if is_common else ():
        cause = "mean_instead_of_sum" if factor < 1 else "scaled_gradient"
        text = f"the update uses {factor:.4g} times the sum"
        yield row(cause, text, gradients=scaled_all(applied, factor))
    if context.has("clipped") and context.clips_sum and context.has("sums"):
        text = "the update uses the gradients before clipping"
        yield row("clipped_on_one_replica", text, gradients=context.named("sums")[update.copy])
    text = "the summed gradients are clipped on this replica"
    yield row("clipped_on_one_replica", text, clips=True)
    if context.previous and (old := context.previous.applied(update.copy)):
        text = "the update uses the gradients of the previous step"
        yield row("stale_gradient", text, gradients=old)
    for name in (n for n in update.wrong if n in applied):
        zero = scaled_all({name: applied[name]}, 0.0)
        text = f"{name} is updated with a gradient of 0"
        yield row("frozen", text, gradients=applied | zero)


def _of_states(update: _Update) -> Iterator[Row]:
    """Yields updates from an optimizer state or weights that are reset, old or exchanged."""
    context, before, slots = update.context, update.before, update.slots
    zeros = {name: np.zeros_like(before[name]) for name in slots}
    is_kept = any(np.any(before[name]) for name in slots)
    if is_kept:
        text = "the update starts from an optimizer state of zeros"
        yield update.row("zeroed_state", text, state=zeros)
    counters = [
        key
        for key, variable in context.trace.variables.items()
        if key in before and (variable.slot in COUNTERS or key.endswith("iteration"))
    ]
    if counters:
        start = {name: np.zeros_like(before[name]) for name in counters} | zeros
        text = "the update starts from the optimizer state of a first step"
        yield update.row("reset_state", text, state=start)
        reset = update.variant(start) if is_kept else before  # Else, only the rate is fitted.
        if np.isfinite(rate := update.factor([*update.applied], reset, before)):
            text += f", with {rate:.4g} times the learning rate of this step"
            yield update.row("reset_state", text, state=start, rate=rate)
    if context.previous:
        older = context.previous.named("before")[update.copy]
        if old := {name: older[name] for name in slots if name in older}:
            text = "the update starts from the optimizer state of the previous step"
            yield update.row("shifted_state", text, state=old)
        weights = {name: older[name] for name in update.applied if name in older}
        text = "the update starts from the weights of the previous step"
        yield update.row("stale_weights", text, state=weights)
    yield from _of_state_of_others(update)


def _of_state_of_others(update: _Update) -> Iterator[Row]:
    """Yields updates of weights of the same shape that use each other's state."""
    by_shape: dict[tuple, list[str]] = {}
    for name in update.applied:
        by_shape.setdefault(update.before[name].shape, []).append(name)
    own = update.context.trace.slots
    for names in by_shape.values():
        moved = {
            own[a][slot]: update.before[own[b][slot]]
            for a, b in zip(names, [*names[1:], names[0]], strict=True)
            for slot in own.get(a, {}).keys() & own.get(b, {}).keys()
            if {own[a][slot], own[b][slot]} <= {*update.slots}
        }
        if len(names) > 1 and moved:
            text = f"the update uses the optimizer state of other weights for {names[0]}"
            yield update.row("shifted_state", text, state=moved)


def _of_exchanged_parts(update: _Update) -> Iterator[Row]:
    """Yields updated weights that are put together wrongly, also in the step before."""
    context = update.context
    weights, exchange = context.of_kind(WEIGHT), functools.partial(with_exchanged_elements, context)

    def again(first: int, second: int) -> Named:
        held = exchange(update.before, weights, first, second, back=True)
        return exchange(update.variant(held), weights, first, second)

    for devices in itertools.combinations(range(len(context.trace.about.parts)), 2):
        text = "the updated weights have the elements of devices {} and {} exchanged"
        text = text.format(*devices)
        yield computed("swapped_parts", text, exchange, update.expected, weights, *devices)
        yield computed("swapped_parts", text, again, *devices)


def _of_parts(update: _Update) -> Iterator[Row]:
    """Yields updates of which each rank computes that of its part alone, where elements mix."""
    updater, about = update.context.updater, update.context.trace.about
    rules = updater.rules if isinstance(updater, RuleOracle) else {}
    if not any(rules[name].mixes_elements for name in update.wrong if name in rules):
        return
    numbers = {about.num_replicas, len(update.context.copies), *about.mesh.values()} - {1}
    for number, axis in itertools.product(sorted(numbers), (0, 1)):
        text = f"each of {number} parts along axis {axis} is updated as a weight of its own"
        yield update.row("updated_from_a_part", text, parts=number, axis=axis)


# --- Other settings ------------------------------------------------------------------------------


def _of_replicas(update: _Update) -> Iterator[Row]:
    """Yields updates with settings of a replica that are not those of replica 0.

    In data parallelism, they apply to the replica's copy of the weights. Where weights are sharded
    and put together for the recording, they apply to the replica's rows: `fully_shard` gives each
    replica equally many, and fewer to the last.
    """
    context, first, applied = update.context, update.context.updater, update.applied
    num = context.trace.about.num_replicas
    if not isinstance(first, RuleOracle) or len(context.copies) != num:
        return
    own = [RuleOracle(context.trace, context.position, applied, r) for r in range(num)]
    if not all(each.rules.keys() == first.rules.keys() for each in own):
        return

    def shown(value: Any) -> str:
        return f"{value:g}" if isinstance(value, float) else str(value)

    def of_rows() -> Named:
        of_replicas = [each.update(update.before, applied) for each in own]
        found = dict(of_replicas[0])
        for name, value in found.items():
            if np.ndim(value) and value is not update.before.get(name):
                size = -(-len(value) // num)
                rows = [of[name][size * r : size * (r + 1)] for r, of in enumerate(of_replicas)]
                found[name] = np.concatenate(rows)
        return found

    for replica in sorted(range(num), key=lambda r: r != update.copy):  # Its own settings first.
        if different := first.differences(own[replica]):
            cause = detail_of(next(iter(different)))
            text = "; ".join(
                f"{name.replace('_', ' ')} {shown(a)} on replica 0, {shown(b)} on replica {replica}"
                for name, (a, b) in different.items()
            )
            if replica == update.copy:
                yield computed(cause, text, own[replica].update, update.before, applied)
            yield computed(cause, text, of_rows)


def _of_short_numbers(update: _Update) -> Iterator[Row]:
    """Yields updates with settings, or with state, that are rounded to 16 bits."""
    updater = update.context.updater
    assert isinstance(updater, RuleOracle)
    rules = [*updater.rules.values()]
    for name, rounded in SHORT.items():
        for settings in (_BETAS, (*_BETAS, "learning_rate", "epsilon", "weight_decay")):
            values = {each: {getattr(rule, each) for rule in rules} for each in settings}
            if all(len(each) == 1 for each in values.values()):
                short = {k: float(rounded(np.array([*v]))[0]) for k, v in values.items()}
                listed = ", ".join(f"{k.replace('_', ' ')} {v:g}" for k, v in short.items())
                text = f"settings are rounded to {name}: {listed}"
                yield update.row("reduced_precision", text, **short)
        if state := _short_state(update, updater, UNITS[name]):
            text = f"the optimizer state is rounded to {name} in the update"
            yield update.row("reduced_precision", text, state=state)


def _short_state(update: _Update, updater: RuleOracle, unit: float) -> Named:
    """Returns the state before the update that leaves what is left, if that has been rounded.

    Each element after an update is linear in that before it.
    """
    after, expected = update.after, update.expected
    names = [
        n for n in updater.tracks
        if n in after and unit_of(after[n]) == unit
        and np.all(np.abs(dense(after[n]) - expected[n]) <= unit * np.abs(expected[n]) + TINY)
    ]  # fmt: skip
    old = {n: dense(update.before.get(n, np.zeros_like(dense(after[n])))) for n in names}
    if sum(np.count_nonzero(dense(after[n])) for n in names) < _TELLING:
        return {}
    new, moved = (update.variant({n: a + more for n, a in old.items()}) for more in (0.0, 1.0))
    slopes = {n: np.subtract(moved[n], new[n]) for n in names}
    if not all(np.all(slope) for slope in slopes.values()):
        return {}
    return {n: a + (dense(after[n]) - new[n]) / slopes[n] for n, a in old.items()}


def _of_solved_settings(update: _Update) -> Iterator[Row]:
    """Yields updates with the weight decay, and the momentum, that fit best.

    A weight is linear in the decay, except of Adam and RMSprop with it in the gradient. A velocity
    is linear in the momentum, and so is a weight with the look-ahead of Nesterov in a step that
    starts from a velocity of 0, in which the velocity itself is right.
    """
    updater, kinds = update.context.updater, update.context.trace.kinds
    rules = updater.rules if isinstance(updater, RuleOracle) else {}
    linear = {
        name: rules[name].weight_decay
        for name in update.wrong
        if name in rules
        and (rules[name].family == "SGD" or rules[name].decay_placement != IN_GRADIENT)
    }
    for usual in dict.fromkeys(linear.values()):
        names = [name for name, decay in linear.items() if decay == usual]
        more = update.factor(names, update.variant(weight_decay=usual + 1))
        if np.isfinite(more) and (decay := usual + more) > 0:
            text = f"the change is that of a weight decay of {decay:.4g}"
            yield update.row("other_weight_decay", text, weight_decay=decay)
    weights = [name for name in update.wrong if kinds[name] == WEIGHT and name in update.before]
    undecayed = {} if rules else update.variant(weight_decay=0.0)
    is_decayed = any(not np.array_equal(undecayed[n], update.expected[n]) for n in undecayed)
    if is_decayed and len(weights) == len(update.wrong):
        before, expected = (
            {n: dense(s[n]) for n in weights} for s in (update.before, update.expected)
        )
        share = update.factor(weights, {n: expected[n] + before[n] for n in weights})
        if np.isfinite(share):
            text = f"each weight also changes by {share:.4g} times itself"
            moved = {n: expected[n] + share * before[n] for n in weights}
            yield update.leaves("other_weight_decay", text, moved)
    if usual := updater.momentum if updater else 0.0:
        own = [name for name in update.slots if name in update.expected]
        own = [name for name in own if not same_bits(update.after[name], update.expected[name])]
        names = own or [*update.wrong]
        more = update.factor(names, update.variant(momentum=2 * usual))
        if np.isfinite(more) and 0 <= (momentum := (1 + more) * usual) < 1:
            text = f"the change is that of a momentum of {momentum:.4g}"
            yield update.row("other_momentum", text, momentum=momentum)


def _of_scaled_gradients(update: _Update) -> Iterator[Row]:
    """Yields the update with the factor of all gradients that fits best, as of clipping.

    State that is linear in the gradients gives the factor: that of a rule, or the state of each
    slot in turn, as the whole update has to fit. It is clipping where a limit that the script has
    recorded is the norm.
    """
    context, applied, updater = update.context, update.applied, update.context.updater
    is_rule = isinstance(updater, RuleOracle)
    twice = update.variant(gradients=scaled_all(applied, 2.0))
    slots: dict[str, list[str]] = {}
    for name in updater.sums if isinstance(updater, RuleOracle) else context.of_kind(STATE):
        if name in update.after and name in twice and update.after[name].ndim:
            slots.setdefault("" if is_rule else context.trace.variables[name].slot, []).append(name)
    limits = recorded_norms(context, update.copy)
    for names in slots.values():
        factor = 1 + update.factor(names, twice)
        if np.isfinite(factor) and factor > 0:
            size = factor * total_norm(applied)
            is_clipped = factor < 1 and any(abs(limit - size) < 1e-4 * size for limit in limits)
            text = f"the optimizer multiplies the gradients by {factor:.4g}, to norm {size:.4g}"
            cause = "other_clipping" if is_clipped else "scaled_gradient"
            yield update.row(cause, text, gradients=scaled_all(applied, factor))


def recorded_norms(context: Context, copy: int) -> list[float]:
    """Returns the norms to which a script clips gradients, as it has recorded them."""
    calls = [call.split() for call in context.trace.calls(context.position, copy)]
    norms = [float(call[-1]) for call in calls if call[:2] == ["clip", "norm"]]
    about = context.trace.about
    groups = about.settings[context.position] if about.settings else ()
    found = [own.get(name) for own in (about.optimizer, *groups) for name in _LIMITS]
    return norms + [float(norm) for norm in found if isinstance(norm, int | float)]


def _of_solved_numbers(
    update: _Update, far: Sequence[tuple[Named, bool]], chosen: Sequence[str]
) -> Iterator[Row]:
    """Yields updates with a number that some weights give: a learning rate, a decay."""
    before, expected, applied = update.before, update.expected, update.applied
    for twice, decays in far:
        rate = 1 + update.factor(chosen, twice)
        if np.isfinite(rate):
            text = f"the learning rate is {rate:.4g} times that of the optimizer"
            yield update.row("other_learning_rate", text, rate=rate, decays=decays)

    def decayed(by: float) -> Named:
        more = {n: dense(g) + by * dense(before[n]) for n, g in applied.items()}
        return {n: g.astype(np.float32) for n, g in more.items()}

    if all(dense(g).shape == np.shape(before[n]) for n, g in applied.items()):
        decay = update.factor(chosen, update.variant(gradients=decayed(1.0)))
        if np.isfinite(decay) and decay > 0:
            text = f"{decay:.3g} times the weight is added to the gradient"
            yield update.row("weight_decay_on_top", text, gradients=decayed(decay))
    for base in (expected, before) if {*chosen} <= {*before} else (expected,):
        less = {n: dense(expected[n]) - dense(base[n]) for n in applied}
        decay = update.factor(chosen, expected | less)
        if decay > 0:
            text = f"a weight decay of {decay:.3g} is applied in addition to the optimizer's update"
            values = {n: dense(expected[n]) - decay * dense(base[n]) for n in applied}
            yield update.leaves("weight_decay_on_top", text, values)
