"""Checks that each example of the global batch is on one replica."""

from collections import Counter
from collections.abc import Iterator

from .context import StepContext
from .distances import row_hashes
from .findings import Finding
from .recorder_imports import leaves


def check_examples(context: StepContext) -> Iterator[Finding]:
    """Checks the examples of all replicas against the batch of the dataset."""
    if context.batch is None:
        return
    context.mark_checked()
    inputs = len(leaves(context.one.unpack(context.batch)[0]))
    given, asked = row_hashes(context.whole), row_hashes(context.batch)
    missing, extra = asked - given, given - asked
    if not missing and not extra:
        return
    x_given, x_asked = row_hashes(context.whole[:inputs]), row_hashes(context.batch[:inputs])
    if x_given == x_asked:
        yield context.found(
            "labels_shifted",
            f"{sum(extra.values())} of {len(context.batch[0])} inputs have a different target than"
            " in the data set",
        )
        return
    shards = [row_hashes(data) for data in context.data]
    if len(shards) > 1 and all(shard == shards[0] for shard in shards):
        yield context.found(
            "same_examples",
            f"all {len(shards)} replicas received the same {len(context.data[0][0])} examples",
            replicas=tuple(context.replicas),
        )
    else:
        yield context.found(*_why_other_examples(context, asked, given))


def _why_other_examples(context: StepContext, asked: Counter, given: Counter) -> tuple[str, str]:
    """Returns cause and text for unexpected or missing rows."""
    missing, extra = asked - given, given - asked
    sizes, num = "/".join(map(str, context.sizes)), sum(asked.values())
    if extra and all(hashed in asked for hashed in extra):
        return "repeated_examples", (
            f"the replicas received {sum(extra.values())} examples twice and"
            f" {sum(missing.values())} not at all; shards of {sizes}, batch of {num}"
        )
    if extra:
        return "other_examples", (
            f"{sum(extra.values())} of {sum(given.values())} examples are not in this batch of"
            " the data set"
        )
    return "lost_examples", (
        f"no replica received {sum(missing.values())} of {num} examples; shards of {sizes}"
    )
