"""Checks that random layers use different random numbers on each replica."""

import itertools
from collections.abc import Iterator

from lockstep.answer.verdict import NOT_COMPARED, Finding
from lockstep.context import Context
from lockstep.data.trace import SEED, STATE
from lockstep.explain.pairing import have_equal_outputs
from lockstep.explain.random_layers import (
    draws,
    has_keys,
    own_states,
)
from lockstep.numeric.arrays import MARGIN, relative_distance, relative_norm, same_arrays, same_bits
from lockstep.reference import StepPair

_SEED_BYTES = 8


def check_random_numbers(context: Context) -> Iterator[Finding]:
    """Checks the seeds and the states of generators that a step uses."""
    if not context.computes:
        yield from _repeated(context)
    elif not context.oracle.random_layers:
        return
    before, left = (
        [context.state(shard, kind) for shard in context.shards] for kind in ("before", "after")
    )
    seeds = [
        name
        for name in context.of_kind(SEED)
        if any(
            name in b and not same_bits(b[name], a.get(name, b[name]))
            for b, a in zip(before, left, strict=True)
        )
    ]
    # Those of the script, also where `replay=` has loaded others.
    kind = "replaced" if context.has("replaced") else "before"
    own = [before[s] | context.state(s, kind) for s in context.shards]
    drawing = [s for s in context.shards if not context.computes and draws(context, s)]
    for pair in itertools.combinations(context.shards, 2):
        both_draw = {*pair} <= {*drawing}
        if not seeds and not both_draw:
            continue
        context.mark_checked("random numbers")
        equal = [name for name in seeds if same_bits(*(own[shard][name] for shard in pair))]
        if context.computes:  # Layers may also draw by the number of the replica.
            equal = [name for name in equal if not _looks_at_number(context, pair[1], name)]
        if equal or (both_draw and same_arrays(*(own_states(context, s) for s in pair))):
            text = f"replicas {pair[0]} and {pair[1]} draw from the same random state"
            yield context.found(
                "random numbers", "same_random_numbers", text, items=pair, tensors=equal
            )


def _looks_at_number(context: Context, shard: int, seed: str) -> bool:
    """Returns whether random numbers depend on the number of the replica, not only on the seed.

    The step then differs from the step with number 0.

    Args:
        context: the step.
        shard: the shard.
        seed: name of a seed; layers with other seeds are switched off.
    """
    oracle = context.oracle
    own = oracle.layers_of([seed])
    off = tuple(index for index in oracle.random_layers if index not in own)
    mine, first = (
        oracle.compute(context.ask(shard, replica=number, off=off, scales=(1.0, 1.0)))
        for number in (context.trace.replica_of(shard), 0)
    )
    expected = context.expected(shard)
    if mine.y_pred:
        return relative_distance(mine.y_pred, first.y_pred) > MARGIN * expected.forward
    return relative_norm(mine.raw, first.raw) > MARGIN * expected.backward


def _repeated(context: Context) -> Iterator[Finding]:
    """Finds steps that draw the same numbers as an earlier one."""
    for earlier, shard in _equal_states(context):
        if not _may_count(earlier):
            yield _repeats(context, earlier, shard)


def compare_repeated(pair: StepPair) -> Iterator[Finding]:
    """Finds steps whose key is that of an earlier one, and is not in the reference."""
    known = {earlier.number for earlier, _ in _equal_states(pair.first)}
    for earlier, shard in _equal_states(pair.second):
        if _may_count(earlier) and earlier.number not in known:
            yield _repeats(pair.second, earlier, shard)


def _equal_states(context: Context) -> Iterator[tuple[Context, int]]:
    """Yields each earlier step, and a shard that draws from equal states in both."""
    for position in range(context.position):
        earlier = Context(context.trace, position)
        for shard in context.shards:
            if draws(earlier, shard) and draws(context, shard):
                context.mark_checked("random numbers")
                states = [own_states(each, shard) for each in (earlier, context)]
                if states[0] and same_arrays(*states):
                    yield earlier, shard


def _may_count(context: Context) -> bool:
    """Returns whether a step may draw by its number beside the key that its script passes.

    A whole number in its state then counts the steps.
    """
    if context.trace.about.layers or context.has("random_after"):
        return False
    before, after = (context.named(kind)[0] for kind in ("before", "after"))
    return any(
        before[name].dtype.kind in "iu" and not same_bits(before[name], after[name])
        for name in context.of_kind(STATE)
        if name in before and name in after
    )


def _repeats(context: Context, earlier: Context, shard: int) -> Finding:
    text = f"step {context.number} starts from the random state of step {earlier.number}"
    return context.found("random numbers", "random_numbers_repeated", text, items=(shard,))


def compare_drawn(pair: StepPair) -> Iterator[Finding]:
    """Finds ranks of one replica whose own random states differ, which `replay=` made equal.

    From equal states, the step is that of the reference: what its ranks draw must be equal.
    """
    step = pair.second
    if not (step.has("own_random") and pair.are_gradients_right):
        return
    for shard in step.shards:
        for index in range(len(step.arrays("own_random")[shard])):
            own = step.trace.views(step.position, "own_random", shard, index)
            drawing = [rank for rank in own if _draws_from(step, shard, index, rank)]
            apart = [rank for rank in drawing if not same_bits(own[rank], own[drawing[0]])]
            if apart:
                step.mark_checked("random numbers")
                text = (
                    f"ranks {drawing[0]} and {apart[0]} compute one replica and draw numbers, from"
                    " different random states before replay= replaced them"
                )
                yield step.found(
                    "random numbers", "other_random_numbers", text, kind="before", items=apart
                )
                return


def draws_as_one(pair: StepPair) -> bool:
    """Returns whether each replica draws what the reference draws, and uses its own part of it.

    The gradients, or the outputs, are then right only if all draw from equal states: as for masks
    of the whole batch, or for layers that are left out.
    """
    first, second, kinds = pair.first, pair.second, ("random", "random_after")
    if len(first.shards) > 1 or first.has("shards") or not (first.has(*kinds)):
        return False
    if not second.has(*kinds) or not (pair.are_gradients_right or have_equal_outputs(pair)):
        return False
    before, after = (first.arrays(kind)[0] for kind in kinds)
    if not pair.are_gradients_right:  # The backward pass may draw again, and wrongly.
        own = [second.arrays(kinds[0])[shard] for shard in second.shards]
        return draws(first, 0) and all(same_arrays(each, before) for each in own)
    return not same_arrays(before, after) and all(
        same_arrays(second.arrays(kind)[shard], right)
        for kind, right in zip(kinds, (before, after), strict=True)
        for shard in second.shards
    )


def compare_replicas(pair: StepPair) -> Iterator[Finding]:
    """Finds replicas that no longer draw what the others draw; see `draws_as_one`."""
    step = pair.second
    if not (step.has("random") and pair.first.has("random")) or pair.are_gradients_right:
        return
    states = {s: own_states(step, s) for s in step.shards if draws(step, s)}
    right = pair.first.arrays("random")[0]
    if not any(same_arrays(own, right) for own in states.values()):
        right = [*next(iter(states.values()), ())]
    if apart := [s for s, own in states.items() if not same_arrays(own, right)]:
        text = "the replicas drew equal numbers in an earlier step, as the reference, and not here"
        yield step.found("random numbers", "other_random_numbers", text, items=apart)


def _draws_from(step: Context, shard: int, index: int, rank: int) -> bool:
    """Returns whether a rank draws from a generator, and does not set its seed before that."""
    views = [
        step.trace.views(step.position, kind, shard, index) for kind in ("random", "random_after")
    ]
    if not all(rank in each for each in views):
        return False
    before, after = (each[rank] for each in views)
    # The states of PyTorch's generators begin with the seed.
    is_seeded = not same_bits(before[:_SEED_BYTES], after[:_SEED_BYTES])
    return not (same_bits(before, after) or is_seeded)


def compare_keys(pair: StepPair) -> Iterator[Finding]:
    """Compares the keys that a script passes to its step with those of the reference.

    A step may make other keys of a key that is always the same; then it is so in the reference,
    too. Another stream of numbers is no less random.
    """
    own, right = own_states(pair.second, 0), pair.first.arrays("random")[0]
    if not (own and right and has_keys(pair)):
        return
    pair.second.mark_checked("random numbers")
    for number in pair.first.trace.steps[: pair.first.position]:
        if number not in pair.second.trace.steps:
            continue
        first, second = (
            Context(step.trace, step.trace.steps.index(number))
            for step in (pair.first, pair.second)
        )
        earlier = own_states(second, 0)
        if same_arrays(own, earlier) and not same_arrays(right, first.arrays("random")[0]):
            text = f"the key of step {number} is passed to step {pair.second.number} again"
            yield pair.second.found("random numbers", "random_numbers_repeated", text)
            return
    states = filter(None, pair.second.arrays("random"))  # Replicas may have keys of their own.
    if (
        not (same_arrays(own, right) or pair.are_gradients_right)
        and len({tuple(s.tobytes() for s in each) for each in states}) < 2
    ):
        text = "the keys that the script passes are not those of the first recording"
        yield pair.second.found("random numbers", "random_layers", text, status=NOT_COMPARED)
