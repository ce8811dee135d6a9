"""Why a step is false: hypotheses that are tested by computation, and the first that holds.

Most say what all false arrays would be if they were true, and explain the numbers if the arrays are
that, within rounding, in every tensor; others count what was given, or what was changed.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from app.proof.arithmetic import (
    REDUCED_PRECISIONS,
    fit,
    has_values_of,
    is_reduced,
    is_weighted_sum,
    telling_factors,
)
from app.proof.checks import find_shards, state_before
from app.proof.measurement import SMALLEST, UNIT_ROUNDOFF, Measurement, relative_error
from app.proof.reference import Arrays, Reference
from app.proof.trace import Trace, hash_examples
from app.proof.verdict import Diagnosis

UNEXPLAINED = Diagnosis(
    "unexplained",
    "none of these explains it: scaling, a mean of means, a lost or repeated gradient or shard,"
    " another order of examples, BatchNorm's statistics, reduced precision, a scaled update",
)


class Diagnostician:
    """Tests hypotheses about the first false step of a trace.

    Args:
        trace: the whole training.
        measurements: of all of it.
        batch: returns images and labels of the global batch of a step.
        training_hashes: returns the hashes of all training examples.
        reference64: recomputes what is needed.
    """

    def __init__(
        self,
        trace: Trace,
        measurements: Sequence[Measurement],
        *,
        batch: Callable[[int], tuple[np.ndarray, np.ndarray]],
        training_hashes: Callable[[], np.ndarray],
        reference64: Reference,
    ):
        self._trace, self._measurements = trace, measurements
        self._batch, self._training_hashes = batch, training_hashes
        self._reference64 = reference64

    def explain(self, false: Measurement) -> Diagnosis:
        """Returns the first hypothesis that explains why `false`, the first one, is false."""
        tests = {
            "examples": self._examples,
            "loss": self._loss,
            "gradients": self._gradients,
            "sums": self._sums,
            "own statistics": self._own_statistics,
            "statistics": self._statistics,
        }
        test = tests.get(false.kind, self._update) if false.step else self._initial_state
        return next(test(false), UNEXPLAINED)

    # What a replica was given.

    def _examples(self, false: Measurement) -> Iterator[Diagnosis]:
        images, labels = self._batch(false.step)
        batch = hash_examples(images, labels)
        replicas = range(self._trace.num_replicas)
        per_replica = [self._read(false, "examples", r, "examples") for r in replicas]
        held = per_replica[false.replica_id]
        replica = f"replica {false.replica_id}"
        if len(per_replica) > 1 and len(held) == len(batch) and np.isin(batch, held).all():
            yield Diagnosis("whole_batch", f"{replica} was given the whole global batch")
        for other in replicas:
            if other != false.replica_id and np.isin(held, per_replica[other]).all():
                yield Diagnosis(
                    "repeated_shard",
                    f"{replica} and replica {other} were given the same shard: all {len(held)}"
                    f" examples of {replica} went to both",
                )
        everything = np.concatenate(per_replica)
        left_out = np.count_nonzero(~np.isin(batch, everything))
        if left_out and np.isin(everything, batch).all() and len(everything) < len(batch):
            yield Diagnosis(
                "left_out",
                f"{left_out} of the batch's {len(batch)} examples were given to no replica, all"
                " others once",
            )
        if np.isin(held, self._training_hashes()).all():
            yield Diagnosis(
                "other_order",
                f"{replica} draws in another order: of its {len(held)} examples,"
                f" {np.count_nonzero(~np.isin(held, batch))} belong to other batches of the"
                " training set",
            )
        yield Diagnosis(
            "other_examples",
            f"{replica} was given examples that are not in the training set: other images, other"
            " labels, or images that were changed on the way",
        )

    # What it computed from that.

    def _loss(self, false: Measurement) -> Iterator[Diagnosis]:
        """A false loss with right gradients is merely reported falsely."""
        gradients = [m for m in self._measurements if m.step == false.step]
        if any(m.kind == "gradients" and not m.holds for m in gradients):
            yield from self._gradients(false)
            return
        before, images, labels, shards = self._start(false)
        results = self._reference64.gradients(before, images, labels, shards)
        factor = (
            self._read(false, "loss", false.replica_id, "loss") / results[false.replica_id].loss
        )
        yield Diagnosis(
            "false_loss",
            f"replica {false.replica_id} reports {factor:.6g} times its part of the loss; its"
            " gradients are right",
        )

    def _gradients(self, false: Measurement) -> Iterator[Diagnosis]:
        before, images, labels, shards = self._start(false)
        results = self._reference64.gradients(before, images, labels, shards)
        right = [result.gradients for result in results]
        limits = {
            (m.tensor, m.replica_id): m.limit for m in self._measurements
            if (m.step, m.kind) == (false.step, "gradients")
        }  # fmt: skip
        wrong = sorted({
            m.replica_id for m in self._measurements
            if (m.step, m.kind) == (false.step, "gradients") and not m.holds
        })  # fmt: skip
        who = _name_replicas(wrong, len(shards))
        held = {r: self._arrays(false, "gradients", r) for r in wrong}
        fitted = {r: float(fit(held[r], [right[r]])[0]) for r in wrong}

        def is_scaled(replica: int, expected: Arrays, factor: float) -> bool:
            return all(
                relative_error(array, factor * expected[t]) <= limits[t, replica]
                for t, array in held[replica].items()
                if limits[t, replica] < 1  # Of what is nothing but rounding nothing can be told.
            )

        if all(is_scaled(r, right[r], fitted[r]) for r in wrong):
            uncertainty = min(limit for limit in limits.values())
            sizes = [len(shard) for shard in shards]
            readings = [
                why for factors, why in telling_factors(sizes)
                if all(abs(fitted[r] / factors[r] - 1) <= uncertainty for r in wrong)
            ]  # fmt: skip
            shown = " and ".join(f"{factor:.6g}" for factor in sorted({*fitted.values()}))
            yield Diagnosis(
                "scaled_gradient",
                f"{who} computes {shown} times its part of the gradient"
                + (f": {'; or '.join(readings)}" if readings else ""),
            )
        replica = false.replica_id if false.replica_id in wrong else wrong[0]
        for other in range(len(shards)):
            if other != replica and is_scaled(replica, right[other], 1.0):
                yield Diagnosis(
                    "repeated_shard", f"replica {replica} computes the gradient of replica {other}"
                )
        if self._reference64.has_batch_norm and self._is_gradient_of_whole_batch(false, limits):
            yield _WHOLE_BATCH_NORM
        for name in REDUCED_PRECISIONS:
            if all(has_values_of(array, name) for array in held[replica].values()):
                yield Diagnosis(
                    "reduced_precision",
                    f"{who} computes its gradient in {name}: it holds no other numbers",
                )

    def _is_gradient_of_whole_batch(self, false: Measurement, limits: dict) -> bool:
        """Whether the sum over the replicas is the gradient with the whole batch's statistics."""
        before, images, labels, shards = self._start(false)
        (whole,) = self._reference64.gradients(before, images, labels, [np.arange(len(labels))])
        replicas = range(len(shards))
        held = [self._arrays(false, "gradients", replica_id) for replica_id in replicas]
        return all(
            relative_error(np.sum([arrays[t] for arrays in held], axis=0), gradient)
            <= 2 * max(limits[t, r] for r in replicas)
            for t, gradient in whole.gradients.items()
        )

    # What the exchange made of it.

    def _sums(self, false: Measurement) -> Iterator[Diagnosis]:
        replicas = range(self._trace.num_replicas)
        sizes = [len(self._read(false, "examples", r, "examples")) for r in replicas]
        sent = [self._arrays(false, "gradients", replica_id) for replica_id in replicas]
        got = self._arrays(false, "sums", false.replica_id)
        if len(sent) > 1:
            for lost in replicas:
                if is_weighted_sum(got, sent, [float(r != lost) for r in replicas]):
                    yield Diagnosis(
                        "lost_gradient",
                        f"the sum is without replica {lost}: its gradient never got into it",
                    )
            for repeated in replicas:
                if is_weighted_sum(got, sent, [1.0 + (r == repeated) for r in replicas]):
                    yield Diagnosis(
                        "repeated_gradient",
                        f"the sum holds the gradient of replica {repeated} twice",
                    )
        means = [sum(sizes) / (len(sizes) * size) for size in sizes]
        if len(set(sizes)) > 1 and is_weighted_sum(got, sent, means):
            shown = " and ".join(map(str, sorted(set(sizes), reverse=True)))
            yield Diagnosis(
                "mean_of_means",
                "the mean of the replicas' means, not the mean of the batch: shards of"
                f" {shown} examples weigh the same",
            )
        weights = fit(got, sent)
        factor = float(np.mean(weights))
        if is_weighted_sum(got, sent, [factor] * len(sent)):
            readings = [
                why for factors, why in telling_factors(sizes)
                if all(abs(factor / f - 1) < 1e-6 for f in factors)
            ]  # fmt: skip
            yield Diagnosis(
                "scaled_gradient",
                f"the sum is {factor:.6g} times what it should be"
                + (f": {'; or '.join(readings)}" if readings else ""),
            )
        for name in REDUCED_PRECISIONS:
            if is_reduced(got, sent, name):
                yield Diagnosis(
                    "reduced_precision", f"the gradients are exchanged in {name}, not in float32"
                )
        if is_weighted_sum(got, sent, weights):
            terms = " + ".join(f"{w:.4g} × replica {r}" for r, w in enumerate(weights))
            yield Diagnosis("weighted_sum", f"the sum is {terms}")

    # What the optimizer made of the sum.

    def _update(self, false: Measurement) -> Iterator[Diagnosis]:
        kind, tensor = "slots" if false.kind == "slots" else "weights", false.tensor
        if false.kind == "agreement":
            kind, _, tensor = tensor.partition("/")
        if kind == "sums":
            yield Diagnosis(
                "unequal_sums",
                "replicas got sums that rounding sets apart: they add in different orders, and"
                " their weights part",
            )
        wrong = self._wrong_replicas(false, kind, tensor)
        if len(wrong) < self._trace.num_replicas:
            yield self._changed_by_itself(false, kind, tensor, wrong)
        before = state_before(self._trace, false.step)
        if "iteration" in self._trace.tensors(false.step, "slots"):
            made = self._read(false, "slots", 0, "iteration") - before["iteration"]
            if made != 1:
                yield Diagnosis(
                    "scaled_update", f"the optimizer was applied {made} times in one step"
                )
        sums = self._arrays(false, "sums", 0)
        exact = self._reference64.update(before, sums)
        expected = {t: exact[t] - before[t] for t in sums}
        held = self._arrays(false, "updates", false.replica_id)
        (factor,) = fit(held, [expected])
        if all(
            np.all(
                np.abs(array - factor * expected[t])
                <= 4 * UNIT_ROUNDOFF * (np.abs(before[t]) + np.abs(array)) + SMALLEST
            )
            for t, array in held.items()
        ):
            yield Diagnosis(
                "scaled_update",
                f"the update is {factor:.5g} times what the optimizer makes of the sum: another"
                " learning rate, or an update that is applied more than once",
            )

    def _changed_by_itself(self, false: Measurement, kind, tensor, wrong) -> Diagnosis:
        """Says what distinguishes one replica from those that are right."""
        right = next(r for r in range(self._trace.num_replicas) if r not in wrong)
        held, expected = (
            self._read(false, kind, r, tensor).astype(np.float64).ravel()
            for r in (false.replica_id, right)
        )
        at = int(np.argmax(np.abs(held - expected)))
        return Diagnosis(
            "changed_by_itself",
            f"replica {false.replica_id} has changed by itself, outside of the update:"
            f" {np.count_nonzero(held != expected)} of {held.size} elements of {tensor}, number"
            f" {at} by {held[at] - expected[at]:.6g}; the sum that it got was right",
        )

    def _initial_state(self, false: Measurement) -> Iterator[Diagnosis]:
        wrong = self._wrong_replicas(false, false.kind, false.tensor)
        what = {"weights": "weights", "slots": "optimizer variables"}.get(false.kind, false.kind)
        yield Diagnosis(
            "initial_weights" if false.kind == "weights" else "initial_state",
            f"{_name_replicas(wrong, self._trace.num_replicas)} starts from other {what} than"
            f" model, recipe and flags give: {false.tensor}, by up to {false.absolute:.3g}",
        )

    # What BatchNorm keeps.

    def _own_statistics(self, false: Measurement) -> Iterator[Diagnosis]:
        before, images, labels, _ = self._start(false)
        held = self._read(false, "own statistics", false.replica_id, false.tensor)
        if np.array_equal(held, before[false.tensor]):
            yield Diagnosis(
                "frozen_batch_norm",
                f"replica {false.replica_id} does not move {false.tensor}: BatchNorm works as in"
                " evaluation",
            )
        (whole,) = self._reference64.gradients(before, images, labels, [np.arange(len(labels))])
        if relative_error(held, whole.statistics[false.tensor]) <= false.limit:
            yield _WHOLE_BATCH_NORM

    def _statistics(self, false: Measurement) -> Iterator[Diagnosis]:
        held = self._read(false, "statistics", 0, false.tensor)
        for replica_id in range(self._trace.num_replicas):
            own = self._read(false, "own statistics", replica_id, false.tensor)
            if np.array_equal(held, own):
                yield Diagnosis(
                    "local_batch_norm",
                    "BatchNorm's moving statistics stay local to each replica: what is evaluated"
                    f" and saved are replica {replica_id}'s own, not the mean over the replicas",
                )

    def _start(self, false: Measurement):
        """Returns what the false step starts from: state, images, labels and shards."""
        images, labels = self._batch(false.step)
        shards, _ = find_shards(self._trace, false.step, images, labels)
        return state_before(self._trace, false.step), images, labels, shards

    def _wrong_replicas(self, false: Measurement, kind: str, tensor: str) -> list[int]:
        """Returns the replicas whose array is false; a trace names those of other bits only."""
        measured_false = {
            m.replica_id for m in self._measurements
            if m.order == false.order and m.tensor == false.tensor and not m.holds
        }  # fmt: skip
        named = self._trace.replicas(false.step, kind, tensor)
        replicas = range(self._trace.num_replicas)
        return [r for r in replicas if (r if r in named else 0) in measured_false]

    def _arrays(self, false: Measurement, kind: str, replica_id: int) -> Arrays:
        tensors = self._trace.tensors(false.step, kind)
        return {tensor: self._read(false, kind, replica_id, tensor) for tensor in tensors}

    def _read(self, false: Measurement, kind: str, replica_id: int, tensor: str) -> np.ndarray:
        return self._trace.read(false.step, kind, replica_id, tensor)


def _name_replicas(replicas: Sequence[int], num_replicas: int) -> str:
    if len(replicas) == num_replicas:
        return "every replica" if num_replicas > 1 else "the one replica"
    return "replica " + ", ".join(map(str, replicas))


_WHOLE_BATCH_NORM = Diagnosis(
    "whole_batch_norm",
    "BatchNorm normalises over the whole global batch, as one device does, not over each replica's"
    " shard",
)
