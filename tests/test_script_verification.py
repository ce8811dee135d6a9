"""`verify --traces`: what it finds in recordings of a small training, right ones and wrong ones."""

import json
import types

import numpy as np
import pytest

from app.records.script_trace import load_trace
from app.runtime.errors import DataError
from app.verification.recordings.flatten_order import reordered_rows
from app.verification.recordings.recorded_step import RecordedStep
from app.verification.recordings.trace_finding import REMEDIES, STAGES
from app.verification.recordings.trace_verification import (
    between_frameworks,
    computed_tolerance,
    given_tolerance,
    pairs_of,
    verify_against,
    verify_alone,
)
from app.verification.script_match import Matching
from in_process import run_here
from script_samples import Script, adam, batch_of, examples, mean_of, sgd

FAULT, BY_DESIGN = "fault", "by design"
ADAMW = {"optimizer": {"class": "AdamW", "framework": "torch"}}


@pytest.fixture(scope="module")
def one():
    return Script()


@pytest.fixture
def found(tmp_path, one):
    """Verifies a recording against that of one replica; returns what is found: stage, cause."""

    def verify(script, reference=one, tolerance=None, status=None):
        first = load_trace_of(reference, tmp_path / "one.npz")
        second = load_trace_of(script, tmp_path / "two.npz")
        if tolerance is None:
            permuted = load_trace_of(
                Script(permute=1, replay=one, steps=(0, 1)), tmp_path / "permuted.npz"
            )
            tolerance = computed_tolerance(load_trace_of(one, tmp_path / "p.npz"), permuted, {})
        report = verify_against(first, second, {}, tolerance)
        assert set(report.stages) <= set(STAGES)
        return [(f.stage, f.cause) for f in report.findings if status in (None, f.status)]

    return verify


def load_trace_of(script, path):
    script.write(path)
    return load_trace(path)


def two(one, **changes):
    return Script(replicas=2, replay=one, **changes)


# Right trainings


@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
def test_a_right_training_is_clean(found, one, replicas):
    assert found(Script(replicas=replicas, replay=one)) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": "Adam"},
        {"optimizer": "Adam", "settings": {"weight_decay": 0.01}, "about": ADAMW},
        {"optimizer": "Adam", "framework": "keras"},
        {"settings": {"nesterov": True}},
        {"settings": {"momentum": 0.0, "weight_decay": 0.01}},
        {"settings": {"weight_decay": 0.1}},
    ],
)  # fmt: skip
def test_a_right_update_is_clean(found, changes):
    reference = Script(**changes)
    assert found(Script(replicas=2, replay=reference, **changes), reference) == []


def test_a_port_with_other_names_and_layouts_is_compared(tmp_path, found, one):
    first = load_trace_of(one, tmp_path / "one.npz")
    for changes, expected in (({}, []), ({"reduce": half}, ["other_sum"])):
        second = transposed(two(one, **changes), tmp_path / "two.npz")
        assert {variable.name for variable in second.variables} >= {"fc.weight", "fc.bias"}
        report = verify_against(first, second, {}, given_tolerance(None))
        assert [f.cause for f in report.findings] == expected and not report.unmatched
        assert report.stages["gradients"] == "clean" and not report.skipped


def transposed(script, path):
    """Writes a recording as PyTorch would: kernels (out, in), other names."""
    for name, array in script.arrays.items():
        if array.shape == (12, 3):
            script.arrays[name] = np.ascontiguousarray(array.T)
    script.write(path)
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    text = str(arrays.pop("about")).replace("dense/kernel", "fc.weight")
    text = text.replace("dense/bias", "fc.bias").replace('"IO"', '"OI"')
    np.savez(path, **arrays, about=np.array(text))
    return load_trace(path)


def test_a_training_from_its_own_states_is_compared_in_its_first_step(tmp_path, one):
    first = load_trace_of(one, tmp_path / "one.npz")
    second = load_trace_of(Script(replicas=2), tmp_path / "two.npz")
    report = verify_against(first, second, {}, given_tolerance(None))
    assert not report.findings and report.stages["gradients"] == "clean"
    assert report.skipped and 0 not in report.skipped


def test_shards_of_other_sizes_are_right_if_weighted(found, one):
    assert found(two(one, shard=three_quarters)) == []


def three_quarters(rows, replica, count):
    size = 3 * len(rows) // 4
    return rows[:size] if replica == 0 else rows[size:]


def test_clipping_after_the_sum_is_clean(found):
    def clip(replica, gradients):
        norm = np.sqrt(sum(float((g**2).sum()) for g in gradients))
        return [g * np.float32(min(1, 0.1 / norm)) for g in gradients]

    reference = Script(clip=clip)
    assert found(Script(replicas=2, clip=clip, replay=reference), reference) == []


def test_equal_random_states_are_right_where_no_layer_draws(found, one):
    state = [np.zeros(4, np.uint8)]
    script = two(one)
    keep_random(script, lambda step, replica: state)
    assert found(script) == []


def keep_random(script, state_of):
    for position, step in enumerate(script.steps, start=1):
        for replica in range(script.replicas):
            (script.arrays[f"{position}/random/{replica}/0"],) = state_of(step, replica)


# Faults


def no_rows(rows, replica, count):
    return rows[: len(rows) // count]


def clip_on_first(replica, gradients):
    return [g * np.float32(0.5) for g in gradients] if replica == 0 else gradients


def first_only(sent):
    return [[array.copy() for array in sent[0]] for _ in sent]


def half(sent):
    return [[array / 2 for array in arrays] for arrays in mean_of(sent)]


def in_bfloat16(sent):
    def cut(array):
        return (array.view(np.uint32) & 0xFFFF0000).view(np.float32)

    return [[cut(array) for array in arrays] for arrays in mean_of(sent)]


def summed(sent):
    return [[np.float32(len(sent)) * array for array in arrays] for arrays in mean_of(sent)]


def other_update(**settings):
    def update(script, weights, gradients, state):
        changed = type("Changed", (), {"settings": {**script.settings, **settings}})
        changed.decays_gradient = settings.get("decays_gradient", script.decays_gradient)
        sgd(changed, weights, gradients, state)

    return update


def no_update(script, weights, gradients, state):
    """Changes nothing."""


FAULTS = {
    "same shard": ({"shard": no_rows}, ("examples", "same_examples")),
    "bypassed": ({"reduce": None}, ("all-reduce", "not_all_reduced")),
    "lost replica": ({"reduce": first_only}, ("all-reduce", "lost_replica")),
    "sum": ({"reduce": summed}, ("all-reduce", "sum_instead_of_mean")),
    "half": ({"reduce": half}, ("all-reduce", "other_sum")),
    "bfloat16": ({"reduce": in_bfloat16}, ("all-reduce", "reduced_precision")),
    "uneven": ({"shard": three_quarters, "weighted": False}, ("gradients", "mean_of_means")),
    "clipped on one": ({"clip": clip_on_first}, ("clipping", "clipped_on_one_replica")),
    "clipped": ({"clip": lambda r, g: [a / 2 for a in g]}, ("clipping", "other_clipping")),
    "doubled": (
        {"gradient": lambda s, r, g: [2 * a for a in g]}, ("gradients", "sum_instead_of_mean")
    ),
    "scaled": ({"gradient": lambda s, r, g: [3 * a for a in g]}, ("gradients", "scaled_gradient")),
    "halved": (
        {"gradient": lambda s, r, g: [a / 2 for a in g]}, ("gradients", "mean_instead_of_sum")
    ),
    "frozen": (
        {"gradient": lambda s, r, g: [g[0], 0 * g[1]]}, ("gradients", "frozen")
    ),
    "noise": (
        {"gradient": lambda s, r, g: [a + 0.01 * np.sin(1 + 9 * a) for a in g]},
        ("gradients", "unexplained_gradient"),
    ),
    "loss": ({"sums_loss": True}, ("loss", "other_loss_reduction")),
    "rate": ({"settings": {"learning_rate": 0.2}}, ("update", "other_learning_rate")),
    "momentum": ({"settings": {"momentum": 0.8}}, ("update", "other_momentum")),
    "nesterov": ({"settings": {"nesterov": True}}, ("update", "other_nesterov")),
    "decay": ({"settings": {"weight_decay": 0.1}}, ("update", "other_weight_decay")),
    "hidden rate": (
        {"update": other_update(learning_rate=0.3)}, ("update", "other_learning_rate")
    ),
    "hidden decay": (
        {"settings": {"weight_decay": 0.1}, "update": other_update(weight_decay=0.0)},
        ("update", "other_weight_decay"),
    ),
    "hidden nesterov": ({"update": other_update(nesterov=True)}, ("update", "other_nesterov")),
    "no update": ({"update": no_update}, ("update", "not_updated")),
    "sums are raw": ({"reduce": lambda sent: sent}, ("all-reduce", "not_all_reduced")),
    "other weights": (
        {"gradient": lambda s, r, g: [(0.7, 1.3)[r] * a for a in g]}, ("gradients", "mean_of_means")
    ),
    "scaled inputs": ({"inputs": lambda x: 2 * x - 1}, ("examples", "other_normalisation")),
    "reshuffled": ({"batch": lambda step: batch_of(step % 3)}, ("examples", "not_reshuffled")),
    "padded": (
        {"batch": lambda step: np.append(batch_of(step), batch_of(step)[:2])},
        ("examples", "repeated_examples"),
    ),
    "cut": ({"batch": lambda step: batch_of(step)[:-2]}, ("examples", "lost_examples")),
    "other order": (
        {"batch": lambda step: batch_of((1, 0, 2, 3)[step])}, ("examples", "other_order")
    ),
    "other examples": (
        {"batch": lambda step: np.sort(batch_of(step) * 7 % 40)}, ("examples", "other_examples")
    ),
    "norm momentum": ({"norm_momentum": 0.01}, ("statistics", "other_batch_norm_momentum")),
    "unbiased": ({"unbiased": True}, ("statistics", "unbiased_variance")),
    "local norm": ({"local_norm": True}, ("statistics", "local_statistics")),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named(found, one, name):
    changes, expected = FAULTS[name]
    causes = found(two(one, **changes))
    assert expected in causes
    # What follows from it has the same name.
    allowed = {expected[1], *ALSO.get(name, ())}
    assert {cause for _, cause in causes} <= allowed


ALSO = {
    "same shard": {"repeated_examples"},  # Each example of the first half is there twice.
    "loss": {"other_loss_reduction"},
    "scaled": {"other_loss"},
    "hidden decay": {"other_weight_decay"},
}


def test_a_dropped_last_batch_is_named(found, one):
    def dropping(step):
        epoch, number = divmod(step, 2)
        return batch_of(3 * epoch + number)

    assert ("examples", "last_batch_dropped") in found(two(one, batch=dropping))


def test_other_initial_weights_are_named_and_other_distributions_too(tmp_path, one):
    first = load_trace_of(Script(), tmp_path / "one.npz")
    for script, cause in (
        (Script(seed=1), "other_initial_weights"),
        (Script(seed=1, initial_scale=0.5), "other_initialiser"),
    ):
        second = load_trace_of(script, tmp_path / "two.npz")
        report = verify_against(first, second, {}, given_tolerance(None))
        assert [f.cause for f in report.findings if f.stage == "start"] == [cause] or (
            first.variables and cause == "other_initialiser"
        )


@pytest.mark.parametrize("form", ["raw", "sums", "after", "before"])
def test_a_flipped_bit_is_found(found, one, form):
    """A change that no check was made for: one bit of the exponent, in one array of one step."""

    def flip(step, kind, replica, arrays):
        if (step, kind, replica) == (1, form, 1):
            bits = arrays[0].reshape(-1).view(np.uint32)
            bits[5] ^= 1 << 25
        return arrays

    assert found(two(one, change=flip))


def test_regularisation_in_the_loss_is_named(found):
    def regularised(script, replica, gradients):
        weights = script.states[max(script.states)][replica][:2]
        return [g + np.float32(0.05) * w for g, w in zip(gradients, weights, strict=True)]

    one = Script()
    assert found(two(one, gradient=regularised), one)[0] == (
        "gradients", "regularisation_in_the_loss",
    )  # fmt: skip


def test_the_order_of_flattened_axes_is_named(found, one):
    """3 channels of 4 pixels: one script has the channels first, the other last."""
    order = np.arange(12).reshape(3, 4).T.ravel()

    def permuted(script, replica, gradients):
        return [gradients[0][order], gradients[1]]

    assert ("gradients", "flatten_order") in found(two(one, gradient=permuted))


@pytest.mark.parametrize(
    ("setting", "values", "cause"),
    [
        ("epsilon", (1e-5, 1e-3), "other_batch_norm_epsilon"),
        ("padding", ([1, 1], "same"), "other_padding"),
    ],
)
def test_settings_of_layers_explain_other_gradients(tmp_path, setting, values, cause):
    layer = {"name": "conv", "class": "Conv2d", "strides": [2, 2], "weights": []}
    if setting == "epsilon":
        layer = {"name": "bn", "class": "BatchNorm2d", "weights": []}
    one = Script(about={"layers": [{**layer, setting: values[0]}]})
    noisy = Script(
        replay=one,
        about={"layers": [{**layer, setting: values[1]}]},
        gradient=lambda s, r, g: [1.01 * g[0], g[1]],
    )
    first = load_trace_of(one, tmp_path / "one.npz")
    second = load_trace_of(noisy, tmp_path / "two.npz")
    report = verify_against(first, second, {}, given_tolerance(None))
    assert [(f.stage, f.cause) for f in report.findings] == [("gradients", cause)]


def test_adam_of_two_frameworks_differs_in_its_epsilon(found):
    keras = Script(optimizer="Adam", framework="keras", settings={"epsilon": 1e-4})
    torch = Script(optimizer="Adam", settings={"epsilon": 1e-4}, replay=keras)
    assert found(torch, keras) == [("update", "epsilon_placement")]
    other = Script(optimizer="Adam", settings={"epsilon": 1e-8}, replay=keras)
    assert ("update", "other_epsilon") in found(other, keras)


def test_the_place_of_weight_decay_is_named(found):
    decay = {"settings": {"weight_decay": 0.1}}
    torch = Script(**decay)
    keras = Script(
        decays_gradient=False, replay=torch,
        about={"optimizer": {"class": "SGD", "framework": "torch", "decay_placement": "weights"}},
        **{"settings": {"weight_decay": 0.1, "decay_placement": "taken from the weights"}},
    )  # fmt: skip
    assert found(keras, torch) == [("update", "weight_decay_placement")]


@pytest.mark.parametrize(
    ("setting", "values", "cause"),
    [
        ("beta_1", (0.9, 0.8), "other_beta_1"),
        ("beta_2", (0.999, 0.99), "other_beta_2"),
        ("epsilon", (1e-7, 1e-4), "other_epsilon"),
        ("learning_rate", (0.01, 0.02), "other_learning_rate"),
        ("weight_decay", (0.0, 0.1), "other_weight_decay"),
    ],
)
def test_other_settings_of_adam_are_named(found, setting, values, cause):
    adamw = {"optimizer": "Adam", "about": ADAMW}
    one = Script(settings={setting: values[0]}, **adamw)
    two = Script(replicas=2, settings={setting: values[1]}, replay=one, **adamw)
    assert found(two, one) == [("update", cause)]


def test_a_moment_that_does_not_follow_is_found(found):
    def stale(script, weights, gradients, state):
        kept = state[1].copy()
        adam(script, weights, gradients, state)
        state[1][:] = kept

    one = Script(optimizer="Adam")
    assert found(Script(optimizer="Adam", update=stale, replay=one), one)


def test_other_optimizers_are_told_apart(found):
    one = Script(optimizer="Adam")
    two = Script(replay=None, steps=(0, 1))
    assert ("update", "other_optimizer") in found(two, one)


def test_an_optimizer_without_a_known_rule_is_not_checked(tmp_path):
    about = {"optimizer": {"class": "Lion", "framework": "torch"}}
    report = verify_alone(load_trace_of(Script(about=about), tmp_path / "one.npz"))
    assert "update" not in report.stages and "clipping" in report.stages


def test_clipping_before_the_sum_is_named_and_no_clipping_is_clean(tmp_path, one):
    """As Keras' fit records it: raw, clipped, then the sum of these."""
    first = load_trace_of(one, tmp_path / "one.npz")
    for factors, expected in (((1, 1), []), ((0.5, 0.25), ["clipped_before_the_sum"])):
        script = two(one, reduce=mean_of, about={"order": "clip, reduce"})
        for position, _ in enumerate(script.steps, start=1):
            clipped = []
            for replica, scale in enumerate(factors):
                names = [f"{position}/{{}}/{replica}/{i}" for i in range(2)]
                raw = [script.arrays[name.format("raw")] for name in names]
                clipped.append([np.float32(scale) * array for array in raw])
                for name, array in zip(names, clipped[-1], strict=True):
                    script.arrays[name.format("clipped")] = array
            for replica, sums in enumerate(mean_of(clipped)):
                for i, array in enumerate(sums):
                    script.arrays[f"{position}/sums/{replica}/{i}"] = array
        second = load_trace_of(script, tmp_path / "two.npz")
        report = verify_against(first, second, {}, given_tolerance(None))
        assert [
            f.cause for f in report.findings if f.stage in ("clipping", "all-reduce")
        ] == expected


def test_gradients_of_rows_are_those_of_the_whole_table(tmp_path, one):
    script = two(one)
    for name in [
        name for name in script.arrays if name.split("/")[1] in ("raw", "sums", "clipped")
    ]:
        if name.endswith("/0"):
            array = script.arrays.pop(name)
            half = array / 2  # Each row comes twice.
            script.arrays[f"{name}/values"] = np.concatenate([half, half])
            script.arrays[f"{name}/indices"] = np.tile(np.arange(len(array)), 2)
            script.arrays[f"{name}/rows"] = np.array(len(array))
    first = load_trace_of(one, tmp_path / "one.npz")
    second = load_trace_of(script, tmp_path / "two.npz")
    assert verify_against(first, second, {}, given_tolerance(None)).findings == []


@pytest.mark.parametrize("has_layer", [True, False])
def test_equal_random_numbers_on_two_replicas_are_a_fault(tmp_path, one, has_layer):
    layers = [{"name": "drop", "class": "Dropout", "rate": 0.5, "weights": []}] * has_layer
    script = two(one, about={"layers": layers})
    keep_random(script, lambda step, replica: [np.full(4, step, np.uint8)])
    report = verify_alone(load_trace_of(script, tmp_path / "two.npz"))
    assert [(f.stage, f.cause) for f in report.faults] == [
        ("random numbers", "same_random_numbers")
    ]
    right = two(one, about={"layers": layers})
    keep_random(right, lambda step, replica: [np.array([step, replica], np.uint8)])
    assert verify_alone(load_trace_of(right, tmp_path / "two.npz")).faults == []
    keep_random(right, lambda step, replica: [np.array([replica], np.uint8)])
    report = verify_alone(load_trace_of(right, tmp_path / "two.npz"))
    assert [f.cause for f in report.faults] == ["random_numbers_repeated"]


def test_replicas_that_start_apart_are_a_fault(tmp_path):
    script = Script(replicas=2)
    script.arrays["1/before/1/0"] = script.arrays["1/before/1/0"] + np.float32(1e-3)
    report = verify_alone(load_trace_of(script, tmp_path / "two.npz"))
    assert ("start", "diverged_replicas") in [(f.stage, f.cause) for f in report.faults]


def test_the_tolerance_is_computed_from_permuted_examples(tmp_path, one):
    first = load_trace_of(one, tmp_path / "one.npz")
    permuted = load_trace_of(Script(permute=3, replay=one, steps=(0, 1)), tmp_path / "p.npz")
    tolerance = computed_tolerance(first, permuted, {})
    assert set(tolerance.of_weight) == {"dense/kernel", "dense/bias"}
    assert all(8 * 2**-23 <= value < 1e-4 for value in tolerance.of_weight.values())
    assert "2 steps of" in tolerance.text
    assert (
        given_tolerance(0.5)("dense/kernel") == 0.5 and "--tolerance" in given_tolerance(0.5).text
    )


def test_inputs_that_a_model_scales_do_not_hide_a_fault(tmp_path, one):
    """The recorded inputs are those before a layer that scales them."""

    def recorded_before_scaling(step, kind, replica, arrays):
        return [255 * array for array in arrays] if kind == "data" else arrays

    def apart(script, replica, gradients):
        return [gradients[0] + 0.01 * np.sin(1 + 9 * gradients[0]), gradients[1]]

    first = load_trace_of(one, tmp_path / "one.npz")
    for changes, causes in (({}, []), ({"gradient": apart}, ["unexplained_gradient"])):
        script = two(one, change=recorded_before_scaling, **changes)
        second = load_trace_of(script, tmp_path / "two.npz")
        report = verify_against(first, second, {}, given_tolerance(None))
        assert [f.cause for f in report.findings] == causes


def test_a_fault_that_the_permuted_recording_shares_is_found(found, tmp_path, one):
    """A permuted recording of the wrong script must not make its fault a matter of rounding."""

    def halved(script, replica, gradients):
        return [array / 2 for array in gradients]

    first = load_trace_of(one, tmp_path / "one.npz")
    wrong = Script(permute=1, replay=one, steps=(0, 1), gradient=halved)
    tolerance = computed_tolerance(first, load_trace_of(wrong, tmp_path / "p.npz"), {})
    assert "limited to 0.01" in tolerance.text
    causes = found(two(one, gradient=halved), tolerance=tolerance)
    assert causes == [("gradients", "mean_instead_of_sum")]


def test_every_cause_of_the_checks_has_a_remedy():
    assert all(REMEDIES.values())
    assert {cause for changes, (_, cause) in FAULTS.values()} <= set(REMEDIES)


# The command


def test_the_command_reports_a_fault(tmp_path, one, capsys):
    first, second = one.write(tmp_path / "one.npz"), None
    second = two(one, reduce=None).write(tmp_path / "two.npz")
    permuted = Script(permute=1, replay=one, steps=(0,)).write(tmp_path / "permuted.npz")
    out = tmp_path / "out"
    result = run_here("verify", f"--traces={first},{second},{permuted}", f"--out={out}")
    assert result.returncode == 9
    assert "two.npz is not the training of one.npz: not all reduced" in result.stdout
    record = json.loads((out / "verify.json").read_text())
    assert list(record["strategies"]) == ["one.npz", "two.npz"]
    assert record["strategies"]["two.npz"]["stages"]["all-reduce"] == "fault"
    assert {path.name for path in out.iterdir()} >= {"verify.json", "report.html"}
    page = (out / "report.html").read_text()
    assert "not all reduced" in page and "call the wrapped model" in page


def test_the_command_ends_with_0_if_all_is_clean(tmp_path, one):
    first = one.write(tmp_path / "one.npz")
    second = two(one).write(tmp_path / "two.npz")
    result = run_here("verify", f"--traces={first},{second}", f"--out={tmp_path / 'out'}")
    assert result.returncode == 0
    assert "two.npz is the training of one.npz: every stage is clean" in result.stdout
    assert "0.0001, the default" in result.stdout


@pytest.mark.parametrize(
    ("flags", "code", "text"),
    [
        (["--traces={missing}"], 3, "does not exist"),
        (["--traces={damaged}"], 3, "damaged.npz"),
        (["--traces={permuted}"], 3, "is recorded with permute="),
        (["--traces={one}", "--recipe=fast"], 2, "--recipe has no part in --traces"),
        (["--traces={one}", "--name_map=a"], 2, "--name_map=a must be OTHER=FIRST"),
        (["--tolerance=0.1"], 2, "--tolerance needs --traces"),
        (["--traces={one},{later}"], 3, "has no step in common"),
    ],
)  # fmt: skip
def test_what_cannot_be_verified_is_refused_in_one_line(tmp_path, one, flags, code, text):
    paths = {name: tmp_path / f"{name}.npz" for name in ("missing", "damaged", "permuted", "one")}
    paths["later"] = tmp_path / "later.npz"
    one.write(paths["one"])
    Script(permute=1, steps=(0,)).write(paths["permuted"])
    Script(steps=(4,)).write(paths["later"])
    paths["damaged"].write_bytes(paths["one"].read_bytes()[:-100])
    result = run_here("verify", *(f.format(**paths) for f in flags), f"--out={tmp_path / 'out'}")
    assert result.returncode == code and text in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_a_generator_that_no_step_uses_may_be_equal_on_all_replicas(tmp_path, one):
    layers = [{"name": "drop", "class": "Dropout", "rate": 0.5, "weights": []}]
    for change, causes in ((0, []), (1, ["same_random_numbers"])):
        script = two(one, about={"layers": layers})
        keep_random(script, lambda step, replica: [np.full(4, step, np.uint8)])
        for name in [name for name in script.arrays if "/random/" in name]:
            after = name.replace("random", "random_after")
            script.arrays[after] = script.arrays[name] + np.uint8(change)
        report = verify_alone(load_trace_of(script, tmp_path / "two.npz"))
        assert [f.cause for f in report.faults] == causes


def test_images_are_the_same_in_both_layouts(tmp_path, one):
    """Channels last in one recording, first in the other; a wrong layout is another order."""
    shapes = {"NHWC": (-1, 2, 2, 3), "NCHW": (-1, 3, 2, 2)}

    def images(script, layout, stored=None):
        script.about = {**script.about, "data_layout": layout}
        for name in [name for name in script.arrays if "/data/" in name]:
            x = script.arrays[name].reshape(shapes["NHWC"])
            stored_first = (stored or layout) == "NCHW"
            script.arrays[name] = x.transpose(0, 3, 1, 2) if stored_first else x
        return script

    first = load_trace_of(images(Script(), "NHWC"), tmp_path / "one.npz")
    noisy = two(one, gradient=lambda s, r, g: [1.5 * g[0], g[1]])
    right, wrong = images(two(one), "NCHW"), images(noisy, "NHWC", stored="NCHW")
    for script, causes in ((right, []), (wrong, ["other_layout"])):
        second = load_trace_of(script, tmp_path / "two.npz")
        report = verify_against(first, second, {}, given_tolerance(None))
        assert [f.cause for f in report.findings] == causes


def test_micro_batches_are_joined(tmp_path, one):
    script = two(one, about={"micro_batches": [2] * 4})
    for name in [name for name in script.arrays if "/data/" in name]:
        array = script.arrays[name]
        script.arrays[name], script.arrays[f"{name[:-1]}1"] = array[:3], array[3:]
    first = load_trace_of(one, tmp_path / "one.npz")
    second = load_trace_of(script, tmp_path / "two.npz")
    assert verify_against(first, second, {}, given_tolerance(None)).findings == []


@pytest.mark.parametrize("weighted", [True, False])
def test_sums_of_shares_are_right_and_uneven_ones_are_named(found, one, weighted):
    """Each replica divides by the size of the global batch, and the all-reduce adds."""

    def add(sent):
        return [[sum(parts) for parts in zip(*sent, strict=True)] for _ in sent]

    def divided(script, replica, gradients):
        return [array / np.float32(2) for array in gradients]

    script = two(
        one, reduce=add, gradient=divided, weighted=weighted, shard=three_quarters,
        about={"reduction": "sum"},
    )  # fmt: skip
    assert found(script) == ([] if weighted else [("gradients", "mean_of_means")])


def test_equal_seeds_of_layers_are_a_fault_if_they_are_drawn_from(tmp_path, one):
    def seeds(step, kind, replica, arrays):
        if kind in ("before", "after"):
            number = step + (drawn and kind == "after")
            arrays.append(np.array([number, replica * apart], np.uint32))
        return arrays

    for drawn, apart, causes in ((1, 0, ["same_random_numbers"]), (1, 1, []), (0, 0, [])):
        script = two(one, change=seeds)
        path = tmp_path / "two.npz"
        script.write(path)
        with np.load(path) as file:
            arrays = {name: file[name] for name in file.files}
        about = json.loads(str(arrays.pop("about")))
        about["variables"].append({"name": "drop/seed", "kind": "seed", "layout": ""})
        np.savez(path, **arrays, about=np.array(json.dumps(about)))
        report = verify_alone(load_trace(path))
        assert [f.cause for f in report.faults] == causes, (drawn, apart)
        assert all(f.tensors == ("drop/seed",) for f in report.faults)


@pytest.mark.parametrize(
    ("values", "is_named"),
    [
        (([1, 1], "same"), True), ((1, "same"), True), ((0, "valid"), False), (([0, 0], 1), True),
        (("valid", "same"), True),
    ],
)  # fmt: skip
def test_paddings_of_strided_convolutions_are_compared_in_one_form(tmp_path, values, is_named):
    layers = [
        [{"name": "conv", "class": "Conv2D", "strides": 2, "padding": value, "weights": []}]
        for value in values
    ]
    one = Script(about={"layers": layers[0]})
    noisy = Script(
        replay=one, about={"layers": layers[1]}, gradient=lambda s, r, g: [1.01 * g[0], g[1]]
    )
    first = load_trace_of(one, tmp_path / "one.npz")
    second = load_trace_of(noisy, tmp_path / "two.npz")
    report = verify_against(first, second, {}, given_tolerance(None))
    expected = "other_padding" if is_named else "unexplained_gradient"
    assert [f.cause for f in report.findings] == [expected]


# Ports: two frameworks, other defaults


def with_weights_of_layers(momentum, **changes):
    layer = {"name": "norm", "class": "BatchNorm2d", "weights": ["norm/moving_mean"]}
    layer |= {"momentum": momentum, "weights": ["norm/moving_mean", "norm/moving_variance"]}
    return Script(norm_momentum=momentum, about={"layers": [layer]}, **changes)


def test_another_momentum_is_a_fault_though_the_variance_is_unbiased(found):
    one = with_weights_of_layers(0.1, unbiased=True)
    two = with_weights_of_layers(0.01, replay=one)
    assert found(two, one, status=FAULT) == [("statistics", "other_batch_norm_momentum")]
    assert found(two, one, status=BY_DESIGN) == [("statistics", "unbiased_variance")]


def test_a_variance_of_another_batch_is_not_called_unbiased(found):
    """The variance is 1.5 times as large: n / (n - 1) is at most 16 / 15."""

    def scaled(step, kind, replica, arrays):
        if kind == "after":
            before = two.states[step][0][3]
            share = np.float32(0.1)
            batch = (arrays[3] - (1 - share) * before) / share
            arrays[3] = ((1 - share) * before + share * np.float32(1.5) * batch).astype(np.float32)
        return arrays

    one = with_weights_of_layers(0.1)
    two = with_weights_of_layers(0.1, replay=one)
    for position, step in enumerate(two.steps, start=1):
        arrays = [two.arrays[f"{position}/after/0/{i}"] for i in range(4)]
        two.arrays[f"{position}/after/0/3"] = scaled(step, "after", 0, arrays)[3]
    assert found(two, one) == [("statistics", "other_statistics")]


def noisy(script, replica, gradients):
    return [1.01 * gradients[0], gradients[1]]


def layers(*settings):
    return {"layers": [{"weights": [], **each} for each in settings]}


TORCH_CONV = {"name": "0", "class": "Conv2d", "strides": [2, 2], "padding": [1, 1]}
KERAS_CONV = {"name": "conv", "class": "Conv2D", "strides": [2, 2], "padding": "valid"}
PADDED = {"name": "pad", "class": "ZeroPadding2D", "padding": [[1, 1], [1, 1]]}
TORCH_PADDED = {"name": "pad", "class": "ZeroPad2d", "padding": [0, 1, 0, 1]}
TORCH_NORM = {"name": "bn", "class": "BatchNorm2d", "epsilon": 1e-5}
KERAS_NORM = {"name": "bn", "class": "BatchNormalization", "epsilon": 1e-3}


@pytest.mark.parametrize(
    ("first", "second", "causes"),
    [
        ([TORCH_CONV], [PADDED, KERAS_CONV], ["unexplained_gradient"]),
        ([TORCH_CONV], [KERAS_CONV], ["other_padding"]),
        (
            [TORCH_PADDED, {**TORCH_CONV, "padding": [0, 0]}],
            [{**KERAS_CONV, "padding": "same"}],
            ["unexplained_gradient"],
        ),
        (
            [TORCH_CONV, TORCH_NORM],
            [PADDED, KERAS_CONV, KERAS_NORM],
            ["other_batch_norm_epsilon"],
        ),
        (
            [TORCH_CONV, TORCH_NORM],
            [{**KERAS_CONV, "padding": "same"}, KERAS_NORM],
            ["other_padding", "other_batch_norm_epsilon"],
        ),
    ],
)
def test_padding_before_a_convolution_is_its_padding(found, first, second, causes):
    one = Script(about=layers(*first))
    two = Script(replay=one, about=layers(*second), gradient=noisy)
    assert sorted(found(two, one)) == sorted(("gradients", cause) for cause in causes)


def test_a_setting_without_effect_on_the_next_batch_norm_is_no_cause(found):
    """The padding differs by name only: the BatchNorm behind it has the same statistics."""
    norm = {"name": "bn", "class": "BatchNorm2d", "momentum": 0.1, "weights": ["norm/moving_mean"]}
    one = Script(about=layers(TORCH_CONV, norm, {**TORCH_NORM, "name": "last"}))
    two = Script(
        replay=one,
        about=layers(KERAS_CONV, norm, {**TORCH_NORM, "epsilon": 1e-3}),
        gradient=noisy,
    )
    assert found(two, one) == [("gradients", "other_batch_norm_epsilon")]


def test_a_factor_of_one_explains_nothing(found, one):
    """The difference is 2 to 4 times the tolerance, and no smaller with the factor."""

    def noise(script, replica, gradients):
        kernel, bias = gradients
        other = np.random.default_rng(0).normal(size=kernel.shape)
        size = np.linalg.norm(kernel) / np.linalg.norm(other)
        return [kernel + np.float32(2e-2 * size) * other.astype(np.float32), bias]

    two = Script(replay=one, gradient=noise)
    causes = found(two, one, tolerance=given_tolerance(1e-2), status=FAULT)
    assert set(causes) <= {("gradients", "unexplained_gradient")}
    assert causes


def decayed_in_loss(script, replica, gradients):
    weights = script.states[max(script.states)][replica][:2]
    return [g + np.float32(0.05) * w for g, w in zip(gradients, weights, strict=True)]


@pytest.mark.parametrize(("decay", "status"), [(0.05, BY_DESIGN), (0.02, FAULT)])
def test_weight_decay_in_the_loss_is_that_of_an_optimizer_if_it_is_as_much(found, decay, status):
    one = Script(settings={"weight_decay": decay})
    two = Script(replay=one, gradient=decayed_in_loss)
    expected = [("gradients", "regularisation_in_the_loss")]
    if status == FAULT:
        expected.append(("update", "other_weight_decay"))
    assert found(two, one, status=status) == expected


def test_a_mean_over_the_weights_of_the_examples_is_named(found, one):
    """One script divides weighted losses by the sum of the weights, the other by their number."""
    two = Script(replay=one, gradient=lambda s, r, g: [np.float32(1.5) * a for a in g])
    for position in range(1, 5):
        count = len(two.arrays[f"{position}/data/0/0"])
        weights = np.where(np.arange(count) % 2, 1, 2).astype(np.float32)
        two.arrays[f"{position}/data/0/1"] = weights
    assert found(two, one) == [("gradients", "other_loss_reduction")]


def test_a_dropped_batch_has_one_name_in_all_later_steps(found):
    def in_order(step):
        return np.arange(40)[step % 3 * 16 :][:16]

    def dropping(step):
        return np.arange(40)[step % 2 * 16 :][:16]

    one = Script(batch=in_order)
    assert found(Script(batch=dropping, replay=one), one) == [("examples", "last_batch_dropped")]


def test_adam_with_a_bias_correction_in_float32_is_clean(found):
    """Keras computes 1 - 0.999 in float32: 1e-5 away from 0.001."""

    def in_float32(script, weights, gradients, state):
        adam(script, weights, gradients, state)
        number = float(state[2])
        left = 1 - np.float32(0.999) ** np.float32(number)
        for weight, before in zip(weights, script.states[number - 1][0][:2], strict=True):
            change = (weight - before) * np.float32((left / (1 - 0.999**number)) ** 0.5)
            weight[:] = before + change

    one = Script(optimizer="Adam", framework="keras")
    two = Script(optimizer="Adam", framework="keras", replay=one, update=in_float32)
    assert found(two, one) == []


@pytest.mark.parametrize("is_reordered", [True, False])
def test_the_order_of_flattened_axes_is_named_by_the_sizes_of_rows(is_reordered):
    """Under replay, the logits differ: the rows of the gradient are only of similar size."""
    generator = np.random.default_rng(0)
    activity = generator.random((16 * 9, 1)) ** 2
    order = np.arange(16 * 9).reshape(16, 9).T.ravel()
    gradients = [activity * generator.normal(size=(16 * 9, 10)) for _ in range(2)]
    if is_reordered:
        gradients[1] = gradients[1][order]
    variable = types.SimpleNamespace(name="dense", layout="IO")
    trace = types.SimpleNamespace(variables=[variable])
    pair = types.SimpleNamespace(first=types.SimpleNamespace(trace=trace))
    first, second = ({"dense": array} for array in gradients)
    causes = [c for c, *_ in reordered_rows(pair, first, second, ["dense"], lambda name: 1e-4)]
    assert causes == ["flatten_order"] * is_reordered


def test_the_tolerance_between_frameworks_is_that_of_their_kernels(tmp_path, one):
    first = load_trace_of(one, tmp_path / "one.npz")
    permuted = load_trace_of(Script(permute=3, replay=one, steps=(0, 1)), tmp_path / "p.npz")
    tolerance = computed_tolerance(first, permuted, {})
    assert between_frameworks(tolerance, first, permuted) is tolerance
    other = load_trace_of(Script(framework="keras"), tmp_path / "two.npz")
    wider = between_frameworks(tolerance, first, other)
    assert min(wider.of_weight.values()) >= 64 * 2**-23 and "two frameworks" in wider.text


def test_few_different_examples_may_be_on_several_replicas(tmp_path):
    """As in the truth table of XOR: four rows, many times."""

    def few(x):
        return np.tile(examples()[0][:2], (len(x), 1))[: len(x)]

    trace = load_trace_of(Script(replicas=2, inputs=few), tmp_path / "two.npz")
    assert verify_alone(trace).faults == []


def test_recordings_without_a_common_weight_are_refused(tmp_path, one):
    first = load_trace_of(one, tmp_path / "one.npz")
    with pytest.raises(DataError, match=r"no weight matches .*; pass --name_map"):
        pairs_of(first, first, Matching((), (), (), ()))


def test_arrays_of_a_step_are_freed_after_it(tmp_path, one, monkeypatch):
    held = []
    monkeypatch.setattr(RecordedStep, "release", lambda step: held.append(len(step._read)))
    first = load_trace_of(one, tmp_path / "one.npz")
    verify_against(first, load_trace_of(two(one), tmp_path / "two.npz"), {}, given_tolerance(None))
    assert len(held) == 3 * len(one.steps) and all(held)


def test_one_gradient_that_is_too_large_is_no_mean_of_means(found, one):
    """Both replicas would count 1.01 times: they count equally."""
    script = two(one, gradient=lambda s, r, g: [1.01 * g[0], g[1]])
    assert found(script) == [("gradients", "unexplained_gradient")]
