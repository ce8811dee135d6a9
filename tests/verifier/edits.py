"""What is changed in the arrays of a recording."""

import functools

import numpy as np

from lockstep.data.trace import SEED, STATE, STATISTIC, WEIGHT, Variable
from tests.verifier.script_samples import mean_of, split_evenly

from .changes import in_16_bits


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


def scaled(by, kinds):
    """Gradients are recorded before a script divides them."""
    return edit(lambda array: np.float32(by) * array, kinds)


@option
def differentiated(script, by=1):
    """A loss that a step differentiates, and does not report, times a factor."""
    for name in names(script, "loss"):
        loss = script.arrays.pop(name)
        script.arrays[name.replace("loss", "objective")] = np.float32(by) * loss


MOMENTS_IN_16_BITS = edit(in_16_bits, "after", index=(4, 7))
# As PyTorch records it: the optimizer's state does not exist before the first update.
WITHOUT_FIRST_STATE = without("before", index=range(4, 10), position=1)
WITHOUT_GRADIENTS = without("raw sums clipped")


def flip(kind, index=0):
    """One bit of the exponent, in one array of one step."""

    def flipped(array):
        bits = array.copy().reshape(-1).view(np.uint32)
        bits[5 % bits.size] ^= 1 << 25
        return bits.view(np.float32).reshape(array.shape)

    return edit(flipped, kind, 1, index, 2)


@option
def random_states(script, state_of, change=None):
    for position, step, replica in places(script):
        state = np.array(state_of(step, replica), np.uint8)
        script.arrays[f"{position}/random/{replica}/0"] = state
        if change is not None:
            script.arrays[f"{position}/random_after/{replica}/0"] = state + np.uint8(change)


@option
def own_random_states(script, state_of):
    """Those of the script, which `replay` has replaced."""
    for position, step, replica in places(script):
        state = np.array(state_of(step, replica), np.uint8)
        script.arrays[f"{position}/own_random/{replica}/0"] = state


def with_variable(variable, value_of):
    """A further variable: an array, or the number in it, of `(position, replica, is_later)`."""

    def add(script):
        for position, _, replica in places(script):
            for is_later, kind in enumerate(("before", "after")):
                value = value_of(position, replica, is_later)
                array = value if np.ndim(value) else np.full(5, value, np.float32)
                script.arrays[f"{position}/{kind}/{replica}/6"] = array

    return {"edit": add, "more_variables": [variable]}


def seeds(state_of):
    """A variable with the state of a layer's generator."""
    return with_variable(
        Variable("drop/seed", SEED), lambda *place: np.array(state_of(*place), np.uint32)
    )


def seeds_before_replay(state_of, own_of):
    """The same, where `replay` has replaced those with which the script began."""
    given = seeds(state_of)

    def add(script):
        given["edit"](script)
        for position, _, replica in places(script):
            where = f"{position}/before" if position == 1 else f"{position - 1}/after"
            own = [script.arrays[f"{where}/{replica}/{i}"] for i in range(7)]
            if position == 1:
                own[6] = np.array(own_of(replica), np.uint32)
            for i, array in enumerate(own):
                script.arrays[f"{position}/replaced/{replica}/{i}"] = array

    return given | {"edit": add}


def with_average_of(index, update=lambda own, old, new: 0.75 * own + 0.25 * new):
    """An average of a variable; it starts each step as if all before it had averaged it so."""

    def add(script):
        for position, _, replica in places(script):
            own = script.arrays[f"1/before/{replica}/{index}"] + np.float32(0.1)
            for earlier in range(2, position + 1):
                start = script.arrays[f"{earlier}/before/{replica}/{index}"]
                own = (0.75 * own + 0.25 * start).astype(np.float32)
            old, new = (script.arrays[f"{position}/{x}/{replica}/{index}"]
                        for x in ("before", "after"))  # fmt: skip
            script.arrays[f"{position}/before/{replica}/6"] = own
            script.arrays[f"{position}/after/{replica}/6"] = update(own, old, new).astype(own.dtype)

    of = ("dense/kernel", "dense/bias", "norm/moving_mean", "norm/moving_variance")[index]
    return {"edit": add, "more_variables": [Variable(f"ema.{of}", STATISTIC)]}


def residuals(loaded_at=9):
    """Each replica has its own; from a step on, all have that of replica 0."""
    residual = Variable("residual", STATE, of="dense/kernel", slot="residual")
    return with_variable(residual, lambda at, r, _: 1 + r * (at < loaded_at))


VQ = {"name": "vq", "class": "VectorQuantizer", "weights": ["codes"]}


def codes(far=0.0, drift=0.0, first=0.0):
    """A codebook, which is no BatchNorm's, may change differently on a replica, or on both."""
    variable = Variable("codes", STATISTIC)
    given = with_variable(
        variable, lambda at, r, later: at + later * (1 + drift + (far if r else first))
    )
    return {**given, "about": {"layers": (VQ,)}}


def queue(far=0.0, drift=0.0):
    """A buffer that a script fills after the update: differently on a replica, or on both."""
    given = codes()

    def fill(script):
        given["edit"](script)
        for position, _, r in places(script):
            start = script.arrays[f"{position}/before/{r}/6"]
            script.arrays[f"{position}/after/{r}/6"] = start
            script.arrays[f"{position}/left/{r}/6"] = start + np.float32(1 + drift + far * r)

    return {**given, "edit": fill}


def codes_left(far, at_the_end):
    """One that differs between update and end of the step, or only before the script changes it."""
    given = codes(far, first=-far)

    def add(script):
        given["edit"](script)
        for position, _, replica in places(script):
            value = np.full(5, position + 1 + at_the_end * (1 + replica), np.float32)
            script.arrays[f"{position}/left/{replica}/6"] = value

    return given | {"edit": add}


def with_head(value_of):
    """A further weight that the recorded optimizer does not have."""
    return with_variable(Variable("head", WEIGHT), value_of)


@option
def as_rows(script):
    """The gradient of a table of which some rows are used, each twice."""
    for name in names(script, "raw sums clipped", index=0):
        array = script.arrays.pop(name)
        script.arrays[f"{name}/values"] = np.concatenate([array / 2, array / 2])
        script.arrays[f"{name}/indices"] = np.tile(np.arange(len(array)), 2)
        script.arrays[f"{name}/rows"] = np.array(len(array))


def clipped_first(*factors):
    """As Keras' fit records it: raw, clipped, then the sum of these."""

    def edited(script):
        for position, _ in enumerate(script.steps, start=1):
            clipped = [
                [scale * script.arrays[f"{position}/raw/{replica}/{i}"] for i in range(2)]
                for replica, scale in enumerate(np.float32(factors))
            ]
            for replica, sums in enumerate(mean_of(clipped)):
                for i in range(2):
                    script.arrays[f"{position}/clipped/{replica}/{i}"] = clipped[replica][i]
                    script.arrays[f"{position}/sums/{replica}/{i}"] = sums[i]

    return {"edit": edited, "about": {"order": "clip, reduce"}}


@option
def unclipped(script):
    """The gradients before clipping, which are the sums."""
    for name in names(script, "sums"):
        script.arrays[name.replace("sums", "unclipped")] = script.arrays[name]


def with_loss_scale(scale, clip, *calls):
    """Gradients that are clipped, or not, while they are multiplied by the loss scale."""
    about = {"calls": [["backward", *calls]] * 4, "loss_scale": [float(scale)] * 4}
    return {"clip": lambda replica, g: [clip(np.float32(scale) * a) for a in g], "about": about,
            **unclipped()}  # fmt: skip


def by_value(scale=1, *calls):
    def clip(gradient):
        return np.clip(gradient, -0.05, 0.05) / np.float32(scale)

    return with_loss_scale(scale, clip, "clip value 0.05", *calls)


@option
def bias_on_first_only(script):
    """Replica 0 sends the sum of the bias' gradients, replica 1 sends none."""
    for name in names(script, "raw", 0, 1):
        script.arrays[name] = script.arrays[name] + script.arrays.pop(name.replace("0/1", "1/1"))


@option
def two_losses(script):
    """A first loss whose gradients the script clears: only the second one counts."""
    for name in names(script, "loss"):
        own = script.arrays[name]
        script.arrays[name], script.arrays[f"{name[:-1]}1"] = own + np.float32(7), np.float32(7)


@option
def sums_of_a_part(script):
    """The recorded sums are those of the first micro-batch, which was all that was reduced."""
    for name in names(script, "sums"):
        position, _, _, index = name.split("/")
        sent = [script.arrays[f"{position}/raw/{r}/{index}"] for r in range(script.replicas)]
        script.arrays[name] = np.float32(0.1) * (sent[0] + sent[1]) ** 2


@option
def put_together(script):
    """Each replica updates its rows; all record the whole weights."""
    for name in names(script, "after", index=(0, 1)):
        position, _, _, index = name.split("/")
        array = script.arrays[name]
        size = -(-len(array) // 2)
        array[:size] = script.arrays[f"{position}/after/0/{index}"][:size]
        array[size:] = script.arrays[f"{position}/after/1/{index}"][size:]


@option
def micro_batches(script):
    for name in names(script, "data"):
        array = script.arrays[name]
        script.arrays[name], script.arrays[f"{name[:-1]}1"] = array[:3], array[3:]


@option
def weights_of_examples(script):
    """Half of the examples count twice."""
    for name in names(script, "data", 0):
        count = len(script.arrays[name])
        script.arrays[f"{name[:-1]}1"] = np.where(np.arange(count) % 2, 1, 2).astype(np.float32)


def images(layout, stored=None):
    """Channels last or first; a wrong layout is another order."""

    def as_images(array):
        x = array.reshape(-1, 2, 2, 3)
        return x.transpose(0, 3, 1, 2) if (stored or layout) == "NCHW" else x

    return {"about": {"data_layout": layout}, **edit(as_images, "data")}


@option
def in_torch(script):
    """As PyTorch records it: kernels (out, in), other names."""
    for name, array in script.arrays.items():
        if array.shape == (12, 3):
            script.arrays[name] = np.ascontiguousarray(array.T)
    script.renamed = {"dense/kernel": "fc.weight", "dense/bias": "fc.bias", "IO": "OI"}


@option
def keys(script, of_step, own_of=None, devices=1):
    """The keys of one program for all devices; in a replay, its own keys were replaced."""
    for position, step, replica in places(script):
        key, own = (np.array([0, of(step)], np.uint32) for of in (of_step, own_of or of_step))
        if replica < devices:  # Those of the others are unknown.
            script.arrays[f"{position}/random/{replica}/0"] = key.view(np.uint8)
        script.arrays[f"{position}/before/{replica}/6"] = key
        if script.replay:
            where = f"{position}/before" if position == 1 else f"{position - 1}/after"
            own_state = [script.arrays[f"{where}/{replica}/{i}"] for i in range(6)]
            for i, array in enumerate([*own_state, own]):
                script.arrays[f"{position}/replaced/{replica}/{i}"] = array


# --- Between the steps: what replicas had before a state was loaded ------------------------------


@option
def own_states(script, change=None, steps=(2, 3, 4)):
    """Adds the state of the step before; `change(array, position, replica, index)` is another."""
    for name in names(script, "after"):
        position, _, replica, index = name.split("/")
        place = int(position) + 1, int(replica), int(index)
        if place[0] in steps:
            array = script.arrays[name]
            own = array if change is None else change(array, *place)
            script.arrays[f"{place[0]}/replaced/{replica}/{index}"] = own


def last_bits(*changed, times=1.0):
    """The last bit of the last element changes in arrays `POSITION/REPLICA/INDEX`, or more."""

    def change(array, *place):
        own = array.copy()
        if "/".join(map(str, place)) in changed:
            own.ravel()[-1] = np.nextafter(own.ravel()[-1] * np.float32(times), np.float32(9))
        return own

    return own_states(change)


@option
def buffers_of_first(script):
    """As DDP does, replica 0 sends its buffers to all before the next step."""

    def state(array, position, replica, index):
        return script.arrays[f"{position - 1}/after/0/{index}"] if index in (2, 3) else array

    own_states(state)["edit"](script)


def not_loaded(names):
    """Makes a recording one that was to start from the first one, without some variables."""
    return {"about": {"replayed": "one.npz", "not_loaded": names}}


def starts_apart(step):
    """Makes a step start from other weights, and end with the same change."""
    apart = edit(lambda array: array + np.float32(1e-3), "before after", None, (0, 1), step + 1)
    return both(apart, own_states(steps=(2, 3)))


@option
def replaced(script, change, *indices):
    """Adds the states that replicas had before the first one was loaded."""
    for name in names(script, "before", position=1):
        array = script.arrays[name]
        own = change(array) if int(name[-1]) in indices else array
        script.arrays[name.replace("before", "replaced")] = own


@option
def of_shards(script):
    """The reference computes each replica's part of the batch."""
    for name in names(script, "data", index=0):
        count = len(script.arrays[name])
        second = split_evenly(np.arange(count), 1, 2)
        script.arrays[name.replace("data", "shards")] = np.isin(np.arange(count), second) * 1


# --- State that a rank owns ----------------------------------------------------------------------


@option
def owned(script):
    """Replica 0 keeps the momentum of the kernel, replica 1 that of the bias; others stay 0."""
    for replica in (0, 1):
        change(script, np.zeros_like, "before after", replica, 5 - replica)


@option
def halves(script):
    """Each of two replicas keeps its rows of the momentum of the kernel."""
    for replica in (0, 1):
        part = np.s_[:6] if replica == 0 else np.s_[6:]
        change(script, lambda array, part=part: array[part], "before after", replica, 4)


@option
def resumed(script):
    """A checkpoint that one replica wrote has zeros for the state that the other one owns."""

    def state(array, position, replica, index):
        is_lost = (position, replica) == (3, 1) and index in (4, 5)
        return script.arrays[f"2/after/0/{index}"] if is_lost else array

    own_states(state)["edit"](script)


@option
def not_reduced(script):
    """Each replica gives its own gradient to the optimizer."""
    for name in names(script, "clipped sums"):
        position, _, replica, index = name.split("/")
        script.arrays[name] = script.arrays[f"{position}/raw/{replica}/{index}"]


@option
def resumed_from(script, step):
    """The first step starts from the state of a later one of the reference."""
    for name, array in script.replay.arrays.items():
        if name.startswith(f"{step + 1}/before/0/"):
            script.arrays[f"1/replaced/0/{name[-1]}"] = array.copy()


@option
def ends_early(script, replica):
    """At the end, as `join` does, a replica gets what the other one has trained since."""
    for name in [name for name in script.arrays if name[:2] == "3/" and f"/{replica}/" in name]:
        del script.arrays[name]
    for name in names(script, "after", 1 - replica, position=3):
        script.arrays[f"2/left/{replica}/{name[-1]}"] = script.arrays[name]


# --- Outputs and other data ----------------------------------------------------------------------


@option
def first_data(script, array_of):
    """Examples begin with another array."""
    for name in names(script, "data"):
        array = script.arrays[name]
        script.arrays[f"{name[:-1]}1"], script.arrays[name] = array, array_of(array)


def as_texts(array):
    return np.array([b"text %d" % number for number in (array[:, 0] * 1e6).astype(int)])


SYNC = {"name": "norm", "class": "SyncBatchNorm", "weights": ["norm/moving_mean"]}


def in_part(left_out):
    """One gradient is not reduced."""

    def reduce(sent):
        received = mean_of(sent)
        for own, got in zip(sent, received, strict=True):
            got[left_out] = own[left_out]
        return received

    return {"reduce": reduce, **without("sums")}
