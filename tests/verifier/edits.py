"""What is changed in the arrays of a recording."""

import numpy as np

from lockstep.data.trace import SEED, Variable
from tests.verifier.script_samples import batch_of, examples, mean_of, split_evenly

from .changes import as_it_is, in_16_bits


def edit(of_array, kind, replica=None, index=None, position=None):
    """Returns what changes the arrays of a kind: all, or those of one place."""

    def edited(script):
        for name, array in list(script.arrays.items()):
            place = name.split("/")
            wanted = (position, kind, replica, index)
            if all(w is None or str(w) == p for w, p in zip(wanted, place, strict=True)):
                script.arrays[name] = of_array(array)

    return {"edit": edited}


def moments_in_16_bits(script):
    for index in (4, 7):
        edit(in_16_bits, "after", None, index)["edit"](script)


def flip(kind, index=0):
    """One bit of the exponent, in one array of one step."""

    def flipped(array):
        bits = array.copy().reshape(-1).view(np.uint32)
        bits[5 % bits.size] ^= 1 << 25
        return bits.view(np.float32).reshape(array.shape)

    return edit(flipped, kind, 1, index, 2)


def random_states(state_of, change=None):
    def edited(script):
        for position, step in enumerate(script.steps, start=1):
            for replica in range(script.replicas):
                state = np.array(state_of(step, replica), np.uint8)
                script.arrays[f"{position}/random/{replica}/0"] = state
                if change is not None:
                    script.arrays[f"{position}/random_after/{replica}/0"] = state + np.uint8(change)

    return {"edit": edited}


def without_state(script):
    """Optimizer state is created in each step, and lost before the next one."""
    for name in [name for name in script.arrays if "/before/" in name]:
        if name.endswith(("/4", "/5")):
            del script.arrays[name]


def seeds(state_of):
    """A variable with the state of a layer's generator."""

    def edited(script):
        for position, step in enumerate(script.steps, start=1):
            for replica in range(script.replicas):
                for later, kind in enumerate(("before", "after")):
                    state = np.array(state_of(step, replica, later), np.uint32)
                    script.arrays[f"{position}/{kind}/{replica}/6"] = state

    return {"edit": edited, "more_variables": [Variable("drop/seed", SEED)]}


def as_rows(script):
    """The gradient of a table of which some rows are used, each twice."""
    for name in [n for n in script.arrays if n.split("/")[1] in ("raw", "sums", "clipped")]:
        if name.endswith("/0"):
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


def without_gradient(of_sum, *replicas):
    """Some replicas send no gradient of the bias; others may send the sum in its place."""

    def edited(script):
        for position, _ in enumerate(script.steps, start=1):
            raw = [f"{position}/raw/{replica}/1" for replica in range(2)]
            if of_sum:
                script.arrays[raw[0]] = script.arrays[raw[0]] + script.arrays[raw[1]]
            for replica in replicas:
                del script.arrays[raw[replica]]
                if len(replicas) == 2:
                    for kind in ("sums", "clipped"):
                        del script.arrays[f"{position}/{kind}/{replica}/1"]

    return {"edit": edited}


def not_cleared(script, replica, gradients):
    """The gradients of this step are added to those of the previous one."""
    step = max(script.states)
    kept = [script.arrays.get(f"{step}/clipped/{replica}/{i}", np.float32(0)) for i in range(2)]
    return [old + gradient for old, gradient in zip(kept, gradients, strict=True)]


def two_losses(script):
    """A first loss whose gradients the script clears: only the second one counts."""
    for name in [name for name in script.arrays if "/loss/" in name]:
        own = script.arrays[name]
        script.arrays[name], script.arrays[f"{name[:-1]}1"] = own + np.float32(7), np.float32(7)


def sends_more(script, replica, gradients):
    return [gradient + np.float32(0.3) for gradient in gradients]


def clears_more(script):
    """The script clears gradients before those of the step itself."""
    for name in [name for name in script.arrays if "/raw/" in name]:
        more = np.full_like(script.arrays[name], 0.3)
        script.arrays[name.replace("/raw/", "/removed/")] = more


def sums_of_a_part(script):
    """The recorded sums are those of the first micro-batch, which was all that was reduced."""
    for name in [name for name in script.arrays if "/sums/" in name]:
        position, _, _, index = name.split("/")
        sent = [script.arrays[f"{position}/raw/{r}/{index}"] for r in range(script.replicas)]
        script.arrays[name] = np.float32(0.1) * (sent[0] + sent[1]) ** 2


def without(kind, *places):
    """Returns what removes the arrays of a kind: all, or those of `REPLICA/INDEX`."""

    def edited(script):
        for name in [name for name in script.arrays if f"/{kind}/" in name]:
            if not places or name.split(f"/{kind}/")[1] in places:
                del script.arrays[name]

    return edited


def without_first_state(script):
    """As PyTorch records it: the optimizer's state does not exist before the first update."""
    for name in [n for n in script.arrays if n.startswith("1/before/")]:
        if int(name.split("/")[-1]) >= 4:
            del script.arrays[name]


def put_together(script):
    """Each replica updates its rows; all record the whole weights."""
    for name, array in script.arrays.items():
        position, kind, _, index = name.split("/")
        if kind == "after" and int(index) < 2:
            size = -(-len(array) // 2)
            array[:size] = script.arrays[f"{position}/after/0/{index}"][:size]
            array[size:] = script.arrays[f"{position}/after/1/{index}"][size:]


def micro_batches(script):
    for name in [name for name in script.arrays if "/data/" in name]:
        array = script.arrays[name]
        script.arrays[name], script.arrays[f"{name[:-1]}1"] = array[:3], array[3:]


def weights_of_examples(script):
    """Half of the examples count twice."""
    for position in range(1, 5):
        count = len(script.arrays[f"{position}/data/0/0"])
        weights = np.where(np.arange(count) % 2, 1, 2).astype(np.float32)
        script.arrays[f"{position}/data/0/1"] = weights


def other_variance(script):
    """A variance 1.5 times as large: n / (n - 1) is at most 16 / 15."""
    for position, step in enumerate(script.steps, start=1):
        name, share = f"{position}/after/0/3", np.float32(0.1)
        rest = (1 - share) * script.states[step][0][3]
        script.arrays[name] = rest + np.float32(1.5) * (script.arrays[name] - rest)


def images(layout, stored=None):
    """Channels last or first; a wrong layout is another order."""

    def as_images(array):
        x = array.reshape(-1, 2, 2, 3)
        return x.transpose(0, 3, 1, 2) if (stored or layout) == "NCHW" else x

    return {"about": {"data_layout": layout}, **edit(as_images, "data")}


def in_torch(script):
    """As PyTorch records it: kernels (out, in), other names."""
    for name, array in script.arrays.items():
        if array.shape == (12, 3):
            script.arrays[name] = np.ascontiguousarray(array.T)
    script.renamed = {"dense/kernel": "fc.weight", "dense/bias": "fc.bias", "IO": "OI"}


def scaled(by, *kinds):
    """Gradients are recorded before a script divides them."""

    def edited(script):
        for name in script.arrays:
            if name.split("/")[1] in kinds:
                script.arrays[name] = np.float32(by) * script.arrays[name]

    return {"edit": edited}


def clipped_alone(script):
    for kind in ("raw", "sums"):
        without(kind)(script)


def keys(of_step, own_of=None):
    """The keys of one program for all devices; in a replay, its own keys were replaced."""

    def edited(script):
        for position, step in enumerate(script.steps, start=1):
            key, own = (np.array([0, of(step)], np.uint32) for of in (of_step, own_of or of_step))
            script.arrays[f"{position}/random/0/0"] = key.view(np.uint8)
            for replica in range(script.replicas):
                script.arrays[f"{position}/before/{replica}/6"] = key
                where = f"{position}/before" if position == 1 else f"{position - 1}/after"
                for i in range(6) if script.replay else ():
                    array = script.arrays[f"{where}/{replica}/{i}"]
                    script.arrays[f"{position}/replaced/{replica}/{i}"] = array
                    script.arrays[f"{position}/replaced/{replica}/6"] = own

    return {"edit": edited}


def own_states(*changed):
    """Adds the states that replicas had before one was loaded; some of them are changed."""

    def add(script):
        for key, array in list(script.arrays.items()):
            position, kind, replica, index = key.split("/")
            if kind == "after" and position in "12":
                by = (position, int(replica), int(index)) in changed
                script.arrays[f"{int(position) + 1}/replaced/{replica}/{index}"] = array + by

    return {"edit": add}


def not_loaded(names):
    """Makes a recording one that was to start from the first one, without some variables."""
    return {"about": {"replayed": "one.npz", "not_loaded": names}}


def starts_apart(step):
    """Makes a step start from other weights, and end with the same change."""

    def move(script):
        for key, array in list(script.arrays.items()):
            number, kind, _, index = key.split("/")
            if int(number) == step + 1 and kind in ("before", "after") and index in "01":
                script.arrays[key] = array + np.float32(1e-3)
        own_states()["edit"](script)

    return {"edit": move}


def without_the_step_before(script):
    own_states(("1", 1, 0))["edit"](script)
    for key in [key for key in script.arrays if key.startswith("1/after")]:
        del script.arrays[key]


def replaced(change, *indices):
    """Adds the states that replicas had before the first one was loaded."""

    def add(script):
        for replica in range(2):
            for index in range(6):
                array = script.arrays[f"1/before/{replica}/{index}"]
                own = change(array) if index in indices else array
                script.arrays[f"1/replaced/{replica}/{index}"] = own

    return {"edit": add}


def without_gradients(script):
    for name in [n for n in script.arrays if n.split("/")[1] in ("raw", "sums", "clipped")]:
        del script.arrays[name]


def of_shards(script):
    """The reference computes each replica's part of the batch."""
    for key in [key for key in script.arrays if "/data/" in key and key.endswith("/0")]:
        count = len(script.arrays[key])
        second = split_evenly(np.arange(count), 1, 2)
        script.arrays[key.replace("data", "shards")] = np.isin(np.arange(count), second) * 1


def of_step_before(script):
    """The gradients of a step are those of the one before; those of the first are 0."""
    right = script.replay.trace()
    for position in range(4):
        for replica in range(2):
            for i, array in enumerate(right.arrays(max(position - 1, 0), "raw", 0)):
                for kind in ("raw", "sums", "clipped"):
                    name = f"{position + 1}/{kind}/{replica}/{i}"
                    script.arrays[name] = array * np.float32(position > 0)


def flat(order, gradient_of=True, layout="", **changes):
    """A model with its features in an order, whose outputs are recorded.

    It has the gradients of its outputs only if `gradient_of`.
    """

    def add_outputs(script):
        for number, step in enumerate(script.steps, start=1):
            for r in range(script.replicas):
                x = script.arrays[f"{number}/data/{r}/0"]
                kernel, bias = (script.arrays[f"{number}/before/{r}/{i}"] for i in range(2))
                script.arrays[f"{number}/y_pred/{r}/0"] = outputs = x @ kernel + bias
                rows = split_evenly(batch_of(step), r, script.replicas)
                wrong = outputs - examples()[1][rows]
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


def first_data(array_of):
    """Examples begin with another array."""

    def add(script):
        for name in [name for name in script.arrays if "/data/" in name]:
            position, _, replica, _ = name.split("/")
            script.arrays[f"{position}/data/{replica}/1"] = script.arrays[name]
            script.arrays[name] = array_of(script.arrays[name])

    return {"edit": add}


def as_texts(array):
    return np.array([b"text %d" % number for number in (array[:, 0] * 1e6).astype(int)])


SYNC = {"name": "norm", "class": "SyncBatchNorm", "weights": ["norm/moving_mean"]}


def synchronised(replicas, *changed):
    """Statistics of some replicas differ in a layer that is synchronised."""

    def change(script):
        for replica in changed:
            script.arrays[f"1/after/{replica}/2"] = script.arrays["1/after/0/2"] + 1

    return {"replicas": replicas, "about": {"layers": [SYNC]}, "steps": (0,), "edit": change}


def in_part(left_out):
    """One gradient is not reduced."""

    def reduce(sent):
        received = mean_of(sent)
        for own, got in zip(sent, received, strict=True):
            got[left_out] = own[left_out]
        return received

    return {"reduce": reduce, "edit": without("sums")}
