"""Rows of recorded steps of Keras' `fit`, compared with one device.

Each kind of model is recorded once. Faults are made in copies of the arrays; everything that
follows from it is computed again. That the same faults are found in real trainings is shown by the
zoo.
"""

# ruff: noqa: F403, F405 (the names of the models)
import functools

import numpy as np
import tensorflow as tf

from lockstep.answer.verdict import NOTHING
from lockstep.data.trace import STATE, STATISTIC, WEIGHT
from tests.verifier.zoo.small import dense

from . import Row
from .keras_copies import *
from .keras_faults import *
from .keras_models import *

STAGE_OF = {"raw": "gradients", "clipped": "clipping", "sent": "all-reduce", "sums": "all-reduce"}
# Of sums, `test_rows` and the rows of recordings have more.
# What is changed, how, detail, tensors (None for all; of the finding, for any), replicas.
GRADIENT_FAULTS = [
    ("sums", times(1 / 3), "mean_instead_of_sum", None, (1, 2)),
    ("sent", rounded, "reduced_precision", None, REPLICAS),
    ("sums", lambda g: rounded(g, tf.float16), "reduced_precision", None, REPLICAS),
    ("sent", top_k, "sparsified", None, REPLICAS),
    ("sent", int8, "quantised", (0,), REPLICAS),
    ("raw", np.zeros_like, "frozen", (0,), (1,)),
    ("raw", one_nan, "not_finite", (2,), (1,)),
    ("raw", times(3), "scaled_gradient", (2,), REPLICAS),
    ("raw", lambda g: rounded(g, tf.float16), "reduced_precision", None, (2,)),
    ("raw", top_k, "sparsified", None, (0,)),
    ("raw", signs, "quantised", (1,), (0,)),
    ("raw", coarse, "unexplained", (0,), (0,)),
    ("raw", clipped_values, "clipped_before_the_sum", (2,), REPLICAS),
    ("raw", noisy, "unexplained", (2,), REPLICAS),
    ("clipped", to_norm, "clipped_on_one_replica", None, (1,)),
    ("clipped", lambda g: np.clip(g, -0.02, 0.02), "clipped_on_one_replica", None, (1,)),
    ("clipped", noisy, "unexplained", (2,), REPLICAS),
]
# Model, positions of the copied steps, what is changed, what is found, replicas, part of the text.
FAULTS = [
    ("plain", (0,), lambda f: f.compute(ONE, data=rolled_targets),
     "loss: labels_shifted", ONE, ""),
    ("own step", (0,), without_loss, "gradients: labels_shifted", ONE, "shifted by one"),
    ("classes", (0,), smoothed, "loss: label_smoothing", ONE, "smoothing of 0.1"),
    ("plain", (0,), left_out, "loss: lost_examples", ONE, "example 4 of 4"),
    ("plain", (0,), lambda f: f.compute(scales=(1 / 9, 1 / 9)), "loss: scaled_gradient", (),
     "divided by the number of replicas twice"),
    ("normalised", (0,), lambda f: f.compute(scales=(1 / 3, 1)),
     "regularisation: regulariser_repeated", (), "3 times"),
    ("normalised", (0,), lambda f: f.compute(scales=(1 / 3, 0)),
     "regularisation: regulariser_missing", (), "0 times"),
    ("normalised", (0,), regularised_gradients,
     "gradients: regulariser_repeated", ALL, "3 times"),
    *(
        (name, (0,), lambda f: f.compute(ONE, off=modal(f)), "forward: inference_mode", ONE, "")
        for name in ("normalised", "dropped")
    ),
    ("dropped", (0,), with_seeds_of_replica_0, "forward: same_random_numbers", ONE, "replica 0"),
    ("plain", (0, 1), lambda f: with_old(f, f.names[2:]),
     "forward: stale_weights", ONE, "weights of network/out"),
    ("momentum", (0, 1), edit("before", 1, 1, "momentum", change=next_up),
     "start: changed_on_its_own", ONE, "momentum"),
    ("plain", (0,), edit("before", 2, change=one_more), "start: diverged_replicas", (2,), ""),
    ("momentum", (1,), updated(rate=lambda *_: 2.0),
     "update: other_learning_rate", ONE, "2 times"),
    ("momentum", (1,), updated(momentum=lambda *_: 0.45),
     "update: other_momentum", ONE, "momentum of 0.45"),
    ("momentum", (1,), updated(nesterov=lambda *_: True),
     "update: other_nesterov", ONE, "with the look-ahead"),
    ("momentum", (1,), updated(before=zeros), "update: zeroed_state", ONE, ""),
    ("adamw", (1,), updated(before=at_start), "update: reset_state", ONE, "first step"),
    ("two heads", (1,), updated(before=exchanged), "update: shifted_state", ONE, "other weights"),
    ("adamw", (1,), updated(before=lambda f, s: f.oracle.update(s["before", 1], s["sums", 1])),
     "update: updated_twice", ONE, ""),
    ("plain", (1,), updated(sums=lambda f, step: step["raw", 1]),
     "update: not_all_reduced", ONE, ""),
    ("plain", (1,), mean_instead_of_sum, "update: mean_instead_of_sum", ALL, "0.3333 times"),
    ("momentum", (1, 2), from_old(STATE), "update: shifted_state", ALL, "previous step"),
    ("momentum", (1, 2), from_old(WEIGHT), "update: stale_weights", ALL, "previous step"),
    ("momentum", (1,), after(WEIGHT, lambda new, old: new - np.float32(0.01) * old),
     "update: weight_decay_on_top", ONE, "0.01"),
    ("momentum", (0,), after(WEIGHT, lambda new, old: noisy(new)),
     "update: unexplained", ONE, "different update"),
    ("adamw", (0,), lambda f: edit("after", 1, end=clock(f), change=lambda i: i + 1)(f),
     "update: schedule_stepped_too_often", ONE, "by 2"),
    ("adamw", (0,), updated(sums=lambda f, step: {n: 0.37 * g for n, g in step["sums", 1].items()}),
     "update: scaled_gradient", ONE, "by 0.37, to norm"),
    ("plain", (0,), first_half_twice, "all-reduce: repeated_gradient", ALL, "added twice"),
    ("normalised", (0,), statistics_of_the_whole_batch,
     "statistics: whole_batch_norm", ONE, "over the whole batch"),
    ("normalised", (0,), after(STATISTIC, lambda new, old: new + (new - old)),
     "statistics: doubled_average", ONE, ""),
    ("normalised", (0,),
     after(STATISTIC, lambda new, old: old + np.float32(4 / 3) * (new - old)),
     "statistics: wrong_count", ONE, "n / (n - 1)"),
    ("normalised", (0,),
     after(STATISTIC, lambda new, old: old + np.float32(3 / 4) * (new - old)),
     "statistics: wrong_count", ONE, "(n - 1) / n"),
    ("normalised", (0,), after(STATISTIC, lambda new, old: old),
     "statistics: inference_mode", ONE, ""),
    ("normalised", (0,), after(STATISTIC, lambda new, old: noisy(new)),
     "statistics: unexplained", ONE, ""),
    ("normalised", (0,), others_statistics, "statistics: same_examples", ONE, "replica 0"),
]  # fmt: skip
BATCH = X[:12], Y[:12]
LIMITS = {"global_clipnorm": 0.1, "clipvalue": 0.01}
SHARED_MEAN = functools.partial(losses.MeanSquaredError, reduction="mean_with_sample_weight")
AVERAGES = (
    (lambda parts, sizes: np.mean(parts, axis=0), ""),
    (lambda parts, sizes: parts[1], "statistics: statistics_not_averaged"),
    (lambda parts, sizes: np.average(parts, axis=0, weights=sizes), "statistics: weighted_average"),
    (lambda parts, _: np.average(parts, axis=0, weights=(1, 2, 1)), "statistics: weighted_average"),
    (lambda parts, sizes: np.sum(parts, axis=0), "statistics: doubled_average"),
    (lambda parts, sizes: noisy(parts[0]), "statistics: unexplained"),
)
MORE = {  # Name: model, positions, what is changed, what is found, and more.
    **{
        f"{kind} of the step before, {number}": ("plain", (0, 1), stale(kind, number),
            f"{STAGE_OF[kind]}: stale_gradient", {"place": (
                (0, 1), replicas(*(ALL if kind == "sums" else ONE)), None)})
        for kind, number in (("sums", 1), ("raw", 4))
    },
    "a sum that one replica lacks": ("plain", (0, 1), without_a_sum,
        "all-reduce: not_all_reduced", {"place": ((1,), replicas(2), None)}),
    **{
        f"clipped by {name} before the sum": ("plain", (0,), lambda f: f.follow(f.steps[0]),
            "clipping: clipped_before_the_sum", {
                "text": f"{name}={value}", "model": lambda k=name, v=value: plain(**{k: v})})
        for name, value in LIMITS.items()
    },
    "clipping that clips nothing": ("plain", (0,), None, "", {
        "model": lambda: plain(global_clipnorm=1e9), "checked": ("clipping",)}),
    "predictions of replica 0": ("plain", (0,), predicted(lambda step: step["y_pred", 0]),
        "forward: same_examples; loss: other_loss", {"place": ((0,), replicas(1), ())}),
    "other predictions": ("plain", (0,), predicted(lambda step: [noisy(*step["y_pred", 1])]),
        "forward: unexplained; loss: other_loss", {"place": ((0,), replicas(1), ())}),
    "another loss": ("plain", (0,), None, "loss: other_loss", {
        "model": lambda: dense(loss="mae"), "place": ((0,), replicas(*ALL), ())}),
    "a weighted mean of each": ("momentum", (0,), Copy.compute, "loss: weighted_mean_of_means", {
        "model": lambda: dense(loss=SHARED_MEAN(), optimizer=optimizers.SGD(0.05, momentum=0.9))}),
    "its losses are not recorded": ("masked sequence", (0,), without_losses, "", {
        "text": "shares 0.422/0.578 of the sample weights, or unmasked steps, their gradients"}),
    "a last batch that does not divide": ("plain", (0, 1), None, "loss: mean_of_means", {
        "whole": short_last_batch, "text": "2/2/0", "place": ((1,), None, None)}),
    "two at once": ("plain", (0,), lambda f: f.compute(scales=(1.0, 1.0)).change(
        "sent", np.zeros_like, replicas=ONE),
        "loss: scalar_loss_not_divided; all-reduce: lost_replica"),
    **{
        f"average {number}": ("normalised", (0,), averaged(average), found, {
            "checked": ("statistics",)})
        for number, (average, found) in enumerate(AVERAGES)
    },
    **{
        f"a micro-batch {factor} times": ("plain", (0,), accumulated(factor), found, {
            "checked": ("all-reduce",)})
        for factor, found in (
            (1, ""), (0, "all-reduce: lost_micro_batch"))
    },
    "apart without recorded sums": (
        "plain", (0,), apart_without_sums, "all-reduce: not_all_reduced"),
    "infinite on one device, too": ("adamw", (0, 1), infinite,
        "gradients: not_finite-; start: not_finite-", {
            "place": ((0,), replicas(1), None), "status": NOTHING,
            "text": "gradients are NaN or infinite, on one device too"}),
    "a step that overflows": ("momentum", (0, 1), None, "", {
        "whole": lambda: overflowing(0), "model": float16, "checked": ("all-reduce",)}),
    "a skipped step that changes": ("momentum", (0,), edit("after", 2, change=one_more),
        "update: changed_on_its_own", {"whole": lambda: overflowing(0), "model": float16}),
    "a skipped step that does not overflow": ("momentum", (0,), nothing_overflows,
        "loss: other_loss; update: not_updated", {
            "whole": lambda: overflowing(0), "model": float16}),
    "an overflow on another replica than the first": ("momentum", (0, 1), None,
        "update: overflow_not_skipped; start: not_finite-", {
            "whole": lambda: overflowing(1), "model": float16,
            "place": ((0,), replicas(1), None)}),
    **{
        f"batches: {name}": ("plain", (0,), make, found, {"batches": [batch]})
        for name, make, found, batch in (
            ("right", None, "", BATCH),
            ("rolled", None, "examples: labels_shifted", (X[:12], np.roll(Y[:12], 1, 0))),
            ("more", None, "examples: lost_examples", (X[:16], Y[:16])),
            ("others", None, "examples: other_examples", (X[:12] + 1, Y[:12])),
            ("repeated", with_data(2, repeated_example), "examples: repeated_examples", BATCH),
            ("same on two", with_data(2, lambda step: step["data", 1]), "examples: same_examples",
             BATCH),
        )
    },
}  # fmt: skip


def verdict_of(name, at, make, model=None, whole=None, batches=None):
    """Compares a copy of recorded steps, which `make` changes, with one device."""
    given = {"model": model and model(), "whole": whole and whole()}
    faulty = Copy(name, at, **given)
    if make:
        make(faulty)
    return faulty.verdict(batches=batches) if batches else faulty.verdict()


def _rows():
    for kind, change, detail, tensors, numbers in GRADIENT_FAULTS:

        def make(faulty, given=(kind, change, tensors, numbers)):
            faulty.change(*given)

        name = f"{kind} {getattr(change, '__name__', '')} {tensors} {numbers}"
        place = (0,), replicas(*numbers), tensors and [NAMES[i] for i in tensors]
        verdict = functools.partial(verdict_of, "plain", (0,), make)
        found = f"{STAGE_OF[kind]}: {detail}"
        yield Row("gradients of fit", f"{name}: {detail}", found, verdict, place=place)
    for number, (name, at, make, found, numbers, text) in enumerate(FAULTS):
        verdict, last = functools.partial(verdict_of, name, at, make), (at[-1],)
        place = last, replicas(*numbers), None
        also = () if make is with_seeds_of_replica_0 else MODELS[name][2]
        row = Row(name, f"{found}, {number}", found, verdict, text=text, place=place)
        yield row._replace(also=also)
    for bug, (name, at, make, found, *more) in MORE.items():
        given = more[0] if more else {}
        own = {key: given.pop(key) for key in ("model", "whole", "batches") if key in given}
        verdict = functools.partial(verdict_of, name, at, make, **own)
        yield Row(f"{name} of fit", bug, found, verdict, also=MODELS[name][2], **given)


NAMES = tuple(
    f"network/{name}" for name in ("hidden/kernel", "hidden/bias", "out/kernel", "out/bias")
)
ROWS = [*_rows()]
