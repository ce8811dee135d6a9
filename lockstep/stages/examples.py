"""Checks that every example of the batch is on one replica, and compares them with others."""

import collections
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from lockstep.answer.text import count
from lockstep.answer.verdict import BY_DESIGN, FAULT, Finding
from lockstep.context import Context
from lockstep.data.trace import Trace
from lockstep.explain import drawn
from lockstep.explain.batches import (
    StepInputs,
    count_rows,
    inputs_of,
    pairs_of_ids,
    why_ids,
    why_other_order,
    why_other_size,
    why_padded,
    why_rows,
    why_size,
)
from lockstep.numeric.arrays import (
    Named,
    are_finite,
    distance,
    norm,
    rows_of,
    same_arrays,
    same_bits,
)
from lockstep.numeric.tolerance import Tolerance
from lockstep.oracles import Batch
from lockstep.recorded import Step
from lockstep.reference import StepPair, common_steps

_AGAIN = "repeated_examples"
_NEAR = 0.1  # Gradients from inputs of another scale differ by more than this.
Why = tuple[str, str]  # Cause and text.
_Rows = collections.Counter  # Row → how often it occurs.
_Inputs = Sequence[np.ndarray]  # Rows of each forward pass.


_DIFFERENT_PART = 0.9
_BY_ROWS = {"other_examples", "other_order", "repeated_examples", "lost_examples"}
_NEARLY_EQUAL = 1e-2  # Gradients of equal examples, with units that turn over.
_SAME_PART = 0.5  # Replicas that share a larger part of their examples are a fault.


def check_examples(context: Context) -> Iterator[Finding]:
    """Checks the examples of all shards against the batch of the data set, or each other."""
    if not context.has("data"):
        return
    yield from _different_in_a_replica(context)
    if context.batch is not None:
        context.mark_checked("examples")
        yield from _against_batch(context, context.batch)
    elif len(context.shards) > 1:
        context.mark_checked("examples")
        yield from _different_examples(context)


def _different_in_a_replica(context: Context) -> Iterator[Finding]:
    """Finds ranks that compute a replica together, from different examples."""
    trace = context.trace
    for shard, data in enumerate(context.data):
        for index in range(len(data)):
            views = trace.views(context.position, "data", shard, index)
            first, *others = views or [0]
            odd = [rank for rank in others if not same_bits(views[rank], views[first])]
            if odd:
                names = ", ".join(trace.name_of("before", rank) for rank in [first, *odd])
                text = f"{names} compute one replica together, from different examples"
                yield context.found(
                    "examples", "other_examples_in_a_replica", text, kind="before", items=odd
                )
                break


def _against_batch(context: Context, batch: Batch) -> Iterator[Finding]:
    """Compares the examples with those of the batch that the data set defines."""
    shards = [rows_of(data) for data in context.data]
    given, asked = sum(shards, collections.Counter()), rows_of(batch)
    missing, extra = asked - given, given - asked
    if not missing and not extra:
        return
    num_inputs, _ = context.oracle.targets(batch)
    of_inputs = [rows_of(data[:num_inputs]) for data in context.data]
    if sum(of_inputs, collections.Counter()) == rows_of(batch[:num_inputs]):
        yield context.found(
            "examples",
            "labels_shifted",
            f"{extra.total()} of {asked.total()} inputs have a different target than in the data"
            " set",
        )
        return
    twins = [
        (a, b)
        for a, b in itertools.combinations(context.shards, 2)
        if shards[a] and not shards[b] - shards[a]
    ]
    all_same = len(shards) > 1 and all(shard == shards[0] for shard in shards)
    if all_same or (twins and extra and not extra.keys() - asked.keys()):
        text = f"all {len(shards)} received the same {shards[0].total()} examples"
        if not all_same:
            first, second = (context.trace.name_of("data", shard) for shard in twins[0])
            text = f"{first} and {second} received the same {shards[twins[0][1]].total()} examples"
        items = sorted({shard for pair in twins for shard in pair})
        yield context.found("examples", "same_examples", text, items=items)
        return
    wrong = [s for s in context.shards if shards[s] - asked]
    why = why_rows(asked, given, context.sizes, context.oracle.known_examples())
    if extra.keys() - asked.keys():
        of_first = [context.trace.arrays(0, "data", shard) or [] for shard in context.shards]
        usual = sum(rows_of(data).total() for data in of_first)
        names = "data set", "training"
        why = why_size((asked.total(), given.total()), (usual, usual), names) or why
    yield context.found("examples", *why, items=wrong)


def _different_examples(context: Context) -> Iterator[Finding]:
    """Finds shards that train on the same examples, without knowing the batch."""
    rows = [rows_of(context.inputs(shard)[:1]) for shard in context.shards]
    for first, second in itertools.combinations(context.shards, 2):
        shared = (rows[first] & rows[second]).total()
        size = min(rows[first].total(), rows[second].total())
        # In data with few distinct examples, replicas share many of them.
        are_different = all(
            len(rows[r]) >= _DIFFERENT_PART * rows[r].total() for r in (first, second)
        )
        if size and shared > _SAME_PART * size and are_different:
            yield context.found(
                "examples",
                "same_examples",
                f"replicas {first} and {second} train on the same examples: {shared} of {size}",
                items=(first, second),
            )


def parts_of_a_model(context: Context, found: Sequence[Finding]) -> str:
    """Returns a sentence if shards with equal examples send other gradients; else "".

    So do ranks that compute parts of one model. Replicas with equal examples would send equal ones.

    Args:
        context: the step.
        found: all its findings of examples.
    """
    if not found or not {each.detail for each in found} <= {"same_examples", _AGAIN}:
        return ""
    if not (context.has("raw") and context.has("data")):
        return ""
    rows = [rows_of(context.inputs(shard)[:1]) for shard in context.shards]
    raw = context.named("raw")
    twins = [(a, b) for a, b in itertools.combinations(context.shards, 2) if rows[a] == rows[b]]
    if not twins or any(_are_near(raw[a], raw[b]) for a, b in twins):
        return ""
    first, second = (context.trace.name_of("data", shard) for shard in twins[0])
    return (
        f"{first} and {second} have the same examples and send other gradients, and what the step"
        " leaves is right: if they compute parts of one model, pass mesh= to the recorder"
    )


def _are_near(first: Named, second: Named) -> bool:
    """Returns whether the gradients of two shards differ by rounding at most."""
    return first.keys() == second.keys() and all(
        distance(second[name], gradient) <= _NEARLY_EQUAL * norm(gradient)
        for name, gradient in first.items()
    )


def repeated_batch(context: Context, every: bool = True) -> str:
    """Returns a sentence if an earlier step has the same examples in order.

    Args:
        context: the step.
        every: whether every shard has to have the same examples again, or only some.
    """
    for position in range(context.position if context.has("data") else 0):
        earlier = [context.trace.arrays(position, "data", s) or [] for s in context.shards]
        data = list(zip(earlier, context.data, strict=True))
        same = [s for s, (a, b) in enumerate(data) if a and a[0].size and same_arrays(a, b)]
        if same and (len(same) == len(data) or not every):
            whose = "step" if len(same) == len(data) else "replica"
            who = context.number if whose == "step" else ", ".join(map(str, same))
            step = f"step {context.trace.steps[position]}"
            return f"{whose} {who} has the examples of {step} again, in the same order"
    return ""


def has_examples_second(first: Trace, second: Trace) -> bool:
    """Returns whether the examples are the second axis of the inputs, as in (time, batch).

    The first axis then has the same length everywhere, and the second axis of the reference that
    of all replicas together.
    """
    if len(first.shards) > 1 or len(second.shards) < 2:
        return False
    shapes = [
        [[a.shape for shard in step.shards for a in step.inputs(shard)] for step in pair]
        for pair in common_steps(first, second)
    ]
    are_known = all(
        own and other and all(len(s) > 1 for s in (*own, *other)) for own, other in shapes
    )
    return are_known and all(
        {s[0] for s in own} == {s[0] for s in other}
        and sum(s[1] for s in own) == sum(s[1] for s in other)
        and len(own) < len(other)
        for own, other in shapes
    )


def other_examples(first: Trace, second: Trace) -> dict[int, Why] | None:
    """Compares the inputs of all steps, ignoring the order within a step and the replica.

    Returns:
        Number of a step → why its inputs differ; None if no step is in both, a trace has no inputs,
        or if their first axis is not the examples.
    """
    if has_examples_second(first, second):
        return None
    both = list(common_steps(first, second))
    counted = _counted([(inputs_of(own), inputs_of(other)) for own, other in both])
    if not counted or not all(map(all, counted)):
        return None
    steps = [
        StepInputs(given, used, own, other)
        for (given, used), (own, other) in zip(counted, both, strict=True)
    ]
    of_first = set().union(*(step.given for step in steps))
    ids = [(pairs_of_ids(step.first), pairs_of_ids(step.second)) for step in steps]
    known = {own for asked, _ in ids for own, _ in asked}
    other_size = why_other_size(steps)
    found: dict[int, Why] = {}
    dropped: Why | None = None  # After a batch that was dropped, all batches are shifted.
    for step, noted in zip(steps, ids, strict=True):
        if step.given == step.used:
            continue
        if why := other_size or why_padded(step, steps):
            found[step.first.number] = why
            continue
        dropped = dropped or why_size(step.sizes, steps[0].sizes)
        if dropped:
            why = dropped
        elif again := _repeated_in_epoch(steps, step):
            why = _AGAIN, again
        elif repeated := repeated_batch(step.second, every=False):
            why = "not_reshuffled", repeated
        else:
            why = why_rows(step.given, step.used, step.second.sizes, of_first)
        if why[0] == "other_examples":
            why = why_other_order(step) or why
        if why[0] in _BY_ROWS:
            why = why_ids(*noted, known) or why
        found[step.first.number] = why
    # Another order in each epoch does not begin with that of a script that shuffles once.
    once = [why for why in found.values() if why[0] in ("not_reshuffled", _AGAIN)]
    return {n: once[0] if once and why[0] == "other_order" else why for n, why in found.items()}


def _repeated_in_epoch(steps: Sequence[StepInputs], step: StepInputs) -> str:
    """Returns a sentence if a step has examples of an earlier one, and the reference never does.

    All recorded steps are then of one epoch, in which each example is to be received once.
    """
    given = sum((each.given for each in steps), collections.Counter())
    used = sum((each.used for each in steps), collections.Counter())
    if max(given.values(), default=0) > 1 or used.keys() - given.keys():
        return ""
    earlier = set[Any]().union(
        *(each.used for each in steps if each.second.position < step.second.position)
    )
    again = sum(number for row, number in step.used.items() if row in earlier)
    if not again:
        return ""
    return (
        f"{again} of {step.used.total()} examples of step {step.second.number} were received in an"
        " earlier step, too; the first recording has each example once"
    )


def with_data_axes(first: Trace, second: Trace) -> Trace:
    """Returns a trace whose axes of data are all those over which the script splits the batch.

    Gradients may not be reduced over one of them, by which a recorder knows it: the ranks along it
    then hold whole weights, and the examples of all of them are those of the first trace.
    """
    for read in second.as_data.values() if other_examples(first, second) else ():
        other = with_data_axes(first, read())
        if other_examples(first, other) == {}:
            return other
    return second


def _counted(steps: Sequence[tuple[_Inputs, _Inputs]]) -> list[tuple[_Rows, _Rows]]:
    """Counts the rows of both recordings in each step, without padding if they differ in length.

    Batches that are padded to their longest example have other shapes on each replica.
    """
    parts = [part for pair in steps for inputs in pair for part in inputs]
    if len({part.shape[1] for part in parts}) <= 1:
        return [(count_rows(own), count_rows(other)) for own, other in steps]
    # Tokens that are more frequent at the end of rows than padding are removed from all rows, too.
    ends = collections.Counter(value for part in parts for value in part[:, -1:].ravel())
    starts = collections.Counter(value for part in parts for value in part[:, :1].ravel())
    found = []
    for end, start in itertools.product(*(each.most_common(2) for each in (ends, starts))):
        found.append(
            [
                (
                    count_rows(a, start[0], end[0]),
                    count_rows(b, start[0], end[0]),
                )
                for a, b in steps
            ]
        )
        if all(given == used for given, used in found[-1]):
            return found[-1]
    return found[0]


def compare_examples(others: Mapping[int, Why] | None, pair: StepPair) -> Iterator[Finding]:
    """Compares the inputs of a step.

    Args:
        others: the result of `other_examples`.
        pair: the step.
    """
    if others is None:
        return
    pair.second.mark_checked("examples")
    why = others.get(pair.first.number)
    if why and (text := _not_skipped(pair)):
        yield pair.second.found("examples", "overflow_not_skipped", text)
    elif why and not (pair.starts_equally and _is_converted_inside(pair, why[0])):
        is_drawn = why[0] in ("other_examples", "other_augmentation")
        if is_drawn and (text := _equal_loader_seeds(pair.second)):
            yield pair.second.found("random numbers", "same_random_numbers", text)
        if is_drawn and (text := _equal_arrays(pair)):
            yield pair.second.found("random numbers", "same_random_numbers", text)
        if is_drawn and (text := _augmented_again(pair)):
            yield pair.second.found("random numbers", "random_numbers_repeated", text)
        elif is_drawn and (other := _drawn_otherwise(pair)):
            cause, text, items = other
            yield pair.second.found("random numbers", cause, text, items=items)
        yield pair.second.found(
            "examples", *why, status=BY_DESIGN if why[0] == "sampler_padding" else FAULT
        )


def _not_skipped(pair: StepPair) -> str:
    """Returns a sentence if a step counts whose gradients overflow, which the reference skips."""
    numbers = [step.trace.about.skipped for step in (pair.first, pair.second)]
    step: Step | None = pair.second
    while step and numbers[0] > numbers[1]:
        if step.has("raw") and not all(map(are_finite, step.named("raw"))):
            return (
                f"gradients of step {step.number} overflow, and its update is made; the first"
                f" recording skips {count('update', numbers[0])}, and this one {numbers[1]}: from"
                " then on, steps have other examples"
            )
        step = step.previous
    return ""


def _equal_loader_seeds(step: Context) -> str:
    """Returns a sentence if the workers of all replicas' loaders have the same seeds; else ""."""
    seeds = {step.trace.about_of(shard).loader_seeds for shard in step.shards}
    if len(step.shards) < 2 or len(seeds) > 1 or not (own := seeds.pop()):
        return ""
    return (
        f"the workers of the replicas' loaders have the same seed, {own[0]}: what they draw, as"
        " for augmentations, is the same on each replica"
    )


def _equal_arrays(pair: StepPair) -> str:
    """Returns a sentence if replicas with other inputs have drawn an equal array; else "".

    Such as the times of a diffusion: next to the inputs, with numbers that are all different in the
    first recording.
    """
    step, first = pair.second, pair.first
    if any(
        s.trace.micro_batches(s.position, shard) > 1 for s in (step, first) for shard in s.shards
    ):
        return ""
    for index in range(1, min(map(len, (*step.data, *first.data)), default=0)):
        arrays, right = ([own[index] for own in s.data] for s in (step, first))
        if any(array.dtype.kind != "f" or not array.ndim for array in (*arrays, *right)):
            continue
        rows = [sum((rows_of([array]) for array in own), _Rows()) for own in (right, arrays)]
        if max(rows[0].values(), default=2) > 1 or rows[0].total() != rows[1].total():
            continue
        twins = [
            (a, b)
            for a, b in itertools.combinations(step.shards, 2)
            if arrays[a].size > 1
            and same_bits(arrays[a], arrays[b])
            and not same_bits(step.data[a][0], step.data[b][0])
        ]
        if twins:
            names = (step.trace.name_of("data", shard) for shard in twins[0])
            return (
                f"{' and '.join(names)} have other inputs, and next to them the same array"
                f" {index + 1}, whose numbers are all different in the first recording"
            )
    return ""


def _augmented_again(pair: StepPair) -> str:
    """Returns a sentence if examples have the inputs of an earlier step, and not in the reference.

    That is so if each epoch, or each step, draws the same augmentations.
    """
    own, right = ({*pairs_of_ids(step)} for step in (pair.second, pair.first))
    ids = [{each for each, _ in pairs} for pairs in (own, right)]
    for earlier, before in common_steps(pair.first.trace, pair.second.trace):
        if earlier.number >= pair.first.number:
            break
        first, second = {*pairs_of_ids(earlier)}, {*pairs_of_ids(before)}
        again = {each for each, _ in second} & {each for each, _ in first} & ids[0] & ids[1]
        repeated = {each for each, _ in own & second} & again
        if len(again) > 1 and repeated == again and not {x for x, _ in right & first} & again:
            return (
                f"step {pair.second.number} has the inputs of {len(again)} examples of step"
                f" {before.number} again; in the first recording they are augmented in another way"
            )
    return ""


def _drawn_otherwise(pair: StepPair) -> drawn.Why | None:
    """Explains examples that are new, on those replicas that have drawn other random numbers."""
    why = drawn.other_draws(pair, drawn.OF_SCRIPT)
    if why is None or why[0] == "same_random_numbers":
        return None
    known = {row for step, _ in common_steps(pair.first.trace, pair.second.trace)
             for data in step.data for row in rows_of(data[:1])}  # fmt: skip
    new = [s for s in pair.second.shards if not {*rows_of(pair.second.inputs(s)[:1])} <= known]
    return why if new == [*(why[2] or pair.second.shards)] else None


def _is_converted_inside(pair: StepPair, cause: str) -> bool:
    """Returns whether inputs of another scale or layout give approximately equal gradients.

    One of the models then scales or transposes its inputs, and a remaining difference has another
    cause.
    """
    terms, near = pair.gradients, Tolerance(given=max(pair.tolerance.usual, _NEAR))
    is_form = cause in ("other_normalisation", "other_layout")
    return is_form and bool(terms.names) and near.fits(terms.given[0], [(1.0, terms.reference)])
