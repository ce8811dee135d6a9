"""What the checks of two traces and their comparison say together."""

import dataclasses
import math
from collections.abc import Sequence

from app.records.pair_outcomes import BY_DESIGN, DIFFERENT, EQUAL, IDENTICAL
from app.verification.measurement import Measurement
from app.verification.split import Split
from app.verification.straggler import Straggler
from app.verification.trace import KIND_TITLES
from app.verification.trace_comparison import PairDifference


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """What is wrong.

    Attributes:
        cause: a short name, "unexplained" where no hypothesis holds.
        text: one sentence with the numbers.
    """

    cause: str
    text: str


NO_CAUSE = "unexplained"


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something that is not as it should be.

    Attributes:
        cause: a short name.
        where: the first step, kind, tensor and replica, and by how much.
        text: one sentence that explains it.
    """

    cause: str
    where: str
    text: str

    def __str__(self) -> str:
        return f"{self.cause.replace('_', ' ')}, {self.where}: {self.text}"


@dataclasses.dataclass(frozen=True)
class StrategyVerdict:
    """What the comparison of one training with the reference found.

    Attributes:
        strategy: name of the strategy.
        measurements: of every array of every step.
        first_mismatch: the first one out of tolerance, None where there is none.
        diagnosis: why, None likewise.
        straggler: a replica for which the others wait, None where there is none.
        split: names the shards and copies.
    """

    strategy: str
    measurements: Sequence[Measurement]
    first_mismatch: Measurement | None
    diagnosis: Diagnosis | None
    straggler: Straggler | None
    split: Split

    @property
    def outcome(self) -> str:
        """The verdict against the reference, in its words."""
        if self.first_mismatch:
            return DIFFERENT
        exact = all(measured.absolute32 == 0 for measured in self.measurements)
        return IDENTICAL if exact else EQUAL

    @property
    def passed(self) -> bool:
        """Whether there is neither a mismatch nor a straggler."""
        return not (self.first_mismatch or self.straggler)

    def findings(self) -> list[Finding]:
        """Returns everything that was found."""
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
        """Returns where the first mismatch is, and how large it is."""
        if first.kind == "examples":
            return (
                f"first at step {first.step}, examples of"
                f" {self.split.name_shard(first.replica_id)}:"
                f" {first.absolute:.0f} are wrong"
            )
        kind, tensor = first.kind, first.tensor
        if kind == "agreement":
            kind, _, tensor = tensor.partition("/")
        # Of what replicas have in common, replica 0's stands for all that hold the same bits.
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

    They are if they start from the same weights, are given the same examples, and every step of
    both is right but for rounding. How far rounding has carried them apart by then is another
    matter, and shown beside it. Where BatchNorm normalises other parts of a batch in one than in
    the other, they are two trainings by design, both of which can be right.

    Attributes:
        strategies: names of the two.
        outcome: IDENTICAL, EQUAL, DIFFERENT or BY_DESIGN.
        differences: of all that they have in common.
        by_design: how far apart the first gradients are, relative, where BatchNorm normalises other
            parts of a batch in one training than in the other; None where it does not.
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
            first, second: of each against the reference.
            differences: of the two.
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
        """Returns where weights are farthest apart after the last step, or else anything is."""
        last = max(d.step for d in self.differences)
        apart = [d for d in self.differences if d.step == last and not d.identical]
        weights = [d for d in apart if d.kind == "weights"]
        return max(
            weights or apart or self.differences, key=lambda d: (math.isnan(d.absolute), d.absolute)
        )
