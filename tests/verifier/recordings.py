"""Rows of recordings: a small training of `Script`, and the same with other arrays or settings."""
# ruff: noqa: F403, F405 (the names of the tables)

import dataclasses
import functools

import numpy as np

from lockstep.answer.verdict import NOT_VERIFIED, NOTHING
from lockstep.comparison import verify_against, verify_alone
from lockstep.reference import tolerance_of
from tests.verifier.script_samples import WEIGHTS, Script, batch_of, examples, split_evenly

from . import Row
from .changes import *
from .edits import *
from .faults import *
from .states import ALL, BIAS, BOTH, FIRST, KERNEL, RAISED, SECOND, STATES


def flat(order, gradient_of=True, layout="", **changes):
    """A model with its features in an order, whose outputs are recorded.

    It has the gradients of its outputs only if `gradient_of`.
    """

    def add_outputs(script):
        for number, step, r in places(script):
            x = script.arrays[f"{number}/data/{r}/0"]
            kernel, bias = (script.arrays[f"{number}/before/{r}/{i}"] for i in range(2))
            script.arrays[f"{number}/y_pred/{r}/0"] = outputs = x @ kernel + bias
            wrong = outputs - examples()[1][split_evenly(batch_of(step), r, script.replicas)]
            if gradient_of:
                script.arrays[f"{number}/y_grad/{r}/0"] = 2 * wrong / np.float32(wrong.size)
            script.arrays[f"{number}/data/{r}/0"] = x[:, np.argsort(order)]

    given = {"about": {"data_layout": layout}, "edit": add_outputs}
    return {**given, "inputs": lambda x: x[:, order], "gradient": as_it_is, **changes}


USUAL, MIXED = np.arange(12), np.random.default_rng(0).permutation(12)
NOISE = np.random.default_rng(1).normal(size=(12, 3)).astype(np.float32)


def flattened(layout, channels):
    shape = (channels, -1) if layout == "NCHW" else (-1, channels)
    return USUAL.reshape(shape).T.ravel()


RIGHT = {
    "Adam that clips by the norm of weights": ({**ADAM, "update": clipped_by_weights}, {}),
    **{f"{n} replicas": ({}, {"replicas": n}) for n in (1, 2, 3, 4)},
    "Adam": (ADAM, {}),
    "Adam without a first state": ({**ADAM, **WITHOUT_FIRST_STATE}, WITHOUT_FIRST_STATE),
    "RMSprop": (RMSPROP, {}),
    "RMSprop without a first state": ({**RMSPROP, **WITHOUT_FIRST_STATE}, WITHOUT_FIRST_STATE),
    "RMSprop without momentum": ({**RMSPROP, "settings": {"momentum": 0.0}}, {}),
    "RMSprop, decay": ({**RMSPROP, "settings": {"weight_decay": 0.1}}, {}),
    "RMSprop, large epsilon": ({**RMSPROP, "settings": {"epsilon": 0.1, "rho": 0.9}}, {}),
    "Muon": (MUON, {}),
    "Muon, 4 replicas": ({**MUON, "settings": {"nesterov": False}}, {"replicas": 4}),
    "Muon, decay": ({**MUON, "settings": {"weight_decay": 0.5}}, {}),
    "AdamW": ({**ADAM, "settings": {"weight_decay": 0.01}, "about": {"optimizer": ADAMW}}, {}),
    "Adam of Keras": ({**ADAM, "framework": "keras"}, {}),
    "Adam of Keras in float32": ({**ADAM, "framework": "keras"}, {"update": corrected_in_float32}),
    "fused Adam of a GPU": (FUSED, FUSED),
    **{
        f"{optimizer} by an unknown rule, weights of {scale}": (
            {**UNKNOWN, "optimizer": optimizer, "initial_scale": scale}, {"replicas": 4})
        for optimizer in ("SGD", "Adam") for scale in (1e-3, 10)
    },
    "AMSGrad": ({**ADAM, "settings": {"amsgrad": True}}, {}),
    "wrapped": (UNKNOWN, {"about": {"optimizer": {"class": "ZeRO"}}}),
    "an optimizer without a rule": (UNKNOWN, {"settings": {"foreach": True}}),
    "weights that no optimizer has": ({"about": KERNEL_ONLY, "update": of_kernel_only}, {}),
    "state in 16 bits": ({**ADAM, **MOMENTS_IN_16_BITS}, MOMENTS_IN_16_BITS),
    "large gradients that cancel": (DROPOUT, {
        "gradient": lambda s, r, g: [a + np.float32(1000 - 2000 * r) for a in g]}),
    "Nesterov": ({"settings": {"nesterov": True}}, {}),
    "plain SGD": ({"settings": {"momentum": 0.0, "weight_decay": 0.01}}, {}),
    "decay": ({"settings": {"weight_decay": 0.1}}, {}),
    "a gradient that cancels the decay": (cancelled(), cancelled(4e-7)),
    "weighted shards": ({}, {"shard": three_quarters}),
    "a replica without examples": ({}, {"shard": all_on_second}),
    "sum of shares": ({},
        {"shard": three_quarters, "about": {"reduction": "sum"}, **times(0.5), **SUMMED}),
    "an unused setting of one replica": ({"settings": {"momentum": 0.0}},
        {"of_replica": {1: {"beta_1": 0.5}}}),
    "clipping after the sum": ({"clip": clip}, {}),
    "clipping by value": (by_value(), by_value()),
    "no clipping before the sum": ({}, clipped_first(1, 1)),
    "zeros after the sum": (without_bias(0, 1), {}),
    "equal random states": ({}, random_states(lambda step, replica: [0] * 4)),
    "rows": ({}, as_rows()),
    "rows in both": (as_rows(), as_rows()),
    "examples of a replica do not use a weight": ({}, bias_on_first_only()),
    "micro-batches": ({}, {"about": {"micro_batches": [2] * 4}, **micro_batches()}),
    "layouts": (images("NHWC"), images("NCHW")),
    "scaled by the model": ({}, edit(lambda array: 255 * array, "data")),
    "other names": ({}, in_torch()),
    # In JAX, scripts say themselves what they keep.
    "divided after the sum": (JAX, scaled(6, "raw")),
    "divided later": (JAX, scaled(2, "raw sums")),
    "divided and clipped later": (CLIPPED, scaled(6, "raw sums")),
    "only clipped": (CLIPPED, without("raw sums")),
    "a mask of decay": ({**DECAYED, "update": with_mask}, {}),
    "a mask of Adam's decay": ({**ADAM, **DECAYED, "decays_gradient": False, "update": with_mask,
        "about": {**JAX["about"], "optimizer": {"class": "AdamW", "framework": "jax"}}}, {}),
    "no decay, against the settings": ({**DECAYED, **with_settings(weight_decay=0.0)}, {}),
    "the loss of a part, gradients of all": (differentiated(), differentiated(0.3)),
    "keys": ({**KEYS, **keys(int)}, keys(int)),
    "one key that devices fold": ({**KEYS, **keys(int)}, keys(int, devices=2)),
    "one key that steps fold": ({**KEYS, **keys(lambda step: 5)}, keys(lambda step: 5)),
}  # fmt: skip


FLATTENED = (
    "loss: flatten_order; gradients: flatten_order; update: unexplained; statistics: flatten_order"
)
OUTPUTS = "; ".join(f"{x}: other_outputs" for x in ("forward", "loss", "gradients", "statistics"))
ZERO = "every gradient is 0"
UNUSED = {
    **without("raw", 1, 1), **bias_times(lambda step, r: 1 - r),
}  # fmt: skip
SHARDED = {"about": {"reduction": ""}, **without("raw"), "clip": clip}
SEEN = {  # Forward passes → what the remedy is about.
    ("ddp", "no_sync"): "is_last", ("module",): "ddp.module(x)", ("",): "dist.all_reduce",
    ("ddp",): "hooks of weights",
}  # fmt: skip
MORE = {
    "loaders with equal seeds": ({}, drawn((7,), 1),
        "random numbers: same_random_numbers; examples: other_examples"),
    "loaders": ({}, drawn((), 1), "examples: other_examples"),
    "loaders that draw nothing": ({}, drawn((7,), 0), ""),
    # Nothing to verify.
    ZERO: (zero_in(0, 1, 2, 3), {}, "", {"status": NOTHING, "text": ZERO}),
    "every gradient is 0, and weights decay": ({**zero_in(0, 1, 2, 3),
        **settings(weight_decay=0.1)}, {}, "", {"status": NOTHING, "text": ZERO}),
    "an overflow that all skip": (OVERFLOW, {}, "",
        {"text": "nothing to verify in step 1: gradients overflow, and the step is skipped"}),
    "in some steps": (zero_in(1, 3), {}, "",
        {"text": f"nothing to verify in step 1, step 3: {ZERO}"}),
    "of some weights": ({**without_bias(0, 1), **bias_times(lambda step, r: 0)}, {}, "",
        {"text": "gradients of 1 of 2 weights, which are 0 in every step: dense/bias"}),
    "nothing is trained": (settings(learning_rate=0.0) | WITHOUT_GRADIENTS, WITHOUT_GRADIENTS, "",
        {"status": NOTHING, "text": "no gradient is recorded, and no weight changes"}),
    "no gradient is recorded": (WITHOUT_GRADIENTS, WITHOUT_GRADIENTS, "",
        {"text": "gradients are not compared: they are not recorded in both; weights and state"}),
    "no gradient is recorded, summed": (WITHOUT_GRADIENTS, {**WITHOUT_GRADIENTS, **SUMMED},
        "all-reduce: sum_instead_of_mean"),
    "no gradient is recorded of another framework": (
        WITHOUT_GRADIENTS, {**WITHOUT_GRADIENTS, "framework": "keras"}, "",
        {"status": NOTHING, "text": "gradients of no step could be compared: record them in both"}),
    "a gradient of 0 in one": ({}, zero_in(0, 1, 2, 3), "gradients: frozen"),
    "a gradient of 0 in the reference": (zero_in(0, 1, 2, 3), {"gradient": as_it_is},
        "gradients: not_frozen"),
    "a gradient that cancels another decay": (cancelled(), {**cancelled(4e-7),
        **with_settings(weight_decay=0.11)}, "update: other_weight_decay"),
    "no mask of decay": ({**DECAYED, "update": with_mask}, {"update": sgd},
        "update: other_weight_decay", {"text": "weight decay 0 in the first recording, 0.05 in"}),
    "the mask of decay in one": (DECAYED, {"update": with_mask}, "update: other_weight_decay"),
    "the loss and a gradient of a part": (differentiated(), {**differentiated(0.3),
        **bias_times(lambda step, r: 0.3)}, "gradients: unexplained"),
    "the loss and the gradients of a part": (differentiated(), {**differentiated(0.3),
        **times(0.3)}, "loss: scaled_gradient; gradients: scaled_gradient"),
    "the whole batch on both": ({}, whole_batch_on_both(()),
        "examples: same_examples; examples: repeated_examples"),
    "parts of a model without a mesh": ({}, whole_batch_on_both(), "",
        {"status": NOT_VERIFIED, "text": "if they compute parts of one model, pass mesh="}),
    "parts of a model without a mesh, doubled": ({}, whole_batch_on_both((1.0, 2.0)),
        "examples: same_examples; examples: repeated_examples"),
    # Reductions.
    "a multiple of each sent one": ({"gradient": for_two_classes}, without("sums"), ""),
    "a multiple of each sent one, bypassed": ({"gradient": for_two_classes}, {"reduce": None,
        **without("sums")}, "all-reduce: not_all_reduced"),
    **{
        f"{name} is not reduced": ({}, in_part(i), "all-reduce: partly_all_reduced", {
            "text": "1 of 2 gradients are not all-reduced, and 1 are",
            "place": (ALL, BOTH, (name,))})
        for i, name in enumerate(WEIGHTS)
    },
    **{
        f"bypassed by {seen}": ({"steps": (0,)}, {
            "reduce": None, "about": {"passes": (seen,)}},
            "all-reduce: not_all_reduced", {"text": told})
        for seen, told in SEEN.items()
    },
    # Layers that compute per replica.
    "the same modes": (in_modes(ON), NOISY, "gradients: random_layers?"),
    "evaluation mode in the second": (in_modes(ON), {**NOISY, **in_modes(OFF)},
        "gradients: inference_mode"),
    "shards of the reference": ({**layers(NORM), **of_shards()}, NOISY, "gradients: unexplained"),
    "other shards of the reference": ({**layers(NORM), **of_shards()}, {**NOISY,
        "shard": three_quarters}, "gradients: local_statistics?"),
    "a little noise behind local norms": (layers(NORM), {"gradient": little_noise},
        "gradients: local_statistics?",
        {"text": 'again, in one process, with replay="two.npz", shards="each"'}),
    "of the step before": ({}, of_step_before(), "gradients: stale_gradient; update: unexplained"),
    # What the ids of examples tell.
    "augmented in the same way": (augmented(0), augmented(0), ""),
    "augmented in another way": (augmented(0), augmented(1), "examples: other_augmentation",
        {"text": "16 of 16 examples have the ids of the first recording, and other inputs"}),
    "another order, by the ids": (augmented(0), {**augmented(1),
        "batch": lambda step: batch_of((1, 0, 2, 3)[step])},
        "examples: other_order; examples: other_augmentation",
        {"text": "16 of 16 ids belong to other steps"}),
    "other examples, by the ids": (augmented(0), {**augmented(1), "ids": lambda rows: rows + 50},
        "examples: other_examples", {"text": "16 of 16 ids are not those of the first"}),
    "received twice, by the ids": (augmented(0), {**augmented(1),
        "batch": lambda s: np.append(batch_of(s)[:-2], batch_of(s)[:2])},
        "examples: repeated_examples", {"text": "the ids of 2 examples were received twice"}),
    "the same augmentation in each epoch": (augmented(0), augmented(1, each_epoch=False),
        "examples: other_augmentation; random numbers: random_numbers_repeated",
        {"text": "of step 0 again; in the first recording they are augmented in another way"}),
    "too few ids": (augmented(0), {**augmented(1), "ids": lambda rows: rows[1:]},
        "examples: other_examples"),
    # Orders of flattened axes.
    **{
        f"{channels} channels, {layout}, {of_first}": (
            flat(USUAL, of_first, layout),
            {**flat(flattened(layout, channels), not of_first, framework="keras"),
             **({} if of_first else ONE)},
            FLATTENED, {"text": f" {channels} channels are flattened first"})
        for layout, channels, of_first in (
            ("NCHW", 2, True), ("NCHW", 6, False), ("NHWC", 3, True), ("NHWC", 4, False))
    },
    "exchanged channels": (flat(USUAL, True, "NCHW"), flat(MIXED), OUTPUTS),
    "an order, and noise": (flat(USUAL, True, "NCHW"), flat(USUAL.reshape(3, 4).T.ravel(),
        gradient=lambda s, r, own: [own[0] + 0.01 * NOISE, own[1]]), OUTPUTS),
    "no order, and noise": (flat(USUAL, True, "NCHW"), flat(USUAL, gradient=lambda s, r,
        own: [own[0] + NOISE, own[1]]), "gradients: unexplained"),
    "the same order": (flat(USUAL, True, "NCHW"), flat(USUAL, False), ""),
    # Examples that begin with a number or a text.
    **{
        f"{name} first": (first_data(array_of), first_data(array_of), "")
        for name, array_of in (("number", lambda array: np.array(5)), ("text", as_texts))
    },
}  # fmt: skip
ALONE = {
    "ended with an exception": (RAISED, "",
        {"status": NOT_VERIFIED, "text": "exception: RuntimeError"}),
    "right": ({}, ""),
    "Adam that clips by the norm of weights": ({**ADAM, "update": clipped_by_weights}, "",
        {"text": "not compared without a reference: updates that are not those of Adam, in every",
        "checked": ("update",)}),
    "a mask of decay": ({**DECAYED, "update": with_mask}, ""),
    "no decay, against the settings": ({**DECAYED, **with_settings(weight_decay=0.0)},
        "update: other_weight_decay", {"place": (ALL, BOTH, WEIGHTS), "checked": ("update",)}),
    "few different examples": (  # As in the truth table of XOR: four rows, many times.
        {"inputs": lambda x: np.tile(examples()[0][:2], (len(x), 1))[: len(x)]},
        "examples: not_reshuffled*"),
    "same shard": ({"shard": same_rows}, "examples: same_examples"),
    "a text first, same shard": ({**first_data(as_texts), "shard": same_rows},
        "examples: same_examples"),
    "again": ({"batch": lambda step: batch_of(step % 3)}, "examples: not_reshuffled*"),
    "summed": (SUMMED, "all-reduce: sum_instead_of_mean"),
    "gradients that are nearly equal": ({**without("sums"), "gradient": nearly_equal}, "",
        {"checked": ("update",)}),
    "average of weights": (with_average(True), ""),
    "average on the first": (with_average(False), "start: diverged_replicas"),
    "lost state": ({**settings(momentum=0.0), **WITHOUT_STATE}, "start: reset_state"),
    "state of 0": (edit(lambda array: array * np.float32(0), "before", index=4, position=2),
        "start: reset_state; update: unexplained"),
    "an overflow that all skip": (OVERFLOW, "",
        {"text": "gradients overflow, and the step is skipped"}),
    "an overflow that none skips": ({"gradient": overflow},
        "gradients: not_finite; start: not_finite-", {"checked": ("gradients",)}),
    "overflow in the sum": (edit(lambda array: np.float32(np.nan) * array, "sums", position=2),
        "all-reduce: not_finite"),
    "weights decay, no gradient": (zero_in(0, 1, 2, 3) | settings(weight_decay=0.1), "",
        {"status": NOTHING, "text": ZERO}),
    "nothing is trained": (settings(learning_rate=0.0) | WITHOUT_GRADIENTS, "",
        {"status": NOTHING, "text": "no weight changes", "checked": ()}),
    "no gradient is recorded": (WITHOUT_GRADIENTS, "", {"checked": ()}),
    "evaluation mode on one": (in_modes(ON, OFF), "forward: inference_mode", {"place": (ALL,
        SECOND, ())}),
    "evaluation mode on both": (in_modes(OFF, OFF), ""),
    "evaluation mode without effect": (in_modes(ON, OFF, rate=0.0), ""),
    "synchronised, different": (synchronised(2, 1), "statistics: local_statistics"),
    "synchronised, one of three different": (synchronised(3, 1), "statistics: local_statistics"),
    "synchronised in groups": (synchronised(4, 1, 2), "statistics: local_statistics*"),
    "a weight that one replica does not use": (UNUSED, ""),
    "a weight that one replica does not use, not reduced": ({**without("raw", 1, 0),
        "gradient": lambda s, replica, g: [(replica == 0) * g[0], g[1]],
        "reduce": lambda sent: sent}, "all-reduce: not_all_reduced", {
            "place": (ALL, BOTH, WEIGHTS), "checked": ("all-reduce",)}),
    "a weight that one replica does not use, and sums": ({**UNUSED, **SUMMED},
        "all-reduce: sum_instead_of_mean", {"place": (ALL, BOTH, WEIGHTS)}),
    "a sum that one replica does not receive": (without("sums", 1, 1),
        "all-reduce: frozen", {"place": (ALL, SECOND, BIAS)}),
    "it is unknown what was sent": (SHARDED, "", {"checked": ("update",)}),
    "it is unknown what was sent, not reduced": ({**SHARDED, "reduce": lambda sent: sent},
        "all-reduce: not_all_reduced", {"checked": ("update",)}),
    "no rule of the optimizer": (UNKNOWN, "", {"checked": ("loss",), "unchecked": ("update",)}),
}  # fmt: skip
PLACES = {
    "same shard": (ALL, BOTH, ()), "broadcast": ((0,), SECOND, KERNEL),
    "seeds": (ALL, BOTH, ("drop/seed",)), "repeated": (ALL[1:], BOTH, ()),
    "bypassed": (ALL, BOTH, WEIGHTS), "without the last": (ALL, ("replica 2",), WEIGHTS),
    "clipped on one": (ALL, FIRST, ()), "clipped first": (ALL, BOTH, ()), "frozen": (ALL, (), BIAS),
    "no gradient on one": (ALL, SECOND, BIAS), "no gradient": (ALL, (), BIAS),
    "not cleared": (ALL[1:], (), WEIGHTS), "not finite": ((1,), FIRST, ()),
    "reshuffled": ((3,), (), ()), "dropped": ((2, 3), (), ()), "nesterov": (ALL, (), ()),
    "flipped after": ((1,), SECOND, KERNEL),
    "local norm": (ALL, (), ("norm/moving_mean", "norm/moving_variance")),
}  # fmt: skip
STAGES = ("start", "examples", "loss", "all-reduce", "clipping", "update", "agreement")
STAGES += ("statistics",)


@functools.cache
def tolerance():
    """That of permuted examples."""
    one = Script()
    permuted = Script(permute=1, replay=one, steps=(0, 1))
    return tolerance_of(one.trace(), permuted.trace("permuted.npz"), {}, None)


def pair(first, second):
    """Returns a training, and one with further changes, from the states of the first."""
    reference = Script(**first)
    first = {name: value for name, value in first.items() if name != "edit"}
    return reference, Script(**{"replicas": 2, **first, "replay": reference, **second})


def compared(first, second, allowed=None):
    allowed = allowed or tolerance_of(first.trace(), None, {}, None)
    return verify_against(first.trace(), second.trace("two.npz"), {}, allowed)


def alone(changes):
    """Returns the verdict on one recording of two replicas, whose files may say other things."""
    given = {"replicas": 2, **changes}
    per_replica = given.pop("per_replica", {})
    trace = Script(**given).trace()
    for replica in range(2) if per_replica else ():
        own = {key: values[replica] for key, values in per_replica.items()}
        trace.of_replica[replica] = dataclasses.replace(trace.about, **own)
    return verify_alone(trace)


def against_reference(first, second):
    return compared(*pair(first, second), tolerance())


def _rows():
    for name, both in RIGHT.items():
        verdict = functools.partial(against_reference, *both)
        yield Row("right", name, "", verdict, checked=("gradients", "update"), notes=False)
    for name, (first, second, found, *more) in {**FAULTS, **MORE, **STATES}.items():
        verdict = functools.partial(against_reference, first, second)
        given = {"place": PLACES.get(name, ())} | (more[0] if more else {})
        yield Row("two recordings", name, found, verdict, **given)
    for name, (changes, found, *more) in ALONE.items():
        given = {"checked": STAGES} | (more[0] if more else {})
        yield Row("one recording", name, found, functools.partial(alone, changes), **given)


ROWS = [*_rows()]
