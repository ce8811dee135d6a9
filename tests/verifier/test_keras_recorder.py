"""The recorder of Keras: `fit` and custom loops, replays, and what is not recorded."""

import functools
import random
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

from examples.keras_remedies import ReplicaDropout
from lockstep import compare
from lockstep.data.file import load, save
from lockstep.record_keras import record
from lockstep.recorders.common import Hooks
from lockstep.recorders.keras import private
from tests.conftest import ROOT
from tests.small_models import mirrored, momentum_sgd

layers, optimizers = keras.layers, keras.optimizers
BATCH = 12
RANDOM = np.random.default_rng(0)
IMAGES = RANDOM.normal(size=(48, 8, 8, 1)).astype(np.float32)
CLASSES = RANDOM.integers(0, 3, 48)
WEIGHTS = RANDOM.uniform(0.5, 1.5, 48).astype(np.float32)
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
PER_EXAMPLE = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)


def convolution(is_built=False):
    model = keras.Sequential([
        layers.Conv2D(4, 3, strides=2, padding="same"), layers.BatchNormalization(),
        layers.ReLU(), layers.Flatten(), layers.Dropout(0.2), layers.Dense(3),
    ])  # fmt: skip
    schedule = optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
    optimizer = optimizers.AdamW(schedule, weight_decay=0.01)
    optimizer.exclude_from_weight_decay(var_names=["bias", "beta"])
    model.compile(optimizer, LOSS)
    if is_built:
        model.build((None, 8, 8, 1))
    return model


def linear(*hidden, **options):
    model = keras.Sequential([keras.Input((8, 8, 1)), layers.Flatten(), *hidden, layers.Dense(3)])
    model.compile("sgd", LOSS, **options)
    return model


def on_replicas(build=convolution, seed=1, **options):
    keras.utils.set_random_seed(seed)
    with mirrored(2).scope():
        return build(**options)


def batches():
    return tf.data.Dataset.from_tensor_slices((IMAGES, CLASSES, WEIGHTS)).batch(BATCH)


def recorded(path, model, steps=(0, 2, 3), **options):
    """Records a training; returns the description, and the arrays of the training."""
    with record(path, model, steps=steps, **options):
        model.fit(batches(), verbose=0)
    trace = load(path)
    stored = trace.stored()
    return trace.about, {name: stored[name] for name in stored if "/replaced/" not in name}


def bits_of(*owners):
    return [v.numpy().tobytes() for owner in owners for v in owner.variables]


# --- fit -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """The path of a recording, which changes no bit, and what `recorded` returns for it."""
    path = tmp_path_factory.mktemp("traces") / "one.npz"
    plain, model = on_replicas(), on_replicas()
    plain.fit(batches(), verbose=0)
    found = recorded(path, model)
    assert bits_of(model, model.optimizer) == bits_of(plain, plain.optimizer)
    return path, *found


def test_layouts_slots_and_settings_are_described(one):
    """Without them, a fault of the update is found, too, and explained less well."""
    _, about, _ = one
    kernels = [v for v in about.variables if v.name.endswith("/kernel")]
    state = [v for v in about.variables if v.of == kernels[0].name]
    assert [v.layout for v in [*kernels, *state]] == ["HWIO", "IO", "HWIO", "HWIO"]
    assert [v.slot for v in state] == ["momentum", "velocity"]
    rates = [[group["learning_rate"] for group in groups] for groups in about.settings]
    assert rates == [pytest.approx([0.1 / 2**step] * 2) for step in (0, 2, 3)]
    groups = {group["weight_decay"]: group["weights"] for group in about.settings[0]}
    names = {decay: [x.rpartition("/")[2] for x in own] for decay, own in groups.items()}
    assert names == {0.01: ["kernel", "gamma", "kernel"], 0.0: ["bias", "beta", "bias"]}


def test_an_error_ends_the_recording_and_removes_its_hooks(tmp_path):
    def ends(batch, logs):
        if batch == 1:
            raise RuntimeError("in between")

    def own_hook(data):
        return type(model).train_step(model, data)

    model = linear()
    object.__setattr__(model, "train_step", own_hook)
    callback = keras.callbacks.LambdaCallback(on_train_batch_end=ends)
    with (
        pytest.raises(RuntimeError, match="in between"),
        record(tmp_path / "cut.npz", model, steps=4),
    ):
        assert vars(model)["train_step"] is not own_hook
        model.fit(batches(), verbose=0, callbacks=[callback])
    about = load(tmp_path / "cut.npz").about
    assert about.ended_with == "RuntimeError: in between" and about.asked == (0, 1, 2, 3)
    assert about.steps == (0, 1) and [p.name for p in tmp_path.iterdir()] == ["cut.npz"]
    assert vars(model)["train_step"] is own_hook and "compute_loss" not in vars(model)
    hooks = ("_backend_apply_gradients", "_clip_gradients", "_all_reduce_sum_gradients")
    assert not {*hooks} & {*vars(model.optimizer)} and model.train_function is None


def test_what_cannot_be_recorded_is_told_in_a_line(one, tmp_path):
    dense, x = keras.Sequential([layers.Dense(3)]), tmp_path / "x.npz"
    replay = {"path": x, "replay": one[0], "steps": 1}
    for model, options, told in (
        (dense, {"path": x}, r"is not compiled; call model\.compile first"),
        (linear(jit_compile=True), {"path": x}, "jit_compile=False"),
        (linear(), {"path": tmp_path / "none" / "x.npz"}, r"\.npz file in a folder that exists"),
        (linear(), {"path": x, "steps": [9]}, "no step was recorded"),
        (linear(), {**replay, "steps": 3}, r"lacks steps \[1\]; it has \[0, 2, 3\]"),
        (linear(layers.Dense(5)), replay, r"no weight fits \S+/kernel \(64, 5\)"),
        (linear(), {**replay, "names": {"no": "p"}}, "names has no, which the model does not"),
    ):
        options = {"model": model, **options}
        with pytest.raises(ValueError, match=told), record(**options):
            model.fit(batches(), verbose=0)


# --- Replay and permutation ----------------------------------------------------------------------


def test_a_replay_from_another_start_is_bitwise_identical(one, tmp_path):
    path, _, first = one
    save(load(path), tmp_path / "one.npz")  # Equal arrays once.
    model = on_replicas(seed=5, is_built=True)
    own = model.trainable_variables[0].numpy()
    about, second = recorded(tmp_path / "two.npz", model, replay=tmp_path / "one.npz")
    assert about.replayed == path.name and first.keys() == second.keys()
    assert not [name for name in first if first[name].tobytes() != second[name].tobytes()]
    replaced = load(tmp_path / "two.npz").arrays(0, "replaced", 0)
    assert np.array_equal(replaced[0], own) and not np.array_equal(own, first["1/before/0/0"])


@pytest.mark.slow
def test_examples_are_permuted_together(one, tmp_path):
    path, _, first = one
    about, second = recorded(tmp_path / "two.npz", on_replicas(seed=5), replay=path, permute=7)
    assert about.permuted == 7
    for replica in (0, 1):
        before, after = ([a[f"1/data/{replica}/{i}"] for i in range(3)] for a in (first, second))
        order = [int(np.flatnonzero(before[2] == weight)[0]) for weight in after[2]]
        assert sorted(order) == list(range(6)) != order
        assert all(np.array_equal(b[order], a) for b, a in zip(before, after, strict=True))


# --- Eager steps ---------------------------------------------------------------------------------


class Noisy(keras.Model):
    """Counts its steps, and draws noise for them, in Python; a step that runs eagerly does so."""

    def __init__(self):
        super().__init__()
        self.hidden, self.dropout = layers.Dense(4, "tanh"), layers.Dropout(0.5)
        self.last, self.num_steps = layers.Dense(1), 0

    def call(self, x, training=False):
        return self.last(self.dropout(self.hidden(x)))

    def train_step(self, data):
        x, y = data
        self.num_steps += 1
        noise = np.random.normal(size=(1, 3)).astype(np.float32) * random.random()
        return super().train_step((x + noise, y))


@pytest.mark.parametrize("is_marked", [False, True])
def test_a_model_that_an_eager_step_builds_draws_the_same_numbers(tmp_path, is_marked):
    x = RANDOM.normal(size=(24, 3)).astype(np.float32)
    found = []
    for path in (None, tmp_path / "one.npz"):
        keras.utils.set_random_seed(1)
        model = Noisy()
        model.compile(optimizers.SGD(0.1), "mse", run_eagerly=True)
        model.built = is_marked  # Its layers are not built.
        with record(path, model):
            model.fit(x, x[:, :1], batch_size=8, verbose=0, shuffle=False)
        found.append((bits_of(model), np.random.random(), model.num_steps))
    assert found[0] == found[1] and found[0][2] == 3


# --- Custom loops --------------------------------------------------------------------------------


def classifier(*hidden, **options):
    first = keras.Input((8, 8, 1)), layers.Flatten(), layers.Dense(8, "tanh")
    return keras.Sequential([*first, *hidden, layers.Dense(3, **options)])


def gradients_of(model, x, labels, scale=lambda loss: loss):
    with tf.GradientTape() as tape:
        losses = PER_EXAMPLE(labels, model(x, training=True))
        loss = scale(tf.nn.compute_average_loss(losses, global_batch_size=BATCH))
    return tape.gradient(loss, model.trainable_variables)


def applying(model, optimizer, scale=lambda loss: loss, times=1):
    """Returns both, and a step that applies the gradients of the model so often."""

    def step(x, labels, _):
        for _ in range(times):
            optimizer.apply(gradients_of(model, x, labels, scale), model.trainable_variables)

    return model, optimizer, step


def mixed_float16():
    """A loss scale."""
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = classifier(dtype="float32")
    finally:
        keras.config.set_dtype_policy("float32")
    optimizer = optimizers.LossScaleOptimizer(momentum_sgd())
    return applying(model, optimizer, optimizer.scale_loss)


def several_updates():
    """Applies two gradients in a step, one after the other."""
    return applying(classifier(), momentum_sgd(), times=2)


def of_each_kind():
    """An optimizer for weights and one for biases, which Keras has as one."""
    biases, weights = optimizers.Adam(0.01), momentum_sgd()
    both = optimizers.MultiOptimizer(lambda weight: biases if "bias" in weight.path else weights)
    return applying(classifier(), both)


def norm_and_dropout(is_wrong=False):
    """Both compute on the examples of a replica; if it is wrong, replica 1 changes statistics."""
    model = classifier(layers.BatchNormalization(name="norm"), ReplicaDropout(0.5))
    optimizer = momentum_sgd()

    def step(x, labels, _):
        if tf.size(x) > 1000:  # AutoGraph converts it, recorded or not.
            x *= 2
        optimizer.apply(gradients_of(model, x, labels), model.trainable_variables)
        if is_wrong:
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            mean = model.get_layer("norm").moving_mean
            mean.assign(mean * (1 + 0.1 * tf.cast(replica == 1, tf.float32)))

    return model, optimizer, step


def train(program, num, path, jit_compile=None, **options):
    """Records a training on replicas, and returns its final bits."""
    keras.utils.set_random_seed(1)
    strategy = mirrored(num)
    with strategy.scope():
        model, optimizer, step = program()
    with record(path, model, optimizer, **{"steps": 3, **options}) as recorder:
        wrapped = recorder.wrap(step)
        run = tf.function(lambda batch: strategy.run(wrapped, args=batch), jit_compile=jit_compile)
        for batch in strategy.experimental_distribute_dataset(batches()):
            run(batch)
    return bits_of(model, optimizer)


def trained(program, folder, wrong=None, **options):
    """Records a program on one device, and it or a wrong one on two; returns both paths."""
    one, two = str(folder / "one.npz"), str(folder / "two.npz")
    train(program, 1, one, **options)
    train(wrong or program, 2, two, replay=one, **options)
    return one, two


@pytest.mark.parity
def test_recording_changes_no_bit(tmp_path):
    bits = train(norm_and_dropout, 2, None)
    assert bits == train(norm_and_dropout, 2, str(tmp_path / "one.npz"), steps=[0, 2])


@pytest.mark.parametrize("program, dtype, updated", [
    (of_each_kind, "", {"Adam": ["bias"] * 2, "SGD": ["kernel"] * 2}),
    (mixed_float16, "float16", {None: ["kernel", "bias"] * 2}),
])  # fmt: skip
def test_right_programs_are_clean(program, dtype, updated, tmp_path):
    one, two = trained(program, tmp_path)
    assert compare(one, two).status == "clean"
    about = load(two).about
    assert about.computed_in == dtype
    for groups in about.settings:
        named = {group.get("optimizer"): group["weights"] for group in groups}
        assert {x: [w.rpartition("/")[2] for w in own] for x, own in named.items()} == updated


def test_several_updates_of_a_weight_in_a_step_are_not_accused(tmp_path):
    one, two = trained(several_updates, tmp_path)
    assert compare(one, two).status != "fault"
    names = load(two).stored()
    assert any("/after/" in name for name in names) and not any("/raw/" in x for x in names)


@pytest.mark.parametrize("is_wrong", [False, True])
def test_each_replica_computes_its_part(is_wrong, tmp_path):
    wrong, steps = functools.partial(norm_and_dropout, is_wrong), [0, 1] if is_wrong else [2]
    one, two = trained(norm_and_dropout, tmp_path, wrong, steps=steps)
    parts = str(tmp_path / "parts.npz")
    train(norm_and_dropout, 1, parts, steps=steps, replay=two, shards="each")
    assert load(parts).about.draws_apart
    verdict = compare(one, two, by_parts=parts)
    if is_wrong:
        assert (verdict.status, verdict.place.node) == ("fault", "update"), str(verdict)
        assert verdict.place.ranks == ("replica 1",)
    else:  # Steps that were not recorded may have trained other weights, which is a note.
        assert (verdict.status, verdict.place.node) == ("by design", "outputs"), str(verdict)
        assert len(verdict.notes) == 1


def test_what_a_loop_must_do_to_be_recorded_is_told_in_a_line(tmp_path):
    def without_weights():
        return keras.Sequential([layers.Dense(3)]), momentum_sgd(), lambda *batch: None

    def of_first_layer():
        model, *others = of_each_kind()
        return keras.Sequential([keras.Input((8, 8, 1)), *model.layers[:2]]), *others

    path = str(tmp_path / "none.npz")
    for program, options, told in (
        (of_each_kind, {"jit_compile": True}, r"^jit_compile=True is around [^\n]* to record$"),
        (without_weights, {}, "has no weights yet; call the model with a batch before the block"),
        (of_first_layer, {}, r"^a step updates \S+/kernel, [^\n]* list of all models"),
    ):
        with pytest.raises(ValueError, match=told):
            train(program, 1, path, **options)


def test_what_cannot_be_computed_by_parts_is_told_in_a_line(tmp_path):
    one, path = str(tmp_path / "one.npz"), str(tmp_path / "own.npz")
    train(several_updates, 1, one, steps=1)
    given = {"steps": 1, "replay": one, "shards": "each"}
    for told, layer in (
        ("is synchronised", layers.BatchNormalization(synchronized=True)),
        ("^shards='each': layers add losses of ", layers.ActivityRegularization(l1=0.01)),
    ):
        with pytest.raises(ValueError, match=told):
            train(lambda own=layer: applying(classifier(own), momentum_sgd()), 1, path, **given)


def test_the_lines_of_the_page_record_fit_and_a_custom_loop(tmp_path, monkeypatch):
    page = (ROOT / "docs" / "verify_scripts.md").read_text(encoding="utf-8")
    of_keras = page.split("\n### Keras")[1].split("\n### ")[0]
    fit, loop = re.findall(r"```python\n(.*?)```", of_keras, re.DOTALL)
    model = on_replicas(linear)
    strategy, optimizer = model.distribute_strategy, optimizers.SGD(0.1)

    def replica_step(batch):
        optimizer.apply(gradients_of(model, *batch[:2]), model.trainable_variables)

    space = {"tf": tf, "model": model, "dataset": batches(), "strategy": strategy}
    space |= {"optimizer": optimizer, "replica_step": replica_step}
    space["distributed_dataset"] = strategy.experimental_distribute_dataset(batches())
    monkeypatch.chdir(tmp_path)
    for lines in (fit, loop):
        exec(lines, space)
        about = load("one.npz").about
        assert (about.steps, about.num_replicas) == ((0, 1, 2), 2)


# --- Private names of Keras and TensorFlow --------------------------------------------------------


def test_a_name_that_keras_does_not_have_is_told_with_its_version():
    versions = f"record_keras: Keras {keras.__version__} on TensorFlow {tf.__version__}"
    for function, *arguments in (
        (private.layers_of, object()), (private.layers_in, object()),
        (private.weights_of, object()),
        (private.hook_update, Hooks(), object(), print, print, print),
    ):  # fmt: skip
        with pytest.raises(RuntimeError) as raised:
            function(*arguments)
        text = str(raised.value)
        assert text.startswith(f"{versions} has no ") and "\n" not in text, text


def test_names_of_traced_functions():
    seen = []

    def note():
        seen.append((private.is_in_xla(), private.is_in_branch()))
        return tf.zeros(())

    tf.function(note, jit_compile=True)()
    tf.function(lambda: tf.cond(tf.random.uniform(()) > 0.5, note, lambda: tf.zeros(())))()
    body = tf.function(lambda: tf.while_loop(lambda i: i < 1.0, lambda i: i + 1 + note(), [0.0]))
    body()
    assert seen == [(True, False), (False, True), (False, True)]
