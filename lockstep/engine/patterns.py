"""The one table of names: at which nodes, what has to fit, and why; the most specific first.

A row's test gets the finding and what is known of its step, and returns a reason in words, or "" if
it does not fit. Formulas come before recorded evidence, and evidence before a node's own name. No
test asks for another name, and a name changes neither status nor place.
"""

import collections
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from lockstep.data.trace import STATE, STATISTIC, WEIGHT
from lockstep.engine.averages import FITS
from lockstep.engine.claim import Change
from lockstep.engine.examples import Batches, Rows
from lockstep.engine.look import OF_LOSS, Finding, Look
from lockstep.engine.pair import State, copies_are_equal, names_in_norms
from lockstep.engine.random import OTHER, REPEATED, SAME
from lockstep.engine.solve import CLOSE, NOTHING, Formula, is_constant, solve
from lockstep.engine.sums import is_along_data
from lockstep.engine.verdict import (
    BETWEEN,
    BY_DESIGN,
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


def seen(key: str, text: str = "") -> Test:
    """Returns the test of evidence that a node has under a key."""
    return lambda finding, look: (
        (finding.seen.get("text", "") or text) if finding.seen.get(key) else ""
    )


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


def examples(
    test: Callable[[Finding, Look, _Others], bool] = lambda finding, look, rows: True,
) -> Test:
    """Returns the test of a batch with other rows."""

    def of_rows(finding: Finding, look: Look) -> str:
        if "rows" not in finding.seen:
            return ""
        right, own = finding.seen["rows"]
        given: Rows = sum(own, Rows())
        others = _Others(right, own, right - given, given - right)
        text = (
            f"{others.extra.total()} of {given.total()} examples are not the reference's,"
            f" {others.missing.total()} are missing"
        )
        return text if test(finding, look, others) else ""

    return of_rows


def of_batches(test: Callable[[Batches, int], bool]) -> Test:
    """Returns the test of a batch with other rows by a judgement of all batches."""
    return examples(lambda finding, look, rows: test(look.batches, look.pair.number))


def have_other_size(finding: Finding, look: Look, rows: _Others) -> bool:
    """Tests batches of another size in all steps, or a last one that is dropped or filled up."""
    if rows.right.total() == sum(each.total() for each in rows.own):
        return False
    batches = look.batches.rows.values()
    right = max(first.total() for first, _ in batches)
    own = max(sum(each.total() for each in ranks) for _, ranks in batches)
    if right != own:
        return not rows.missing or bool(rows.extra)
    is_short = rows.right.total() < right, sum(each.total() for each in rows.own) < own
    return finding.status == BY_DESIGN or is_short[0] != is_short[1]


def are_not_shuffled(finding: Finding, look: Look, rows: _Others) -> bool:
    """Tests a rank that has exactly its examples of an earlier step."""
    batches = look.batches
    earlier = [batches.rows[number][1] for number in batches.earlier(look.pair.number)]
    is_again = any(
        own and own == before
        for ranks in earlier for own, before in zip(rows.own, ranks, strict=False)
    )  # fmt: skip
    return bool(rows.extra) and is_again


def are_lost_or_repeated(finding: Finding, look: Look, rows: _Others) -> bool:
    """Tests a batch that lacks rows, or has some of its own twice, also by their ids."""
    ids = look.batches.ids(look.pair.number)
    more = collections.Counter(ids[1]) - collections.Counter(ids[0]) if ids else {}
    return {*rows.extra} <= {*rows.right} or bool(more and {*more} <= {*ids[0]})


def targets(finding: Finding, look: Look) -> str:
    """Tests other arrays next to equal inputs."""
    if "targets" not in finding.seen:
        return finding.seen.get("read", "")
    index, a, b = finding.seen["targets"]
    num = int(np.sum(np.any((a != b).reshape(len(a), -1), axis=1)))
    return f"array {index + 1} next to equal inputs differs in {num} of {len(a)} examples"


# --- Random numbers, outputs and loss -------------------------------------------------------------


def stream(how: str) -> Test:
    """Returns the test of random streams that are "same", "repeated" or "other"."""

    def test(finding: Finding, look: Look) -> str:
        found = finding.seen.get("random")
        # The reference by parts draws the same numbers for each part.
        if found is None and look.pair.has_same_shards and how != REPEATED:
            return ""
        return next((each.text for each in found or look.random if each.how == how), "")

    return test


def layers(key: str) -> Test:
    """Returns the test of what is recorded of layers."""
    return lambda finding, look: look.layers.get(key, "")


def mean_of_means(finding: Finding, look: Look) -> str:
    """Tests that ranks count equally, and in the reference by weights that add up to a mean."""
    if finding.seen.get("by"):
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


# --- Gradients and sums ---------------------------------------------------------------------------


def factor(finding: Finding, look: Look) -> str:
    """Tests gradients that are the reference's times a number, on all ranks."""
    found = []
    for formula in finding.given:
        shares, right = formula.shares, finding.right_of(formula)
        has_more = any(abs(f) > CLOSE for f, t in formula.counted if t.offset or t.is_weight)
        if finding.seen.get("is_factor"):
            found.append(formula.factors[0])
        elif not len(shares) or not formula.is_even or has_more:
            return ""
        elif formula.terms[0].kind == "right":
            found.append(shares[0])
        elif right is None or not right.is_even or not right.shares[0]:
            return ""
        else:
            found.append(shares[0] / right.shares[0])
    own = np.array(found)
    fits = len(own) > 0 and np.all(own != 0) and not np.all(np.abs(own - 1) < CLOSE)
    shown = _listed(np.unique(np.round(own, 6)))
    return f"the gradient is {shown} times the reference's" if fits else ""


def _of_gradients(finding: Finding) -> list[tuple[Formula, np.ndarray]]:
    return [(f, f.of("gradient")) for f in finding.given if len(f.of("gradient"))]


def not_reduced(finding: Finding, look: Look) -> str:
    """Tests that each copy uses its own gradient, or that the sum of the copies' is right."""
    text = "each rank has its own gradient"
    used = look.pair.used
    known = [name for name in finding.names if all(name in own for own in used)]
    if known and all(copies_are_equal(used, name) for name in known):
        return ""  # What optimizers use was reduced after this.
    if _is_own_only(finding, look):
        return text
    right = _right_of_copies(finding)
    is_along = is_along_data(look.pair, finding.seen.get("of_copies", ()))
    return f"{text}: {right}" if right and is_along else ""


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


def lost_part(finding: Finding, look: Look) -> str:
    """Tests ranks, or micro-batches, that count 0 in what all copies got, or in the loss."""
    for formula in finding.given:
        passes = [(f, t.label) for f, t in formula.counted if t.kind in ("pass", "loss")]
        largest = max((abs(f) for f, _ in passes), default=0.0)
        lost = [label for f, label in passes if abs(f) <= CLOSE * largest]
        if lost and largest:
            return f"{', '.join(lost)} {'does' if len(lost) == 1 else 'do'} not count"
    known = _of_gradients(finding)
    ranks = [s for _, a in known for s, x in enumerate(a) if abs(x) <= CLOSE * np.max(np.abs(a))]
    are_equal = len({tuple(np.round(a, 4)) for _, a in known}) == 1
    is_lost = ranks and are_equal and np.any(known[0][1])
    return f"the gradient of rank {ranks[0]} does not count" if is_lost else ""


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
    is_stale = any(formula.has_earlier for formula in finding.given)
    return "it contains the gradient of the step before" if is_stale else ""


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


def loss_scales(finding: Finding, look: Look) -> str:
    """Tests loss scales of ranks that differ."""
    step = look.pair.training
    scales = [step.trace.loss_scale(step.position, shard) for shard in step.shards]
    return f"the loss scales of the ranks are {_listed(np.array(scales))}" if np.ptp(scales) else ""


def not_finite(finding: Finding, look: Look) -> str:
    """Tests NaN or infinity that the reference does not have."""
    if finding.seen.get("not_finite"):
        return "gradients are NaN or infinite"
    states = [own for _, _, own in _states(finding, look) if own is not None]
    return "" if all(np.isfinite(dense(own.new)).all() for own in states) else "NaN or infinite"


def overflow(finding: Finding, look: Look) -> str:
    """Tests gradients that are not finite, and an update that the reference does not make."""
    pair = look.pair
    copies = [pair.right_used, *pair.used, *pair.raw]
    if all(np.isfinite(g).all() for own in copies for g in own.values()):
        return ""
    weights = [pair.state(v) for v in pair.variables if v.kind == WEIGHT]
    is_skipped = not any(state is not None and np.any(state.change) for state in weights)
    return "gradients overflow, and the step is not skipped" if is_skipped else ""


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
    is_scaled = step.trace.loss_scale(step.position, 0) != 1
    is_first = "clip" in calls and (
        "unscale" in calls[calls.index("clip") :] or ("unscale" not in calls and is_scaled)
    )
    return "it clips gradients that are multiplied by the loss scale" if is_first else ""


def other_clipping(finding: Finding, look: Look) -> str:
    """Tests factors of clipping, or ranks that do not clip beside others that clip rightly."""
    own = np.unique(np.round([f.shares[0] for f in finding.given if len(f.shares)], 5))
    right = finding.seen.get("factor", 1.0)
    text = f"it clips by {_listed(own)}, and the reference by {right:.4g}" if len(own) else ""
    is_on_some = 0 < len(finding.ranks) < len(look.pair.copies)
    return text or ("these ranks clip otherwise than the others" if is_on_some else "")


# --- State ----------------------------------------------------------------------------------------


def _states(
    finding: Finding, look: Look, kind: str = ""
) -> Iterator[tuple[Change, State | None, State | None]]:
    """Yields the wrong changes of a kind, or of any, with the states of both trainings."""
    for change in finding.seen.get("changes", ()):
        if kind in ("", change.variable.kind):
            first, own = (look.pair.state(change.variable, c) for c in (None, change.copy))
            yield change, first, own


def of_kind(kind: str, test: Test) -> Test:
    """Returns a test of findings of statistics alone, or of weights and their state."""

    def only_of_kind(finding: Finding, look: Look) -> str:
        kinds = {x.variable.kind == STATISTIC for x in finding.seen.get("changes", ())}
        are_statistics = kinds == {True}
        return test(finding, look) if kinds and are_statistics == (kind == STATISTIC) else ""

    return only_of_kind


def kept(finding: Finding, look: Look) -> str:
    """Tests variables that do not change, and do in the reference."""
    found = [*_states(finding, look, WEIGHT)] or [*_states(finding, look)]
    for _, first, own in found:
        if own is None or not same_bits(*own) or first is None or not np.any(first.change):
            return ""
    return "they do not change in this step" if found else ""


def unlike_copies(finding: Finding, look: Look) -> str:
    """Tests variables that each copy changes differently."""
    return "each rank has its own" if _apart(finding, look) else ""


def _apart(finding: Finding, look: Look) -> list[str]:
    found = []
    for variable in dict.fromkeys(x.variable for x, *_ in _states(finding, look)):
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
    is_of_norm = {*_apart(finding, look)} & names_in_norms(look.pair.training)
    return "layers normalise each rank's examples" if is_of_norm else ""


def scaled_change(finding: Finding, look: Look) -> str:
    """Tests changes that are a multiple of the reference's, of tensors or of a rank's parts."""
    changes = [f for f in finding.given if f.terms and f.terms[0].kind == "change"]
    own = np.array([f.factors[0] for f in changes if not any(f.factors[1:])])
    is_known = len(own) and len(own) == len(finding.given) and np.all(own)
    fits = is_known and np.any(np.abs(own - 1) > CLOSE)
    shown = _listed(np.unique(np.round(own, 5)))
    return f"updates are {shown} times the reference's" if fits else ""


def decayed_change(finding: Finding, look: Look) -> str:
    """Tests updates that contain a multiple of the weight beside the reference's update."""
    own = [f for f in finding.given if len(f.factors) == 2 and abs(f.factors[0] - 1) < CLOSE]
    fits = own and len(own) == len(finding.given) and all(f.factors[1] for f in own)
    return f"updates contain {own[0].factors[1]:.4g} times the weights" if fits else ""


def setting(key: str = "") -> Test:
    """Returns the test of a recorded setting of the optimizers that differs; "" for any."""

    def test(finding: Finding, look: Look) -> str:
        own = {k: v for k, v in look.settings.items() if key in ("", k)}
        return "; ".join(f"{k} is {a} in the reference and {b} here" for k, (a, b) in own.items())

    return of_kind(WEIGHT, test)


def other_average(finding: Finding, look: Look) -> str:
    """Says how averages of weights differ: X' = k·X + (1 − k)·W' in the reference."""
    text = ""
    for change in finding.seen.get("changes", ()):
        variable, (first, copies) = change.variable, look.pair.states(change.variable)
        own, average = copies[change.copy], look.averages.of(variable.first)
        if first is None or own is None or average is None:
            return ""
        kept = average.kept.get(look.pair.number)
        source = look.pair.state(average.source)
        if kept is None or source is None or not np.any(dense(own.old)):
            continue
        old, new = variable.as_first(own.old), variable.as_first(own.new)
        starts_there = norm(old - dense(source.old)) <= FITS * norm(old)
        if same_bits(*own):
            if not starts_there:
                return ""
            text = "it takes the weights before the update, which it has"
            continue
        terms = [{"": old}, {"": dense(source.new)}]
        terms += [] if starts_there else [{"": dense(source.old)}]
        factors, known = solve({"": new}, terms, [""])
        value = sum(f * t[""] for f, t in zip(factors, terms, strict=True))
        if not known.all() or norm(new - value) > FITS * norm(new):
            return ""
        shown = [f"{f:.4g}·{x}" for f, x in zip(factors, ("X", "W'", "W"), strict=False)]
        text = f"X' = {' + '.join(shown)}, in the reference {kept:.4g}·X + {1 - kept:.4g}·W'"
    return text


# --- Starts ---------------------------------------------------------------------------------------


def moved_apart(finding: Finding, look: Look) -> str:
    """Tests weights, or statistics alone, of which each rank has its own before the step."""
    found = finding.seen.get("moved", ())
    weights = [x for x in found if x.variable.kind == WEIGHT]
    are_statistics = all(x.variable.kind == STATISTIC for x in found)
    is_own = any(x.is_own for x in weights or (found if are_statistics else ()))
    return "variables have other values, each rank its own" if is_own else ""


def reset(finding: Finding, look: Look) -> str:
    """Tests state that is 0 or missing where the last step left other values."""
    found = finding.seen.get("moved", ())
    are_zero = found and all(x.variable.kind == STATE and x.is_zero for x in found)
    return "they are 0 or missing" if are_zero else ""


_GS = GRADIENT, SUM
_LGS = LOSS, GRADIENT, SUM
TABLE = (
    Row((START, RANDOM, GRADIENT), "state_lost", seen("is_resumed")),
    Row((START,), "other_tying", seen("tied", "they are one weight in one recording only")),
    Row((START,), "not_updated", seen("in_reference", "only the reference trains them")),
    Row((START,), "frozen", seen("in_training", "only this training trains them")),
    Row(
        (EXAMPLES, *_GS, UPDATE, BETWEEN),
        "overflow_not_skipped",
        lambda finding, look: look.skipped,
    ),
    Row((START,), "diverged_replicas", moved_apart),
    Row((START,), "other_start", always("they have other values")),
    Row((BETWEEN,), "state_lost", reset),
    Row((EXAMPLES,), "other_examples_in_a_replica", seen("views")),
    Row((EXAMPLES,), "other_targets", targets),
    Row((EXAMPLES,), "batch_not_split", of_batches(Batches.share_examples)),
    Row((EXAMPLES,), "other_batch_size", examples(have_other_size)),
    Row((EXAMPLES,), "not_reshuffled", examples(are_not_shuffled)),
    Row((EXAMPLES,), "batch_not_split", examples(are_lost_or_repeated)),
    Row((EXAMPLES,), "other_examples", examples()),
    Row((LOSS,), "lost_part", lost_part),
    Row((LOSS,), "mean_of_means", mean_of_means),
    Row((RANDOM, LOSS), "random_numbers_repeated", stream(REPEATED)),
    Row((RANDOM, LOSS), "same_random_numbers", stream(SAME)),
    Row((RANDOM, LOSS), "other_random_numbers", stream(OTHER)),
    Row((RANDOM,), "other_preprocessing", of_batches(Batches.have_equal_ids)),
    Row((OUTPUTS, BETWEEN), "inference_mode", layers("mode")),
    Row((OUTPUTS, LOSS), "reduced_precision", layers("dtype")),
    Row((BETWEEN,), "diverged_replicas", unlike_copies),
    Row((BETWEEN,), "changed_on_its_own", always("they change after the update")),
    Row((OUTPUTS,), "other_layer_settings", layers("settings")),
    Row((OUTPUTS,), "other_outputs", always("outputs differ")),
    Row((*_GS, UPDATE), "overflow_not_skipped", overflow),
    Row(_GS, "not_finite", not_finite),
    Row((GRADIENT,), "clipped_too_early", operator("clipped")),
    Row((GRADIENT,), "clipped_too_early", seen("is_clipped", "each rank's gradient is clipped")),
    Row(_GS, "reduced_precision", operator("rounded")),
    Row(_LGS, "other_loss_scale", loss_scales),
    Row(_GS, "frozen", seen("zero", "gradients are 0 or missing")),
    Row(_GS, "frozen", seen("only", "there are gradients in this training alone")),
    Row(_GS, "stale_gradient", stale),
    Row(_LGS, "regularisation_count", decayed),
    Row(_GS, "not_all_reduced", not_reduced),
    Row(_GS, "partial_not_reduced", summands_not_reduced),
    Row(_GS, "mean_of_means", mean_of_means),
    Row(_GS, "lost_part", lost_part),
    Row(_GS, "reduced_over_other_axis", reduced_elsewhere),
    Row(_LGS, "wrong_factor", factor),
    Row((LOSS,), "wrong_factor", seen("by")),
    Row(_GS, "random_numbers_repeated", stream(REPEATED)),
    Row(_GS, "same_random_numbers", stream(SAME)),
    Row((GRADIENT,), "other_backward", seen("unknown", "the loss of each rank is right")),
    Row((LOSS,), "other_loss", seen("unknown", "the loss is another one")),
    Row((CLIPPING,), "clipped_too_early", clips_first),
    Row((CLIPPING,), "other_clipping", other_clipping),
    Row((UPDATE,), "other_average", other_average),
    Row((UPDATE,), "other_weight_decay", decayed),
    Row((UPDATE,), "not_finite", of_kind(WEIGHT, not_finite)),
    Row((UPDATE,), "not_updated", kept),
    Row((UPDATE,), "not_updated", seen("is_idle")),
    Row((UPDATE,), "other_learning_rate", setting("learning_rate")),
    Row((UPDATE,), "other_weight_decay", setting("weight_decay")),
    Row((UPDATE,), "other_optimizer", setting()),
    Row((UPDATE,), "other_optimizer", seen("is_switched")),
    Row((UPDATE,), "other_weight_decay", of_kind(WEIGHT, decayed_change)),
    Row((UPDATE,), "other_learning_rate", of_kind(WEIGHT, scaled_change)),
    Row((UPDATE,), "diverged_replicas", of_kind(WEIGHT, unlike_copies)),
    Row((UPDATE,), "statistics_not_averaged", of_kind(STATISTIC, mean_is_right)),
    Row((UPDATE,), "local_statistics", of_kind(STATISTIC, of_norm)),
    Row((UPDATE,), "diverged_replicas", of_kind(STATISTIC, unlike_copies)),
    Row((UPDATE,), "other_statistics", of_kind(STATISTIC, always("statistics differ"))),
)
