"""One step of two recordings, with all arrays by the names and in the layouts of the reference.

One vocabulary: *raw* is what a rank computed, *received* what it got from the reduction, *sum* what
enters clipping or the optimizer, *used* what the optimizer used, *right* the reference's. Gradients
are dense, in float64; that of a weight that a loss does not use is 0. What was not recorded is an
empty mapping or list, never an array of zeros.
"""

import functools
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from lockstep.data.match import Matching
from lockstep.data.trace import STATE, STATISTIC, WEIGHT, Trace
from lockstep.engine.step import Step
from lockstep.numeric.arrays import (
    TINY,
    Array,
    Named,
    add,
    blocks,
    computed,
    dense,
    distance,
    norm,
    norm_in,
    same_bits,
    scaled_all,
    stored,
    wide,
)
from lockstep.numeric.sampling import without_sums
from lockstep.numeric.state_bounds import unit_of_state
from lockstep.oracles.rules import Rule, RuleOracle

# A rule gives the change of weights to 1e-3, beside what these round; Muon computes in bfloat16, in
# five iterations: its matrices are known to a few percent.
OF_RULE, OF_MIXED, UNITS_OF_WEIGHTS = 1e-3, 0.05, 8
# A loaded state has the bits of the reference; of a state in another layout, float32's digits.
SAME_START = 1e-7


class Variable(NamedTuple):
    """A weight, statistic or optimizer state that both trainings have.

    Attributes:
        first, second: its keys in the reference and in the training.
        transpose: permutation of the training's axes to those of the reference.
        kind: "weight", "statistic" or "optimizer state".
        weight: the reference's name of its weight; "" for statistics and common counters.
        slot: of optimizer state, its name in the optimizer, as "momentum_buffer".
    """

    first: str
    second: str
    transpose: tuple[int, ...]
    kind: str
    weight: str
    slot: str = ""

    def as_first(self, array: Array) -> np.ndarray:
        """Returns an array of the training in the layout of the reference, in float64."""
        return dense(self.placed(array))

    def placed(self, array: Array) -> np.ndarray:
        """Returns an array of the training in the layout of the reference."""
        found = wide(array)
        return found.transpose(self.transpose) if found.ndim == len(self.transpose) else found


class State(NamedTuple):
    """A variable before and after a step."""

    old: np.ndarray
    new: np.ndarray

    @property
    def change(self) -> np.ndarray:
        """By how much the step changes it."""
        return dense(self.new) - dense(self.old)


def variables_of(reference: Trace, training: Trace, matching: Matching) -> list[Variable]:
    """Returns the weights, statistics and optimizer state that both trainings have."""
    found = []
    for names in matching.pairs:
        kind = reference.kinds[names.first]
        weight = names.first if kind == WEIGHT else ""
        found.append(Variable(*names, kind, weight))
        if weight:
            slots = _common_slots(reference, training, names.first, names.second)
            found += [Variable(*keys, names.transpose, STATE, weight, slot) for slot, keys in slots]
    common = _common_slots(reference, training, "", "")
    found += [Variable(*keys, (), STATE, "", slot) for slot, keys in common]
    return [each for each in found if reference.variables[each.first].slot != "learning_rate"]


def _common_slots(
    reference: Trace, training: Trace, first: str, second: str
) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yields slot and keys in both trainings of the state of a weight; "" for common state."""
    slots, others = reference.slots.get(first, {}), training.slots.get(second, {})
    yield from ((slot, (key, others[slot])) for slot, key in slots.items() if slot in others)


class Pair:
    """A step of the reference and of the training that is verified.

    Args:
        reference: the step of the reference.
        training: the step of the training.
        matching: pairs of weights and statistics of both.
        late: weights that are left out: they have passed through others that are wrong.
    """

    def __init__(
        self, reference: Step, training: Step, matching: Matching, late: Collection[str] = ()
    ) -> None:
        self.reference, self.training, self.matching = reference, training, matching
        every = variables_of(reference.trace, training.trace, matching)
        self.variables = [x for x in every if (x.weight or x.first) not in late]
        self.late = late

    @property
    def number(self) -> int:
        """The number of the step."""
        return self.training.number

    @property
    def copies(self) -> range:
        """The copies of the weights in the training."""
        return self.training.copies

    @property
    def shards(self) -> range:
        """The parts of the training's batch."""
        return self.training.shards

    @property
    def num_ranks(self) -> int:
        """The number of ranks, or of replicas."""
        return max(len(self.shards), len(self.copies))

    @property
    def is_port(self) -> bool:
        """Whether the two trainings have different frameworks."""
        about = self.reference.trace.about, self.training.trace.about
        return about[0].framework != about[1].framework

    def has(self, *kinds: str) -> bool:
        """Returns whether arrays of each kind were recorded in both."""
        return self.reference.has(*kinds) and self.training.has(*kinds)

    @functools.cached_property
    def previous(self) -> "Pair | None":
        """The previous step, if both recorded it."""
        first, second = self.reference.previous, self.training.previous
        return Pair(first, second, self.matching) if first and second else None

    # Gradients.

    @functools.cached_property
    def names(self) -> list[str]:
        """The weights whose gradients both recordings have, or list as 0."""
        first = sum_of(self.reference, 0)
        second = {n for c in self.copies for n in self._to_first(sum_of(self.training, c))}
        if not (first and second):
            return []
        listed = {*self.reference.trace.about.gradients}, {*self.training.trace.about.gradients}
        return [
            each.first for each in self.matching.pairs
            if (each.first in first or each.first in second) and each.first not in self.late
            and (each.first in first or each.first in listed[0])
            and (each.first in second or each.second in listed[1])
        ]  # fmt: skip

    @functools.cached_property
    def shapes(self) -> Named:
        """Weight → shape of its gradient."""
        copies = [self._to_first(sum_of(self.training, copy)) for copy in reversed(self.copies)]
        all_ = [sum_of(self.reference, 0), *copies]

        def shape_of(name: str) -> tuple[int, ...]:
            return next(wide(stored(own, name)).shape for own in all_ if name in own)

        return computed(dict.fromkeys(name for own in all_ for name in own), shape_of)

    def _to_first(self, named: Named) -> Named:
        return self.matching.to_first(named) if named else {}

    def _filled(self, own: Named) -> Named:
        """Returns the gradients of all names in float64; 0 where a loss does not use a weight."""

        def gradient(name: str) -> Array:
            return stored(own, name) if name in own else np.zeros(self.shapes[name])

        return computed(self.names, gradient, is_wide=True)

    @functools.cached_property
    def right_sum(self) -> Named:
        """The reference's gradient of the whole batch before clipping."""
        return self._filled(sum_of(self.reference, 0)) if self.names else {}

    @functools.cached_property
    def right_used(self) -> Named:
        """The gradient that the reference's optimizer used."""
        return self._filled(self.reference.applied(0)) if self.names else {}

    @functools.cached_property
    def right_received(self) -> Named:
        """The reference's gradient of the whole batch, before the script changes it by hand."""
        step = self.reference
        if self.names and len(step.shards) == 1 and (passes := self._summed_passes(step, 0)):
            return self._filled(passes)
        kind = "sums" if step.has("sums") else "raw"
        is_known = self.names and step.has(kind) and len(step.shards) == 1
        return self._filled(step.named(kind)[0]) if is_known else {}

    @functools.cached_property
    def sums(self) -> list[Named]:
        """What enters clipping, or the optimizer, of each copy."""
        return self._of_copies([sum_of(self.training, copy) for copy in self.copies])

    @functools.cached_property
    def received(self) -> list[Named]:
        """What each copy got from the reduction, before the script changes it by hand."""
        if not (self.names and self.training.has("sums") and self.training.clips_sum):
            return []
        return self._of_copies(self.training.named("sums"))

    @functools.cached_property
    def used(self) -> list[Named]:
        """What the optimizer of each copy used."""
        return self._of_copies([self.training.applied(copy) for copy in self.copies])

    def _of_copies(self, copies: Sequence[Named]) -> list[Named]:
        return [self._filled(self._to_first(own)) if self.names else {} for own in copies]

    @functools.cached_property
    def raw(self) -> list[Named]:
        """What each shard computed, in all its passes; empty if it was not recorded."""
        passes = [self._summed_passes(self.training, shard) for shard in self.shards]
        if self.names and all(passes):
            return [self._filled(self._to_first(own)) for own in passes]
        if not (self.names and self.training.has("raw")):
            return []
        computed = [self._to_first(own) for own in self.training.named("raw")]
        known = {name for own in computed for name in own}
        if any(np.any(self.sums[0][n]) for n in self.names if n not in known):
            return []  # Of sharded weights, only what is reduced is recorded.
        return [self._filled(own) for own in computed]

    @staticmethod
    def _summed_passes(step: Step, shard: int) -> Named:
        """Returns what several backward passes add together; empty of a single one."""
        passes = step.trace.backward_passes(step.position, shard)
        names = dict.fromkeys(name for own in passes for name in own) if len(passes) > 1 else ()
        return computed(names, lambda n: add([dense(own[n]) for own in passes if n in own]))

    @functools.cached_property
    def passes(self) -> list[list[Named]]:
        """What each backward pass of each shard adds; empty lists of a single pass."""
        trace, position = self.training.trace, self.training.position
        found = [trace.backward_passes(position, shard) for shard in self.shards]
        return [[self._filled(self._to_first(own)) for own in each] for each in found]

    @functools.cached_property
    def weights(self) -> Named:
        """The weights before the step."""
        before, kinds = self.reference.starts[0], self.reference.trace.kinds
        names = [name for name in before if kinds[name] == WEIGHT]
        return computed(names, lambda name: stored(before, name), is_wide=True)

    @property
    def framework_share(self) -> float | None:
        """The factor with which a framework reduces what a shard computed; None if unknown.

        What a script sums or averages itself is its own, as all reductions in JAX are.
        """
        if len(self.shards) == 1:
            return 1.0
        about = self.training.trace.about
        if about.reduction:
            return self.training.share if about.framework != "jax" else None
        # `fully_shard` averages over the ranks in the backward pass.
        is_sharded = any("backward, all-reduced" in self.training.calls(s) for s in self.shards)
        return 1 / len(self.shards) if is_sharded else None

    @functools.cached_property
    def clip_factor(self) -> float:
        """The factor by which the reference clips its gradient; 1 if it does not."""
        return common_factor(self.right_used, self.right_sum)

    @functools.cached_property
    def hand_factor(self) -> float:
        """The factor by which the reference changes its gradient by hand, as in clipping."""
        return common_factor(self.right_sum, self.right_received)

    @functools.cached_property
    def clips(self) -> bool:
        """Whether something between sum and optimizer saturates, in one of the trainings."""
        if self.reference.has("unclipped") or self.training.has("unclipped"):
            return True
        calls = [
            *self.reference.calls(0),
            *(c for s in self.shards for c in self.training.calls(s)),
        ]
        if any(call.startswith("clip") for call in calls) or self.clip_factor < 1 - 1e-6:
            return True
        return self.follows_rule is False and not self.reference.has("clipped")

    # State.

    @functools.cached_property
    def starts_equally(self) -> bool:
        """Whether all copies of both begin the step with the same weights and statistics.

        Statistics are asked for on the first copy alone: each replica may have its own.
        """
        if not self.has("before"):
            return False
        first, copies = self.reference.named("before")[0], self.training.named("before")
        for variable in self.variables:
            if variable.kind == STATE or variable.first not in first:
                continue
            right = wide(first[variable.first])
            for copy, own in enumerate(copies):
                if variable.second not in own or (variable.kind != WEIGHT and copy):
                    continue
                apart = distance(variable.placed(own[variable.second]), right)
                if not apart <= SAME_START * norm(right) + TINY:
                    return False
        return True

    def states(self, variable: Variable) -> tuple[State | None, list[State | None]]:
        """Returns a variable of the reference, and of each copy; see `_state`."""
        return self.state(variable), [self.state(variable, copy) for copy in self.copies]

    def state(self, variable: Variable, copy: int | None = None) -> State | None:
        """Returns a variable of the reference, or of a copy; see `_state`."""
        weight = next((v for v in self.variables if v.first == variable.weight), variable)
        if copy is None:
            starts, ends = self.reference.starts[0], self.reference.ends[0]
            return _state(starts, ends, variable.first, weight.first)
        starts, ends = self.training.starts[copy], self.training.ends[copy]
        return _state(starts, ends, variable.second, weight.second)

    def right(self, variable: Variable, copy: int) -> State | None:
        """Returns a variable of the reference as a copy should have it.

        A statistic is what the copy's part makes of it, if the reference ran part by part; None if
        that is unknown, as where something else changes the statistic in the step, too.
        """
        first = self.state(variable)
        if first is None or variable.kind != STATISTIC or not (copy and self.has_same_shards):
            return first
        ways = self.training.trace.about.passes[self.training.position :][:1]
        if any("ddp" in own[:-1] for own in ways):
            return None  # DDP sends the statistics of rank 0 before each pass but the first.
        numbers, training = range(self.training.trace.about.num_replicas), self.training.trace
        shard = (training.numbers or numbers)[training.shards_of(copy)[0]]
        of_first, own = (
            (self.reference.trace.named(self.reference.position, "own_after", part) or {}).get(
                variable.first
            )
            for part in (0, shard)
        )
        is_known = of_first is not None and own is not None and same_bits(of_first, first.new)
        return State(first.old, np.asarray(own)) if is_known else None

    def known_states(self, variable: Variable) -> tuple[State, list[State]] | None:
        """Returns a variable of the reference, and of each copy; None if one of them has none."""
        first, copies = self.states(variable)
        known = [state for state in copies if state is not None]
        return (first, known) if first is not None and len(known) == len(copies) else None

    @functools.cached_property
    def oracle(self) -> RuleOracle | None:
        """The rules of the reference's optimizer; None if they are unknown."""
        used = self.reference.applied(0)
        found = RuleOracle(self.reference.trace, self.reference.position, used) if used else None
        return found if found and found.rules else None

    @functools.cached_property
    def follows_rule(self) -> bool | None:
        """Whether its rule makes the reference's update of what it applies; None without a rule.

        Something between both, as clipping that was not recorded, makes another one.
        """
        if self.oracle is None:
            return None
        new = self.oracle.update(self.reference.starts[0], self.reference.applied(0))
        for variable in [v for v in self.variables if v.kind == WEIGHT and v.first in new]:
            first, rule = self.states(variable)[0], self.rule(variable.first)
            if first is None or rule is None:
                continue
            num_sums = self.reference.trace.num_sums(np.shape(first.new))
            far, change = (
                norm(without_sums(x, num_sums))
                for x in (dense(new[variable.first]) - dense(first.new), dense(first.change))
            )
            slack = UNITS_OF_WEIGHTS * unit_of_state(first.new) * norm(first.new)
            if far > (OF_MIXED if rule.mixes_elements else OF_RULE) * change + slack:
                return False
        return True

    def rule(self, weight: str) -> Rule | None:
        """Returns the rule that updates a weight in the reference; None if it is unknown."""
        return self.oracle.rules.get(weight) if self.oracle else None

    @functools.cached_property
    def has_same_shards(self) -> bool:
        """Whether the reference ran the model for each part of the training's batch."""
        first, second = self.reference, self.training
        if not (first.has("shards", "data") and second.has("data") and len(first.shards) == 1):
            return False
        computed: dict[int, list[bytes]] = {}
        for inputs, numbers in zip(first.inputs(0), first.arrays("shards")[0], strict=False):
            for row, number in zip(inputs, numbers.ravel().tolist(), strict=False):
                computed.setdefault(number, []).append(np.asarray(row).tobytes())
        given = [[r.tobytes() for r in x] for s in self.shards for x in second.inputs(s) if len(x)]
        return sorted(map(sorted, computed.values())) == sorted(map(sorted, given))


def _state(before: Named, after: Named, key: str, weight: str) -> State | None:
    """Returns a variable of a copy before and after a step; None if the copy has none.

    State that the step creates was 0, or its weight if it is a copy of that, as in more digits.
    """
    if key not in after:
        return None
    new = after[key]
    if key in before:
        return State(before[key], new)
    own = before.get(weight) if key != weight else None
    if own is not None and np.shape(own) == np.shape(new) and distance(new, own) < norm(new) / 2:
        return State(own, new)
    return State(np.zeros_like(np.asarray(new)), new)


def sum_of(step: Step, copy: int) -> Named:
    """Returns what enters clipping, or the optimizer, on a copy; empty if it is unknown."""
    if not step.clips_sum:  # Each shard clips what it sends: what it computes enters.
        raw = step.named("raw") if step.has("raw") else []
        names = dict.fromkeys(name for own in raw for name in own)
        sums = computed(names, lambda n: add([dense(own[n]) for own in raw if n in own]))
        return scaled_all(sums, step.share)
    if own := step.entering(copy):
        return own
    for kind in ("sums", "clipped"):
        if step.has(kind):
            return step.named(kind)[copy]
    return step.applied(copy)


def common_factor(changed: Named, before: Named) -> float:
    """Returns the factor that brings gradients nearest to others; 1 if either is unknown."""
    names = [name for name in changed if name in before]
    squares = sum(norm_in(before, name) ** 2 for name in names)
    products = (blocks(stored(changed, name), stored(before, name)) for name in names)
    product = sum(float(np.sum(a * b)) for parts in products for a, b in parts)
    return product / squares if squares and np.isfinite(product) else 1.0


def copies_are_equal(copies: Sequence[Named], name: str) -> bool:
    """Returns whether all copies have bitwise identical arrays."""
    return all(same_bits(stored(own, name), stored(copies[0], name)) for own in copies)


def norm_of(named: Named) -> float:
    """Returns the norm of all arrays together."""
    return sum(norm_in(named, name) ** 2 for name in named) ** 0.5


def has_batch_norms(step: Step) -> bool:
    """Returns whether layers normalise over the examples of a batch, in training mode."""
    trace = step.trace
    off = set.intersection(*(trace.in_evaluation(step.position, shard) for shard in step.shards))
    layers = [x for x in trace.about.layers if "batchnorm" in str(x.get("class")).lower()]
    return any(layer.get("name") not in off for layer in layers)


def names_in_norms(step: Step) -> set[str]:
    """Returns the names of weights and statistics of layers that normalise."""
    norms = [x for x in step.trace.about.layers if "norm" in str(x.get("class")).lower()]
    return {name for layer in norms for name in layer.get("weights", ())}
