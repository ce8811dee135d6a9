"""The one table of names: at which nodes, what has to fit, and why; the most specific first.

A row's test gets the finding and what is known of its step, and returns a reason in words, or "" if
it does not fit. Formulas come before recorded evidence, and evidence before a node's own name. No
test asks for another name, and a name changes neither status nor place.
"""

import collections
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from lockstep.data.trace import STATE, STATISTIC, WEIGHT
from lockstep.engine import updates
from lockstep.engine.claim import Change
from lockstep.engine.examples import Rows
from lockstep.engine.look import OF_LOSS, Finding, Look
from lockstep.engine.pair import copies_are_equal
from lockstep.engine.solve import CLOSE, NOTHING, Formula, is_constant, is_one_of
from lockstep.engine.sums import is_along_data, is_one_norm, local_norms
from lockstep.engine.verdict import (
    BETWEEN,
    CLIPPING,
    EXAMPLES,
    GRADIENT,
    LOSS,
    OUTPUTS,
    RANDOM,
    START,
    SUM,
    UPDATE,
)
from lockstep.numeric.arrays import dense, norm, same_bits
from lockstep.numeric.state_bounds import unit_of_state

Test = Callable[[Finding, Look], str]


class Row(NamedTuple):
    """A name: at which nodes, and the test that returns why."""

    nodes: tuple[str, ...]
    name: str
    test: Test


def named(finding: Finding, look: Look) -> tuple[str, str]:
    """Returns name and reason of a finding; ("", reason) where no row fits."""
    for row in TABLE:
        if finding.node in row.nodes and (reason := row.test(finding, look)):
            return row.name, reason
    return "", finding.seen.get("text", "")


def always(text: str) -> Test:
    """Returns a test that always fits: a node that is its own name."""
    return lambda finding, look: finding.seen.get("text") or text


def _listed(values: np.ndarray) -> str:
    shown = [f"{value:.4g}" for value in values[:6]]
    return ", ".join(shown + (["…"] if len(values) > 6 else []))


# --- Examples -------------------------------------------------------------------------------------


class _Others(NamedTuple):
    """The rows of a batch: `right` of the reference, `own` of each rank, and how they differ."""

    right: Rows
    own: Sequence[Rows]
    missing: Rows
    extra: Rows

    @property
    def text(self) -> str:
        total = sum(each.total() for each in self.own)
        return (
            f"{self.extra.total()} of {total} examples are not the reference's,"
            f" {self.missing.total()} are missing"
        )


def examples(test: Callable[[Look, _Others], bool]) -> Test:
    """Returns the test of a batch with other rows."""

    def of_rows(finding: Finding, look: Look) -> str:
        if "rows" not in finding.seen:
            return ""
        right, own = finding.seen["rows"]
        given: Rows = sum(own, Rows())
        others = _Others(right, own, right - given, given - right)
        return others.text if test(look, others) else ""

    return of_rows


def _of_earlier(look: Look) -> set[bytes]:
    """Returns the rows that earlier steps of the training had."""
    batches = look.batches
    return {r for n in batches.earlier(look.pair.number) for own in batches.rows[n][1] for r in own}


def are_same(look: Look, rows: _Others) -> bool:
    """Tests ranks that share most of their examples, which the reference has once."""
    return look.batches.share_examples(look.pair.number)


def filled_up(finding: Finding, look: Look) -> str:
    """Tests a last batch that a sampler fills up."""
    return examples(lambda look, rows: finding.is_filled_up)(finding, look)


def _usual_sizes(look: Look) -> tuple[int, int]:
    batches = look.batches.rows.values()
    right = max(first.total() for first, _ in batches)
    return right, max(sum(each.total() for each in own) for _, own in batches)


def have_other_size(look: Look, rows: _Others) -> bool:
    """Tests batches of another size in all steps."""
    right, own = _usual_sizes(look)
    return right != own and bool(not rows.missing or rows.extra)


def lack_last_batch(look: Look, rows: _Others) -> bool:
    """Tests a last batch that is dropped."""
    right, own = _usual_sizes(look)
    given = sum(each.total() for each in rows.own)
    return right == own and (rows.right.total() < right) != (given < own)


def ids_are_equal(look: Look, rows: _Others) -> bool:
    """Tests ids of examples, as scripts note them, that are the reference's."""
    return look.batches.have_equal_ids(look.pair.number)


def ids_are_repeated(look: Look, rows: _Others) -> bool:
    """Tests ids that occur more often than in the reference."""
    ids = look.batches.ids(look.pair.number)
    if not ids:
        return False
    more = collections.Counter(ids[1]) - collections.Counter(ids[0])
    return bool(more) and {*more} <= {*ids[0]}


def are_repeated(look: Look, rows: _Others) -> bool:
    """Tests rows that occur twice, or those of an earlier step."""
    if rows.extra and {*rows.extra} <= {*rows.right}:
        return True
    earlier = _of_earlier(look)
    return bool(rows.extra) and {*rows.extra} <= earlier and not {*rows.right} & earlier


def are_not_shuffled(look: Look, rows: _Others) -> bool:
    """Tests a rank that has exactly its examples of an earlier step."""
    batches = look.batches.rows
    for number in look.batches.earlier(look.pair.number):
        both = zip(rows.own, batches[number][1], strict=False)
        if rows.extra and any(own and own == before for own, before in both):
            return True
    return False


def are_lost(look: Look, rows: _Others) -> bool:
    """Tests a batch that only lacks rows."""
    return not rows.extra


def are_known(look: Look, rows: _Others) -> bool:
    """Tests rows of other steps of the reference."""
    return {*rows.extra} <= look.batches.known


def within_replica(finding: Finding, look: Look) -> str:
    """Tests ranks that compute one replica together from unlike examples."""
    return (
        "ranks compute one replica together, from unlike examples"
        if finding.seen.get("views")
        else ""
    )


def targets(*, are_moved: bool) -> Test:
    """Returns the test of other arrays next to equal inputs, which may be those of other rows."""

    def test(finding: Finding, look: Look) -> str:
        if "read" in finding.seen:
            return finding.seen["read"] if finding.seen["are_moved"] or not are_moved else ""
        if "targets" not in finding.seen:
            return ""
        index, a, b = finding.seen["targets"]
        rows = [collections.Counter(row.tobytes() for row in x) for x in (a, b)]
        is_shifted = (
            a.ndim > 1
            and a.shape[1] > 2
            and (np.array_equal(a[:, 1:], b[:, :-1]) or np.array_equal(a[:, :-1], b[:, 1:]))
        )
        if are_moved and not (is_shifted or rows[0] == rows[1]):
            return ""
        num = int(np.sum(np.any((a != b).reshape(len(a), -1), axis=1)))
        return f"array {index + 1} next to equal inputs differs in {num} of {len(a)} examples"

    return test


# --- Random numbers, outputs and loss -------------------------------------------------------------


def stream(how: str) -> Test:
    """Returns the test of random streams that are "same", "repeated" or "other"."""

    def test(finding: Finding, look: Look) -> str:
        if look.pair.has_same_shards and how != "repeated" and "random" not in finding.seen:
            return ""  # The reference draws the same numbers for each part.
        if finding.node == BETWEEN and "random" not in finding.seen:
            return ""
        found = finding.seen.get("random") or look.random
        return next((each.text for each in found if each.how == how), "")

    return test


def layers(key: str) -> Test:
    """Returns the test of what is recorded of layers."""
    return lambda finding, look: look.layers.get(key, "")


def lost_pass_of_loss(finding: Finding, look: Look) -> str:
    """Tests losses of micro-batches that count 0."""
    if finding.seen.get("by") != "rank" or look.num_passes < 2:
        return ""
    own = zip(finding.given[0].factors, finding.given[0].terms, strict=True)
    lost = [f"micro-batch {term.part} of rank {term.rank}" for factor, term in own if factor == 0]
    return f"{', '.join(lost)} does not count" if lost else ""


def lost_loss(finding: Finding, look: Look) -> str:
    """Tests losses of ranks that count 0."""
    if finding.seen.get("by") != "rank":
        return ""
    own = np.array(finding.given[0].factors)
    lost = np.flatnonzero(own == 0)
    return f"the loss of rank {lost[0]} does not count" if len(lost) and np.any(own) else ""


def mean_of_means(finding: Finding, look: Look) -> str:
    """Tests that ranks count equally, and in the reference by weights that add up to a mean."""
    if finding.seen.get("by") == "rank":
        factors = np.array(finding.given[0].factors)
        total = float(np.sum(1 / factors)) if np.all(factors > 0) else 0.0
        numbers = {1, len(factors), *look.numbers}
        numbers |= {number * look.num_passes for number in (1, *look.numbers)}
        is_mean = any(abs(total - number) <= len(factors) * OF_LOSS * number for number in numbers)
        text = f"losses of ranks count {_listed(factors)} times: the inverse of their parts"
        return text if is_mean else ""
    for formula in finding.given:
        right = finding.right_of(formula)
        if right is None or not formula.is_even or right.is_even or np.any(right.shares <= 0):
            continue
        if abs(np.sum(right.shares) / np.sum(formula.shares) - 1) < CLOSE:
            return (
                f"ranks count {_listed(formula.shares)}, in the reference {_listed(right.shares)}"
            )
    return ""


def by_rank(finding: Finding, look: Look) -> str:
    """Tests losses of ranks with factors of their own."""
    if finding.seen.get("by") != "rank":
        return ""
    return f"losses of ranks count {_listed(np.array(finding.given[0].factors))} times"


def by_example(finding: Finding, look: Look) -> str:
    """Tests losses of examples with factors of their own."""
    if finding.seen.get("by") != "example":
        return ""
    own = finding.seen["factors"]
    return f"examples count {np.nanmin(own):.4g} to {np.nanmax(own):.4g} times as in the reference"


def loss_differs(finding: Finding, look: Look) -> str:
    """Tests a loss without a formula."""
    is_unknown = finding.seen.get("unknown") or finding.seen.get("by")
    return finding.seen.get("text") or ("the loss is another one" if is_unknown else "")


def loss_agrees(finding: Finding, look: Look) -> str:
    """Tests a gradient without a formula."""
    is_unknown = finding.seen.get("unknown")
    return "what ranks compute of their loss has a part missing, or more" if is_unknown else ""


# --- Gradients and sums ---------------------------------------------------------------------------


def _factors(finding: Finding) -> np.ndarray:
    """Returns the factor of each formula over the reference's, if all ranks have one; else NaN."""
    found = []
    for formula in finding.given:
        shares, right = formula.shares, finding.right_of(formula)
        if not len(shares) or not formula.is_even or _has_more(formula):
            found.append(np.nan)
        elif formula.terms[0].kind == "right":
            found.append(shares[0])
        elif right is None or not right.is_even or not right.shares[0]:
            found.append(np.nan)
        else:
            found.append(shares[0] / right.shares[0])
    return np.array(found)


def _has_more(formula: Formula) -> bool:
    """Returns whether a formula has terms beside what ranks computed in this step."""
    both = zip(formula.factors, formula.terms, strict=True)
    return any(abs(f) > CLOSE for f, t in both if t.offset or t.kind in ("weight", "sign"))


def factor(which: str) -> Test:
    """Returns the test of a factor: "number" of ranks, "inverse", "passes", or "any"."""

    def test(finding: Finding, look: Look) -> str:
        own = _factors(finding)
        if finding.seen.get("is_factor"):
            own = np.array([f.factors[0] for f in finding.given])
        wanted: dict[str, Sequence[float]] = {
            "number": look.numbers,
            "inverse": [1 / n for n in look.numbers],
            "passes": [look.num_passes] if look.num_passes > 1 else [],
        }
        if which == "any":
            is_right = np.all(np.abs(own - 1) < CLOSE)
            fits = len(own) > 0 and np.isfinite(own).all() and np.all(own != 0) and not is_right
        else:
            fits = is_one_of(own, wanted[which])
        shown = _listed(np.unique(np.round(own, 6)))
        return f"the gradient is {shown} times the reference's" if fits else ""

    return test


def _of_gradients(finding: Finding) -> list[tuple[Formula, np.ndarray]]:
    return [(f, f.of("gradient")) for f in finding.given if len(f.of("gradient"))]


def _is_own_only(finding: Finding, look: Look) -> bool:
    """Returns whether each copy got its own rank's gradient alone."""
    known = _of_gradients(finding)
    for formula, shares in known:
        for copy in formula.copies:
            own = look.pair.training.trace.shards_of(copy)
            others = [x for shard, x in enumerate(shares) if shard not in own]
            least = CLOSE * np.max(np.abs(shares))
            if not others or np.any(np.abs(others) > least) or not np.any(shares):
                return False
    return bool(known)


def not_reduced(finding: Finding, look: Look) -> str:
    """Tests that each copy uses its own gradient, of all tensors, or that copies' sum is right."""
    text = "each rank has its own gradient"
    used = look.pair.used
    known = [name for name in finding.names if all(name in own for own in used)]
    if known and all(copies_are_equal(used, name) for name in known):
        return ""  # What optimizers use was reduced after this.
    if finding.seen.get("is_own") or (_is_own_only(finding, look) and finding.seen.get("all")):
        return text
    right = _right_of_copies(finding)
    is_along = is_along_data(look.pair, finding.seen.get("of_copies", ()))
    return f"{text}: {right}" if right and is_along else ""


def partly_reduced(finding: Finding, look: Look) -> str:
    """Tests the same of some tensors."""
    is_own = _is_own_only(finding, look)
    return "each rank has its own gradient of these weights" if is_own else ""


def summands_not_reduced(finding: Finding, look: Look) -> str:
    """Tests that ranks of a model hold summands of the gradient."""
    of_copies = finding.seen.get("of_copies", ())
    return "" if is_along_data(look.pair, of_copies) else _right_of_copies(finding)


def _right_of_copies(finding: Finding) -> str:
    """Says whether the reference is the sum or mean of what copies got."""
    for formula in finding.seen.get("of_copies", ()):
        values = np.array(formula.factors)
        used = values[np.abs(values) > CLOSE]
        if all(formula.known) and len(used) > 1 and is_constant(used):
            return f"the reference is {formula.text}"
    return ""


def lost_rank(finding: Finding, look: Look) -> str:
    """Tests ranks that count 0 in what all copies got."""
    known = _of_gradients(finding)
    lost = [s for _, a in known for s, x in enumerate(a) if abs(x) <= CLOSE * np.max(np.abs(a))]
    are_equal = len({tuple(np.round(a, 4)) for _, a in known}) == 1
    return (
        f"the gradient of rank {lost[0]} does not count"
        if lost and are_equal and np.any(known[0][1])
        else ""
    )


def reduced_elsewhere(finding: Finding, look: Look) -> str:
    """Tests ranks that count, and do not in the reference, or the other way round."""
    for formula, own in _of_gradients(finding):
        right = finding.right_of(formula)
        if right is None or len(right.shares) < 3:
            continue
        if np.any((np.abs(own) < CLOSE) != (np.abs(right.shares) < CLOSE)):
            return f"ranks count {_listed(own)}, and in the reference {_listed(right.shares)}"
    return ""


def stale(finding: Finding, look: Look) -> str:
    """Tests a gradient of the step before."""
    for formula in finding.given:
        both = zip(formula.factors, formula.terms, strict=True)
        if any(abs(f) > CLOSE for f, term in both if term.offset):
            return "it contains the gradient of the step before"
    return ""


def lost_pass(finding: Finding, look: Look) -> str:
    """Tests micro-batches that count 0."""
    for formula in finding.given:
        both = zip(formula.factors, formula.terms, strict=True)
        passes = [(f, term.label) for f, term in both if term.kind == "pass"]
        largest = max((abs(f) for f, _ in passes), default=0.0)
        lost = [label for f, label in passes if abs(f) <= CLOSE * largest]
        if lost and largest:
            return f"{', '.join(lost)} do not count"
    return ""


def decayed(finding: Finding, look: Look) -> str:
    """Tests the weight, or its sign, as a term."""
    for formula in finding.given:
        right = finding.right_of(formula)
        if right is None:
            continue
        for kind in ("weight", "sign"):
            a, b = formula.of(kind), right.of(kind)
            if len(a) == len(b) == 1 and abs(a[0] - b[0]) > NOTHING:
                return f"it contains {a[0] - b[0]:.4g} times the weights more than the reference's"
    return ""


def zero(finding: Finding, look: Look) -> str:
    """Tests gradients that are 0 on all copies, and not in the reference."""
    return "gradients are 0 or missing" if finding.seen.get("zero") else ""


def only(finding: Finding, look: Look) -> str:
    """Tests gradients that the reference has as 0, or lacks."""
    return "there are gradients in this training alone" if finding.seen.get("only") else ""


def loss_scales(finding: Finding, look: Look) -> str:
    """Tests loss scales of ranks that differ."""
    step = look.pair.training
    scales = [step.trace.loss_scale(step.position, shard) for shard in step.shards]
    return f"the loss scales of the ranks are {_listed(np.array(scales))}" if np.ptp(scales) else ""


def not_finite(finding: Finding, look: Look) -> str:
    """Tests NaN or infinity that the reference does not have."""
    if finding.seen.get("not_finite"):
        return "gradients are NaN or infinite"
    for change in finding.seen.get("changes", ()):
        state = look.pair.states(change.variable)[1][change.copy]
        if state is not None and not np.isfinite(dense(state.new)).all():
            return "NaN or infinite"
    return ""


def overflow(finding: Finding, look: Look) -> str:
    """Tests gradients that are not finite, and an update that the reference does not make."""
    pair = look.pair
    copies = [pair.right_used, *pair.used, *pair.raw]
    if all(np.isfinite(g).all() for own in copies for g in own.values()):
        return ""
    weights = [pair.states(v)[0] for v in pair.variables if v.kind == WEIGHT]
    is_skipped = not any(state is not None and np.any(state.change) for state in weights)
    return "gradients overflow, and the step is not skipped" if is_skipped else ""


def clipped_each(finding: Finding, look: Look) -> str:
    """Tests ranks whose own gradients count as if each were clipped to one norm."""
    if finding.seen.get("is_clipped"):
        return "each rank's gradient is clipped to one norm before they are added"
    return ""


def operator(word: str) -> Test:
    """Returns the test of an operator that acts on a sum: "rounded" or "clipped"."""

    def test(finding: Finding, look: Look) -> str:
        found = [f.operator for f in finding.given if word in f.operator]
        return f"what is added is {found[0]}" if found else ""

    return test


# --- Clipping -------------------------------------------------------------------------------------


def clips_first(finding: Finding, look: Look) -> str:
    """Tests a clipping that was called before the gradients were unscaled."""
    step = look.pair.training
    calls = [call.split()[0] for call in step.calls(0)]
    is_first = "clip" in calls and "unscale" in calls[calls.index("clip") :]
    is_scaled = step.trace.loss_scale(step.position, 0) != 1
    is_missing = "clip" in calls and "unscale" not in calls and is_scaled
    return (
        "it clips gradients that are multiplied by the loss scale" if is_first or is_missing else ""
    )


def local_norm(finding: Finding, look: Look) -> str:
    """Tests ranks that clip by the norm of their own parts: factor times norm is one limit."""
    norms = finding.seen.get("local") or local_norms(look.pair)
    if is_one_norm(norms):
        sizes = np.array([size for size, _ in norms])
        return f"each rank clips by the norm of its own parts, {_listed(sizes)}"
    unlike = {round(f.factors[0], 4) for f in finding.given}
    is_of_ranks = (
        finding.node == CLIPPING and len(unlike) > 1 and len(finding.given) >= len(finding.ranks)
    )
    return "each rank clips by another factor" if is_of_ranks else ""


def clipped_on_some(finding: Finding, look: Look) -> str:
    """Tests ranks that do not clip, beside others that clip rightly."""
    ranks, num = finding.ranks, len(look.pair.copies)
    return "these ranks clip otherwise than the others" if 0 < len(ranks) < num else ""


def other_clipping(finding: Finding, look: Look) -> str:
    """Tests factors of clipping, for all tensors or for each."""
    own = np.unique(np.round([f.shares[0] for f in finding.given if len(f.shares)], 5))
    right = finding.seen.get("factor", 1.0)
    return f"it clips by {_listed(own)}, and the reference by {right:.4g}" if len(own) else ""


# --- State ----------------------------------------------------------------------------------------


def _changes(finding: Finding) -> Sequence[Change]:
    return finding.seen.get("changes", ())


def of_kind(kind: str, test: Test) -> Test:
    """Returns a test of findings of statistics alone, or of weights and their state."""

    def only_of_kind(finding: Finding, look: Look) -> str:
        kinds = {change.variable.kind == STATISTIC for change in _changes(finding)}
        are_statistics = kinds == {True}
        return test(finding, look) if kinds and are_statistics == (kind == STATISTIC) else ""

    return only_of_kind


def is_short(finding: Finding, look: Look) -> str:
    """Tests variables that have only the digits of 16 bits, which the reference's have not."""
    changes = [x for x in _changes(finding) if x.variable.kind != STATISTIC]
    for change in changes:
        first, copies = look.pair.states(change.variable)
        own = copies[change.copy]
        if first is None or own is None or not np.any(dense(own.new)):
            return ""
        if unit_of_state(own.new) <= unit_of_state(first.new):
            return ""
    return "they have the digits of 16 bits" if changes else ""


def kept(finding: Finding, look: Look) -> str:
    """Tests variables that do not change, and do in the reference."""
    changes = _changes(finding)
    weights = [x for x in changes if x.variable.kind == WEIGHT] or changes
    for change in weights:
        first, copies = look.pair.states(change.variable)
        own = copies[change.copy]
        if own is None or not same_bits(*own) or first is None or not np.any(first.change):
            return ""
    return "they do not change in this step" if weights else ""


def no_update(finding: Finding, look: Look) -> str:
    """Tests ranks that make no update in any step."""
    return finding.seen.get("text", "") if "changes" not in finding.seen and finding.ranks else ""


def unlike_copies(finding: Finding, look: Look) -> str:
    """Tests variables that each copy changes differently."""
    return "each rank has its own" if _apart(finding, look) else ""


def _apart(finding: Finding, look: Look) -> list[str]:
    found = []
    for variable in dict.fromkeys(x.variable for x in _changes(finding)):
        new = [s.new for s in look.pair.states(variable)[1] if s is not None]
        if any(np.shape(x) == np.shape(new[0]) and not same_bits(x, new[0]) for x in new[1:]):
            found.append(variable.first)
    return found


def mean_is_right(finding: Finding, look: Look) -> str:
    """Tests statistics of the copies whose mean, or sum, is the reference's."""
    names = _apart(finding, look)
    for variable in [v for v in look.pair.variables if v.first in names]:
        states = look.pair.known_states(variable)
        if states is None:
            return ""
        first, copies = states
        change = [variable.as_first(s.new) - variable.as_first(s.old) for s in copies]
        if any(x.shape != first.change.shape for x in change):
            return ""
        values = np.mean(change, axis=0), np.sum(change, axis=0)
        if all(norm(v - first.change) > CLOSE * norm(first.change) for v in values):
            return ""
    return "the mean over the ranks would be right" if names else ""


def of_norm(finding: Finding, look: Look) -> str:
    """Tests statistics of layers that normalise, which each rank has of its own examples."""
    if look.pair.has_same_shards:
        return ""  # So has the reference.
    layers = look.pair.training.trace.about.layers
    norms = [x for x in layers if "norm" in str(x.get("class")).lower()]
    names = {name for layer in norms for name in layer.get("weights", ())}
    return "layers normalise each rank's examples" if {*_apart(finding, look)} & names else ""


def _factors_of_change(finding: Finding) -> np.ndarray:
    own = [f for f in finding.given if f.terms and f.terms[0].kind == "change"]
    return np.array([f.factors[0] for f in own if not any(f.factors[1:])])


def change_is_number(finding: Finding, look: Look) -> str:
    """Tests changes that are the number of ranks times the reference's."""
    own = _factors_of_change(finding)
    fits = is_one_of(own, [*map(float, look.numbers)])
    return f"the change is {own[0]:.4g} times the reference's" if fits else ""


def scaled_change(finding: Finding, look: Look) -> str:
    """Tests changes that are a multiple of the reference's, of tensors or of a rank's parts."""
    own = _factors_of_change(finding)
    is_known = len(own) and len(own) == len(finding.given) and np.all(own)
    fits = is_known and np.any(np.abs(own - 1) > CLOSE)
    shown = _listed(np.unique(np.round(own, 5)))
    return f"updates are {shown} times the reference's" if fits else ""


def decayed_change(finding: Finding, look: Look) -> str:
    """Tests updates that contain a multiple of the weight beside the reference's update."""
    own = [f for f in finding.given if len(f.factors) == 2 and abs(f.factors[0] - 1) < CLOSE]
    fits = own and len(own) == len(finding.given) and all(f.factors[1] for f in own)
    return f"updates contain {own[0].factors[1]:.4g} times the weights" if fits else ""


def setting(*keys: str) -> Test:
    """Returns the test of a recorded setting of the optimizers that differs."""

    def test(finding: Finding, look: Look) -> str:
        own = {k: v for k, v in look.settings.items() if not keys or k in keys}
        return "; ".join(f"{k} is {a} in the reference and {b} here" for k, (a, b) in own.items())

    return test


def switched(finding: Finding, look: Look) -> str:
    """Tests a setting that differs, of an update that does not show it."""
    return finding.seen.get("text", "") if "changes" not in finding.seen and look.settings else ""


def average(how: str) -> Test:
    """Returns the test of averages of weights, X' = k·X + c·W': "stale", "doubled" or "decay"."""

    def test(finding: Finding, look: Look) -> str:
        found = updates.other_average(finding, look)
        return found[1] if found and found[0] == how else ""

    return test


def by_rule(name: str) -> Test:
    """Returns the test of an update by the reference's rule with something changed."""
    return lambda finding, look: updates.changed_rules(finding, look).get(name, "")


# --- Starts ---------------------------------------------------------------------------------------


def moved(*kinds: str, own: bool | None = None, is_zero: bool = False) -> Test:
    """Returns the test of variables that start, or are changed between steps, otherwise."""

    def test(finding: Finding, look: Look) -> str:
        found = finding.seen.get("moved", ())
        chosen = [x for x in found if x.variable.kind in kinds]
        if not chosen or (kinds != (WEIGHT,) and len(chosen) < len(found)):
            return ""
        if own is not None and all(x.is_own != own for x in chosen):
            return ""
        if is_zero and not all(x.is_zero for x in chosen):
            return ""
        return f"{len(chosen)} variables have other values" + (", each rank its own" if own else "")

    return test


def tied(finding: Finding, look: Look) -> str:
    """Tests weights that are one in one training."""
    return "they are one weight in one recording only" if finding.seen.get("tied") else ""


def trained(*, in_reference: bool) -> Test:
    """Returns the test of weights that only one training trains."""

    def test(finding: Finding, look: Look) -> str:
        whose = "the reference" if in_reference else "this training"
        is_so = finding.seen.get("trained") is in_reference
        return f"only {whose} trains them" if is_so else ""

    return test


def skips_otherwise(finding: Finding, look: Look) -> str:
    """Tests numbers of skipped updates that differ."""
    return look.skipped


def lost(name: str) -> Test:
    """Returns the test of what was named where it was seen, as in `resume` and `tokens`."""
    return lambda finding, look: finding.seen["text"] if finding.seen.get("lost") == name else ""


_GS = GRADIENT, SUM
_LGS = LOSS, GRADIENT, SUM
TABLE = (
    Row((START,), "shifted_state", lost("shifted_state")),
    Row((EXAMPLES,), "examples_restarted", lost("examples_restarted")),
    Row((START, RANDOM, GRADIENT), "not_restored", lost("not_restored")),
    Row((START,), "weights_not_synchronised", lost("weights_not_synchronised")),
    Row((START,), "other_initialiser", lost("other_initialiser")),
    Row((OUTPUTS,), "other_temperature", lost("other_temperature")),
    Row((OUTPUTS,), "other_positions", lost("other_positions")),
    Row((OUTPUTS,), "reduced_precision", lost("reduced_precision")),
    Row((START,), "other_tying", tied),
    Row((START,), "not_updated", trained(in_reference=True)),
    Row((START,), "not_frozen", trained(in_reference=False)),
    Row((EXAMPLES, *_GS, UPDATE, BETWEEN), "overflow_not_skipped", skips_otherwise),
    Row((START,), "diverged_replicas", moved(WEIGHT, own=True)),
    Row((START,), "other_initial_weights", moved(WEIGHT)),
    Row((START,), "diverged_replicas", moved(STATISTIC, own=True)),
    Row((START,), "other_initial_state", moved(STATISTIC, STATE)),
    Row((BETWEEN,), "reset_state", moved(STATE, is_zero=True)),
    Row((EXAMPLES,), "other_examples_in_a_replica", within_replica),
    Row((EXAMPLES,), "labels_shifted", targets(are_moved=True)),
    Row((EXAMPLES,), "other_targets", targets(are_moved=False)),
    Row((EXAMPLES,), "same_examples", examples(are_same)),
    Row((EXAMPLES,), "sampler_padding", filled_up),
    Row((EXAMPLES,), "other_batch_size", examples(have_other_size)),
    Row((EXAMPLES,), "last_batch_dropped", examples(lack_last_batch)),
    Row((EXAMPLES,), "repeated_examples", examples(ids_are_repeated)),
    Row((EXAMPLES,), "lost_examples", examples(are_lost)),
    Row((EXAMPLES,), "not_reshuffled", examples(are_not_shuffled)),
    Row((EXAMPLES,), "repeated_examples", examples(are_repeated)),
    Row((EXAMPLES,), "other_order", examples(are_known)),
    Row((EXAMPLES,), "other_examples", examples(lambda look, rows: True)),
    Row((LOSS,), "lost_micro_batch", lost_pass_of_loss),
    Row((LOSS,), "lost_replica", lost_loss),
    Row((LOSS,), "mean_of_means", mean_of_means),
    Row((RANDOM, LOSS, BETWEEN), "random_numbers_repeated", stream("repeated")),
    Row((RANDOM, LOSS), "same_random_numbers", stream("same")),
    Row((RANDOM, LOSS, BETWEEN), "other_random_numbers", stream("other")),
    Row((RANDOM,), "other_augmentation", examples(ids_are_equal)),
    Row((OUTPUTS, BETWEEN), "inference_mode", layers("mode")),
    Row((OUTPUTS, LOSS), "reduced_precision", layers("dtype")),
    Row((BETWEEN,), "diverged_replicas", unlike_copies),
    Row((BETWEEN,), "changed_on_its_own", always("they change after the update")),
    Row((OUTPUTS,), "other_layer_settings", layers("settings")),
    Row((OUTPUTS,), "other_outputs", always("outputs differ")),
    Row((*_GS, UPDATE), "overflow_not_skipped", overflow),
    Row(_GS, "not_finite", not_finite),
    Row((GRADIENT,), "clipped_before_the_sum", operator("clipped")),
    Row((GRADIENT,), "clipped_before_the_sum", clipped_each),
    Row(_GS, "reduced_precision", operator("rounded")),
    Row(_LGS, "other_loss_scale", loss_scales),
    Row(_GS, "clipped_by_local_norm", local_norm),
    Row(_GS, "frozen", zero),
    Row(_GS, "not_frozen", only),
    Row(_GS, "stale_gradient", stale),
    Row(_GS, "lost_micro_batch", lost_pass),
    Row(_LGS, "regulariser_repeated", decayed),
    Row(_GS, "not_all_reduced", not_reduced),
    Row(_GS, "partly_all_reduced", partly_reduced),
    Row(_GS, "partial_not_reduced", summands_not_reduced),
    Row(_GS, "mean_of_means", mean_of_means),
    Row(_GS, "lost_replica", lost_rank),
    Row(_GS, "reduced_over_other_axis", reduced_elsewhere),
    Row(_LGS, "sum_instead_of_mean", factor("number")),
    Row(_LGS, "mean_instead_of_sum", factor("inverse")),
    Row(_LGS, "micro_batches_not_averaged", factor("passes")),
    Row(_LGS, "scaled_gradient", factor("any")),
    Row((LOSS,), "scaled_gradient", by_rank),
    Row((LOSS,), "other_loss", by_example),
    Row(_GS, "random_numbers_repeated", stream("repeated")),
    Row(_GS, "same_random_numbers", stream("same")),
    Row((GRADIENT,), "other_backward", loss_agrees),
    Row((LOSS,), "other_loss", loss_differs),
    Row((CLIPPING,), "clipped_before_unscale", clips_first),
    Row((CLIPPING,), "clipped_by_local_norm", local_norm),
    Row((CLIPPING,), "clipped_on_one_replica", clipped_on_some),
    Row((CLIPPING,), "other_clipping", other_clipping),
    Row((UPDATE,), "stale_average", average("stale")),
    Row((UPDATE,), "doubled_average", average("doubled")),
    Row((UPDATE,), "other_average_decay", average("decay")),
    Row((UPDATE,), "other_weight_decay", decayed),
    Row((UPDATE,), "not_finite", of_kind(WEIGHT, not_finite)),
    Row((UPDATE,), "reduced_precision", is_short),
    Row((UPDATE,), "not_updated", kept),
    Row((UPDATE,), "not_updated", no_update),
    *(
        Row((UPDATE,), f"other_{key}", of_kind(WEIGHT, setting(key)))
        for key in (
            "learning_rate", "weight_decay", "momentum", "nesterov", "dampening", "beta_1",
            "beta_2", "epsilon",
        )
    ),
    Row((UPDATE,), "other_optimizer", of_kind(WEIGHT, setting())),
    Row((UPDATE,), "updated_twice", by_rule("updated_twice")),
    Row((UPDATE,), "updated_from_a_part", by_rule("updated_from_a_part")),
    Row((UPDATE,), "reset_state", by_rule("reset_state")),
    Row((UPDATE,), "other_optimizer", switched),
    Row((UPDATE,), "other_weight_decay", of_kind(WEIGHT, decayed_change)),
    Row((UPDATE,), "other_learning_rate", of_kind(WEIGHT, scaled_change)),
    Row((UPDATE,), "diverged_replicas", of_kind(WEIGHT, unlike_copies)),
    Row((UPDATE,), "statistics_not_averaged", of_kind(STATISTIC, mean_is_right)),
    Row((UPDATE,), "local_statistics", of_kind(STATISTIC, of_norm)),
    Row((UPDATE,), "diverged_replicas", of_kind(STATISTIC, unlike_copies)),
    Row((UPDATE,), "sum_instead_of_mean", of_kind(STATISTIC, change_is_number)),
    Row((UPDATE,), "other_statistics", of_kind(STATISTIC, always("statistics differ"))),
)  # fmt: skip
