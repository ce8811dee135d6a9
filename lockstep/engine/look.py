"""What is known of one step beside its claim: judged once, read by nodes and names."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lockstep.data.trace import STATE, WEIGHT
from lockstep.engine import bounds, settings
from lockstep.engine.averages import Averages
from lockstep.engine.claim import Claim
from lockstep.engine.examples import Batches, Matched, factors_of, matched_examples, rows_apart
from lockstep.engine.pair import Pair
from lockstep.engine.random import Unlike, unlike_states
from lockstep.engine.solve import CLOSE, Formula, Term
from lockstep.engine.step import Step
from lockstep.engine.verdict import FAULT
from lockstep.numeric.arrays import EPS, MARGIN, TINY, Named, dense, distance, norm, of_each
from lockstep.numeric.state_bounds import COMPUTED, unit_of_state
from lockstep.numeric.tolerance import KERNELS, Tolerance

# A network of tens of layers adds some hundred roundings of 1e-7 to an output; ten times that.
OF_OUTPUTS = 1e-4
# The gradient of a loss is a difference, of a probability and 1, that cancels to 3 digits.
OF_LOSS = 1e-3
# Fractions that are shown of an array's largest gap, for which it is called wrong in a place.
SHOWN_GAP = 1e-2


@dataclasses.dataclass(frozen=True)
class Finding:
    """The first wrong node of a step: where it is, the formulas that fit, what was seen beside.

    Attributes:
        node: the node.
        names: the reference's names of the wrong tensors; empty for all.
        ranks: the wrong ranks; empty for all.
        given: the formulas of what is wrong.
        right: the reference's formulas, of the same terms.
        seen: evidence of this node, which only names read.
        status: `NOT_COMPARED` if layers that mix or draw for each rank may cause it, `BY_DESIGN` if
            all that differs is a batch that a sampler fills up.
        is_before: whether it happened after the step before, not in this one.
    """

    node: str
    names: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    given: tuple[Formula, ...] = ()
    right: tuple[Formula, ...] = ()
    seen: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    status: str = FAULT
    is_before: bool = False

    def right_of(self, formula: Formula) -> Formula | None:
        """Returns the reference's formula of the tensors of another one; None if it has none."""
        for right in self.right:
            if {*right.names} & {*formula.names} and len(right.terms) == len(formula.terms):
                return right
        return None


class Look:
    """One step of both trainings, with what was judged of it.

    Args:
        pair: the step.
        bound: the bound of the reference's gradients.
        batches: the examples of all steps.
        averages: the averages of weights that the reference keeps.
    """

    def __init__(self, pair: Pair, bound: Tolerance, batches: Batches, averages: Averages) -> None:
        self.pair, self.batches, self.averages = pair, batches, averages
        self._tight = bounds.of_step(bound, pair)

    @functools.cached_property
    def bound(self) -> Tolerance:
        """The bound of the step's gradients, with ties where the outputs show some."""
        if all(share <= 1 for own in self._tight_shares for share in own.values()):
            return self._tight
        apart = max((float(np.max(x, initial=0.0)) for x in self.outputs_apart), default=0.0)
        if not self.outputs_apart:
            apart = bounds.ROUNDING_OF_OUTPUTS
        return bounds.with_ties(self._tight, self.pair, apart)

    @functools.cached_property
    def solved(self) -> bounds.Bound:
        """The bound of sums of terms that were solved for."""
        return bounds.solved(self.bound)

    @functools.cached_property
    def _tight_shares(self) -> list[dict[str, float]]:
        """For each copy weight → difference of its sum over the bound without ties."""
        right = [(1.0, self.pair.right_sum)]
        return of_each(lambda own: self._tight.shares(own, right), self.pair.sums)

    @functools.cached_property
    def sum_shares(self) -> list[dict[str, float]]:
        """For each copy weight → difference of its sum from the reference's over the bound."""
        if self.bound is self._tight:
            return self._tight_shares
        right = [(1.0, self.pair.right_sum)]
        return of_each(lambda own: self.bound.shares(own, right), self.pair.sums)

    def wrong(self, own: Named, right: Named | None = None) -> list[str]:
        """Returns the names of the gradients that are not right."""
        right = self.pair.right_sum if right is None else right
        shares = self.bound.shares(own, [(1.0, right)])
        return [name for name, share in shares.items() if not share <= 1]

    @functools.cached_property
    def wrong_sums(self) -> dict[int, list[str]]:
        """Copy → weights of which it got a wrong gradient."""
        found = {
            copy: [name for name, share in shares.items() if not share <= 1]
            for copy, shares in enumerate(self.sum_shares)
        }
        return {copy: names for copy, names in found.items() if names}

    @functools.cached_property
    def unrefuted(self) -> list[str]:
        """Weights of wrong sums that agree, since their state has too few digits to tell.

        State of a unit u agrees where its changes differ by COMPUTED · u: a gradient that differs
        by less may have been used.
        """
        found = []
        for copy, names in self.wrong_sums.items():
            own, right = self.pair.sums[copy], self.pair.right_sum
            for name in names:
                unit = unit_of_state(self.pair.reference.ends[0].get(name))
                far = distance(own[name], right[name])
                if unit > EPS and far <= COMPUTED * unit * max(norm(own[name]), norm(right[name])):
                    found.append(name)
        return [*dict.fromkeys(found)]

    @functools.cached_property
    def claim(self) -> Claim:
        """The claim of this step."""
        return Claim(self.pair, self.bound)

    # Examples, outputs and loss.

    @functools.cached_property
    def has_turns(self) -> bool:
        """Whether forward passes come after an update, as a generator's after a critic's."""
        step = self.pair.training
        return any(call.startswith("update ") for s in step.shards for call in step.calls(s))

    @functools.cached_property
    def _wrong_early(self) -> set[str]:
        """Weights that are wrong, in a step that has forward passes after an update."""
        wrong = Claim(self.pair, self._tight).wrong if self.has_turns else ()
        return {x.variable.second for x in wrong if x.variable.kind == WEIGHT}

    @functools.cached_property
    def late(self) -> set[str]:
        """Weights and statistics after others that an earlier update of the step leaves wrong."""
        step = self.pair.training
        for shard in step.shards if self._wrong_early else ():
            for number in range(step.trace.micro_batches(step.position, shard)):
                early = step.updated_before(shard, number)
                if early & self._wrong_early:
                    return {x.first for x in self.pair.variables if x.kind != STATE} - {
                        x.first for x in self.pair.variables if x.second in early
                    }
        return set()

    @functools.cached_property
    def matched(self) -> list[Matched]:
        """The examples that both trainings have, of passes through weights that may be right."""
        is_known, before = self.pair.has("data"), self.pair.training.updated_before
        found = matched_examples(self.pair, self.batches.padding) if is_known else []
        return [m for m in found if not self._wrong_early & before(m.shard, m.number)]

    @functools.cached_property
    def outputs_apart(self) -> list[np.ndarray]:
        """How far the outputs of each example are apart, for each forward pass."""
        return [rows_apart(m.arrays["y_pred"]) for m in self.matched if m.arrays["y_pred"]]

    @functools.cached_property
    def limit(self) -> float:
        """The relative difference of outputs that rounding can cause."""
        unit = self._tight.unit
        of_16_bits = 4 * unit * self._tight.times if unit > EPS else 0.0
        return max(OF_OUTPUTS, of_16_bits, MARGIN * EPS)

    @property
    def limit_of_loss(self) -> float:
        """The relative difference of loss gradients that rounding can cause."""
        return max(OF_LOSS, self.limit)

    @functools.cached_property
    def loss_factors(self) -> list[tuple[Matched, np.ndarray, np.ndarray]]:
        """For each forward pass the factors of loss gradients, and how far these are off."""
        found = []
        for matched in self.matched if not self.pair.late else ():  # Losses of a step add up.
            arrays = matched.arrays["y_grad"]
            if not arrays or all(np.all(dense(x) == 1) for both in arrays for x in both):
                continue  # 1: a script differentiates outputs by inputs, as for a penalty.
            factors = factors_of(arrays)
            usual = float(np.nanmedian(factors)) if np.isfinite(factors).any() else 0.0
            found.append((matched, factors, rows_apart(arrays, usual)))
        return found

    @functools.cached_property
    def loss_factor(self) -> float | None:
        """The factor of all loss gradients over the reference's; None if there is not one."""
        factors = [np.nanmedian(f) for _, f, _ in self.loss_factors if np.isfinite(f).any()]
        is_one = all(np.all(x <= self.limit_of_loss) for *_, x in self.loss_factors)
        if not factors or not is_one:
            return None
        largest = float(np.max(np.abs(factors)))
        return float(np.mean(factors)) if np.ptp(factors) <= self.limit_of_loss * largest else None

    def loss_agrees(self, shares: Sequence[float] | np.ndarray = ()) -> bool | None:
        """Returns whether the loss of the batch is the reference's; None if it is not recorded.

        Args:
            shares: the factor of each shard's loss in that of the batch; of none, any usual form.
        """
        first, own = _loss_of(self.pair.reference), _loss_of(self.pair.training)
        if not (first and own):
            return None
        if len(shares) == len(own):
            forms = [float(np.dot(own, shares))]
        elif len(own) > 1 and len({*own}) == 1:
            forms = [own[0]]  # One program reports the loss of the whole batch on all devices.
        else:
            forms = self._forms_of_loss(own)
        if self._is_loss(first, forms):
            return True
        return None if _is_part(self.pair.training) else False

    @functools.cached_property
    def reported(self) -> str:
        """Says which loss is reported, if it is the reference's in no form: a sum, a mean, a part.

        That is no part of the claim: a right step may have it.
        """
        first, own = _loss_of(self.pair.reference), _loss_of(self.pair.training)
        if not (self.pair.has("loss") and first and own):
            return ""  # What is only differentiated may be a part.
        forms, parts = self._forms_of_loss(own), _parts_of_loss(self.pair.training)
        if parts is None:
            return ""
        # Ranks of one model each report its loss, or a part of it, some of them the same one.
        means = [float(np.mean(each)) for each in parts]
        for number in range(1, 1 + max(map(len, parts), default=0)):
            forms += self._forms_of_loss([number * mean for mean in means])
        # Micro-batches may be averaged later, and a script may scale its loss, by a power of two.
        forms += [form * by for form in forms for by in (self.num_passes, 1 / self.num_passes)]
        scale = sum(first) / own[0] if own[0] else 0.0
        by = float(2.0 ** np.round(np.log2(scale))) if 0 < scale < np.inf else 1.0
        if self._is_loss(first, [*forms, *(form * by for form in forms)]):
            return ""
        return f"ranks report losses of {own[:4]}, and {first[:4]} in the reference"

    def _forms_of_loss(self, own: Sequence[float]) -> list[float]:
        """Returns the loss of the batch that those of shards may stand for."""
        num, sizes = self.pair.num_ranks, self.pair.training.sizes
        forms = [by * x for x in (sum(own), own[0]) for by in (1.0, num, 1 / num)]
        return forms + ([float(np.dot(own, sizes) / sum(sizes))] if all(sizes) else [])

    def _is_loss(self, first: Sequence[float], forms: Sequence[float]) -> bool:
        """Returns whether a form is the loss of the reference; losses of examples may cancel."""
        of_examples = sum(
            float(np.sum(x, where=np.isfinite(x)))  # A mask is -inf, with a gradient of 0.
            for kinds in zip(*map(self.pair.reference.arrays, ("y_pred", "y_grad")), strict=True)
            for a, g in zip(*kinds, strict=False) if a.shape == g.shape
            for x in [np.abs(dense(a) * dense(g))]
        ) if self.pair.reference.has("y_pred", "y_grad") else 0.0  # fmt: skip
        right, given = np.array([sum(first), sum(first) / len(first)])[:, None], np.array(forms)
        allowed = self._limit_of_value * (np.abs(right) + of_examples) + TINY
        is_near = (np.abs(right - given) <= allowed) | (right == given)  # Also where it overflows.
        return bool(np.any(is_near | (np.isnan(right) & np.isnan(given))))

    @property
    def _limit_of_value(self) -> float:
        """The relative difference of a loss that rounding, as seen in outputs, can cause."""
        if not self.outputs_apart:
            return max(self._tight.of_batch, self.limit)
        if self._tight.unit > EPS:
            return self.limit  # The loss is rounded as outputs are.
        apart = max(float(np.max(x, initial=0.0)) for x in self.outputs_apart)
        return KERNELS + MARGIN * min(apart, self.limit)

    # What is recorded beside arrays.

    @functools.cached_property
    def random(self) -> list[Unlike]:
        """Random states unlike the reference's."""
        return unlike_states(self.pair)

    @functools.cached_property
    def settings(self) -> dict[str, tuple[Any, Any]]:
        """Settings of optimizers that differ, of some rank and weight, with both values."""
        return settings.other_settings(self.pair)

    @functools.cached_property
    def layers(self) -> dict[str, str]:
        """What differs in the layers: "mode", "dtype", "settings", in words."""
        return settings.other_layers(self.pair)

    @property
    def numbers(self) -> list[int]:
        """The numbers of shards, of ranks, and of ranks along axes, above 1."""
        mesh, pair = self.pair.training.trace.mesh, self.pair
        sizes = [len(pair.shards), pair.num_ranks, *(mesh.axes.values() if mesh else ())]
        return [n for n in dict.fromkeys(sizes) if n > 1]

    @property
    def num_passes(self) -> int:
        """The number of forward passes of a shard in this step that may be micro-batches."""
        step = self.pair.training
        numbers = (step.trace.micro_batches(step.position, shard) for shard in step.shards)
        return 1 if self.has_turns else max(numbers)

    @property
    def skipped(self) -> str:
        """Says how many updates the trainings, or their ranks, skip, if the numbers differ."""
        trace, right = self.pair.training.trace, self.pair.reference.trace.about.skipped
        own = [trace.about_of(shard).skipped for shard in self.pair.shards]
        return f"{own} updates are skipped, {right} in the reference" if {*own} != {right} else ""


def _parts_of_loss(step: Step) -> list[list[float]] | None:
    """Returns for each shard the losses of its ranks, if they compute it together; else [].

    None if some of them report none.
    """
    kind, ranks = step.kind_of_loss, step.trace.model_axes
    found = [step.trace.views(step.position, kind, shard, 0) for shard in step.shards]
    if ranks and any(len(each) < np.prod([*ranks.values()]) for each in found):
        return None
    return [[float(np.sum(dense(x))) for x in each.values()] for each in found] if ranks else []


def _is_part(step: Step) -> bool:
    """Returns whether ranks that compute one shard together each report a part of its loss."""
    for shard in step.shards:
        views = [*step.trace.views(step.position, step.kind_of_loss, shard, 0).values()]
        if any(not np.array_equal(own, views[0]) for own in views[1:]):
            return True
    return False


def _loss_of(step: Step) -> list[float]:
    """Returns the loss of each shard; empty if it is not recorded."""
    kind = step.kind_of_loss
    if not step.has(kind) or not all(step.arrays(kind)):
        return []
    return [float(np.sum(dense(own[0]))) for own in step.arrays(kind)]


# --- Places ---------------------------------------------------------------------------------------


def where(observed: np.ndarray, right: np.ndarray) -> str:
    """Says in which rows, columns or part of the elements an array is wrong; "" if everywhere."""
    gap = np.abs(dense(observed) - dense(right))
    largest = float(np.max(np.where(np.isfinite(gap), gap, 0), initial=0.0))
    wrong = ~(gap <= SHOWN_GAP * largest)
    if wrong.all() or not wrong.any():
        return ""
    for axis, word in ((0, "rows"), (1, "columns")):
        if wrong.ndim > axis:
            others = tuple(i for i in range(wrong.ndim) if i != axis)
            places = np.flatnonzero(wrong.any(axis=others))
            if len(places) < wrong.shape[axis]:
                return f"in {word} {_ranges(places)} of {wrong.shape[axis]}"
    return f"in {np.mean(wrong):.0%} of the elements"


def _ranges(places: np.ndarray) -> str:
    breaks = np.flatnonzero(np.diff(places) > 1)
    both = zip([0, *(breaks + 1)], [*breaks, len(places) - 1], strict=True)
    shown = [f"{places[a]}–{places[b]}" if a != b else f"{places[a]}" for a, b in both]
    return ", ".join(shown[:4]) + (", …" if len(shown) > 4 else "")


def parts_of_ranks(pair: Pair, name: str) -> list[tuple[int, tuple[slice, ...]]]:
    """Returns ranks with the slices of a gradient that they hold; none if they hold all of it."""
    trace = pair.training.trace
    own = next((v.second for v in pair.variables if v.first == name), "")
    shape = pair.shapes.get(name, ())
    for kind in ("clipped", "sums"):
        found, offset = list[tuple[int, tuple[slice, ...]]](), 0
        for rank in pair.copies if trace.mesh else ():
            part = np.shape(trace.local(pair.training.position, kind, rank).get(own, 0.0))
            axes = [i for i, n in enumerate(part[: len(shape)]) if n != shape[i]]
            if len(part) != len(shape) or not axes:
                found = []
                break
            axis = axes[0]
            if offset + part[axis] > shape[axis]:
                offset = 0
            place = slice(offset, offset + part[axis])
            found.append((rank, (*[slice(None)] * axis, place)))
            offset += part[axis]
        if found:
            return found
    return []


def factors_of_parts(pair: Pair, given: Sequence[Named], term: Term) -> list[Formula]:
    """Returns the factors of the parts that ranks hold, over a term; no names where there is none.

    Args:
        pair: the step.
        given: for each copy the whole arrays.
        term: the reference's.
    """
    found = list[Formula]()
    for name, right in term.arrays.items():
        for rank, place in parts_of_ranks(pair, name):
            own, first = given[rank][name][place], right[place]
            factor = float(np.sum(own * first)) / max(float(np.sum(first * first)), TINY)
            fits = distance(own, factor * first) <= CLOSE * norm(own) + TINY
            names = (name,) if fits else ()
            operator = f"part of rank {rank}"
            found.append(Formula(names, (term,), (factor,), (True,), (rank,), operator))
    return found
