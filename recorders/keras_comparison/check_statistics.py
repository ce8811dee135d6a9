"""Checks moving statistics and seeds after the step."""

from collections.abc import Iterator

from .context import StepContext
from .distances import MARGIN, is_far, same_bits
from .findings import Finding


def check_statistics(context: StepContext) -> Iterator[Finding]:
    """Checks moving statistics and seeds of each replica."""
    indices = [i for i, kind in enumerate(context.kinds) if kind in ("statistic", "seed")]
    if not indices:
        return
    context.mark_checked()
    for r in context.replicas:
        after, before, own = (
            context.per_replica("after")[r],
            context.per_replica("before")[r],
            context.own[r].after,
        )
        allowed = MARGIN * context.spread[r].forward
        wrong = [
            i for i in indices
            if not same_bits(after[i], own[i])
            and (context.kinds[i] == "seed" or is_far(after[i], own[i], allowed))
        ]  # fmt: skip
        stay = all(same_bits(after[i], before[i]) for i in wrong)
        if context.synchronizes and wrong:
            yield context.found(
                "local_statistics",
                "the layer is synchronized, but its moving statistics are those of one"
                " replica's examples, not of the whole batch",
                replicas=(r,), tensors=tuple(context.paths[i] for i in wrong),
            )  # fmt: skip
            continue
        if wrong and not (stay and r in context.in_inference):
            yield context.found(
                "inference_mode" if stay else "unexplained",
                "moving statistics and seeds do not change in the training step" if stay
                else "moving statistics or seeds differ from those of one device for the"
                " replica's examples",
                replicas=(r,), tensors=tuple(context.paths[i] for i in wrong),
            )  # fmt: skip
