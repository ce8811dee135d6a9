"""Checks that random layers use different random numbers on each replica."""

from collections.abc import Iterator

from .context import StepContext
from .distances import MARGIN, relative_distance, relative_norm, same_bits
from .findings import Finding
from .layers import is_seed_of, seeds_drawn
from .modes import as_replica


def check_random_numbers(context: StepContext) -> Iterator[Finding]:
    """Checks the seeds that random layers use."""
    seeds = sorted(seeds_drawn(context.recording))
    if not seeds or len(context.replicas) == 1:
        return
    context.mark_checked()
    before = context.per_replica("before")
    equal = {
        i: [r for r in context.replicas[1:] if same_bits(before[r][i], before[0][i])] for i in seeds
    }
    looking = [r for r in context.replicas[1:] if any(r in e for e in equal.values())]
    looking = [r for r in looking if looks_at_number(context, r)]
    same = [
        i for i in seeds
        if any(r not in looking or not looks_at_number(context, r, i) for r in equal[i])
    ]  # fmt: skip
    if same:
        one = context.one
        names = ", ".join([
            layer.name for layer in one.random_layers
            if any(is_seed_of(layer, one.state[i]) for i in same)
        ][:3])  # fmt: skip
        yield context.found(
            "same_random_numbers",
            f"{len(same)} of {len(seeds)} seed generators ({names or 'of the model'}) have the"
            " same state on several replicas, which draw the same masks for different examples",
            replicas=tuple(context.replicas), tensors=tuple(context.paths[i] for i in same),
        )  # fmt: skip


def looks_at_number(context: StepContext, r: int, index: int | None = None) -> bool:
    """Returns whether random numbers of replica r depend on its number, not only on the seed.

    The step then differs from the step with number 0.

    Args:
        r: the replica.
        index: index of a seed in the state; layers with other seeds are switched off.
    """
    one, state = context.one, context.per_replica("before")[r]

    def differs() -> bool:
        results = []
        for number in (r, 0):
            with as_replica(number):
                results.append(one.step(state, context.data[r]))
        (mine, first), spread = results, context.spread[r]
        if mine.y_pred:
            return relative_distance(mine.y_pred, first.y_pred) > MARGIN * spread.forward
        return relative_norm(mine.raw, first.raw) > MARGIN * spread.backward

    if index is None:
        return differs()
    others = [v for v in one.random_layers if not is_seed_of(v, one.state[index])]
    return one.without(others, differs)
