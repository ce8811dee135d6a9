"""Checks the state before a step, and that copies agree after it."""

from collections.abc import Collection, Iterator, Sequence

import numpy as np

from lockstep.answer.text import count
from lockstep.answer.verdict import Finding
from lockstep.context import Context
from lockstep.data.match import Matching
from lockstep.data.trace import STATE, STATISTIC, WEIGHT, Trace
from lockstep.explain.random_layers import draws
from lockstep.numeric.arrays import (
    Named,
    all_same_bits,
    dense,
    distance,
    farthest,
    is_far,
    norm,
    same_bits,
    unit_of,
)
from lockstep.numeric.tolerance import Tolerance
from lockstep.oracles.rules import SLOTS_OF_RULES
from lockstep.recorded import Step
from lockstep.reference import StepPair

_LARGE = 100  # Minimum number of elements for a conclusion from the spread of initial values.
_OTHER_SPREAD = 0.2  # Larger than random deviations for that number.
_OTHER_STATE = 0.01  # Relative to the largest of all weights: state drifts more than these.
_SWAPPED = 4  # Units of rounding, of sums and differences of two arrays.
_DRIFT = 1e-4  # Relative; of states after some steps from equal weights.
Why = tuple[str, str]  # Cause and text.


def check_start(context: Context) -> Iterator[Finding]:
    """Checks that copies start from equal weights: those of the previous step, or as defined."""
    if not context.has("before"):
        return
    context.mark_checked("start")
    # The copies' own state, also where that of another recording was loaded in its place.
    kind = "replaced" if context.has("replaced") else "before"
    before = context.named(kind)
    yield from _without_state(context, before)
    previous, is_own = context.previous, kind == "replaced" or context.trace.about.replayed is None
    if not (is_own and previous and previous.has("after")):
        yield from _differing_copies(context, "start", kind, "before the step")
    else:
        after, fixed = previous.named("after"), _kept_between_steps(previous, context)
        yield from _lost_state(context, after, before)
        yield from _changed(context, after, before, fixed)
        # What a step leaves is a finding of that step.
        left = [n for n in context.trace.keys if n not in fixed and _is_left(n, after, before)]
        but = {*fixed, *left}
        yield from _differing_copies(context, "start", kind, "before the step", but=but)
    if context.computes and context.number == 0:
        yield from _initial_state(context)


def _changed(
    context: Context, after: Sequence[Named], before: Sequence[Named], fixed: Sequence[str]
) -> Iterator[Finding]:
    """Finds variables that changed since the end of the previous step.

    Args:
        context: the step.
        after: the variables of each copy at the end of the previous step.
        before: the same at the start of this one.
        fixed: names of those that may not change.
    """
    for name in fixed:
        changed = [
            copy
            for copy in context.copies
            if name in before[copy]
            and name in after[copy]
            and not same_bits(before[copy][name], after[copy][name])
            and not _is_broadcast(context, name, before[copy], before[0])
        ]
        is_state = context.trace.kinds[name] == STATE
        is_lost = is_state and not any(norm(before[copy].get(name, 0.0)) for copy in changed)
        if not is_lost and _is_changed_by_script(context, name, before):
            continue
        if changed and is_state and not any(norm(before[copy][name]) for copy in changed):
            text = f"{name} is 0 again between two steps"
            yield context.found(
                "start", "reset_state", text, kind="before", items=changed, tensors=(name,)
            )
        elif changed and is_state and all(_is_of_another(name, c, after, before) for c in changed):
            text = f"{name} is that of another replica, as of a checkpoint that one of them wrote"
            yield context.found(
                "start", "not_restored", text, kind="before", items=changed, tensors=(name,)
            )
        elif changed and not _is_rounding(context, name, after, before):
            text = f"{name} changed between two steps"
            yield context.found(
                "start", "changed_on_its_own", text, kind="before", items=changed, tensors=(name,)
            )


def _is_rounding(
    context: Context, name: str, after: Sequence[Named], before: Sequence[Named]
) -> bool:
    """Returns whether a variable changes by rounding alone, and on each copy alike.

    As by a callback that swaps weights with their averages, by sums, and back. It is no fault of
    one recording; the node `between` compares it with the reference.
    """
    olds, news = ([own.get(name) for own in states] for states in (after, before))
    if context.computes or any(x is None for x in (*olds, *news)):
        return False
    old, new = dense(olds[0]), dense(news[0])
    bound = _SWAPPED * unit_of(news[0]) * np.max(np.abs(old), initial=0)
    is_small = old.shape == new.shape and bool(np.all(np.abs(new - old) <= bound))
    return is_small and all(same_bits(x, own[0]) for own in (olds, news) for x in own)


def _is_left(name: str, after: Sequence[Named], before: Sequence[Named]) -> bool:
    """Returns whether a variable has the bits on each copy that the previous step has left."""
    return all(
        name in old and name in new and same_bits(old[name], new[name])
        for old, new in zip(after, before, strict=True)
    )


def _is_changed_by_script(context: Context, name: str, before: Sequence[Named]) -> bool:
    """Returns whether the step before has ended with this value on each copy.

    A script may clip or average weights after the update. What it does on each copy is no fault of
    one recording; the claim compares it with the reference.
    """
    previous = context.previous
    if previous is None:
        return False
    return all(
        name in own and name in after and own[name] is not after[name]
        and same_bits(own[name], start.get(name, np.nan))
        for own, after, start in zip(previous.ends, previous.named("after"), before, strict=True)
    )  # fmt: skip


def _is_of_another(name: str, copy: int, after: Sequence[Named], before: Sequence[Named]) -> bool:
    """Returns whether a copy's variable has the bits that another copy had after the last step."""
    others = [own for other, own in enumerate(after) if other != copy and name in own]
    return any(same_bits(before[copy][name], own[name]) for own in others)


def _kept_between_steps(previous: Step, context: Context) -> list[str]:
    """Returns the variables that a step leaves to the next one: all but those of the script.

    A script may assign to the weights that the optimizer does not update, such as a moving average
    of the others, and a callback to the learning rate; then all copies have to do it.
    """
    about = context.trace.about
    own = {variable.name for variable in about.variables if variable.slot == "learning_rate"}
    for position in (previous.position, context.position) if about.settings else ():
        groups = about.settings[position]
        if all("weights" in group for group in groups):
            updated = {name for group in groups for name in group["weights"]}
            own.update(name for name in context.of_kind(WEIGHT) if name not in updated)
    return [name for name in context.trace.keys if name not in own]


def _without_state(context: Context, before: Sequence[Named]) -> Iterator[Finding]:
    """Finds replicas without any optimizer state, where another one has that of all weights."""
    of = {key: v.of for key, v in context.trace.variables.items() if v.kind == STATE}
    counts = [len({of[name] for name in own if name in of}) for own in before]
    empty = [copy for copy, count in enumerate(counts) if not count]
    if empty and max(counts) == len({*of.values()}) > 0:
        text = "before the step, these replicas have no optimizer state, and others have it"
        yield context.found("start", "diverged_replicas", text, kind="before", items=empty)


def _lost_state(
    context: Context, after: Sequence[Named], before: Sequence[Named]
) -> Iterator[Finding]:
    """Finds optimizer state that a step leaves, and the next one does not have."""
    names = context.of_kind(STATE)
    lost = {c: [n for n in names if n in after[c] and n not in before[c]] for c in context.copies}
    if copies := [copy for copy, missing in lost.items() if missing]:
        tensors = [name for name in names if any(name in lost[copy] for copy in copies)]
        text = f"{len(tensors)} arrays of optimizer state are lost between two steps"
        yield context.found(
            "start", "reset_state", text, kind="before", items=copies, tensors=tensors
        )


def _is_broadcast(context: Context, name: str, own: Named, first: Named) -> bool:
    """Returns whether PyTorch's DDP may have sent the statistics of replica 0 to all replicas."""
    of_torch = context.trace.about.framework == "torch"
    return of_torch and context.trace.kinds[name] == STATISTIC and same_bits(own[name], first[name])


def _initial_state(context: Context) -> Iterator[Finding]:
    """Checks the state before the first step, if the oracle defines it."""
    if (expected := context.oracle.start()) is None:
        return
    for shard in context.shards:
        state = context.state(shard)
        wrong = [n for n in expected if n in state and not same_bits(state[n], expected[n])]
        if wrong:
            weights = [n for n in wrong if context.trace.kinds[n] == WEIGHT]
            what = "weights" if weights else "optimizer state or statistics"
            yield context.found(
                "start", "other_initial_weights" if weights else "other_initial_state",
                f"{len(wrong)} variables start from {what} other than those that model, recipe and"
                " seed define",
                kind="before", items=(context.trace.copy_of(shard),), tensors=wrong,
                distance=farthest(state, expected, wrong),
            )  # fmt: skip


def check_agreement(context: Context) -> Iterator[Finding]:
    """Checks that weights and optimizer state are bitwise identical on all copies."""
    if len(context.copies) == 1 or not context.has("after"):
        return
    # Earlier differences, and differences of the sums, are findings of earlier stages.
    applied = [context.applied(copy) for copy in context.copies]
    is_same = all(all_same_bits(other, applied[0]) for other in applied[1:])
    if not is_same and not context.is_wrong("all-reduce", "clipping", "update"):
        context.mark_checked("agreement")
        found = [*_unlike_gradients(context, applied)]
        yield from found
        is_same = not found  # Gradients that differ by rounding only.
    if context.is_wrong("update") or not is_same:
        return
    context.mark_checked("agreement")
    known = {name for name, *_ in context.unlike_first("before")} if context.has("before") else {}
    yield from _differing_copies(context, "agreement", "after", "after the step", but=known)


def _unlike_gradients(context: Context, applied: Sequence[Named]) -> Iterator[Finding]:
    """Finds copies that apply different gradients, where nothing before the update is recorded."""
    first, *others = applied
    left = [name for name in first if name not in context.reduced_inside]
    names = [n for n in left if any(n in other and is_far(other[n], first[n]) for other in others)]
    if idle := [n for n in names if not all(norm(own.get(n, 0.0)) for own in applied)]:
        text = (
            f"copies apply a gradient of 0 to {count('weight', len(idle))}, and other copies do not"
        )
        yield context.found("agreement", "not_updated", text, items=(), tensors=idle)
        names = [name for name in names if name not in idle]
    if names:
        cause = _why_unlike(context, applied, names)
        text = f"the copies apply different gradients of {count('weight', len(names))}, and diverge"
        yield context.found("agreement", cause, text, items=(), tensors=names)


def _why_unlike(context: Context, applied: Sequence[Named], names: Sequence[str]) -> str:
    """Returns the cause of different gradients, which may be those of ranks of one replica."""
    mesh = context.trace.mesh
    firsts = [mesh.ranks_of(mesh.replica_of(copy))[0] if mesh else copy for copy in context.copies]

    def are_unlike(gradients: Sequence[Named]) -> bool:
        pairs = [(own, gradients[first]) for own, first in zip(gradients, firsts, strict=True)]
        return any(is_far(a[n], b[n]) for a, b in pairs for n in names if n in a and n in b)

    if not are_unlike(applied):
        return "not_all_reduced"
    entering = [context.entering(copy) for copy in context.copies]
    if context.has("unclipped") and not are_unlike(entering):
        return "clipped_by_local_norm"
    return "other_random_numbers" if _draw_apart(context) else "partial_not_reduced"


def _draw_apart(context: Context) -> bool:
    """Returns whether ranks of one replica begin with different random states, and draw numbers."""
    for shard in context.shards:
        states = [*context.trace.views(context.position, "random", shard, 0).values()]
        if draws(context, shard) and not all(same_bits(each, states[0]) for each in states):
            return True
    return False


def _differing_copies(
    context: Context, stage: str, kind: str, when: str, but: Collection[str] = ()
) -> Iterator[Finding]:
    """Yields a finding for each weight or state that differs from that of replica 0."""
    what = "rank" if context.trace.model_axes else "replica"
    text = f"{when}, these {what}s have other values than {what} 0"
    for name, copies, apart in context.unlike_first(kind):
        if context.trace.kinds[name] in (WEIGHT, STATE) and name not in but:
            yield context.found(
                stage, "diverged_replicas", text, kind=kind, items=copies, tensors=(name,),
                distance=apart,
            )  # fmt: skip


def compare_starts(pair: StepPair) -> Iterator[Finding]:
    """Compares weights and statistics before a step; later states may differ by rounding."""
    second = pair.second
    second.mark_checked("start")
    is_first = pair.first.number == min({*pair.first.trace.steps} & {*second.trace.steps})
    if is_first:
        yield from _not_restored(pair)
        yield from _replaced(pair)
    # A later step that the recorder could not begin from the reference is not compared.
    own = () if is_first else second.trace.about.not_loaded
    apart = {n: far for n, far in pair.start_distances.items() if pair.in_second(n) not in own}
    if not apart:
        return
    far = max(apart.values())
    is_replayed = second.trace.about.replayed and (is_first or not second.trace.about.sample)
    if is_replayed:
        text = "the step was to start from the state of the first recording, and does not"
        yield second.found("start", "not_replayed", text, distance=far)
    elif is_first:
        why = _why_start(pair, "before", list(apart))
        yield second.found("start", *why, tensors=apart, distance=far)


def resumed_step(
    first: Trace, second: Trace, matching: Matching, tolerance: Tolerance
) -> int | None:
    """Returns the step of the first trace from whose weights the second one starts its step 0.

    Returns:
        None if it starts from those of step 0, or of no later step.
    """
    if second.steps[0] or 0 not in first.steps:
        return None
    start = Context(second, 0)
    kind = "replaced" if start.has("replaced") else "before"
    for position, number in enumerate(first.steps):
        pair = StepPair(Context(first, position), start, matching, tolerance)
        states = pair.states("before", kind)
        if states[0] and not _unlike(pair, *states):
            return number or None
    return None


def _not_restored(pair: StepPair) -> Iterator[Finding]:
    """Finds optimizer state that a training from the weights of the first lacks, or has another."""
    first, second = pair.first, pair.second
    kind = "replaced" if second.has("replaced") else "before"
    rules = [step.trace.about.optimizer.get("class") for step in (first, second)]
    weights = pair.states("before", kind)
    if rules[0] != rules[1] or not weights[0]:
        return
    if _unlike(pair, *weights):
        return
    given, own = first.named("before")[0], second.named(kind)[0]
    num_arrays, lost = 0, list[str]()  # The latter: names of the weights.
    slots_of = dict[str, list[tuple[str, str, str]]]()  # Slot → weight, and the names in both.
    for weight, slots in first.trace.slots.items():
        keys = second.trace.slots.get(pair.in_second(weight), {})
        for slot, key in slots.items() if weight else ():
            num_arrays += key in given
            if norm(given.get(key, 0.0)) and not norm(own.get(keys.get(slot, ""), 0.0)):
                lost.append(weight)
            elif key in given and keys.get(slot) in own:
                slots_of.setdefault(slot, []).append((weight, key, keys[slot]))
    if lost:
        text = (
            f"{len(lost)} of {num_arrays} arrays of optimizer state are 0 or missing before the"
            " first step, which starts from the weights of the first recording"
        )
        # A training that begins may make the state before its first step.
        cause = "not_restored" if second.number else "other_initial_state"
        yield second.found("start", cause, text, tensors=dict.fromkeys(lost))
    elif kind == "replaced" and not second.number:
        known = pair.rules()  # What another optimizer keeps may be of each replica.
        unlike = {name for name, *_ in second.unlike_first(kind)}
        apart = [
            weight
            for slot, places in slots_of.items()
            for weight, key, other in places
            if ((weight in known and slot in SLOTS_OF_RULES) or other not in unlike)
            and np.shape(given[key]) == np.shape(own[other])
            and distance(own[other], given[key])
            > _OTHER_STATE * max(norm(given[each]) for _, each, _ in places)
        ]
        if apart:
            text = (
                f"{len(apart)} of {num_arrays} arrays of optimizer state have other initial values,"
                " before replay= replaced them"
            )
            tensors = dict.fromkeys(apart)
            yield second.found("start", "other_initial_state", text, kind="before", tensors=tensors)


def _unlike(pair: StepPair, first: Named, second: Named) -> list[str]:
    """Returns the variables that differ by more than the rounding of steps before the recording."""
    allowed = max(_DRIFT, pair.tolerance.usual)
    return [n for n, a in first.items() if distance(second[n], a) > allowed * norm(a)]


def _replaced(pair: StepPair) -> Iterator[Finding]:
    """Finds other initial weights that replay= has replaced: a training without it differs."""
    frameworks = {step.trace.about.framework for step, _ in pair.both}
    if pair.second.number or len(frameworks) > 1 or not pair.second.has("replaced"):
        return
    unlike = _unlike(pair, *pair.states("before", "replaced"))
    if changed := [name for name in unlike if _is_changed_before(pair.first, name)]:
        copies = {name for name, *_ in pair.second.unlike_first("replaced")}
        is_own = {*map(pair.in_second, changed)} <= copies
        cause = "diverged_replicas" if is_own else "other_statistics"
        text = f"other values of {count('statistic', len(changed))} when the first forward pass"
        text += " begins, before which the script changes them"
        text += ", and each replica has its own" if is_own else ""
        yield pair.second.found("statistics", cause, text, kind="before", tensors=changed)
        unlike = [name for name in unlike if name not in changed]
    if unlike:
        cause, text = _why_start(pair, "replaced", unlike)
        text += ", before replay= replaced them"
        yield pair.second.found("start", cause, text, kind="before", tensors=unlike)
    elif of_copies := _buffers_apart(pair):
        items = sorted({copy for own in of_copies.values() for copy in own})
        text = f"{count('array', len(of_copies))} beside the weights start from other values on"
        text += " these replicas than on replica 0, before replay= replaced them"
        yield pair.second.found(
            "start", "diverged_replicas", text, kind="before", items=items, tensors=of_copies
        )


def _buffers_apart(pair: StepPair) -> dict[str, list[int]]:
    """Returns name → copies with other initial values of arrays beside weights and state."""
    second = pair.second
    if second.trace.model_axes:  # Ranks of one replica have parts.
        return {}
    return {
        name: copies
        for name, copies, far in second.unlike_first("replaced")
        if second.trace.kinds[name] == STATISTIC
        and far > _DRIFT
        and not _is_changed_before(second, name)
    }


def _is_changed_before(step: Context, name: str) -> bool:
    """Returns whether a script changes a statistic between a step and the next forward pass.

    It may then have changed it before the first one, too: that is no initial value.
    """
    after, end = step.named("after")[0].get(name), step.ends[0].get(name)
    is_known = step.trace.kinds[name] == STATISTIC and after is not None and end is not None
    return is_known and not same_bits(after, end)


def replaced_start(pair: StepPair) -> str:
    """Returns a sentence if replay= has replaced the initial weights of another framework."""
    frameworks = {step.trace.about.framework for step, _ in pair.both}
    if pair.second.number or len(frameworks) == 1 or not pair.second.has("replaced"):
        return ""
    first, second = pair.states("before", "replaced")
    if not (unlike := _unlike(pair, first, second)):
        return ""
    return (
        f"{len(unlike)} of {len(first)} variables started from other values than in the first"
        " recording, before replay= replaced them"
    )


def _why_start(pair: StepPair, kind: str, names: Sequence[str]) -> Why:
    """Returns the cause of different initial values.

    Args:
        pair: the step.
        kind: of the state of the second recording: "before" or "replaced".
        names: names in the first recording of the variables that differ.
    """
    first, second = pair.states("before", kind)
    text = f"{len(names)} of {len(first)} variables have other initial values"
    if not any(pair.first.trace.kinds[name] == WEIGHT for name in names):
        if all(_is_copy(pair.first, first[name]) for name in names):
            text += ": in the first recording, they are copies of weights"
        return "other_initial_state", text
    for name in names:
        a, b = float(np.std(first[name])), float(np.std(second[name]))
        if np.size(first[name]) >= _LARGE and abs(b - a) > _OTHER_SPREAD * max(a, b):
            return "other_initialiser", (
                f"the initial values of {len(names)} of {len(first)} variables come from another"
                f" distribution: {name} has standard deviation {a:.4g} in the first recording and"
                f" {b:.4g} in the second"
            )
    if all(not norm(first[name]) or not norm(second[name]) for name in names):
        return "other_initialiser", f"{text}: zero in one recording"
    return "other_initial_weights", text


def _is_copy(step: Context, array: np.ndarray) -> bool:
    """Returns whether an array is equal to a weight before the step, as an average at its start."""
    before = step.named("before")[0]
    weights = (before[name] for name in step.of_kind(WEIGHT) if name in before)
    return bool(norm(array)) and any(same_bits(each, array) for each in weights)
