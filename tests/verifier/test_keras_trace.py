"""The trace that `record_keras.record` writes, and its replay."""

import contextlib
import functools
import json
import random
import re
import runpy

import keras
import numpy as np
import pytest
import tensorflow as tf

from lockstep import compare
from lockstep.data import file as trace_file
from lockstep.numeric.arrays import Rows
from lockstep.record_keras import Recorder, record
from lockstep.recorders.keras.description import layouts_of
from tests.conftest import ROOT
from tests.small_models import mirrored
from tests.verifier import shown

layers, optimizers = keras.layers, keras.optimizers
RANDOM = np.random.default_rng(0)
IMAGES = RANDOM.normal(size=(48, 8, 8, 1)).astype(np.float32)
CLASSES = RANDOM.integers(0, 3, 48)
WEIGHTS = RANDOM.uniform(0.5, 1.5, 48).astype(np.float32)


def decaying(initial=0.1):
    rate = optimizers.schedules.ExponentialDecay(initial, 1, 0.5)
    optimizer = optimizers.AdamW(rate, weight_decay=0.01)
    optimizer.exclude_from_weight_decay(var_names=["bias", "beta"])
    return optimizer


def convolution(optimizer=decaying, dropout=0.2):
    parts = [layers.Dropout(dropout)] if dropout else []
    model = keras.Sequential([
        layers.Conv2D(4, 3, strides=2, padding="same"), layers.BatchNormalization(epsilon=0.01),
        layers.ReLU(), layers.Flatten(), *parts, layers.Dense(3),
    ])  # fmt: skip
    model.compile(optimizer(), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def built():
    model = convolution()
    model.build((None, 8, 8, 1))
    return model


def on_replicas(build, num=2, seed=1):
    keras.utils.set_random_seed(seed)
    with mirrored(num).scope():
        model = build()
    return model


def batches(size=12):
    return tf.data.Dataset.from_tensor_slices((IMAGES, CLASSES, WEIGHTS)).batch(size)


def recorded(path, build=convolution, *, num=2, seed=1, steps=(0, 2, 3), **options):
    """Records a training and returns what the file says, and its other members."""
    model = on_replicas(build, num, seed)
    with record(path, model, steps=steps, **options):
        model.fit(batches(), verbose=0)
    return read(path)


def read(path):
    """Returns description and arrays; what replay= replaces is of no training compared here."""
    about, arrays = read_whole(path)
    return about, {name: array for name, array in arrays.items() if "/replaced/" not in name}


def read_whole(path):
    with np.load(path, allow_pickle=False) as file:
        about = json.loads(str(file["about"]))
        names = {name: name for name in file.files if name != "about"} | about["aliases"]
        named = sorted(name for name in names if "/kept/" not in name)
        return about, {name: file[names[name]] for name in named}


def differing(a, b, part=""):
    """Returns the names of arrays that have other bits in a second file."""
    names = [name for name in a if part in name]
    assert names and names == [name for name in b if part in name]
    return [name for name in names if a[name].tobytes() != b[name].tobytes()]


def bits_of(model):
    return [v.numpy().tobytes() for v in [*model.variables, *model.optimizer.variables]]


@pytest.fixture(scope="module")
def training(tmp_path_factory):
    """A recorded training: the path of the recording, and the bits that the training ends in."""
    path, model = tmp_path_factory.mktemp("traces") / "one.npz", on_replicas(convolution)
    with record(path, model, steps=(0, 2, 3)):
        model.fit(batches(), verbose=0)
    return path, bits_of(model)


@pytest.fixture(scope="module")
def one(training):
    """The path of a recording, and what `read` returns for it."""
    path, _ = training
    return path, *read(path)


@pytest.fixture(scope="module")
def without_dropout(tmp_path_factory):
    """The same for two steps of a model without random numbers."""
    path = tmp_path_factory.mktemp("traces") / "one.npz"
    return path, *recorded(path, functools.partial(convolution, dropout=0), steps=2)


# --- The file ------------------------------------------------------------------------------------


def test_what_a_file_says(one):
    _, about, arrays = one
    assert (about["format"], about["version"], about["framework"]) == ("lockstep trace", 2, "keras")
    assert about["versions"]["keras"] == keras.__version__
    assert about["num_replicas"] == 2 and about["replicas"] == [0, 1]
    assert about["steps"] == [0, 2, 3]
    assert (about["reduction"], about["order"]) == ("sum", "clip, reduce")
    assert about["data_layout"] == "NHWC"
    assert about["permuted"] is None and about["replayed"] is None
    positions = {name.split("/")[0] for name in arrays}
    kinds = {name.split("/")[1] for name in arrays}
    assert positions == {"1", "2", "3"}
    assert kinds == {
        "data", "before", "y_pred", "loss", "objective", "raw", "clipped", "sums", "after"
    }  # fmt: skip
    assert np.array_equal(arrays["2/data/1/0"], IMAGES[30:36])
    assert np.array_equal(arrays["2/data/1/2"], WEIGHTS[30:36])


def test_variables_have_kinds_layouts_and_slots(one):
    _, about, arrays = one
    variables = {v["name"].rpartition("/")[2]: v for v in about["variables"]}
    assert [variables[n]["layout"] for n in ("bias", "gamma")] == ["", ""]
    kernels = [v for v in about["variables"] if v["name"].endswith("/kernel")]
    assert [(v["kind"], v["layout"]) for v in kernels] == [("weight", "HWIO"), ("weight", "IO")]
    assert variables["moving_mean"]["kind"] == "statistic"
    assert variables["seed_generator_state"]["kind"] == "seed"
    iteration = next(v for v in about["variables"] if v["name"].endswith("/iteration"))
    assert (iteration["kind"], iteration["of"], iteration["slot"]) == (
        "optimizer state", "", "iteration"
    )  # fmt: skip
    of_kernel = [v for v in about["variables"] if v.get("of") == kernels[0]["name"]]
    assert [(v["slot"], v["layout"]) for v in of_kernel] == [
        ("momentum", "HWIO"), ("velocity", "HWIO")
    ]  # fmt: skip
    assert about["gradients"] == [v["name"] for v in about["variables"] if v["kind"] == "weight"]
    for number, variable in enumerate(about["variables"]):
        assert f"1/before/0/{number}" in arrays, variable
    assert len(about["variables"]) == sum(name.startswith("1/before/0/") for name in arrays)


def test_settings_are_read_at_each_step(one):
    _, about, _ = one
    assert about["optimizer"]["class"] == "AdamW" and about["optimizer"]["beta_2"] == 0.999
    rates = [[group["learning_rate"] for group in groups] for groups in about["settings"]]
    assert rates == [pytest.approx([0.1 / 2**step] * 2) for step in (0, 2, 3)]
    decaying_group, other = about["settings"][0]
    assert decaying_group["weight_decay"] == 0.01 and other["weight_decay"] == 0.0
    names = [name.rpartition("/")[2] for name in decaying_group["weights"] + other["weights"]]
    assert names == ["kernel", "gamma", "kernel", "bias", "beta", "bias"]
    assert sorted(decaying_group["weights"] + other["weights"]) == sorted(about["gradients"])


def test_settings_of_layers(one):
    _, about, _ = one
    _, convolution_, normalisation, *_ = about["layers"]  # After the input layer.
    assert convolution_["class"] == "Conv2D" and convolution_["padding"] == "same"
    assert convolution_["strides"] == [2, 2] and convolution_["dilation"] == [1, 1]
    assert normalisation["epsilon"] == 0.01 and normalisation["momentum"] == 0.99
    assert len(normalisation["weights"]) == 4


def test_an_error_ends_the_recording_and_removes_its_hooks(tmp_path):
    def begins(batch, logs):
        model.optimizer.learning_rate = 0.1 * (batch + 1)

    def ends(batch, logs):
        if batch == 1:
            raise RuntimeError("in between")

    def own_hook(data):
        return type(model).train_step(model, data)

    model = on_replicas(lambda: convolution(lambda: optimizers.SGD(0.5, momentum=0.9)))
    object.__setattr__(model, "train_step", own_hook)
    callback = keras.callbacks.LambdaCallback(on_train_batch_begin=begins, on_train_batch_end=ends)
    with (
        pytest.raises(RuntimeError, match="in between"),
        record(tmp_path / "cut.npz", model, steps=4),
    ):
        assert vars(model)["train_step"] is not own_hook
        model.fit(batches(), verbose=0, callbacks=[callback])
    about, _ = read(tmp_path / "cut.npz")
    assert about["ended_with"] == "RuntimeError: in between" and about["asked"] == [0, 1, 2, 3]
    assert about["steps"] == [0, 1] and [p.name for p in tmp_path.iterdir()] == ["cut.npz"]
    rates = [groups[0]["learning_rate"] for groups in about["settings"]]
    assert rates == pytest.approx([0.1, 0.2]) and about["settings"][0][0]["momentum"] == 0.9
    assert vars(model)["train_step"] is own_hook and "compute_loss" not in vars(model)
    hooks = ("_backend_apply_gradients", "_clip_gradients", "_all_reduce_sum_gradients")
    assert not {*hooks} & {*vars(model.optimizer)} and model.train_function is None


def test_sparse_gradients_have_three_members_and_a_file_says_the_same(tmp_path):
    def build():
        model = keras.Sequential([layers.Embedding(9, 4), layers.Flatten(), layers.Dense(3)])
        model.compile("sgd", lambda y, y_pred: tf.reduce_mean(tf.square(y - y_pred)))
        return model

    model = on_replicas(build)
    tokens, targets = RANDOM.integers(0, 9, (8, 5)), np.ones((8, 3), np.float32)
    with Recorder(model, steps=1) as recorder:
        model.fit(tokens, targets, batch_size=8, verbose=0)
    recorder.save(tmp_path / "sparse.npz")
    _, arrays = read(tmp_path / "sparse.npz")
    shapes = [arrays[f"1/raw/0/0/{part}"].shape for part in ("values", "indices", "rows")]
    assert shapes == [(20, 4), (20,), ()] and int(arrays["1/raw/0/0/rows"]) == 9
    loaded = trace_file.load(tmp_path / "sparse.npz")
    assert isinstance(loaded.arrays(0, "raw", 0)[0], Rows)
    assert trace_file.from_parts(recorder.about, recorder.arrays).about == loaded.about
    with Recorder(model := build(), steps=1, replay=tmp_path / "sparse.npz") as one:
        model.fit(tokens, targets, batch_size=8, verbose=0)
    verdict, from_memory = compare(one, tmp_path / "sparse.npz"), compare(one, recorder)
    assert verdict.place == from_memory.place and verdict.formula == from_memory.formula
    assert shown(verdict) == "fault: loss: wrong_factor", str(verdict)


def test_recording_changes_nothing(training):
    model = on_replicas(convolution)
    model.fit(batches(), verbose=0)
    assert bits_of(model) == training[1]


def test_each_process_writes_a_file(one, tmp_path):
    path, about, arrays = one
    recorder = Recorder(on_replicas(convolution))
    for replica in (0, 1):
        recorder.about |= about | {"replicas": [replica]}
        recorder.arrays = {n: a for n, a in arrays.items() if n.split("/")[2] == str(replica)}
        recorder.save(tmp_path / "one.npz")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["one.rank0.npz", "one.rank1.npz"]
    again, whole = trace_file.load(tmp_path / "one.npz"), trace_file.load(path)
    assert again.about == whole.about and sorted(again.stored()) == sorted(arrays)
    assert all(again.stored()[n].tobytes() == array.tobytes() for n, array in arrays.items())
    Recorder(on_replicas(convolution), steps=[2], replay=tmp_path / "one.npz")


def test_errors_of_files(tmp_path):
    with (
        pytest.raises(ValueError, match=r"must be an \.npz file in a folder that exists"),
        record(tmp_path / "none" / "one.npz", on_replicas(convolution)),
    ):
        pass
    with (
        pytest.raises(ValueError, match="no step was recorded"),
        record(tmp_path / "none.npz", on_replicas(convolution), steps=[9]),
    ):
        pass


def test_models_that_cannot_be_recorded():
    def compiled(optimizer, **options):
        model = keras.Sequential([layers.Dense(2)])
        model.compile(optimizer, "mse", **options)
        return model

    for model, message in (
        (keras.Sequential([layers.Dense(2)]), r"is not compiled; call model\.compile first, or"),
        (compiled("sgd", jit_compile=True), "jit_compile=False"),
    ):
        with pytest.raises(ValueError, match=message):
            Recorder(model)
    with pytest.raises(ValueError, match="optimizer: 0 is no optimizer of Keras"):
        Recorder(compiled("sgd"), [0, 1])


def test_a_step_of_a_custom_loop_must_be_wrapped(tmp_path):
    model, optimizer = keras.Sequential([layers.Dense(2)]), optimizers.SGD()
    with (
        pytest.raises(ValueError, match=r"call strategy\.run\(recorder\.wrap\(step\), …\)"),
        record(tmp_path / "two.npz", model, optimizer),
        tf.GradientTape() as tape,
    ):
        loss = tf.reduce_sum(model(tf.ones((2, 3))))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))


# --- Replay --------------------------------------------------------------------------------------


def test_a_kernel_with_lora_has_a_layout_and_nothing_else():
    """Its layer's `kernel` is a sum."""
    layer = layers.Dense(3, name="own")
    model = keras.Sequential([keras.Input((4,)), layer])
    layer.enable_lora(2)
    (weight,) = (each.path for each in model.weights if each.name == "kernel")
    assert layouts_of(model)[0] == {weight: "IO"}


def test_a_replay_from_another_start_is_bitwise_identical(one, tmp_path):
    path, _, first = one
    trace_file.save(trace_file.load(path), tmp_path / "one.npz")  # Equal arrays once.
    path = tmp_path / "one.npz"
    about, second = recorded(tmp_path / "two.npz", seed=5, replay=path)
    assert about["replayed"] == path.name and not differing(first, second)
    _, arrays = read_whole(tmp_path / "two.npz")  # With what the script had before.
    assert not np.array_equal(arrays["1/replaced/0/0"], first["1/before/0/0"])
    model = on_replicas(built, seed=5)  # It would have started from other weights.
    assert not np.array_equal(model.trainable_variables[0].numpy(), first["1/before/0/0"])


def test_a_replay_starts_from_the_same_weights_but_has_its_own_learning_rate(one, tmp_path):
    path, about, first = one
    build = functools.partial(convolution, functools.partial(decaying, 0.2))
    other, second = recorded(tmp_path / "other.npz", build, num=3, seed=5, replay=path)
    for index, variable in enumerate(about["variables"]):
        for replica in range(3):
            a, b = f"2/before/{replica % 2}/{index}", f"2/before/{replica}/{index}"
            is_loaded = variable["kind"] != "seed"  # Other numbers of replicas draw others.
            assert (first[a].tobytes() == second[b].tobytes()) == is_loaded, variable
    rates = [groups[0]["learning_rate"] for groups in other["settings"]]
    assert rates == pytest.approx([0.2 / 2**step for step in (0, 2, 3)])


def of_torch(path, target, names=str):
    """Writes a recording as another framework would: other layouts and names, no slots of Keras."""
    about, arrays = read(path)
    about |= {"framework": "torch", "data_layout": "NCHW"}
    kept = [v for v in about["variables"] if v["kind"] in ("weight", "statistic")]
    turned = {}
    for name, array in arrays.items():
        position, kind, replica, index = name.split("/")[:4]
        variable = about["variables"][int(index)] if kind == "before" else None
        if variable in kept:
            axes = {"HWIO": (3, 2, 0, 1), "IO": (1, 0)}.get(variable["layout"], range(array.ndim))
            turned[f"{position}/before/{replica}/{kept.index(variable)}"] = array.transpose(axes)
    layouts = {"HWIO": "OIHW", "IO": "OI", "": ""}
    about["variables"] = [
        {"name": names(f"p{i}"), "kind": v["kind"], "layout": layouts[v["layout"]]}
        for i, v in enumerate(kept)
    ]
    about |= {"gradients": [], "settings": [], "aliases": {}}
    np.savez(target, **turned, about=np.array(json.dumps(about)))


def test_a_recording_of_another_framework_is_transposed_and_names_choose(one, tmp_path):
    path, about, first = one
    of_torch(path, tmp_path / "torch.npz")
    model = on_replicas(built, seed=5)
    own = {v.path.rpartition("/")[2]: v.path for v in model.variables}
    with record(
        tmp_path / "two.npz", model, steps=[0, 2], replay=tmp_path / "torch.npz",
        names={own["gamma"]: "p3", own["beta"]: "p2"},
    ):  # fmt: skip
        model.fit(batches(), verbose=0)
    _, second = read(tmp_path / "two.npz")
    ends = [variable["name"].rpartition("/")[2] for variable in about["variables"]]
    swapped = {"gamma": "beta", "beta": "gamma"}
    for index, variable in enumerate(about["variables"]):
        other = ends.index(swapped[ends[index]]) if ends[index] in swapped else index
        same = first[f"2/before/1/{other}"].tobytes() == second[f"2/before/1/{index}"].tobytes()
        is_loaded = variable["kind"] in ("weight", "statistic")
        assert same == (is_loaded or variable.get("slot") == "iteration"), variable


def test_errors_of_a_replay(one, tmp_path):
    path, *_ = one
    with pytest.raises(ValueError, match=r"one\.npz: lacks steps \[1\]; it has \[0, 2, 3\]"):
        Recorder(on_replicas(convolution), steps=3, replay=path)

    def wider():
        model = keras.Sequential([layers.Flatten(), layers.Dense(5)])
        model.compile(decaying(), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    with pytest.raises(ValueError, match=r"no weight fits \S+/kernel \(64, 5\); it has \S+/kernel"):
        recorded(tmp_path / "two.npz", wider, replay=path)
    with pytest.raises(ValueError, match="names has none, which the model does not have"):
        recorded(tmp_path / "two.npz", replay=path, names={"none": "p1"})


# --- Permutation ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_examples_are_permuted_together(without_dropout, tmp_path):
    def eager():
        model = build()
        model.run_eagerly = True
        return model

    build = functools.partial(convolution, dropout=0)
    path, _, first = without_dropout
    options = {"seed": 5, "steps": 2, "replay": path, "permute": 7}
    about, second = recorded(tmp_path / "two.npz", build, **options)
    assert about["permuted"] == 7 and not differing(first, second, "/before/")
    for replica in (0, 1):
        before, after = (
            [trace[f"1/data/{replica}/{i}"] for i in range(3)] for trace in (first, second)
        )
        order = [int(np.flatnonzero(before[2] == weight)[0]) for weight in after[2]]
        assert sorted(order) == list(range(6)) != order
        assert all(np.array_equal(b[order], a) for b, a in zip(before, after, strict=True))
    orders = [np.argsort(second[f"{p}/data/{r}/2"]).tolist() for p in (1, 2) for r in (0, 1)]
    assert len({tuple(order) for order in orders}) > 1
    for name in (name for name in first if "/sums/" in name):
        np.testing.assert_allclose(first[name], second[name], atol=1e-5)
    assert differing(first, second, "/sums/")  # Only the order of summation differs.
    _, third = recorded(tmp_path / "three.npz", eager, **options)
    assert not differing(second, third, "/data/") and not differing(first, third, "/before/")


# --- Custom loops --------------------------------------------------------------------------------


@pytest.mark.parity
def test_a_custom_loop(tmp_path):
    def run(recorded_steps):
        keras.utils.set_random_seed(1)
        strategy = mirrored(2)
        with strategy.scope():
            model = keras.Sequential([layers.Flatten(), layers.Dense(3)])
            model.build((None, 8, 8, 1))
            optimizer = optimizers.SGD(0.1, momentum=0.9)
        loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")

        def replica_step(x, y, weights):
            with tf.GradientTape() as tape:
                loss = loss_fn(y, model(x, training=True), weights) / 12
                if tf.size(y) > 100:  # AutoGraph converts it, recorded or not.
                    loss *= 2
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return loss

        def train(step):
            @tf.function
            def distributed(batch):
                return strategy.run(step, args=batch)

            for batch in strategy.experimental_distribute_dataset(batches()):
                distributed(batch)
            return [v.numpy().tobytes() for v in [*model.variables, *optimizer.variables]]

        if not recorded_steps:
            return train(replica_step)
        with record(tmp_path / "own.npz", model, optimizer, steps=recorded_steps) as recorder:
            return train(recorder.wrap(replica_step))

    assert run([0, 2]) == run([])
    about, arrays = read(tmp_path / "own.npz")
    assert about["steps"] == [0, 2]
    assert about["optimizer"]["momentum"] == 0.9
    assert about["settings"][1][0]["learning_rate"] == pytest.approx(0.1)
    kinds = {name.split("/")[1] for name in arrays}
    assert {"data", "before", "raw", "sums", "after"} <= kinds
    total = sum(arrays[f"1/raw/{r}/0"] for r in range(2))
    np.testing.assert_allclose(arrays["1/sums/0/0"], total, rtol=1e-5, atol=1e-7)
    velocity = next(i for i, v in enumerate(about["variables"]) if v.get("slot") == "momentum")
    expected = -0.1 * arrays["1/sums/0/0"]
    np.testing.assert_allclose(arrays[f"1/after/0/{velocity}"], expected, rtol=1e-5, atol=1e-8)


class Noisy(keras.Model):
    """Counts its steps, and draws noise for them, in Python; a step that runs eagerly does so."""

    def __init__(self, is_marked):
        super().__init__()
        self.parts, self.is_marked = [layers.Dense(4, "tanh"), layers.Dense(1)], is_marked

    def build(self, shape):
        if self.is_marked:
            self.built = True  # Its layers are not.
        else:
            super().build(shape)

    def call(self, x, training=False):
        return self.parts[1](self.parts[0](x))

    def train_step(self, data):
        x, y = data
        self.num_steps = getattr(self, "num_steps", 0) + 1
        noise = np.random.normal(size=(1, 3)).astype(np.float32) * random.random()
        return super().train_step((x + noise, y))


@pytest.mark.parametrize("is_marked", [False, True])
def test_a_model_that_an_eager_step_builds_draws_the_same_numbers(tmp_path, is_marked):
    x = RANDOM.normal(size=(24, 3)).astype(np.float32)
    found = []
    for path in (None, tmp_path / "one.npz"):
        keras.utils.set_random_seed(1)
        model = Noisy(is_marked)
        model.compile(optimizers.SGD(0.1), "mse", run_eagerly=True)
        if is_marked:
            model.build((None, 3))
        with record(path, model) if path else contextlib.nullcontext():
            model.fit(x, x[:, :1], batch_size=8, verbose=0, shuffle=False)
        weights = [v.numpy().tobytes() for v in model.variables]
        found.append((weights, np.random.random(), model.num_steps))
    assert found[0] == found[1]
    assert found[0][2] == 3


def test_the_lines_of_the_page_record_fit_and_a_custom_loop(tmp_path, monkeypatch):
    page = (ROOT / "docs" / "verify_scripts.md").read_text(encoding="utf-8")
    fit, loop = re.findall(
        r"```python\n(.*?)```", page.split("\n### Keras")[1].split("\n### ")[0], re.DOTALL
    )
    model = on_replicas(lambda: convolution(optimizers.SGD, dropout=0))
    strategy, optimizer = model.distribute_strategy, optimizers.SGD(0.1)

    def replica_step(batch):
        x, y, _ = batch
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model.loss(y, model(x, training=True)))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    space = {"tf": tf, "model": model, "dataset": batches(), "strategy": strategy}
    space |= {"optimizer": optimizer, "replica_step": replica_step}
    space["distributed_dataset"] = strategy.experimental_distribute_dataset(batches())
    monkeypatch.chdir(tmp_path)
    for lines in (fit, loop):
        exec(lines, space)
        about, _ = read("one.npz")
        assert (about["steps"], about["num_replicas"]) == ([0, 1, 2], 2)


@pytest.mark.slow
def test_the_example_records_clipping_before_the_all_reduce(tmp_path, monkeypatch):
    # This process has its logical devices, and its strategies need another all-reduce.
    monkeypatch.setattr(tf.config, "set_logical_device_configuration", lambda *_: None)
    strategies = {num: mirrored(num) for num in (1, 2)}
    monkeypatch.setattr(tf.distribute, "MirroredStrategy", lambda names: strategies[len(names)])
    main = runpy.run_path(str(ROOT / "examples" / "record_fit.py"))["main"]
    one, two = tmp_path / "one.npz", tmp_path / "two.npz"
    main(1, str(one))
    main(2, str(two), str(one))
    verdict = compare(one, two)
    assert shown(verdict).startswith("fault: gradient: clipped_too_early"), str(verdict)
