"""Measures how far each node is from the reference's; it is shown, and decides nothing."""

import contextlib
from collections.abc import Iterator

from lockstep.engine.look import Look
from lockstep.engine.verdict import EXAMPLES, NODES, OUTPUTS, SUM, UPDATE, Measured
from lockstep.numeric.arrays import same_bits

Shares = list[tuple[float, bool]]  # Of each array: difference over its bound; whether it is equal.


class Table:
    """The differences of all steps that were compared, by node."""

    def __init__(self) -> None:
        self._shares: dict[str, Shares] = {}

    def add(self, look: Look) -> None:
        """Adds a step; one that cannot be measured is left out, as the verdict does not need it."""
        with contextlib.suppress(Exception):
            for node, shares in [*_nodes(look)]:
                self._shares.setdefault(node, []).extend(shares)

    @property
    def rows(self) -> tuple[Measured, ...]:
        """The nodes that were compared, in the order of the data."""
        return tuple(
            Measured(node, max(share for share, _ in own), sum(e for _, e in own), len(own))
            for node in NODES
            if (own := self._shares.get(node))
        )


def _nodes(look: Look) -> Iterator[tuple[str, Shares]]:
    pair, batches = look.pair, look.batches
    if batches.are_known and pair.has("data"):
        differs = batches.differ(pair.number)
        yield EXAMPLES, [(float("inf") if differs else 0.0, not differs)]
    yield (
        OUTPUTS,
        [(float(x.max()) / look.limit, not x.any()) for x in look.outputs_apart if len(x)],
    )
    for own, shares in zip(pair.sums, look.sum_shares, strict=True):
        equal = {name: same_bits(own[name], pair.right_sum[name]) for name in shares}
        yield SUM, [(share, equal[name]) for name, share in shares.items()]
    compared = [x.share for x in look.claim.changes if x.share is not None]
    yield UPDATE, [(share, share == 0) for share in compared]
