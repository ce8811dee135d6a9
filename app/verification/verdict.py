"""Combines the checks of two traces and their comparison into verdicts."""

import dataclasses
import math
from collections.abc import Sequence

from app.verification.measurement import Measurement
from app.verification.pair_outcomes import BY_DESIGN, DIFFERENT, EQUAL, IDENTICAL
from app.verification.split import Split
from app.verification.straggler import Straggler
from app.verification.trace import KIND_TITLES
from app.verification.trace_comparison import PairDifference


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """The cause of a mismatch.

    Attributes:
        cause: short name; "unexplained" if no hypothesis holds.
        text: one sentence with the numbers.
    """

    cause: str
    text: str


NO_CAUSE = "unexplained"


@dataclasses.dataclass(frozen=True)
class Finding:
    """A mismatch or a straggler.

    Attributes:
        cause: short name.
        where: first step, kind, tensor and replica, and size of the difference.
        text: one sentence that explains it.
    """

    cause: str
    where: str
    text: str

    def __str__(self) -> str:
        return f"{self.cause.replace('_', ' ')}, {self.where}: {self.text}"


@dataclasses.dataclass(frozen=True)
class StrategyVerdict:
    """The result of comparing one training with the reference.

    Attributes:
        strategy: name of the strategy.
        measurements: measurements of every array of every step.
        first_mismatch: first measurement out of tolerance; None without one.
        diagnosis: explanation of the first mismatch; None without one.
        straggler: a replica that the others wait for; None without one.
        split: split of the training, which names shards and copies.
    """

    strategy: str
    measurements: Sequence[Measurement]
    first_mismatch: Measurement | None
    diagnosis: Diagnosis | None
    straggler: Straggler | None
    split: Split

    @property
    def outcome(self) -> str:
        """The verdict against the reference in words."""
        if self.first_mismatch:
            return DIFFERENT
        exact = all(measured.absolute32 == 0 for measured in self.measurements)
        return IDENTICAL if exact else EQUAL

    @property
    def passed(self) -> bool:
        """Whether there is neither a mismatch nor a straggler."""
        return not (self.first_mismatch or self.straggler)

    def findings(self) -> list[Finding]:
        """Returns all findings."""
        found = []
        if self.first_mismatch and self.diagnosis:
            where = self._where(self.first_mismatch)
            found.append(Finding(self.diagnosis.cause, where, self.diagnosis.text))
        if self.straggler:
            late = self.straggler
            found.append(
                Finding(
                    "slow_replica",
                    f"in every step, gradients of replica {late.replica_id}",
                    f"it sends them {1000 * late.wait_sec:.0f} ms after all others, which took"
                    f" {1000 * late.work_sec:.0f} ms, and they wait for it; the numbers are right",
                )
            )
        return found

    def _where(self, first: Measurement) -> str:
        """Returns the position and the size of the first mismatch."""
        if first.kind == "examples":
            return (
                f"first at step {first.step}, examples of"
                f" {self.split.name_shard(first.replica_id)}:"
                f" {first.absolute:.0f} are wrong"
            )
        kind, tensor = first.kind, first.tensor
        if kind == "agreement":
            kind, _, tensor = tensor.partition("/")
        # For common values, replica 0 represents all bitwise identical replicas.
        shared = first.kind in ("sums", "slots", "updates", "weights") and not any(
            (m.order, m.tensor) == (first.order, first.tensor) and m.replica_id != first.replica_id
            for m in self.measurements
        )
        split, held = self.split, range(self.split.num_copies) if shared else [first.replica_id]
        who = split.name_items(first.kind, held)
        allowed = f"rounding allows {first.tolerance:.2g}" if first.limit else "none is allowed"
        kind = KIND_TITLES.get(kind, kind)
        what = kind if tensor == kind else f"{kind} of {tensor}"
        return f"first at step {first.step}, {what} on {who}, by {first.absolute:.3g} ({allowed})"


@dataclasses.dataclass(frozen=True)
class PairVerdict:
    """Whether two trainings are the same.

    They are the same if they start from equal weights, receive the same examples, and every step of
    both is right within rounding. The accumulated difference by rounding is reported separately. If
    BatchNorm normalises different parts of a batch, they are two trainings by design, and both can
    be right.

    Attributes:
        strategies: names of the strategies.
        outcome: IDENTICAL, EQUAL, DIFFERENT or BY_DESIGN.
        differences: differences of all values that both have.
        by_design: relative difference of the first gradients, if BatchNorm normalises different
            parts of a batch; else None.
    """

    strategies: tuple[str, str]
    outcome: str
    differences: Sequence[PairDifference]
    by_design: float | None = None

    @classmethod
    def of(
        cls,
        first: StrategyVerdict,
        second: StrategyVerdict,
        differences: Sequence[PairDifference],
        *,
        by_design: float | None = None,
    ) -> "PairVerdict":
        """Compares two trainings by their verdicts and their differences.

        Args:
            first, second: verdicts against the reference.
            differences: differences between the two.
            by_design: see the attribute.
        """
        if all(difference.identical for difference in differences):
            outcome = IDENTICAL
        elif first.first_mismatch or second.first_mismatch:
            outcome = DIFFERENT
        else:
            outcome = EQUAL if by_design is None else BY_DESIGN
        return cls((first.strategy, second.strategy), outcome, differences, by_design)

    def farthest_in_the_end(self) -> PairDifference:
        """Returns the largest difference of the weights after the last step, or of any values."""
        last = max(d.step for d in self.differences)
        apart = [d for d in self.differences if d.step == last and not d.identical]
        weights = [d for d in apart if d.kind == "weights"]
        return max(
            weights or apart or self.differences, key=lambda d: (math.isnan(d.absolute), d.absolute)
        )
