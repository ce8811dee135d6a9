"""Checks that each example of the global batch is on one replica."""

import collections
import itertools
from collections.abc import Collection, Iterator, Sequence

from lockstep.answer.verdict import Finding
from lockstep.context import Context
from lockstep.numeric.arrays import rows_of, same_bits
from lockstep.oracles import Batch

_DIFFERENT_PART = 0.9
_SAME_PART = 0.5  # Replicas that share a larger part of their examples are a fault.


def check_examples(context: Context) -> Iterator[Finding]:
    """Checks the examples of all shards against the batch of the data set, or each other."""
    if not context.has("data"):
        return
    yield from _different_in_a_replica(context)
    if context.batch is not None:
        context.mark_checked()
        yield from _against_batch(context, context.batch)
    elif len(context.shards) > 1:
        context.mark_checked()
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
                yield context.found("other_examples_in_a_replica", text, kind="before", items=odd)
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
        yield context.found("same_examples", text, items=items)
        return
    wrong = [s for s in context.shards if shards[s] - asked]
    why = why_rows(asked, given, context.sizes, context.oracle.known_examples())
    yield context.found(*why, items=wrong)


def why_rows(
    asked: collections.Counter,
    given: collections.Counter,
    shard_sizes: Sequence[int],
    of_data_set: Collection[int],
) -> tuple[str, str]:
    """Returns cause and text for unexpected or missing rows.

    Args:
        asked: the examples of the batch.
        given: the examples that the shards received.
        shard_sizes: numbers of the shards' examples.
        of_data_set: the examples of other batches, if known.
    """
    missing, extra = asked - given, given - asked
    sizes, num = "/".join(map(str, shard_sizes)), asked.total()
    if extra and not extra.keys() - asked.keys():
        return "repeated_examples", (
            f"{extra.total()} examples were received twice and {missing.total()} not at all; shards"
            f" of {sizes}, batch of {num}"
        )
    if extra:
        if of_data_set and not extra.keys() - {*of_data_set}:
            return "other_order", (
                f"{extra.total()} of {given.total()} examples belong to other batches: another"
                " order of examples"
            )
        return "other_examples", (
            f"{extra.total()} of {given.total()} examples are not in the batch of the reference"
        )
    return "lost_examples", (
        f"{missing.total()} of {num} examples were received by no replica; shards of {sizes}"
    )


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
                "same_examples",
                f"replicas {first} and {second} train on the same examples: {shared} of {size}",
                items=(first, second),
            )
