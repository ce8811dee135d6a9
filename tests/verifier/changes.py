"""What is changed in a training of `Script`: its functions, its settings, its recorded arrays."""

import copy
import dataclasses
import functools
import itertools
import types

import numpy as np

from lockstep.data.trace import STATE, STATISTIC, WEIGHT, Trace, Variable
from lockstep.engine.solve import rounded
from tests.verifier.trainer import (
    UPDATES,
    WEIGHTS,
    Script,
    adam,
    batch_of,
    mean_of,
    sgd,
)

ONE, OWN = {"replicas": 1}, {"replay": None}


def pair(first, second):
    """Returns a training, and one with further changes, from the states of the first."""
    reference = Script(**first)
    first = {name: value for name, value in first.items() if name != "edit"}
    return reference, Script(**{"replicas": 2, **first, "replay": reference, **second})


# --- Recorded arrays -----------------------------------------------------------------------------


def option(change):
    """Makes a function that changes a script's arrays an option of `Script`."""

    @functools.wraps(change)
    def as_option(*given, **named):
        return {"edit": lambda script: change(script, *given, **named)}

    return as_option


def both(*options):
    """Returns the option of several edits, made in this order."""
    return {"edit": lambda script: [option["edit"](script) for option in options]}


def is_one_of(number, wanted):
    return wanted is None or int(number) in ((wanted,) if isinstance(wanted, int) else wanted)


def names(script, kinds, replica=None, index=None, position=None):
    """Returns the names of the arrays of some kinds: all, or those of some places."""
    found = []
    for name in script.arrays:
        own_position, kind, own_replica, own_index, *_ = name.split("/")
        places = (own_position, position), (own_replica, replica), (own_index, index)
        if kind in kinds.split() and all(is_one_of(*each) for each in places):
            found.append(name)
    return found


def places(script):
    """Returns position, number and replica of each step of each replica."""
    steps = enumerate(script.steps, start=1)
    return [(*each, replica) for each in steps for replica in range(script.replicas)]


def change(script, of_array, kinds, replica=None, index=None, position=None):
    for name in names(script, kinds, replica, index, position):
        script.arrays[name] = of_array(script.arrays[name])


edit = option(change)


@option
def without(script, *place, **places):
    for name in names(script, *place, **places):
        del script.arrays[name]


@option
def times_element(script, factor, *place):
    """Multiplies an element of an array: position, kind, replica, index."""
    name = "/".join(map(str, place))
    script.arrays[name] = script.arrays[name].copy()
    script.arrays[name].flat[5] *= np.float32(factor)


def flip(kind):
    """A bit of the exponent is another one, in an array of a step."""
    return times_element(16, 2, kind, 1, 0)


def scaled(by, kinds, **places):
    return edit(lambda array: np.float32(by) * array, kinds, **places)


WITHOUT_GRADIENTS = without("raw sums clipped")

# --- Examples ------------------------------------------------------------------------------------


def three_quarters(rows, replica, count):
    size = 3 * len(rows) // 4
    return rows[:size] if replica == 0 else rows[size:]


def padded(number, step=2):
    """Batches, one of which has further examples of the first step of the epoch."""

    def batch(current):
        rows = batch_of(current)
        more = batch_of(current - current % 3)[:number]
        return np.append(rows, more) if current % 3 == step else rows

    return {"batch": batch}


@option
def of_shards(script):
    """The reference computes each replica's part of the batch."""
    for name in names(script, "data", index=0):
        script.arrays[name.replace("data", "shards")] = np.arange(len(script.arrays[name])) % 2


@option
def in_groups(script):
    """Pairs of neighbours are groups, whose numbers begin with 0 on each replica."""
    for name in names(script, "data"):
        script.arrays[f"{name[:-1]}1"] = np.arange(len(script.arrays[name])) // 2


# --- Outputs -------------------------------------------------------------------------------------


def with_outputs(factor):
    """The model returns its inputs times a factor."""

    def add(script):
        for name in names(script, "data"):
            script.arrays[name.replace("data", "y_pred")] = np.float32(factor) * script.arrays[name]

    return {"edit": add}


@option
def acting(script, slope):
    """Before its step the model acts on observations of all replicas, which the loss may use."""
    seen = np.arange(12, dtype=np.float32).reshape(4, 3)
    for name in names(script, "data", index=0):
        for index, (x, by) in enumerate([(seen, slope), (script.arrays[name], 1)]):
            of_pass = {"data": x, "y_pred": x + 9, "y_grad": by * np.ones_like(x)}
            for kind, array in of_pass.items():
                script.arrays[name.replace("data", kind)[:-1] + str(index)] = array


# --- Gradients -----------------------------------------------------------------------------------


def times(*factors):
    """Each replica has a factor of its own, or all have one."""
    return {"gradient": lambda s, r, g: [np.float32(factors[r % len(factors)]) * a for a in g]}


def bias_times(factor_of):
    """The bias' gradient is multiplied by a factor of step and replica."""
    return {"gradient": lambda s, r, g: [g[0], np.float32(factor_of(len(s.states) - 1, r)) * g[1]]}


def zero_in(*steps):
    """Gradients of 0 in some steps."""
    return {"gradient": lambda s, r, g: [a * (len(s.states) - 1 not in steps) for a in g]}


NOISY = {"gradient": lambda s, r, g: [g[0] + 0.01 * np.sin(1 + 9 * g[0]), g[1]]}


def moved(unit):
    """Each element of a gradient is moved by up to a unit, as products of few digits are."""

    def change(script, replica, gradients):
        drawn = np.random.default_rng(0)
        return [g * (1 + unit * drawn.uniform(-1, 1, g.shape)) for g in gradients]

    return {"gradient": change}


# --- Sums ----------------------------------------------------------------------------------------


def after_sum(change):
    """Each sum of gradients is changed."""
    return {"reduce": lambda sent: [[*map(change, arrays)] for arrays in mean_of(sent)]}


SUMMED = after_sum(lambda array: 2 * array)


def averaged_by_optimizer(factor):
    """The optimizer averages the gradients of the replicas itself, or sums them."""

    def update(script, weights, gradients, state):
        sgd(script, weights, [factor * g for g in gradients], state)

    def own_gradients(script):
        for name in names(script, "raw"):
            for kind in ("sums", "clipped"):
                script.arrays[name.replace("raw", kind)] = script.arrays[name]

    return {"edit": own_gradients, "update": update}


# --- Clipping ------------------------------------------------------------------------------------


def clip(replica, gradients, limit=0.1, constant=0.0):
    norm = np.sqrt(sum(float((g**2).sum()) for g in gradients)) + constant
    return [g * np.float32(min(1, limit / norm)) for g in gradients]


def clipping(script, weights, gradients, state):
    """An optimizer that clips what it gets."""
    UPDATES[script.optimizer](script, weights, clip(0, gradients), state)


def small_clip(constant):
    """Gradients of about 1e-4, clipped with a constant beside their norm."""
    return {**times(1e-4), "clip": functools.partial(clip, limit=1e-5, constant=constant)}


# --- Optimizers ----------------------------------------------------------------------------------


def settings(**given):
    return {"settings": given}


def in_each_step(*groups):
    """Settings of groups of weights, as they are recorded in each step."""
    return {"about": {"settings": [[*groups]] * 4}}


ADAM, ADAMW = {"optimizer": "Adam"}, {"class": "AdamW", "framework": "torch"}
LION = {"optimizer": {"class": "Lion", "framework": "torch"}}
UNKNOWN, KERAS_ADAM = {"about": LION}, {**ADAM, "framework": "keras"}
MUON = {"optimizer": {"class": "Muon", "framework": "keras"}}  # Its rule is unknown.
KERNEL_ONLY = in_each_step({"learning_rate": 0.1, "momentum": 0.9, "weights": WEIGHTS[:1]})
TWO_OF_EACH = in_each_step(*(
    {"weights": list(WEIGHTS), "optimizer": "SGD", "learning_rate": rate, "momentum": 0.9}
    for rate in (0.1, 0.2)
))  # fmt: skip


def changed(script, settings):
    """Returns a copy of a script with other settings."""
    own = copy.copy(script)
    own.settings = script.settings | settings
    return own


def with_settings(rule=None, **settings):
    """An update with other settings than those that are recorded."""

    def update(script, *arrays):
        (rule or UPDATES[script.optimizer])(changed(script, settings), *arrays)

    return {"update": update}


def with_mask(script, weights, gradients, state):
    """Adam or SGD without decay of the bias."""
    update, size = UPDATES[script.optimizer], len(state) // 2
    update(script, weights[:1], gradients[:1], state[:size])
    update(changed(script, {"weight_decay": 0.0}), weights[1:], gradients[1:], state[size:])


def twice(script, weights, gradients, state):
    for _ in range(2):
        UPDATES[script.optimizer](script, weights, gradients, state)


def of_kernel_only(script, weights, gradients, state):
    sgd(script, weights[:1], gradients[:1], state)


def orthogonalised(script, weights, gradients, state):
    """Updates a kernel as Muon does, in five iterations; plain SGD for the bias."""
    x = gradients[0] / np.linalg.norm(gradients[0])
    for _ in range(5):
        gram = x.T @ x
        x = np.float32(3.4445) * x + x @ (
            np.float32(-4.775) * gram + np.float32(2.0315) * gram @ gram
        )
    for weight, change in zip(weights, (x, gradients[1]), strict=True):
        weight -= np.float32(script.settings["learning_rate"]) * change


def over_classes(script, replica, gradients):
    """Gradients of a loss that is the same if all outputs rise, as that of a softmax."""
    return [gradient - gradient.mean(axis=-1, keepdims=True) for gradient in gradients]


def in_few_digits(script, weights, gradients, state):
    """SGD whose weights and momentum are kept in bfloat16."""
    sgd(script, weights, gradients, state)
    for array in (*weights, *state):
        array[...] = rounded(array, "bfloat16")


def fused(script, weights, gradients, state):
    """Updates as PyTorch's fused kernel on a GPU does: its betas are of float32."""
    betas = {name: float(np.float32(script.settings[name])) for name in ("beta_1", "beta_2")}
    adam(changed(script, betas), weights, gradients, state)


FUSED = {"optimizer": "Adam", "update": fused, "settings": {"betas_in": "float32"}}
# --- Layers and frameworks -----------------------------------------------------------------------

NORM = {"name": "bn", "class": "BatchNorm2d", "epsilon": 1e-5}


def layers(*settings):
    return {"about": {"layers": [{"weights": [], **each} for each in settings]}}


DROPOUT = layers({"name": "drop", "class": "Dropout", "rate": 0.5})
JAX = {"about": {"framework": "jax", "layers": ()}}
DECAYED = {**JAX, "settings": {"weight_decay": 0.05}}
CLIPPED = {**JAX, "clip": clip}


# --- Random numbers ------------------------------------------------------------------------------


@option
def random_states(script, state_of, change=None, own_of=None):
    """States of a generator; `own_of` are those of the script, which `replay` has replaced."""
    for position, step, replica in places(script):
        state = np.array(state_of(step, replica), np.uint8)
        script.arrays[f"{position}/random/{replica}/0"] = state
        if change is not None:
            script.arrays[f"{position}/random_after/{replica}/0"] = state + np.uint8(change)
        if own_of:
            own = np.array(own_of(step, replica), np.uint8)
            script.arrays[f"{position}/own_random/{replica}/0"] = own


def with_variable(variable, value_of):
    """A further variable, whose elements are a number of `(position, replica, is_later)`."""

    def add(script):
        for position, _, replica in places(script):
            for is_later, kind in enumerate(("before", "after")):
                value = np.full(5, value_of(position, replica, is_later), np.float32)
                script.arrays[f"{position}/{kind}/{replica}/6"] = value

    return {"edit": add, "more_variables": [variable]}


# --- Further state -------------------------------------------------------------------------------


def residuals(loaded_at=9):
    """Each replica has its own; from a step on, all have that of replica 0."""
    residual = Variable("residual", STATE, of="dense/kernel", slot="residual")
    return with_variable(residual, lambda at, r, _: 1 + r * (at < loaded_at))


def masked(changed_at):
    """A statistic with an infinite element, of which another one changes before a step."""
    return with_variable(
        Variable("mask", STATISTIC),
        lambda at, r, _: np.array([0, -np.inf, 1, 2, 50 * (at >= changed_at)]),
    )


def with_head(value_of):
    """A further weight that the recorded optimizer does not have."""
    return with_variable(Variable("head", WEIGHT), value_of)


# --- Between the steps: what replicas had before a state was loaded ------------------------------


@option
def own_states(script, change, steps=(2, 3, 4)):
    """Adds the state of the step before, which `change(array, position, replica, index)` made."""
    for name in names(script, "before after"):
        position, kind, replica, index = name.split("/")
        place = int(position) + (kind == "after"), int(replica), int(index)
        if place[0] in steps and (kind == "after" or place[0] == 1):
            own = change(script.arrays[name], *place)
            script.arrays[f"{place[0]}/replaced/{replica}/{index}"] = own


def replaced(change, *indices):
    """Adds the states that replicas had before the first one was loaded."""
    return own_states(lambda a, at, r, index: change(a) if index in indices else a, steps=(1,))


def last_bits(*place):
    """The last bits of an array change: position, replica, index."""
    return own_states(lambda a, *own: np.nextafter(a, np.float32(9)) if own == place else a)


REPLAYED = {"about": {"replayed": "one.npz"}}


@option
def halves(script):
    """Each of two replicas keeps its rows of the momentum of the kernel."""
    for replica in (0, 1):
        part = np.s_[:6] if replica == 0 else np.s_[6:]
        change(script, lambda array, part=part: array[part], "before after", replica, 4)


@option
def resumed_from(script, step):
    """The first step starts from the state of a later one of the reference."""
    for name, array in script.replay.arrays.items():
        if name.startswith(f"{step + 1}/before/0/"):
            script.arrays[f"1/replaced/0/{name[-1]}"] = array.copy()


@option
def left(script, factor, replica=None):
    """The script multiplies the kernel after the update, on all replicas or on one."""
    for name in names(script, "after", replica, index=0):
        script.arrays[name.replace("after", "left")] = np.float32(factor) * script.arrays[name]


# --- Ranks that compute one replica together -----------------------------------------------------


def on_two_ranks(trace, views):
    """Returns a trace as of two ranks of tensor parallelism; name of an array → that of each."""
    about = dataclasses.replace(trace.about, mesh={"tp": 2}, data_axes=(), replayed="one.npz")
    found = Trace(about, trace.stored(), trace.name)
    for position, kind in itertools.product(range(len(trace.steps)), ("before", "after")):
        found.put(position, kind, 1, found.arrays(position, kind, 0))
    found.views_of = {
        name: {rank: types.SimpleNamespace(read=own.copy) for rank, own in enumerate(of_ranks)}
        for name, of_ranks in views.items()
    }
    return found
