"""The nodes of a step in the data's order, each with one judgement: within the bound, or wrong.

examples → random and outputs → loss → gradient and sum → clipping → update. The first wrong one,
with the formulas that fit, is what is said of a step.
"""

import functools
from collections.abc import Callable, Sequence

import numpy as np

from lockstep.data.trace import STATE, STATISTIC, WEIGHT
from lockstep.engine import bounds
from lockstep.engine.claim import Change
from lockstep.engine.examples import rows_apart
from lockstep.engine.look import Finding, Look, factors_of_parts, where
from lockstep.engine.pair import State, Variable, names_in_norms
from lockstep.engine.random import OTHER
from lockstep.engine.solve import CLOSE, Formula, Term, formulas, is_one_of
from lockstep.engine.sums import gradients, reduced_after_clipping
from lockstep.engine.verdict import (
    BETWEEN,
    BY_DESIGN,
    CLIPPING,
    EXAMPLES,
    FAULT,
    GRADIENT,
    LOSS,
    OUTPUTS,
    RANDOM,
    SUM,
    UPDATE,
)
from lockstep.numeric.arrays import EPS, TINY, Named, dense, norm, same_bits

# A change of state is compared as a whole, by a 2-norm, with terms that are rounded as it is.
OF_CHANGE = 4
# A clipped gradient is the sum times a factor, each rounded once; 256 roundings are 1e-5.
OF_CLIPPED = 256

Judge = Callable[[Look], Finding | None]


# --- Examples, outputs and loss -------------------------------------------------------------------


def other_examples(look: Look) -> Finding | None:
    """Judges the rows of the batch, and what stands next to equal inputs, as their targets."""
    number, step = look.pair.number, look.pair.training
    for shard in step.shards if step.has("data") else ():
        for index in range(len(step.data[shard])):
            views = step.trace.views(step.position, "data", shard, index)
            first = next(iter(views.values()), None)
            if odd := [rank for rank, own in views.items() if not same_bits(own, first)]:
                text = "ranks compute one replica together, from unlike examples"
                return Finding(EXAMPLES, ranks=tuple(odd), seen={"views": True, "text": text})
    if look.batches.differ(number):
        right, own = look.batches.rows[number]
        if look.skipped:
            return Finding(UPDATE, seen={"text": look.skipped})
        new = [s for s, each in enumerate(own) if not {*each} <= look.batches.known]
        drawn = [x for x in look.random if x.how != OTHER]
        is_drawn = new and (drawn or look.batches.have_equal_ids(number))
        seen = {"rows": (right, own), "random": drawn}
        is_filled = look.batches.is_filled_up(number) and not look.batches.share_examples(number)
        status = BY_DESIGN if is_filled and not is_drawn else FAULT
        return Finding(RANDOM if is_drawn else EXAMPLES, seen=seen, status=status)
    for matched in look.matched:
        for index, (a, b) in enumerate(matched.arrays["data"]):
            if index and not _are_alike(a, b, look.limit):
                return Finding(EXAMPLES, ranks=(matched.shard,), seen={"targets": (index, a, b)})
    return None


def _are_alike(a: np.ndarray, b: np.ndarray, limit: float) -> bool:
    """Returns whether two arrays stand next to equal inputs in the same training.

    Numbers that the script computes may be rounded. Groups of examples, such as graphs, have
    ascending numbers, which begin anew in each batch.
    """
    if a.shape != b.shape:
        return False
    if a.dtype.kind == "f":
        return bool(np.all(rows_apart([(a, b)]) <= limit))
    groups, num = np.unique(np.stack([a.ravel(), b.ravel()]), axis=1), len(np.unique(a))
    are_groups = groups.shape[1] == num == len(np.unique(b)) and 2 * num <= len(a)
    ascend = all(x.ndim == 1 and np.all(np.diff(x) >= 0) for x in (a, b))
    return np.array_equal(a, b) or (are_groups and ascend)


def outputs(look: Look) -> Finding | None:
    """Judges the outputs of examples that both trainings have."""
    own = [m for m in look.matched if m.arrays["y_pred"]]
    far = [(m, x) for m, x in zip(own, look.outputs_apart, strict=True) if np.any(x > look.limit)]
    if not far:
        return None
    ranks = tuple(sorted({m.shard for m, _ in far}))
    total = sum(map(len, look.outputs_apart))
    number, largest = sum(int(np.sum(x > look.limit)) for _, x in far), max(x.max() for _, x in far)
    seen = {"text": f"outputs of {number} of {total} examples differ, by up to {largest:.2g}"}
    if look.random and not look.pair.has_same_shards:
        return Finding(RANDOM, ranks=ranks, seen=seen)
    return Finding(OUTPUTS, ranks=ranks, seen=seen)


def loss(look: Look) -> Finding | None:
    """Judges the gradient of the loss by equal outputs, up to a factor of the whole step.

    Where the loss of the batch agrees all the same, only its gradient is wrong.
    """
    known = look.loss_factors
    if not known or look.pair.is_port or look.loss_factor is not None:
        return None
    limit = look.limit_of_loss
    means = np.array([np.nanmedian(f) if np.isfinite(f).any() else np.nan for _, f, _ in known])
    if not np.isfinite(means).any():
        return None
    if all(np.all(x <= limit) for *_, x in known):
        label = "loss{0.shard}.{0.number}" if any(m.number for m, *_ in known) else "loss{0.shard}"
        terms = [Term(label.format(m), "loss", m.shard, {}) for m, *_ in known]
        factors, is_known = np.nan_to_num(means).tolist(), np.isfinite(means).tolist()
        formula = Formula((), (*terms,), (*factors,), (*is_known,))
        ranks = tuple(sorted({term.rank for term in terms}))
        seen = {"by": "rank", "text": f"losses of ranks count {np.round(means, 4)} times"}
        return Finding(LOSS, ranks=ranks, given=(formula,), seen=seen)
    ranks = tuple(sorted({m.shard for m, _, x in known if np.any(x > limit)}))
    if text := _read_targets(look):
        return Finding(EXAMPLES, ranks=ranks, seen={"read": text})
    share = look.pair.framework_share
    shares = [share] * len(look.pair.shards) if share else ()
    agrees = look.loss_agrees(shares)
    node = GRADIENT if agrees else LOSS
    return Finding(node, ranks=ranks, seen={"unknown": True})


def _read_targets(look: Look) -> str:
    """Says how many targets differ, read off gradients of a softmax: the only negative one."""
    num = 0
    for matched, *_ in look.loss_factors:
        for a, b in matched.arrays["y_grad"]:
            if a.ndim < 2 or a.shape[-1] < 3:
                return ""
            rows = [dense(x).reshape(-1, x.shape[-1]) for x in (a, b)]
            used = np.all([np.any(x, axis=1) for x in rows], axis=0)
            if not used.any() or any(np.any((x[used] < 0).sum(1) != 1) for x in rows):
                return ""
            num += int(np.sum(rows[0][used].argmin(1) != rows[1][used].argmin(1)))
    return f"{num} outputs have another target" if num else ""


# --- Clipping -------------------------------------------------------------------------------------


def clip(look: Look) -> Finding | None:
    """Judges what the optimizer uses of a sum that is right."""
    pair, found, wrong = look.pair, list[Formula](), dict[int, list[str]]()
    if not pair.training.clips_sum and (reduced := reduced_after_clipping(look)):
        return reduced
    for copy, own in enumerate(pair.used):
        far = bounds.wrong_gradients(own, pair.right_used, look.bound, pair)
        names = [n for n in pair.names if n in far - {*look.wrong_sums.get(copy, ())}]
        if names:
            wrong[copy] = names
            term = Term("s", "received", copy, pair.sums[copy])
            formula, _ = formulas(own, names, [term], bounds.of_rounding(EPS, OF_CLIPPED))
            found += [f._replace(copies=(copy,)) for f in formula]
    if not wrong:
        return None
    every = tuple(dict.fromkeys(n for own in wrong.values() for n in own))
    seen = {"factor": pair.clip_factor}
    return Finding(CLIPPING, every, tuple(wrong), tuple(found), (), seen)


def hidden_factor(look: Look) -> Finding | None:
    """Judges a factor that clipping hides: the sums have it, and what is used does not."""
    pair = look.pair
    if not (pair.names and look.wrong_sums and pair.clips):
        return None
    calls = [
        [c for c in s.calls(0) if c.startswith("clip")] for s in (pair.reference, pair.training)
    ]
    if calls[0] != calls[1]:
        return None
    wrong = {n for own in look.wrong_sums.values() for n in own}
    names, found = [n for n in pair.names if n in wrong], list[Formula]()
    if pair.clip_factor < 1 - EPS and all(
        same_bits(own[n], used[n])
        for own, used in zip(pair.sums, pair.used, strict=True)
        for n in names
    ):
        return None  # What enters its clipping was not recorded.
    for copy in look.wrong_sums:
        term = Term("G", "right", -1, pair.right_sum)
        own, left = formulas(pair.sums[copy], names, [term], look.solved)
        if left or len(own) != 1 or abs(own[0].factors[0] - 1) <= CLOSE:
            return None
        found.append(own[0]._replace(copies=(copy,)))
    factors = np.array([f.factors[0] for f in found])
    numbers = [x for n in look.numbers for x in (n, 1 / n)]
    is_by_hand = not (pair.training.has("unclipped") or pair.training.calls(0))
    if is_by_hand and not is_one_of(factors, numbers) and look.loss_agrees() is not False:
        return None  # A script may keep its sums before it divides them.
    node = SUM if is_one_of(factors, numbers) and pair.framework_share is None else LOSS
    right = found[0]._replace(factors=(1.0,), copies=())
    return Finding(node, (*names,), (*look.wrong_sums,), (*found,), (right,), {"is_hidden": True})


# --- Update ---------------------------------------------------------------------------------------


def update(look: Look) -> Finding | None:
    """Judges weights and optimizer state after the step, from gradients that are right."""
    wrong = [x for x in look.claim.wrong if x.variable.kind in (WEIGHT, STATE)]
    if not wrong:
        return None
    return (_of_unrecorded(look, wrong) if not look.pair.names else None) or _of_state(look, wrong)


def statistics(look: Look, *, are_averages: bool = True) -> Finding | None:
    """Judges statistics after the step; those that a forward pass leaves are no averages."""
    wrong = [x for x in look.claim.wrong if x.variable.kind == STATISTIC]
    averages = look.averages
    wrong = [x for x in wrong if are_averages or averages.of(x.variable.first) is None]
    return _of_state(look, wrong) if wrong else None


def _of_state(look: Look, wrong: Sequence[Change]) -> Finding:
    """Returns a finding with the formulas of the changes: D2 = a·D1 + b·X."""
    # The forward pass of a step moves statistics of norms; a script moves others where it likes.
    of_norms = names_in_norms(look.pair.training)
    known = [x for x in wrong if x.variable.kind != STATISTIC or x.variable.second in of_norms]
    left = [x for x in known if look.claim.is_left_wrong(x)]
    node, wrong = (BETWEEN, left) if len(left) == len(wrong) else (UPDATE, wrong)
    weights = [x for x in wrong if x.variable.kind == WEIGHT] or list(wrong)
    ranks, found, place = tuple(sorted({x.copy for x in wrong})), list[Formula](), ""
    for copy in ranks:
        own, terms, allowed = changes_of(
            look, [x.variable for x in weights if x.copy == copy], copy
        )
        for chosen in ([terms[0]], terms) if own else ():
            more, unsolved = formulas(own, [*own], chosen, bounds.of_changes(allowed))
            if more and not unsolved:
                found += [f._replace(copies=(copy,)) for f in more]
                break
        if own and not any(copy in f.copies for f in found):
            parts = factors_of_parts(look.pair, [own] * len(look.pair.copies), terms[0])
            found += (
                [f._replace(copies=(copy,)) for f in parts] if all(f.names for f in parts) else []
            )
        if own and not place:
            name = next(iter(own))
            place = where(own[name], terms[0].arrays[name])
    names = tuple(dict.fromkeys(x.variable.first for x in wrong))
    return Finding(node, names, ranks, tuple(found), (), {"changes": wrong, "where": place})


def changes_of(
    look: Look, variables: Sequence[Variable], copy: int
) -> tuple[Named, list[Term], Named]:
    """Returns the changes of variables on a copy, the terms D1 and X, and their bounds."""
    own, first, before, allowed = Named(), Named(), Named(), Named()
    for variable in variables:
        right, state = look.pair.right(variable, copy), look.pair.state(variable, copy)
        if right is None or state is None:
            continue
        state = State(variable.as_first(state.old), variable.as_first(state.new))
        if np.shape(state.new) != np.shape(right.new) or not np.isfinite(state.change).all():
            continue
        name = variable.first
        own[name], first[name], before[name] = state.change, right.change, dense(right.old)
        bound = look.claim.allowed(variable, copy, right, state)
        bound = np.where(np.isfinite(bound), bound, np.abs(right.change))
        allowed[name] = OF_CHANGE * norm(bound) + TINY
    return own, [Term("D", "change", -1, first), Term("X", "state", -1, before)], allowed


# --- Gradients that were not recorded -------------------------------------------------------------


def _of_unrecorded(look: Look, wrong: Sequence[Change]) -> Finding | None:
    """Reads off state what is wrong before the update, where no gradients were recorded.

    A slot of state that is linear in the gradient, as a momentum, shows it: the same multiple on
    all copies is a factor of the gradient.
    """
    slots = dict[str, list[Change]]()
    for change in wrong:
        if change.variable.weight:
            slots.setdefault(change.variable.slot, []).append(change)
    names = tuple(dict.fromkeys(x.variable.first for x in wrong))
    ranks = tuple(sorted({x.copy for x in wrong}))
    for changes in slots.values():
        found = list[Formula]()
        for copy in ranks:
            own, terms, allowed = changes_of(
                look, [x.variable for x in changes if x.copy == copy], copy
            )
            more, left = formulas(own, [*own], terms[:1], bounds.of_changes(allowed))
            found += [f._replace(copies=(copy,)) for f in more if not left]
        factors = np.array([f.factors[0] for f in found])
        # A slot that is a square of gradients has the square of their factor.
        numbers = [x for n in look.numbers for x in (n, 1 / n, n**2, 1 / n**2)]
        if len(factors) == len(ranks) and is_one_of(factors, numbers) and not look.settings:
            node = LOSS if look.loss_agrees() is False else SUM
            seen = {"changes": wrong, "is_factor": True}
            return Finding(node, names, ranks, tuple(found), (), seen)
    if look.loss_agrees() is False:
        return Finding(LOSS, names, ranks, (), (), {"changes": wrong, "unknown": True})
    return None


NODES: tuple[Judge, ...] = (
    other_examples, outputs, loss, functools.partial(statistics, are_averages=False), gradients,
    clip, update, statistics,
)  # fmt: skip
