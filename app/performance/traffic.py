"""Describes the bytes that devices send in a step: counted in its graph, and by formula."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from app.report.result import Block, Table
from app.runtime import console

if TYPE_CHECKING:  # Not imported before its devices are set up.
    from strategies.base import Strategy


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes of weights, gradients, activations and their gradients between devices in a step.

    Attributes:
        terms: name, formula and bytes of each kind of traffic, by formula; None without a formula.
        links: sender, receiver and counted bytes; None if they cannot be counted.
        note: why there is no formula, or no count.
    """

    terms: list[tuple[str, str, int]] | None
    links: list[tuple[int, int, int]] | None
    note: str

    def describe(self, name: str) -> list[Block]:
        """Returns the table and a verdict for the output; `name` is that of the case."""
        totals = [
            None if sent is None else sum(size for *_, size in sent)
            for sent in (self.terms, self.links)
        ]
        rows = [[what, formula, f"{size:,}", ""] for what, formula, size in self.terms or []]
        rows.append(["in all", "", *("–" if size is None else f"{size:,}" for size in totals)])
        header = ["what travels", "", "by formula", "counted in the graph"]
        table = Table(f"bytes between devices in a step of {name}", header, rows)
        if self.note or not self.links:
            return [table, self.note or "nothing is sent between devices"]
        sender, receiver, most = max(self.links, key=lambda link: link[2])
        agree = "equal" if totals[0] == totals[1] else "formula and count DIFFER"
        number = console.count(len(self.links), "connection")
        busiest = f"the busiest from device {sender} to {receiver} with {most:,} bytes"
        return [table, f"{agree}; {number}, {busiest}"]


def traffic_of(strategy: "Strategy", batch: Sequence[Any]) -> Traffic:
    """Counts the bytes of a step, and computes them by formula.

    Args:
        strategy: a built strategy; it is not trained.
        batch: images and labels of a global batch.
    """
    from app.performance.traffic_count import UnknownTrafficError, count_traffic
    from app.performance.traffic_formula import terms_of

    terms, links, notes = None, None, []
    try:
        links = [(*link, size) for link, size in sorted(count_traffic(strategy, batch).items())]
    except UnknownTrafficError as error:
        notes.append(f"not counted: {error}")
    try:
        terms = terms_of(strategy, len(batch[0]))
    except UnknownTrafficError as error:
        notes.append(f"no formula: {error}")
    return Traffic(terms, links, "; ".join(notes))
