"""Keeps what the claims of all steps of a comparison have shown."""

import dataclasses
import itertools

import numpy as np

from lockstep.answer.verdict import Finding
from lockstep.context import Context
from lockstep.data.trace import OF_GRADIENTS, STATE, STATISTIC, WEIGHT
from lockstep.numeric.arrays import Rows, same_bits
from lockstep.reference import StepPair
from lockstep.stages.claim import Claim


@dataclasses.dataclass
class Summary:
    """What the claims of all steps have shown.

    Attributes:
        owned: names of state that its rank owns.
        shared: names of state that differs on every copy in some step.
        unknown: number of elements whose change was not compared, over all steps.
        compared: names of weights whose update was compared in a step that trains them.
        trained: names of the weights that both trainings train, in some step.
        steps: numbers of the steps in which the update of a weight was compared.
        local: names of moving statistics that the reference, shard by shard, has of copy 0 alone.
    """

    owned: set[str] = dataclasses.field(default_factory=set)
    shared: set[str] = dataclasses.field(default_factory=set)
    unknown: int = 0
    compared: set[str] = dataclasses.field(default_factory=set)
    trained: tuple[set[str], set[str]] = dataclasses.field(default_factory=lambda: (set(), set()))
    steps: set[int] = dataclasses.field(default_factory=set)
    local: set[str] = dataclasses.field(default_factory=set)

    def add(self, claim: Claim) -> None:
        """Adds a step."""
        self.owned |= claim.owned
        self.shared |= {x.variable.second for x in claim.differing if x.variable.kind == STATE}
        if claim.pair.has_same_shards:
            self.local |= {
                x.variable.second
                for x in claim.changes
                if x.variable.kind == STATISTIC and x.copy and x.share is None
            }
        self.unknown += sum(change.num_unknown for change in claim.changes if not change.copy)
        compared = {x.variable.second for x in claim.changes if x.is_compared_weight}
        self.steps |= {claim.pair.second.number} if compared else set()
        compared |= _compared_by_rules(claim.pair)
        first, second = _trained_in(claim.pair.first), _trained_in(claim.pair.second)
        for trained, of_step in zip(self.trained, (first, second), strict=True):
            trained |= of_step
        second |= {claim.pair.in_second(name) for name in first}
        self.compared |= compared & second

    def is_owned(self, finding: Finding) -> bool:
        """Returns whether a finding only says that ranks own different state."""
        names = {*finding.tensors}
        is_of_state = bool(names) and names <= self.owned - self.shared
        return finding.detail == "diverged_replicas" and is_of_state


def _trained_in(step: Context) -> set[str]:
    """Returns the weights of which a step has a gradient that is not 0, or that it changes."""
    found = set()
    for gradients in itertools.chain.from_iterable(map(step.named, OF_GRADIENTS)):
        for name, gradient in gradients.items():
            values = gradient.values if isinstance(gradient, Rows) else gradient
            found |= {name} if np.any(values) else set()
    for before, after in zip(step.named("before"), step.named("after"), strict=False):
        both = [name for name in step.of_kind(WEIGHT) if name in before and name in after]
        found |= {name for name in both if not same_bits(before[name], after[name])}
    return found


def _compared_by_rules(pair: StepPair) -> set[str]:
    """Returns the weights whose gradients were compared, and whose updates the rules compute.

    Each recording's own update is checked by its optimizer's rule, and both rules are compared.
    """
    if not pair.computes_the_same:
        return set()
    return {pair.in_second(name) for name in pair.rules() if name in pair.gradients.names}
