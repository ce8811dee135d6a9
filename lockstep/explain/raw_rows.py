"""Rows of the node `raw`: what the shards send, as the reference's gradient of the whole batch."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from lockstep.explain.backward_passes import rows_of_backward_passes
from lockstep.explain.factors import meanings
from lockstep.explain.rows import Meaning, Row
from lockstep.explain.solve import solve
from lockstep.numeric.arrays import EPS, Named, are_finite, dense, norm, total_norm
from lockstep.numeric.tolerance import Expression
from lockstep.oracles.rules import IN_GRADIENT
from lockstep.reference import StepPair

_CLOSE = 1e-4  # Relative; of solved coefficients to those of a pattern.
_OF_ALL = ("other_loss_reduction",)  # Causes of factors that no tensor escapes.


@dataclasses.dataclass(frozen=True)
class Raw:
    """What the shards send, and the gradient of the whole batch that they are to add up to.

    Attributes:
        sent: for each shard, what it sends.
        share: the factor of each in the right sum.
        right: the gradient of the whole batch.
        means: says what a common factor of all gradients means.
        what: what is compared, in words.
        of: what it is compared with.
    """

    sent: Sequence[Named]
    share: float
    right: Named
    means: Callable[[float], Sequence[Meaning]]
    what: str = "each gradient"
    of: str = "that of the first recording"

    @property
    def factors(self) -> list[float]:
        """The factors of what is sent in the right sum."""
        return [self.share] * len(self.sent)

    @functools.cached_property
    def total(self) -> Named:
        """The sum of what is sent."""
        names = dict.fromkeys(name for own in self.sent for name in own)
        return {
            name: self.share * np.sum([dense(g[name]) for g in self.sent if name in g], axis=0)
            for name in names
        }

    def row(
        self, why: tuple[str, str], factors: Sequence[float] | np.ndarray,
        items: tuple[int, ...] = (), more: Expression = (),
    ) -> Row:  # fmt: skip
        """Returns the row of other factors of what is sent, and further terms."""
        return Row(*why, [*_of(self.sent, factors), *more], items, tuple(map(float, factors)))

    def of_shares(self, shares: Sequence[float], detail: str, reason: str) -> Row:
        """Returns the row of shards that count equally, although their shares of the batch differ.

        Args:
            shares: the shares, which add up to 1.
            detail: the detail.
            reason: what has these shares.
        """
        times = len(self.sent) * np.asarray(shares, float)
        listed = ", ".join(f"{each:.4g}" for each in times)
        text = (
            f"the replicas count equally; counted {listed} times, as they have {reason}, their"
            " gradients give that of the whole batch"
        )
        return self.row((detail, text), self.share * times)

    def of_sizes(self, sizes: Sequence[int]) -> Iterator[Row]:
        """Yields the row of shards of different sizes that count equally."""
        if len(self.sent) == len(sizes) and np.ptp(sizes):
            shown = ", ".join(f"{size:g}" for size in sizes)
            shares = [size / sum(sizes) for size in sizes]
            yield self.of_shares(shares, "mean_of_means", f"{shown} examples")

    def of_factor(self) -> Iterator[Row]:
        """Yields rows of a common factor of all gradients."""
        one, known = solve(self.right, [self.total])
        if known.all() and np.isfinite(one).all() and one[0]:
            times = 1 / float(one[0])
            for why in self.named(f"{self.what} is {times:.6g} times {self.of}", times):
                yield self.row(why, np.divide(self.factors, times))

    def named(self, text: str, times: float) -> list[tuple[str, str]]:
        """Returns detail and sentence of each meaning of a factor; it is a scaled gradient else."""
        known = [(detail, f"{text}: {reason}") for detail, reason in self.means(times)]
        return known or [("scaled_gradient", text)]


def raw_rows(pair: StepPair, raw: Sequence[Named], share: float) -> Iterator[Row]:
    """Yields rows that may give the reference's gradient, the most specific first.

    Args:
        pair: the step.
        raw: what each shard sends, or the whole gradient as that of one shard.
        share: the factor of what is sent in the right sum.
    """
    of_batch = Raw(raw, share, pair.gradients.reference, functools.partial(meanings, pair))
    if all(pair.second.sizes):  # They are known.
        yield from of_batch.of_sizes(pair.second.sizes)
    yield from _rows_of_micro_batches(pair, of_batch)
    yield from _rows_of_previous(pair, of_batch)
    yield from rows_of_backward_passes(pair, [*pair.different_gradients])
    yield from of_batch.of_factor()
    if len(raw) > 1:
        yield from _rows_of_each_factor(pair, of_batch)
    yield from rows_of_some(pair, of_batch)
    yield from _rows_of_weights(pair, of_batch)


def _of(raw: Sequence[Named], factors: Sequence[float] | np.ndarray) -> list[tuple[float, Named]]:
    return list(zip(map(float, factors), raw, strict=True))


def _rows_of_micro_batches(pair: StepPair, raw: Raw) -> Iterator[Row]:
    """Yields gradients that a script changes between micro-batches, or the reference alone does."""
    step, terms = pair.second, pair.gradients
    own = [each for each in terms.removed if each]
    own = own if step.has("raw") else own[:1]  # Sharded gradients have been summed already.
    of_first = terms.reference_removed
    if not own:
        if of_first:
            text = "gradients are added that the first recording clears before the step's own ones"
            more = [(-1.0, of_first)]
            yield raw.row(("stale_gradient", text), raw.factors, more=more)
            before = terms.previous
            if before:  # The second recording adds up those of all steps.
                more += [(-1.0, before.applied[0]), (1.0, before.reference_applied)]
                yield raw.row(("stale_gradient", text), raw.factors, more=more)
        return
    calls = step.trace.calls(step.position, 0)
    ends = [i for i, call in enumerate(calls) if call.startswith("backward")]
    between = set(calls[ends[0] : ends[-1]]) if ends else set()
    if clips := sorted(call for call in between if call.startswith("clip")):
        text = f"gradients are clipped ({clips[0].removeprefix('clip ')}) after each micro-batch"
        why = "clipped_in_each_micro_batch", f"{text}, not only their sum"
    elif "unscale" in between:
        text = "gradients are divided by the loss scale (unscale_) between the micro-batches of a"
        why = "unscaled_between_micro_batches", f"{text} step, and those after it are not"
    elif "clear" in between:
        text = f"gradients are cleared between the {len(ends)} micro-batches of a step"
        why = "lost_micro_batch", f"{text}: only those after it count"
    else:
        text = f"the script changes gradients between the {len(ends)} micro-batches of a step"
        why = "scaled_gradient", text
    share = raw.share if step.has("raw") else 1.0
    more = [(share, each) for each in own] + ([(-1.0, of_first)] if of_first else [])
    yield raw.row(why, raw.factors, more=more)


def _rows_of_previous(pair: StepPair, raw: Raw) -> Iterator[Row]:
    before = pair.gradients.previous
    kept = pair.second.previous
    if kept is None:
        return
    applied = pair.matching.to_first(kept.applied(0))
    if applied:
        text = "the gradients of the previous step are not cleared, and those of this one are added"
        yield raw.row(("stale_gradient", text), raw.factors, more=[(-1.0, applied)])
    if before and before.reference:
        # What is sent is that of the step before: this one's reference is not a sum of it.
        old, text = before.reference, "the gradients are those of the previous step"
        names = [name for name in raw.total if name in old]
        is_old = bool(names) and pair.tolerance.fits(raw.total, [(1.0, old)], names)
        if is_old and total_norm(raw.total):
            yield Row("stale_gradient", text, [(1.0, raw.right)], factors=tuple(raw.factors))


def _rows_of_each_factor(pair: StepPair, raw: Raw) -> Iterator[Row]:
    """Yields the row of a factor for each shard."""
    factors, known = solve(raw.right, raw.sent)
    if not (known.all() and np.isfinite(factors).all()) or not np.ptp(factors):
        return
    listed = ", ".join(f"{factor / raw.share:.4g}" for factor in factors)
    norms = [total_norm(own) for own in raw.sent]
    are_equal = np.ptp(norms) < _CLOSE * max(norms)
    text = f"each replica clips its own gradient to norm {norms[0]:.4g} before the sum"
    if are_equal and min(factors) > raw.share:
        yield raw.row(
            ("clipped_before_the_sum", f"{text}: they are {listed} times as large"), factors
        )
    elif are_equal and abs(total_norm(raw.right) - norms[0]) < _CLOSE * norms[0]:
        text += ", as the first recording clips the gradient of the whole batch"
        yield raw.row(("clipped_before_the_sum", text), factors)
    if abs(sum(factors) - sum(raw.factors)) < 1e-3 and np.ptp(factors) > 1e-3 * max(factors):
        text = (
            f"the replicas count equally; counted {listed} times, as with other sums of sample"
            " weights or masks, their gradients give that of the whole batch"
        )
        yield raw.row(("mean_of_means", text), factors)
    if why := _of_padded_sizes(pair, factors):
        yield raw.row(("other_loss_reduction", why), factors)
    odd = tuple(r for r, f in enumerate(factors) if abs(f / raw.share - 1) > _CLOSE)
    shown = ", ".join(f"{raw.share / f:.4g}" if f else "0" for f in factors)
    scales = [pair.second.trace.loss_scale(pair.second.position, s) for s in pair.second.shards]
    cause = "other_loss_scale" if np.ptp(scales) and len(odd) < len(factors) else "scaled_gradient"
    text = f"the gradients of the replicas are {shown} times their parts of that of the whole batch"
    yield raw.row((cause, text), factors, odd if len(odd) < len(factors) else ())


def _of_padded_sizes(pair: StepPair, factors: np.ndarray) -> str:
    """Returns a sentence if shards have divided by the sizes of inputs that each pads on its own.

    Counted as these sizes, their gradients give that of the whole batch.
    """
    shards = [pair.second.data[shard] for shard in pair.second.shards]
    if len(shards) != len(factors) or not all(shards):
        return ""
    arrays = [own[0] for own in shards]
    if any(array.ndim < 2 for array in arrays) or len({a.shape[1:] for a in arrays}) < 2:
        return ""
    sizes = np.array([array.size for array in arrays], float)
    times = factors / np.maximum(sizes, 1)
    if min(times) <= 0 or np.ptp(times) > _CLOSE * max(times):
        return ""
    listed = ", ".join(f"{size:g}" for size in sizes)
    return (
        f"each replica divides its losses by the {listed} elements of its own inputs, which are"
        " padded to different lengths: by other numbers than the first recording"
    )


def rows_of_some(pair: StepPair, raw: Raw) -> Iterator[Row]:
    """Yields factors that some tensors have, and other ones not."""
    wrong = [n for n in raw.right if not pair.tolerance.fits(raw.right, [(1.0, raw.total)], [n])]
    for of_group, names in _groups(pair, raw.total, wrong):
        times = 1 / of_group
        text = f"the gradients of {len(names)} weights are {times:.6g} times that of the first"
        # The loss, and mostly the number of micro-batches, changes all of them.
        known = [why for why in raw.named(f"{text} recording", times) if why[0] not in _OF_ALL]
        known.sort(key=lambda each: each[0] == "micro_batches_not_averaged")
        own = [{name: each[name] for name in names if name in each} for each in raw.sent]
        for why in known or [("scaled_gradient", f"{text} recording")]:
            expression = _of(own, np.multiply(raw.factors, of_group))
            yield Row(*why, expression, factors=tuple(raw.factors))


def _groups(pair: StepPair, whole: Named, wrong: Sequence[str]) -> list[tuple[float, list[str]]]:
    """Returns factors that some of the wrong tensors have exactly, with their names.

    The factor that most tensors have comes first.
    """
    observed = pair.gradients.reference
    found, few = dict[float, list[str]](), list[str]()
    for name in wrong:
        factor, known = solve(observed, [whole], [name])
        times = float(factor[0])
        if not known.all():
            few.append(name)
        elif times > 0 and pair.tolerance.fits(observed, [(times, whole)], [name]):
            near = (f for f in found if abs(f - times) < _CLOSE * f)
            found.setdefault(next(near, times), []).append(name)
    for name, (times, names) in itertools.product(few, [*found.items()]):
        if pair.tolerance.fits(observed, [(times, whole)], [name]):
            names.append(name)
    return sorted(found.items(), key=lambda each: -len(each[1]))


# --- Regularisation ------------------------------------------------------------------------------


def _rows_of_weights(pair: StepPair, raw: Raw) -> Iterator[Row]:
    """Yields rows with a term λ · weight that only one of the losses adds.

    One λ for all tensors that are wrong, or one for each; the others may have a common factor.
    """
    observed, weights, whole = raw.right, pair.gradients.weights, raw.total
    if not all(map(are_finite, (observed, whole))):
        return
    wrong = [n for n in pair.tolerance.wrong(observed, whole) if n in weights]
    for scale, names in [(1.0, []), *_groups(pair, whole, wrong)]:
        left = [name for name in wrong if name not in names]
        if not left:
            continue
        decay, known = solve(
            {n: observed[n] - scale * whole[n] for n in left}, [{n: weights[n] for n in left}]
        )
        decays = {name: float(decay[0]) for name in left}
        if not known.all() or not _confirms(pair, whole, scale, decays):
            decays = _decay_of_each(pair, whole, scale, left)
        if not decays or not _confirms(pair, whole, scale, decays):
            continue
        more = {name: factor * weights[name] for name, factor in decays.items()}
        expression = [(scale, whole), (1.0, more)]
        usual = float(np.median([*decays.values()]))
        factors = tuple(scale * factor for factor in raw.factors)
        if scale != 1:
            text = (
                f"each gradient is {1 / scale:.6g} times that of the first recording, without its"
                f" part {abs(usual / (1 - scale)):.4g} · weight, the regularisation"
            )
            for why in raw.named(text, 1 / scale):
                yield Row(*why, expression, factors=factors)
            continue
        yield Row(*_meaning_of_decay(pair, left, -usual), expression, factors=factors)
    yield from _rows_of_penalties(pair, raw, wrong)


def _rows_of_penalties(pair: StepPair, raw: Raw, names: Sequence[str]) -> Iterator[Row]:
    """Yields the row of a penalty of absolute values, also beside one of squares.

    Its gradient is λ · sign(weight); each weight may have factors of its own.
    """
    observed, weights, whole = raw.right, pair.gradients.weights, raw.total
    more, decays, shown, is_absolute = Named(), list[float](), list[str](), False
    for name in names:
        terms = weights[name], np.sign(weights[name])
        rest = observed[name] - whole[name]
        solved, known = solve({name: rest}, [{name: term} for term in terms])
        if not known.all() or not np.isfinite(solved).all() or rest.size <= 2 * len(terms):
            return
        sizes = [abs(factor) * norm(term) for factor, term in zip(solved, terms, strict=True)]
        kept = [
            float(f) if size > 1e-3 * max(sizes) else 0.0
            for f, size in zip(solved, sizes, strict=True)
        ]
        more[name] = kept[0] * terms[0] + kept[1] * terms[1]
        decays, is_absolute = decays + [f for f in kept if f], is_absolute or bool(kept[1])
        shown.append(f"{-kept[0]:.3g} · weight + {-kept[1]:.3g} · sign(weight)")
    if not is_absolute or min(decays) * max(decays) <= 0:
        return
    if pair.tolerance.wrong(
        {n: observed[n] for n in names}, {n: whole[n] + more[n] for n in names}
    ):
        return
    times, which = ("more", "second") if max(decays) < 0 else ("less", "first")
    text = (
        f"the gradients of the second recording contain {times} of a penalty, as"
        f" {shown[0].replace('-', '')}: the loss of the {which} recording counts it more often"
    )
    cause = "regulariser_repeated" if which == "second" else "regulariser_missing"
    yield Row(cause, text, [(1.0, whole), (1.0, more)], factors=tuple(raw.factors))


def _confirms(pair: StepPair, whole: Named, scale: float, decays: dict[str, float]) -> bool:
    """Returns whether λ · weight explains tensors, and each term is more than rounding."""
    observed, weights = pair.gradients.reference, pair.gradients.weights
    more = {name: factor * weights[name] for name, factor in decays.items()}
    names = [*decays]
    expression = [(scale, whole), (1.0, more)]
    has_effect = not any(
        pair.tolerance.fits(observed, [(scale, whole)], [name])
        for name in names
        if norm(more[name])
    )
    return has_effect and pair.tolerance.fits(observed, expression, names)


def _decay_of_each(
    pair: StepPair, whole: Named, scale: float, names: Sequence[str]
) -> dict[str, float]:
    observed, weights = pair.gradients.reference, pair.gradients.weights
    found = {}
    for name in names:
        rest = {name: observed[name] - scale * whole[name]}
        decay, known = solve(rest, [{name: weights[name]}])
        if not known.all():
            return {}
        found[name] = float(decay[0])
    return found


def _meaning_of_decay(pair: StepPair, names: Sequence[str], decay: float) -> tuple[str, str]:
    """Returns cause and text of gradients that contain decay · weight more than the reference."""
    if times := _times_regularised(pair, names, decay):
        cause = "regulariser_repeated" if times > 0 else "regulariser_missing"
        return cause, (
            f"the loss contains {1 + times} times the regularisation of the first recording, whose"
            f" gradient is {decay / times:.4g} · weight"
        )
    rules = pair.rules()
    if all(name in rules and not any(rule.weight_decay for rule in rules[name]) for name in names):
        more, less = ("second", "first") if decay > 0 else ("first", "second")
        return "regulariser_repeated" if decay > 0 else "regulariser_missing", (
            f"the gradients of the {more} recording contain {abs(decay):.4g} · weight more, and no"
            " optimizer decays weights: its loss counts regularisation more often, as once on each"
            f" replica, or the loss of the {less} recording has none"
        )
    return "regularisation_in_the_loss", (
        f"the gradients of the {'second' if decay > 0 else 'first'} recording contain"
        f" {abs(decay):.4g} · weight: a regularisation in its loss"
    )


def _times_regularised(pair: StepPair, names: Sequence[str], decay: float) -> int:
    """Returns how many times more often the second loss has the L2 regularisation of the first.

    The sum of the model's regularisation losses, λ · |weights|², is recorded; its gradient is
    2 · λ · weight. Returns 0 if it is unknown, or not a multiple of it.
    """
    arrays, weights = pair.first.arrays(pair.first.kind_of_loss), pair.gradients.weights
    regular = sum(float(np.sum(each[1])) for each in arrays if len(each) > 1)
    usual = 2 * regular / max(total_norm({name: weights[name] for name in names}) ** 2, EPS)
    times = decay / usual if usual else 0.0
    return round(times) if abs(times - round(times)) < 1e-3 and times > -1.5 else 0


def decays_equally(pair: StepPair) -> bool:
    """Returns whether one script has in its loss the weight decay of the other's optimizer.

    Gradient + λ · weight is then the same in both, if the gradient without decay is not clipped.
    """
    terms, rules, weights = pair.gradients, pair.rules(), pair.gradients.weights
    first, second = terms.reference, terms.given[0]
    if not all(name in rules and name in weights for name in first):
        return False
    own, other = (
        {
            name: rules[name][side].weight_decay * weights[name]
            for name in first
            if rules[name][side].decay_placement == IN_GRADIENT
        }
        for side in (0, 1)
    )
    total = {name: dense(g) + other.get(name, 0.0) for name, g in second.items()}
    is_clipped = not pair.tolerance.fits(terms.reference_applied, [(1.0, first)]) or any(
        not pair.tolerance.fits(applied, [(1.0, given)])
        for applied, given in zip(terms.applied, terms.given, strict=True)
    )
    return not is_clipped and pair.tolerance.fits(total, [(1.0, first), (1.0, own)])
