"""Finds variables that should be bitwise identical on all replicas."""

from collections.abc import Iterator

from .context import StepContext
from .distances import distance, norm, ratio_of, same_bits
from .findings import Finding
from .recorder_imports import Arrays


def other_bits(
    context: StepContext, per_replica: list[Arrays], index: int, when: str
) -> Iterator[Finding]:
    """Yields a finding if a variable of other replicas differs from that of replica 0."""
    first = per_replica[0][index]
    other = [r for r in context.replicas if not same_bits(per_replica[r][index], first)]
    if other:
        apart = max(distance(per_replica[r][index], first) for r in other)
        yield context.found(
            "diverged_replicas",
            f"{when}, these replicas have other values than replica 0",
            replicas=tuple(other), tensors=(context.paths[index],),
            distance=ratio_of(apart, norm(first)),
        )  # fmt: skip
