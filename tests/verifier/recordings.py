"""Rows of recordings: a small training of `Script`, and the same with other arrays or settings."""
# ruff: noqa: F403, F405 (the names of the tables)

import numpy as np

from lockstep.engine.verdict import NOT_VERIFIED, NOTHING
from tests.verifier.script_samples import WEIGHTS, Script, batch_of, examples, split_evenly

from .changes import *
from .edits import *
from .faults import *


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


ZERO = "every gradient is 0"
MORE = {
    # Nothing to verify.
    ZERO: (zero_in(0, 1, 2, 3), {}, "", {"status": NOTHING}),
    "an overflow that all skip": (OVERFLOW, {}, ""),
    "in some steps": (zero_in(1, 3), {}, ""),
    "of some weights": ({**without_bias(0, 1), **bias_times(lambda step, r: 0)}, {}, ""),
    "nothing is trained": (settings(learning_rate=0.0) | WITHOUT_GRADIENTS, WITHOUT_GRADIENTS, "",
        {"status": NOTHING}),
    "no gradient is recorded": (WITHOUT_GRADIENTS, WITHOUT_GRADIENTS, ""),
    "no gradient is recorded, summed": (WITHOUT_GRADIENTS, {**WITHOUT_GRADIENTS, **SUMMED},
        "sum"),
    "a gradient of 0 in one": ({}, zero_in(0, 1, 2, 3), "gradient"),
    "a gradient of 0 in the reference": (zero_in(0, 1, 2, 3), {"gradient": as_it_is},
        "gradient"),
    "a gradient that cancels another decay": (cancelled(), {**cancelled(4e-7),
        **with_settings(weight_decay=0.11)}, "update"),
    "no mask of decay": ({**DECAYED, "update": with_mask}, {"update": sgd},
        "update"),
    "the mask of decay in one": (DECAYED, {"update": with_mask}, "update"),
    "the loss and a gradient of a part": (differentiated(), {**differentiated(0.3),
        **bias_times(lambda step, r: 0.3)}, "gradient"),
    "the loss and the gradients of a part": (differentiated(), {**differentiated(0.3),
        **times(0.3)}, "loss"),
    "the whole batch on both": ({}, whole_batch_on_both(()),
        "examples"),
    "parts of a model without a mesh": ({}, whole_batch_on_both(), "",
        {"status": NOT_VERIFIED}),
    "parts of a model without a mesh, doubled": ({}, whole_batch_on_both((1.0, 2.0)),
        "examples"),
    # Reductions.
    "a multiple of each sent one": ({"gradient": for_two_classes}, without("sums"), ""),
    "a multiple of each sent one, bypassed": ({"gradient": for_two_classes}, {"reduce": None,
        **without("sums")}, "sum"),
    **{
        f"{name} is not reduced": ({}, in_part(i), "sum")
        for i, name in enumerate(WEIGHTS)
    },
    # Layers that compute per replica.
    "the same modes": (in_modes(ON), NOISY, "gradient?"),
    "evaluation mode in the second": (in_modes(ON), {**NOISY, **in_modes(OFF)},
        "outputs"),
    "shards of the reference": ({**layers(NORM), **of_shards()}, NOISY, "gradient"),
    "other shards of the reference": ({**layers(NORM), **of_shards()}, {**NOISY,
        "shard": three_quarters}, "loss?"),
    "a little noise behind local norms": (layers(NORM), {"gradient": little_noise},
        "gradient?"),
    # What the ids of examples tell.
    "augmented in the same way": (augmented(0), augmented(0), ""),
    "augmented in another way": (augmented(0), augmented(1), "examples"),
    "another order, by the ids": (augmented(0), {**augmented(1),
        "batch": lambda step: batch_of((1, 0, 2, 3)[step])},
        "examples"),
    "other examples, by the ids": (augmented(0), {**augmented(1), "ids": lambda rows: rows + 50},
        "examples"),
    "received twice, by the ids": (augmented(0), {**augmented(1),
        "batch": lambda s: np.append(batch_of(s)[:-2], batch_of(s)[:2])},
        "examples"),
    "the same augmentation in each epoch": (augmented(0), augmented(1, each_epoch=False),
        "examples"),
    "too few ids": (augmented(0), {**augmented(1), "ids": lambda rows: rows[1:]},
        "examples"),
    # Orders of flattened axes.
    **{
        f"{channels} channels, {layout}, {of_first}": (
            flat(USUAL, of_first, layout),
            {**flat(flattened(layout, channels), not of_first, framework="keras"),
             **({} if of_first else ONE)},
            "outputs")
        for layout, channels, of_first in (
            ("NCHW", 2, True), ("NCHW", 6, False), ("NHWC", 3, True), ("NHWC", 4, False))
    },
    "exchanged channels": (flat(USUAL, True, "NCHW"), flat(MIXED), "outputs"),
    "an order, and noise": (flat(USUAL, True, "NCHW"), flat(USUAL.reshape(3, 4).T.ravel(),
        gradient=lambda s, r, own: [own[0] + 0.01 * NOISE, own[1]]), "outputs"),
    "no order, and noise": (flat(USUAL, True, "NCHW"), flat(USUAL, gradient=lambda s, r,
        own: [own[0] + NOISE, own[1]]), "gradient"),
    "the same order": (flat(USUAL, True, "NCHW"), flat(USUAL, False), ""),
    # Examples that begin with a number or a text.
    **{
        f"{name} first": (first_data(array_of), first_data(array_of), "")
        for name, array_of in (("number", lambda array: np.array(5)), ("text", as_texts))
    },
}  # fmt: skip


def pair(first, second):
    """Returns a training, and one with further changes, from the states of the first."""
    reference = Script(**first)
    first = {name: value for name, value in first.items() if name != "edit"}
    return reference, Script(**{"replicas": 2, **first, "replay": reference, **second})
