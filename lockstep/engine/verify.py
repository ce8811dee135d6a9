"""Verifies a training against a reference: the claim of each step first, then places and names."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from lockstep.data.match import Matching
from lockstep.data.trace import SEED, STATISTIC, WEIGHT, Trace
from lockstep.engine import modules, nodes, resume, settings
from lockstep.engine.averages import Averages
from lockstep.engine.bounds import bound_of
from lockstep.engine.claim import (
    Claim,
    Moved,
    changed_between,
    drawn_otherwise,
    has_drifted,
    other_starts,
)
from lockstep.engine.examples import Batches
from lockstep.engine.look import Finding, Look
from lockstep.engine.measured import Table
from lockstep.engine.missing import Missing
from lockstep.engine.pair import Pair, copies_are_equal, has_batch_norms
from lockstep.engine.patterns import named
from lockstep.engine.random import REPEATED, SAME, draws, is_random, lost_states
from lockstep.engine.step import Step
from lockstep.engine.sums import hidden_in_sum, unused
from lockstep.engine.verdict import (
    BETWEEN,
    BY_DESIGN,
    CLEAN,
    CLIPPING,
    EXAMPLES,
    GRADIENT,
    LOSS,
    NOT_COMPARED,
    NOT_VERIFIED,
    NOTHING,
    OUTPUTS,
    RANDOM,
    START,
    SUM,
    UPDATE,
    Place,
    Verdict,
)
from lockstep.numeric.memory import RECENT
from lockstep.numeric.tolerance import Tolerance

Names = Mapping[str, str]
# Nodes that layers which mix or draw for each rank do not touch.
UNMIXED = START, EXAMPLES, CLIPPING, UPDATE, BETWEEN
HIDDEN = "the reference clips this gradient to a norm, which hides its factor: the state is right"


@RECENT.kept(256 << 20)
@np.errstate(invalid="ignore", over="ignore", divide="ignore")
def verify(
    reference: Trace, training: Trace, permuted: Trace | None = None,
    by_parts: Trace | None = None, names: Names | None = None, *, resumed: bool = False,
    tolerance: float | None = None, on_step: Callable[[], None] = lambda: None,
) -> Verdict:  # fmt: skip
    """Verifies a training.

    Args:
        reference: the same training on one device.
        training: the training.
        permuted: the reference with permuted examples, which shows how far rounding moves it.
        by_parts: the reference, run part by part of the training's batches, where layers mix or
            draw for each rank.
        names: name of a weight in the training → its name in the reference, if they do not match.
        resumed: whether the training resumes from a checkpoint with its first recorded step.
        tolerance: relative difference of gradients to allow; None to compute it.
        on_step: called after each step.
    """
    if resumed:  # A training that ends early is long enough for one that resumes.
        reference = resume.renumbered(reference, 0, reference)
    names, first = names or {}, reference
    pairs = _pairs(by_parts, training, names) if by_parts else []
    if by_parts and pairs and all(pair.has_same_shards for pair in pairs):
        first, permuted = by_parts, None
    training = _with_data_axes(first, training)
    bound = bound_of(first, permuted, tolerance)
    return _Training(first, reference, training, bound, names, resumed, on_step).verdict()


def _pairs(reference: Trace, training: Trace, names: Names) -> list[Pair]:
    """Returns the steps that both recordings have."""
    matching, found = Matching(reference, training, names), list[Pair]()
    for position, number in enumerate(training.steps):
        if number in reference.steps:
            # A rank that has ended before this step does not hide the others.
            absent = sorted({*training.absent(position), *_silent(training)})
            own = Step(training.without(absent) if absent else training, position)
            found.append(Pair(Step(reference, reference.steps.index(number)), own, matching))
    return found


def _silent(trace: Trace) -> list[int]:
    """Returns the replicas that recorded no step at all, beside others that did."""
    if trace.mesh or trace.about.shards or trace.about.num_copies:
        return []
    found = [
        copy for copy in trace.copies
        if all(trace.named(at, "after", copy) is None for at in range(len(trace.steps)))
    ]  # fmt: skip
    return found if len(found) < len(trace.copies) else []


def _with_data_axes(reference: Trace, training: Trace) -> Trace:
    """Returns a recording whose axes of data are all those over which its batch is split."""
    numbers = [number for number in training.steps if number in reference.steps]
    if any(map(Batches(reference, training).differ, numbers)):
        for read in training.as_data.values():
            other = read()
            if not any(map(Batches(reference, other).differ, numbers)):
                return other
    return training


@dataclasses.dataclass
class _Training:
    """The steps of both trainings, one after the other, until one is wrong.

    Attributes:
        reference: what is compared with: the reference, or the reference by parts.
        origin: the reference as a whole: where the training starts.
        training: the training.
        bound: the bound of the reference's gradients.
        names: names of weights that do not match.
        is_resumed: whether the training resumes from a checkpoint.
        on_step: called after each step.
        table: how far the nodes of all steps are from the reference's.
    """

    reference: Trace
    origin: Trace
    training: Trace
    bound: Tolerance
    names: Names
    is_resumed: bool = False
    on_step: Callable[[], None] = lambda: None
    table: Table = dataclasses.field(default_factory=Table)

    @functools.cached_property
    def pairs(self) -> list[Pair]:
        """The steps that both recordings have."""
        return _pairs(self.reference, self.training, self.names)

    @functools.cached_property
    def origins(self) -> dict[int, Pair]:
        """Number of a step → the step with the reference as a whole."""
        if self.origin is self.reference:
            return {pair.number: pair for pair in self.pairs}
        return {pair.number: pair for pair in _pairs(self.origin, self.training, self.names)}

    @functools.cached_property
    def batches(self) -> Batches:
        """The examples of all steps."""
        return Batches(self.reference, self.training)

    @functools.cached_property
    def averages(self) -> Averages:
        """The averages of weights that the reference keeps."""
        return Averages(self.pairs)

    def verdict(self) -> Verdict:
        """Returns the verdict: the first wrong node of the first wrong step, or what is missing."""
        last: Claim | None = None
        doubtful: tuple[Finding, Look] | None = None
        compared, unknown, designed = set[str](), 0, None
        for pair in self.pairs:
            look = self._look(pair)
            finding = self._finding(look, last)
            self.table.add(look)
            if finding is not None and finding.status == NOT_COMPARED:
                doubtful = doubtful or (finding, look)
                repeated = [x for x in look.random if x.how == REPEATED]
                finding = Finding(RANDOM, seen={"text": repeated[0].text}) if repeated else None
            if finding is not None and finding.node == START and (number := self._begins_later()):
                why = (
                    f"it starts from the weights before step {number} of the reference: record a"
                    f" job that resumes there with first_step={number}"
                )
                return self._said(NOT_VERIFIED, missing=(why,))
            if finding is not None:
                verdict = self._told(self._replaced_by_tying(finding, look), look)
                if verdict.status != BY_DESIGN:
                    return verdict
                designed = designed or verdict  # A later step may be wrong.
            self.on_step()
            compared |= self._compared_updates(look)
            unknown += look.claim.num_unknown
            origin = self.origins.get(pair.number, pair)
            last = look.claim if origin is pair else self._look(origin).claim
        if not self.pairs:
            return self._said(NOT_VERIFIED, missing=("no step is in both recordings",))
        if last is not None and (silent := self._silent()):
            # The step that is compared lacks them, and may number the others otherwise.
            names = tuple(self.training.name_of("after", copy) for copy in silent)
            seen = {"is_idle": True, "text": "no update", "ranks": names}
            return self._told(Finding(UPDATE, seen=seen), look)
        if doubtful:
            return self._told(*doubtful)
        return designed or self._without_fault(compared, unknown)

    def _begins_later(self) -> int:
        """Returns the step of the reference from whose weights the training starts; 0 for none."""
        if self.is_resumed or self.training.steps[0] or self.pairs[0].is_port:
            return 0
        return resume.first_step_of(self.reference, self.training, self.names, 0)

    def _compared_updates(self, look: Look) -> set[str]:
        """Returns the training's names of the weights that change in a step, and were compared."""
        first, second = (t.changes[look.pair.number] for t in (self.reference, self.training))
        return {
            x.variable.second for x in look.claim.changes
            if x.variable.kind == WEIGHT and (x.share is not None or x.unknown)
            and (x.variable.first in first or x.variable.second in second)
        }  # fmt: skip

    def _look(self, pair: Pair) -> Look:
        look = Look(pair, self.bound, self.batches, self.averages)
        if look.late:
            early = Pair(pair.reference, pair.training, pair.matching, look.late)
            look = Look(early, self.bound, self.batches, self.averages)
        return look

    def _silent(self) -> tuple[int, ...]:
        """Returns the replicas that run without an update, beside others that make some."""
        trace = self.training
        idle = _silent(trace)
        return tuple(c for c in idle if not trace.of_replica.get(c, trace.about).trained)

    # One step.

    def _finding(self, look: Look, last: Claim | None) -> Finding | None:
        """Returns the first wrong node of a step; None if it is right."""
        pair = look.pair
        origin = self.origins.get(pair.number, pair)
        if last is None and (finding := self._start(origin)):
            return finding
        if last is not None and (moved := [*changed_between(last, origin)]):
            return _of_moved(BETWEEN, moved)
        modes = {has_batch_norms(step) for step in (pair.reference, pair.training)}
        if "mode" in look.layers and len(modes) > 1 and not (look.claim.is_known or pair.is_port):
            return _caused_between(Finding(OUTPUTS), look)  # Only one normalises its batch.
        if not self._is_clean(look):
            try:
                finding = self._walk(look)
                return self._of_loss(_caused_between(finding, look), look) if finding else None
            except Exception as raised:  # The claim does not hold, whatever a node cannot read.
                names = tuple(dict.fromkeys(x.variable.first for x in look.claim.wrong))
                seen = {"error": f"{type(raised).__name__}: {raised}"}
                return Finding(UPDATE, names, seen=seen)
        return self._unseen(look)

    def _of_loss(self, finding: Finding, look: Look) -> Finding:
        """Returns where a wrong loss is that equals the reference's in this step by chance.

        So do many before the first update, as those of a policy that is its own reference.
        """
        if finding.node != GRADIENT or finding.names or not finding.seen.get("unknown"):
            return finding
        pairs = [p for p in self.pairs if p.number > look.pair.number and p.starts_equally]
        later = [each for each in map(self._look, pairs) if not nodes.other_examples(each)]
        is_chance = any(each.loss_agrees() is False for each in later)
        return dataclasses.replace(finding, node=LOSS) if is_chance else finding

    def _unseen(self, look: Look) -> Finding | None:
        """Returns what the states of a right step do not show.

        Streams that loading the reference's hides; a batch that each rank computes as a whole; the
        loss that is reported; gradients that were not used, or lose digits behind a wide bound; and
        settings, on or off, that make no difference in these steps.
        """
        if lost := lost_states(look.pair):
            return Finding(RANDOM, seen={"text": lost[0].text, "random": lost})
        if look.pair.is_port:
            return None
        raw, names = look.pair.raw, look.pair.names
        computes_alike = all(copies_are_equal(raw, name) for name in names if raw)
        if look.batches.are_copied(look.pair.number) and computes_alike:
            return Finding(EXAMPLES, seen={"rows": look.batches.rows[look.pair.number]})
        if not look.claim.is_known and not look.pair.starts_equally:
            return None
        if look.reported and not self.is_resumed:
            of_loss = Finding(LOSS, seen={"unknown": True, "text": look.reported})
            return nodes.other_examples(look) or of_loss
        if finding := nodes.clip(look):
            return finding
        if finding := unused(look):
            return self._walk(look) or finding
        if finding := hidden_in_sum(look):
            return finding
        if "dtype" in look.layers:
            return Finding(OUTPUTS, seen={"text": look.layers["dtype"]})
        switched = [key for key, both in look.settings.items() if {*map(type, both)} == {bool}]
        if switched:
            text = f"{', '.join(switched)} differs"
            return Finding(UPDATE, seen={"is_switched": True, "text": text})
        return None

    def _start(self, pair: Pair) -> Finding | None:
        """Judges where the training starts, and what it trains."""
        if self.is_resumed:
            if finding := resume.lost(pair):
                return finding
        elif (moved := [*other_starts(pair, self.bound)]) and not self._has_drifted(pair, moved):
            return _of_moved(START, moved)
        is_own = pair.is_port and pair.has("before") and not self.training.about.replayed
        if is_own and pair.number == 0 and (drawn := drawn_otherwise(pair)):
            text = "weights are drawn from another distribution, by their sizes"
            return Finding(START, (*drawn,), seen={"text": text})
        trained = [*settings.trained_elsewhere(pair)] if not pair.is_port else []
        if trained:
            names = tuple(name for name, _ in trained)
            whose = "in_reference" if trained[0][1] else "in_training"
            return Finding(START, names, seen={whose: True})
        return None

    def _has_drifted(self, pair: Pair, moved: Sequence[Moved]) -> bool:
        """Returns whether steps that were not recorded have trained other weights, as they may.

        Rounding is that of all copies: copies unlike each other have not drifted by it.
        """
        is_equal = not any(each.is_own for each in moved)
        may_drift = any(_mixes_or_draws(pair.training)) or (is_equal and has_drifted(pair))
        return pair.number > 0 and may_drift

    def _replaced_by_tying(self, finding: Finding, look: Look) -> Finding:
        """Returns where the training starts, if a fault comes with weights that are tied or not."""
        tied = settings.tied_elsewhere(self.reference, self.training)
        if not tied or finding.node == START or look.pair is not self.pairs[0]:
            return finding
        return Finding(START, tied, seen={"tied": True})

    def _is_clean(self, look: Look) -> bool:
        """Returns whether the claim holds, and nothing that saturates hides a factor."""
        if not look.claim.is_known:
            if not look.pair.starts_equally:
                # Nothing else of it can be compared; what is missing says so.
                return not look.batches.differ(look.pair.number)
            has_wrong = bool(look.pair.names and look.wrong_sums)
            return not has_wrong and not look.batches.differ(look.pair.number)
        return look.claim.holds and nodes.hidden_factor(look) is None and not look.unrefuted

    def _walk(self, look: Look) -> Finding | None:
        """Returns the first wrong node of a step whose claim does not hold."""
        if not look.claim.is_known and not (look.pair.names and look.pair.starts_equally):
            return nodes.other_examples(look)
        for judge in nodes.NODES:
            if finding := judge(look):
                return self._if_by_design(finding, look)
        if look.claim.holds:
            return nodes.hidden_factor(look)
        wrong = tuple(dict.fromkeys(x.variable.first for x in look.claim.wrong))
        return Finding(UPDATE, wrong) if wrong else None

    def _if_by_design(self, finding: Finding, look: Look) -> Finding:
        """Marks what layers that mix or draw for each rank may cause, without their reference."""
        if look.pair.is_port and finding.node == UPDATE and settings.rate_changes(look.pair):
            return dataclasses.replace(finding, status=NOT_COMPARED)
        changes = finding.seen.get("changes", ())
        of_statistics = bool(changes) and all(x.variable.kind == STATISTIC for x in changes)
        if look.pair.has_same_shards or (finding.node in UNMIXED and not of_statistics):
            return finding
        step = look.pair.training
        # Layers may fold the number of the replica into equal states that are variables.
        folds = bool(step.of_kind(SEED))
        unlike = [x for x in look.random if not (folds and x.how == SAME)]
        is_seen = bool(look.layers or unlike) or finding.seen.get("by") == "rank"
        if finding.node in (LOSS, GRADIENT, SUM) and look.outputs_apart:
            # Layers that compute something else for each rank give other outputs.
            is_seen |= all(np.all(apart <= look.limit) for apart in look.outputs_apart)
        may_be = any(_mixes_or_draws(step)) and not is_seen
        return dataclasses.replace(finding, status=NOT_COMPARED) if may_be else finding

    # What is said.

    def _told(self, finding: Finding, look: Look) -> Verdict:
        """Returns the verdict on a finding; its status and place do not depend on its name."""
        name, reason, error = "", "", finding.seen.get("error", "")
        try:
            name, reason = named(finding, look)
        except Exception as raised:  # A name is a comment; nothing that it reads may lose a place.
            error = f"{type(raised).__name__}: {raised}"
        if finding.seen.get("is_hidden"):
            reason = f"{reason}; {HIDDEN}" if reason else HIDDEN
        notes = tuple[str, ...]()
        is_unknown = finding.node in (LOSS, GRADIENT) and finding.seen.get("unknown")
        if is_unknown and not (look.pair.is_port or look.outputs_apart):
            notes = ("outputs, which were not compared: the fault may be in them",)
        place, module = _place_of(finding, look), ""
        with contextlib.suppress(Exception):  # It is no part of the verdict, either.
            module = modules.first_wrong(look, finding.node)
        place = dataclasses.replace(place, module=module)
        return self._said(
            finding.status, place=place, formula=(*_formulas(finding),), name=name,
            reason=reason, error=error, notes=notes,
        )  # fmt: skip

    def _said(self, status: str, **fields: Any) -> Verdict:
        about = self.training.about
        fields["notes"] = (*self._notes(), *fields.get("notes", ()))
        return Verdict(
            status, measured=self.table.rows, framework=about.framework, steps=self.training.steps,
            num_replicas=about.num_replicas, tolerance=self.bound.text, **fields,
        )  # fmt: skip

    def _without_fault(self, compared: set[str], unknown: int) -> Verdict:
        """Returns the verdict on a training without a wrong step: clean, or what is missing."""
        is_port = self.pairs[0].is_port
        copied = [p.number for p in self.pairs if not is_port and self.batches.are_copied(p.number)]
        if missing := (*self.missing.reasons(compared, copied),):
            return self._said(NOT_VERIFIED, missing=missing, num_unknown=unknown)
        if not any(self.missing.changed):
            return self._said(NOTHING, missing=("no weight changes in any step",))
        given = {"num_unknown": unknown, "notes": (*self.missing.notes_of_right(),)}
        if why := self._by_design():
            place = Place(OUTPUTS, self.pairs[0].number)
            return self._said(BY_DESIGN, place=place, name="local_statistics", reason=why, **given)
        return self._said(CLEAN, **given)

    def _by_design(self) -> str:
        """Says that layers normalise each rank's part, as only the reference by parts does, too."""
        steps = [*self.origins.values()]
        if self.reference is self.origin or not steps:
            return ""
        has_norms = has_batch_norms(steps[0].training) and not _is_synchronised(steps[0].training)
        differs = has_norms and not all(self._look(pair).claim.holds for pair in steps)
        return "layers normalise over the examples of each rank" if differs else ""

    # What was not compared.

    @functools.cached_property
    def missing(self) -> Missing:
        """What recordings lack, and what was not compared."""
        return Missing(self.reference, self.training, self.pairs)

    def _notes(self) -> Iterator[str]:
        """Yields what was not compared beside a verdict."""
        if self.batches.has_examples_second:
            yield "examples are not compared: they are the second axis of the inputs"
        yield from self.missing.notes()
        idle = self._silent()
        if ended := [copy for copy in _silent(self.training) if copy not in idle]:
            names = ", ".join(self.training.name_of("after", copy) for copy in ended)
            yield f"{names} ended before the first recorded step: the others are compared"
        first = self.pairs[0] if self.pairs else None
        moved = [*other_starts(first, self.bound)] if first and not self.is_resumed else []
        if first and moved and self._has_drifted(first, moved):
            yield (
                f"the start of step {first.number}: rounding, and layers that mix or draw for each"
                " rank, may have trained other weights in the steps before it"
            )


def _mixes_or_draws(step: Step) -> tuple[bool, bool]:
    """Returns whether layers mix the examples of each rank, and draw numbers for each."""
    num = len(step.shards)
    mixes = has_batch_norms(step) and num > 1 and not _is_synchronised(step)
    has_states = step.has("random_after") or bool(step.trace.about.layers)
    draws_own = num > 1 and has_states and all(draws(step, shard) for shard in step.shards)
    if num > 1 and not step.has("random"):  # It is not recorded what layers draw.
        draws_own = any(map(is_random, step.trace.about.layers))
    return mixes, draws_own


def _caused_between(finding: Finding, look: Look) -> Finding:
    """Returns a difference that layers have since the step before, as one of then."""
    before = look.pair.previous
    if "mode" in look.layers and finding.node in (OUTPUTS, LOSS, GRADIENT):
        text = look.layers["mode"]
        if before and "mode" not in settings.other_layers(before):
            return Finding(BETWEEN, seen={"text": text}, is_before=True)
        return dataclasses.replace(finding, node=OUTPUTS, seen={**finding.seen, "text": text})
    return finding


def _place_of(finding: Finding, look: Look) -> Place:
    """Returns where a finding is, with the names of its ranks."""
    pair = look.pair
    number, before = pair.number, pair.training.previous
    if finding.is_before and before:
        number = before.number
    ranks = tuple[str, ...](finding.seen.get("ranks", ()))
    if 0 < len(finding.ranks) < pair.num_ranks:
        kind = "raw" if len(pair.shards) == pair.num_ranks else "after"
        ranks = tuple(pair.training.trace.name_of(kind, rank) for rank in finding.ranks)
    total = len(pair.names) or len(pair.variables)
    return Place(
        finding.node, number, finding.names, max(total, len(finding.names)), ranks,
        finding.seen.get("where", ""),
    )  # fmt: skip


def _formulas(finding: Finding) -> Iterator[str]:
    """Yields a line for each formula, with the reference's beside it.

    A tensor of one element determines no factor: it is left out beside others.
    """
    determined = [x for x in finding.given if any(x.known) or not x.known]
    for formula in determined or finding.given:
        names = ", ".join(formula.names[:2]) or finding.node
        ranks = "rank" if len(formula.copies) == 1 else "ranks"
        on = f" on {ranks} {', '.join(map(str, formula.copies))}" if formula.copies else ""
        right = finding.right_of(formula)
        beside = f"; in the reference {right.text}" if right else ""
        yield f"{names}{on} = {formula.text}{beside}"


def _of_moved(node: str, moved: Sequence[Moved]) -> Finding:
    ranks = tuple(sorted({copy for each in moved for copy in each.copies}))
    names, is_before = tuple(x.variable.first for x in moved), node == BETWEEN
    return Finding(node, names, ranks, seen={"moved": moved}, is_before=is_before)


def _is_synchronised(step: Step) -> bool:
    """Returns whether all BatchNorm layers normalise over all ranks."""
    layers = [x for x in step.trace.about.layers if "batchnorm" in str(x.get("class")).lower()]
    are_synced = [("Sync" in str(x.get("class"))) or x.get("synchronized") for x in layers]
    return step.trace.about.syncs_batch_norm or all(are_synced)
