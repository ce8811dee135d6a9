"""What is changed in a training of `Script`."""

import types

import numpy as np

from lockstep.data.trace import SEED, Variable
from tests.verifier.script_samples import UPDATES, WEIGHTS, adam, batch_of, mean_of, sgd

ADAM, ADAMW = {"optimizer": "Adam"}, {"class": "AdamW", "framework": "torch"}
RMSPROP, MUON = {"optimizer": "RMSprop"}, {"optimizer": "Muon"}
LION = {"optimizer": {"class": "Lion", "framework": "torch"}}
ONE, OWN = {"replicas": 1}, {"replay": None}


def augmented(seed, each_epoch=True):
    """Adds to each example numbers that its row, the step and a seed decide; notes the ids."""

    def augment(step, rows, x):
        own = [[seed, int(row), step * each_epoch] for row in rows]
        drawn = [np.random.default_rng(each).normal(size=x.shape[1]) for each in own]
        return x + 0.1 * np.reshape(drawn, x.shape)

    return {"augment": augment, "ids": np.asarray}


def three_quarters(rows, replica, count):
    size = 3 * len(rows) // 4
    return rows[:size] if replica == 0 else rows[size:]


def all_on_second(rows, replica, count):
    return rows if replica == 1 else rows[:0]


def same_rows(rows, replica, count):
    return rows[: len(rows) // count]


def whole_batch_on_both(of_parts=(1.0, 1.0)):
    """Both ranks have all examples: each computes the gradient of a part of the model, or all."""

    def gradient(script, replica, gradients):
        if script.replicas == 1 or not of_parts:
            return gradients
        factors = [2 * of_parts[replica] * (replica == i) for i in range(len(gradients))]
        return [np.float32(f) * g for f, g in zip(factors, gradients, strict=True)]

    return {"shard": lambda rows, r, count: rows, "weighted": False, "gradient": gradient}


def first_only(sent):
    return [[array.copy() for array in sent[0]] for _ in sent]


def without_last(sent):
    received = mean_of(sent[:-1])
    return [*received, received[0]]


def after_sum(change):
    """Each sum of gradients is changed."""
    return {"reduce": lambda sent: [[*map(change, arrays)] for arrays in mean_of(sent)]}


SUMMED = after_sum(lambda array: 2 * array)


def before_sum(change):
    """Each gradient of a replica is changed."""
    return {"gradient": lambda script, replica, gradients: [*map(change, gradients)]}


def times(factor):
    return before_sum(lambda array: np.float32(factor) * array)


def times_on(*factors):
    """Each replica has a factor of its own."""
    return {"gradient": lambda s, replica, g: [np.float32(factors[replica]) * a for a in g]}


def bias_times(factor_of):
    """The bias' gradient is multiplied by a factor of step and replica."""
    return {"gradient": lambda s, r, g: [g[0], np.float32(factor_of(len(s.states) - 1, r)) * g[1]]}


def in_rows(rows, change):
    """Some rows of the kernel are changed."""

    def changed(array):
        array = array.copy()
        if array.ndim == 2:
            array[rows] = change(array[rows])
        return array

    return changed


def clip(replica, gradients):
    norm = np.sqrt(sum(float((g**2).sum()) for g in gradients))
    return [g * np.float32(min(1, 0.1 / norm)) for g in gradients]


def without_bias(*replicas):
    return {"clip": lambda replica, g: [g[0], (replica not in replicas) * g[1]]}


def clip_on_first(replica, gradients):
    return [g * np.float32(0.5) for g in gradients] if replica == 0 else gradients


def padded(number, start=0, step=2):
    """Batches, the last of which has further examples of an earlier step of the epoch."""

    def batch(current):
        rows = batch_of(current)
        more = batch_of(current - current % 3 + start)[:number]
        return np.append(rows, more) if current % 3 == step else rows

    return {"batch": batch}


def twice_as_large(step):
    return np.append(batch_of(2 * step), batch_of(2 * step + 1))


def apart(script, replica, gradients):
    return [gradients[0] + 0.01 * np.sin(1 + 9 * gradients[0]), gradients[1]]


NOISY = {"gradient": apart}


def little_noise(script, replica, gradients):
    kernel, bias = gradients
    other = np.random.default_rng(5).normal(size=kernel.shape)
    size = np.linalg.norm(kernel) / np.linalg.norm(other)
    return [kernel + np.float32(2e-2 * size) * other.astype(np.float32), bias]


def decayed_in_loss(script, replica, gradients):
    weights = script.states[max(script.states)][replica][:2]
    return [g + np.float32(0.05) * w for g, w in zip(gradients, weights, strict=True)]


def cancelled(last_bits=0.0):
    """The gradient of one element nearly cancels the decay that is added to it."""

    def gradient(script, replica, gradients):
        kernel, bias = (g.copy() for g in gradients)
        weight = script.states[max(script.states)][replica][0][0, 0]
        kernel[0, 0] = np.float32(-0.1 * (1 + 1e-3 + last_bits)) * weight
        return [kernel, bias]

    return {"gradient": gradient, "settings": {"weight_decay": 0.1}}


def with_settings(**settings):
    """An update with other settings than those that are recorded."""

    def update(script, weights, gradients, state):
        changed = types.SimpleNamespace(
            settings=script.settings | settings, decays_gradient=script.decays_gradient,
            framework=script.framework,
        )  # fmt: skip
        UPDATES[script.optimizer](changed, weights, gradients, state)

    return {"update": update}


def overflow(script, replica, gradients):
    """In step 1 an element of the last replica's kernel overflows."""
    kernel, bias = gradients
    if len(script.states) == 2 and replica == script.replicas - 1:
        kernel = np.where(np.arange(kernel.size).reshape(kernel.shape) == 4, np.inf, kernel)
    return [kernel, bias]


def unless_overflow(script, weights, gradients, state):
    """Skips the steps in which a gradient overflows."""
    if all(np.isfinite(gradient).all() for gradient in gradients):
        UPDATES[script.optimizer](script, weights, gradients, state)


def always(script, weights, gradients, state):
    """Skips no step."""
    UPDATES[script.optimizer](script, weights, gradients, state)


OVERFLOW = {"gradient": overflow, "update": unless_overflow}


def with_mask(script, weights, gradients, state):
    """Adam or SGD without decay of the bias."""
    update, size = UPDATES[script.optimizer], len(state) // 2
    update(script, weights[:1], gradients[:1], state[:size])
    own = types.SimpleNamespace(**{**vars(script), "settings": {**script.settings}})
    own.settings["weight_decay"] = 0.0
    update(own, weights[1:], gradients[1:], state[size:])


def no_update(script, weights, gradients, state):
    """Changes nothing."""


def corrected(first):
    """Adam that corrects the bias of the first moment only, or of none."""

    def update(script, weights, gradients, state):
        s, before = script.settings, [weight.copy() for weight in weights]
        adam(script, weights, gradients, state)
        for i, (weight, old) in enumerate(zip(weights, before, strict=True)):
            left = 1 - s["beta_1"] ** float(state[3 * i + 2]) if first else 1
            root = np.sqrt(state[3 * i + 1]) + np.float32(s["epsilon"])
            weight[:] = old - np.float32(s["learning_rate"] / left) * state[3 * i] / root

    return {"update": update}


def of_kernel_only(script, weights, gradients, state):
    sgd(script, weights[:1], gradients[:1], state)


def in_8_bits(array):
    scale = np.max(np.abs(array)) / np.float32(127)
    return np.round(array / scale) * scale


def with_moved_moments(script, weights, gradients, state):
    adam(script, weights, gradients, state)
    for moment in state[:2]:
        moment[:] = np.roll(moment, 1, axis=0)


def in_16_bits(array):
    return (array.view(np.uint32) & 0xFFFF0000).view(np.float32)


def clipped_by_weights(script, weights, gradients, state):
    """As Optax' adaptive clipping before Adam: to a part of the norm of each weight."""
    limits = [0.01 * max(1e-3, np.linalg.norm(w)) / np.linalg.norm(g)
              for w, g in zip(weights, gradients, strict=True)]  # fmt: skip
    clipped = [np.float32(min(1, a)) * g for a, g in zip(limits, gradients, strict=True)]
    adam(script, weights, clipped, state)


def clipped_inside(script, weights, gradients, state):
    sgd(script, weights, clip(0, gradients), state)


def twice(script, weights, gradients, state):
    for _ in range(2):
        UPDATES[script.optimizer](script, weights, gradients, state)


def stale(script, weights, gradients, state):
    kept = state[1].copy()
    adam(script, weights, gradients, state)
    state[1][:] = kept


def corrected_in_float32(script, weights, gradients, state):
    """Keras computes 1 - 0.999 in float32: 1e-5 away from 0.001."""
    adam(script, weights, gradients, state)
    number = float(state[2])
    left = 1 - np.float32(0.999) ** np.float32(number)
    for weight, before in zip(weights, script.states[number - 1][0][:2], strict=True):
        weight[:] = before + (weight - before) * np.float32((left / (1 - 0.999**number)) ** 0.5)


def with_epsilon_under_root(script, weights, gradients, state):
    """RMSprop as TensorFlow computes it, without momentum."""
    s = script.settings
    for i, (weight, gradient) in enumerate(zip(weights, gradients, strict=True)):
        square, _, number = state[3 * i : 3 * i + 3]
        number += 1
        square[:] = np.float32(s["rho"]) * square + np.float32(1 - s["rho"]) * gradient**2
        root = np.sqrt(square + np.float32(s["epsilon"]))
        weight -= np.float32(s["learning_rate"]) * gradient / root


def fused(script, weights, gradients, state):
    """Updates as PyTorch's fused kernel on a GPU does: its betas are of float32."""
    betas = {name: float(np.float32(script.settings[name])) for name in ("beta_1", "beta_2")}
    script.settings = script.settings | betas
    adam(script, weights, gradients, state)


FUSED = {"optimizer": "Adam", "update": fused, "settings": {"betas_in": "float32"}}
RATES = [0.1, 0.1, 0.05, 0.05]
KERNEL_ONLY = {"settings": [[{"learning_rate": 0.1, "momentum": 0.9, "weights": WEIGHTS[:1]}]] * 4}
SCHEDULE = {"settings": [[{"learning_rate": r, "momentum": 0.9}] for r in RATES]}


def with_schedule(script, weights, gradients, state):
    """SGD of PyTorch or of Keras, whose velocity has the learning rate within."""
    rate = np.float32(RATES[max(script.states)])
    for i, (weight, gradient) in enumerate(zip(weights, gradients, strict=True)):
        if script.framework == "torch":
            state[i][:] = np.float32(0.9) * state[i] + gradient
            weight -= rate * state[i]
        else:
            state[i][:] = np.float32(0.9) * state[i] - rate * gradient
            weight += state[i]


def in_order(size):
    return {"batch": lambda step: np.arange(40)[step % size * 16 :][:16]}


def layers(*settings, off=()):
    """Layers of a script; those in evaluation mode in each of its steps."""
    listed = [{"weights": [], **each} for each in settings]
    return {"about": {"layers": listed, **({"in_evaluation": [list(off)] * 4} if off else {})}}


def with_norm(momentum, **changes):
    """A training whose BatchNorm is recorded with its statistics."""
    layer = {"name": "norm", "class": "BatchNorm2d", "momentum": momentum}
    layer |= {"weights": ["norm/moving_mean", "norm/moving_variance"]}
    return {"norm_momentum": momentum, "about": {"layers": [layer]}, **changes}


CONV = {"name": "0", "class": "Conv2d", "strides": [2, 2], "padding": [1, 1]}
KERAS_CONV = {"name": "conv", "class": "Conv2D", "strides": [2, 2], "padding": "valid"}
SAME_CONV = {**KERAS_CONV, "padding": "same"}
PADDED = {"name": "pad", "class": "ZeroPadding2D", "padding": [[1, 1], [1, 1]]}
TORCH_PADDED = {"name": "pad", "class": "ZeroPad2d", "padding": [0, 1, 0, 1]}
NORM = {"name": "bn", "class": "BatchNorm2d", "epsilon": 1e-5}
SYNCED = {**NORM, "synchronized": True}
KERAS_NORM = {"name": "bn", "class": "BatchNormalization", "epsilon": 1e-3}
OWN_NORM = {**NORM, "momentum": 0.1, "weights": ["norm/moving_mean"]}
DROPOUT = layers({"name": "drop", "class": "Dropout", "rate": 0.5})


def settings(**given):
    return {"settings": given}


KERAS_ADAM = {**ADAM, "framework": "keras"}
PLACED = {
    "decays_gradient": False,
    **settings(weight_decay=0.1, decay_placement="taken from the weights"),
}


def length_of(gradients):
    """Returns the norm of all gradients."""
    return np.sqrt(sum(np.sum(np.square(g)) for g in gradients))


def clipped_by_hand():
    """Gradients are clipped where the recorder does not see it."""
    return {"gradient": lambda s, r, g: [a * np.float32(0.01 / length_of(g)) for a in g]}


def zero_in(*steps):
    """Gradients of 0 in some steps."""
    return {"gradient": lambda s, r, g: [a * (len(s.states) - 1 not in steps) for a in g]}


def as_it_is(script, replica, gradients):
    return gradients


def for_two_classes(script, replica, gradients):
    """Makes the bias' gradient that of two classes, (a, -a)."""
    kernel, bias = gradients
    return [kernel, np.array([bias[0], -bias[0], 0], np.float32)]


ON, OFF = ([],) * 4, (["drop"],) * 4  # Layers in evaluation mode, in each step.


def in_modes(*modes, rate=0.5):
    """A training with dropout; two modes are those of its replicas."""
    about = layers({"name": "drop", "class": "Dropout", "rate": rate})["about"]
    given = {"about": {**about, "in_evaluation": modes[0]}}
    return {**given, "per_replica": {"in_evaluation": modes}} if len(modes) > 1 else given


JAX = {"about": {"framework": "jax", "layers": ()}}
DECAYED = {**JAX, "settings": {"weight_decay": 0.05}}
CLIPPED, KEYS = {**JAX, "clip": clip}, {**JAX, "more_variables": [Variable("key", SEED)]}
UNKNOWN = {"about": LION}


def not_cleared(script, replica, gradients):
    """The gradients of this step are added to those of the previous one."""
    step = max(script.states)
    kept = [script.arrays.get(f"{step}/clipped/{replica}/{i}", np.float32(0)) for i in range(2)]
    return [old + gradient for old, gradient in zip(kept, gradients, strict=True)]


def of_rounding(value):
    """An element of the bias' gradient that is rounding alone."""
    return {"gradient": lambda s, r, g: [g[0], np.append(np.float32(value), g[1][1:])]}


def averaged_by_optimizer(factor):
    """The optimizer averages the gradients of the replicas itself, or sums them."""
    return {
        "update": lambda s, w, gradients, state: sgd(s, w, [factor * g for g in gradients], state)
    }


def at_the_end_on(last):
    """The last batch has examples for one replica only."""
    return lambda rows, r, count: rows[r::count] if len(rows) == 16 else rows[: 8 * (r == last)]


def mean_of_those_left(sent, factor=1):
    """The mean of the replicas that have examples; a wrong factor counts the others, too."""
    with_examples = [own for own in sent if np.any(own[0])]
    if len(with_examples) == len(sent):
        return mean_of(sent)
    return [[np.float32(factor) * array for array in with_examples[0]] for _ in sent]
