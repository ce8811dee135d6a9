"""Sampled recordings: elements at seeded places, random sums of all, and norms, of large arrays."""

import dataclasses
import io
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.comparison import compare_traces
from lockstep.data import file as trace_file
from lockstep.data.placement import placement_from
from lockstep.data.trace import OF_GRADIENTS, OF_VARIABLES, Trace
from lockstep.engine import verify
from lockstep.engine.verdict import CLEAN, FAULT
from lockstep.numeric.arrays import add, dense, norm, same_bits, scaled
from lockstep.numeric.sampling import Sample, Sampled
from lockstep.recorders.common import Request, request_of, sample_in
from lockstep.recorders.parts import members_of
from lockstep.recorders.states import States
from lockstep.recording import VARIABLE
from tests.verifier.recorder_scripts import needs
from tests.verifier.trainer import Script

SEEDS, SIZES = st.integers(0, 2**32 - 1), st.integers(1, 30)  # The kernel has 36 elements.


def sampled(trace, elements, seed=0):
    """Returns a trace as if it had been recorded with samples."""
    sample, shapes = Sample(elements, seed=seed), {}
    found = Trace(trace.about, {}, trace.name)
    for position, kind, item in [*trace._index]:
        arrays = trace.arrays(position, kind, item)
        if kind in (*OF_VARIABLES, *OF_GRADIENTS):
            for number, array in enumerate(arrays):
                if array is not None and sample.takes(dense(array).shape):
                    shapes[trace.names_of(kind)[number]] = array.shape
                    arrays[number] = sample.of(array)
        found.put(position, kind, item, arrays)
    variables = tuple(
        dataclasses.replace(v, shape=shapes.get(v.name, ())) for v in trace.about.variables
    )
    about = dataclasses.replace(trace.about, sample=sample._asdict(), variables=variables)
    return Trace(about, dict(found.stored()), trace.name)


def judged_sampled(first, second, elements, seed=0):
    return verify(*(sampled(x, elements, seed) for x in (first.trace(), second.trace("two.npz"))))


# --- Samples -------------------------------------------------------------------------------------


def test_places_and_signs_depend_on_shape_and_seed_alone():
    """One place in each of equal ranges; the numbers are the same in every version of NumPy."""
    sample = Sample(5, seed=3)
    assert sample.places((4, 6)).tolist() == [0, 6, 10, 17, 20]
    assert sample.signs((4, 6))[0][1].tolist() == [-1, 1, -1, 1]
    for seed in range(20):
        places = Sample(7, seed=seed).places((3, 9))
        ends = np.arange(8) * 27 // 7
        assert np.all((ends[:-1] <= places) & (places < ends[1:]))
    assert Sample(7, seed=1).places((3, 9)).tolist() != Sample(7).places((3, 9)).tolist()


@given(SEEDS, SIZES)
def test_samples_of_sums_are_sums_of_samples(seed, elements):
    generator, sample = np.random.default_rng(seed), Sample(elements, seed=seed)
    first, second = generator.normal(size=(2, 5, 3, 2))
    one, two, both = map(sample.of, (first, second, first + second))
    assert np.allclose(add([one, two]), both)
    assert np.allclose(scaled(one, 3.0), sample.of(3 * first))
    assert norm(one) == pytest.approx(np.linalg.norm(first))
    assert norm(scaled(one, -2.0)) == pytest.approx(2 * norm(one))


@given(SEEDS, SIZES, st.sampled_from(["", "OI", "IO"]))
def test_samples_of_parts_add_up_to_that_of_the_whole_in_any_layout(seed, elements, layout):
    """Rows are split over two devices, columns in zigzag over two others."""
    array, sample = np.random.default_rng(seed).normal(size=(6, 8)), Sample(elements, seed=seed)
    found, sizes = [], {"a": 2, "b": 2}
    for place in np.ndindex(2, 2):
        at = dict(zip("ab", place, strict=True))
        text = "d0[a] d1[b:zigzag]"
        part = array[np.ix_(*placement_from(text, sizes).places(array.shape, sizes, at))]
        found.append(members_of(sample, "raw", part, layout, text, sizes, at))
    whole = members_of(sample, "raw", array, layout)
    of_transposed = members_of(sample, "raw", array.T, layout[::-1])
    assert {each.text for each in found} == {"sum(a) sum(b)"}
    assert {each.shape for each in (*found, whole)} == {(6, 8)}
    for end, expected in whole.arrays.items():
        np.testing.assert_allclose(sum(each.arrays[end] for each in found), expected, 1e-9, 1e-9)
        if layout:
            np.testing.assert_allclose(of_transposed.arrays[end], expected, 1e-9, 1e-9)


def test_large_models_are_sampled_unless_the_script_chooses():
    for options, size, steps, sample in (
        ({}, 64 << 20, {0, 1, 2}, None),
        ({}, (64 << 20) + 1, {0}, Sample(4096)),
        ({"first_step": 7}, 1 << 30, {7}, Sample(4096)),
        ({"steps": 2}, 1 << 30, {0, 1}, Sample(4096)),
        ({"sample": 16}, 1, {0}, Sample(16)),
        ({"sample": 0}, 1 << 30, {0, 1, 2}, None),
    ):
        request = Request("own.npz", **options)
        request.choose_sample(size)
        assert (request.wanted, request.sample) == (steps, sample)
    for sample in (15, -1, True, 20.0):
        with pytest.raises(ValueError, match=f"sample={sample}: must be 16 or more, or 0 for whol"):
            Request("own.npz", sample=sample)


# --- Traces --------------------------------------------------------------------------------------


@given(SEEDS, SIZES, st.sampled_from(["SGD", "Adam"]), st.sampled_from([1, 2, 4]))
@settings(max_examples=12, deadline=None)
def test_a_right_training_of_samples_is_clean(seed, elements, optimizer, replicas):
    first = Script(optimizer=optimizer, seed=seed % 1000)
    second = Script(optimizer=optimizer, seed=seed % 1000, replicas=replicas, replay=first)
    verdict = judged_sampled(first, second, elements, seed)
    assert verdict.status == CLEAN
    assert f"by {elements} of their elements and 8 sums of all" in "".join(verdict.notes)


@given(SEEDS, SIZES, st.sampled_from(["SGD", "Adam"]), st.integers(0, 35), st.booleans())
@settings(max_examples=12, deadline=None)
def test_one_changed_element_is_found_by_samples(seed, elements, optimizer, number, is_later):
    """Of the gradient that an optimizer applies, or of a weight after the update."""

    def change(script):
        name = "1/after/0/0"
        script.arrays[name] = script.arrays[name].copy()
        script.arrays[name].flat[number] += 1e-3

    def raw(script, replica, gradients):
        gradients[0].flat[number] += 0.3 * np.abs(gradients[0]).max()
        return gradients

    first = Script(optimizer=optimizer)
    edit = {"edit": change} if is_later else {"gradient": raw}
    verdict = judged_sampled(first, Script(optimizer=optimizer, replay=first, **edit), elements)
    assert verdict.place.node == ("update" if is_later else "gradient")
    assert verdict.place.tensors[:1] == ("dense/kernel",)


@pytest.mark.parametrize("change", [
    {"reduce": lambda sent: [list(own) for own in sent]},
    {"clip": lambda replica, gradients: [g * np.float32(1 + replica) for g in gradients]},
    {"gradient": lambda script, replica, gradients: [2 * g for g in gradients]},
], ids=["not reduced", "clipped on one", "doubled"])  # fmt: skip
def test_place_formula_and_name_of_samples_are_those_of_whole_arrays(change):
    first = Script()
    second = Script(replicas=2, replay=first, **change)
    whole = verify(first.trace(), second.trace("two.npz"))
    verdict = judged_sampled(first, second, 16)
    assert verdict.status == FAULT
    assert (verdict.place, verdict.name) == (whole.place, whole.name)
    assert verdict.formula == whole.formula


def test_whole_and_other_samples_are_refused():
    trace, whole = Script().trace(), Script().trace("two.npz")
    for other, text in (
        (whole, "one.npz: is recorded with sample=, and two.npz is whole"),
        (sampled(whole, 8), r"two.npz: has other samples than one.npz \(16 elements .*8 elements"),
        (sampled(whole, 16, seed=1), "seeds 0 and 1"),
    ):
        with pytest.raises(ValueError, match=text):
            compare_traces([sampled(trace, 16), other], {})
    # No array has as many elements.
    assert compare_traces([sampled(trace, 99), whole], {})["two.npz"].status == CLEAN


@pytest.mark.parametrize("end, array", [
    ("elements", np.zeros(15, np.float32)), ("sums", np.zeros(8)), ("sums", np.zeros(9, "f4")),
])  # fmt: skip
def test_a_wrong_sample_is_refused(end, array):
    trace, target = sampled(Script().trace(), 16), io.BytesIO()
    trace._stored[f"1/before/0/0/{end}"] = array
    trace_file.save(trace, target)
    with pytest.raises(trace_file.TraceError, match="has a wrong sample in 1/before/0/0"):
        trace_file.load(target)


# --- Recorders -----------------------------------------------------------------------------------


def test_a_sampled_recording_is_read_and_replayed_from_its_start(tmp_path):
    path, trace = str(tmp_path / "one.npz"), sampled(Script(steps=(0, 1)).trace(), 16)
    trace_file.save(trace, path)
    loaded = trace_file.load(path)
    first, second = (t.named(0, "before", 0)["dense/kernel"] for t in (trace, loaded))
    assert isinstance(second, Sampled) and first.is_same(second) and first.norm == second.norm
    assert sample_in(path) == loaded.about.sample == {"elements": 16, "sums": 8, "seed": 0}
    request = Request("own.npz", replay=path)
    assert (request.sample, request.wanted) == (Sample(16), {0})
    told = "without the whole state before step 0; record it with st"
    with pytest.raises(ValueError, match=told):
        States("torch", path, [0, 1], {})
    start = Script(steps=(0, 1)).trace().arrays(0, "before", 0)
    trace.put(0, "start", 0, start)
    trace_file.save(trace, path)
    states = States("torch", path, [0, 1], {})
    found = states.before(0, 0).values()
    assert all(map(same_bits, found, start)) and not states.before(1, 0)


@pytest.mark.parametrize(("replay", "start"), [(None, True), ("one.npz", False)])
def test_the_command_keeps_the_start_of_its_first_run_from_which_others_start(
    replay, start, monkeypatch
):
    monkeypatch.setenv(VARIABLE, json.dumps({"path": "two.npz", "replay": replay}))
    given = request_of(None, start=False, replay="other.npz", sample=16)
    assert (given.path, given.replay, given.keeps_start) == ("two.npz", replay, start)


# --- Frameworks ----------------------------------------------------------------------------------

FRAMEWORKS = ("torch", "jax", "keras")
WRONG = {  # Framework and kind → bug: the node at which it is found.
    ("torch", "plain"): {"other_start": "start", "row": "sum"},
    ("torch", "fsdp"): {"row": "clipping", "row_later": "between"},
    ("jax", "plain"): {"other_start": "start", "row": "gradient"},
    ("jax", "shards"): {"loss": "loss", "row": "sum", "reduce": "sum"},
    ("jax", "mesh"): {"row": "gradient", "unclipped": "clipping"},
    ("keras", "plain"): {"other_start": "start", "row": "gradient"},
    ("keras", "loop"): {"row": "gradient"},
    ("keras", "workers"): {},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("framework", "kind"), [pytest.param(*both, marks=needs(both[0])) for both in WRONG]
)
def test_sampled_recordings(framework, kind, run, tmp_path):
    """Faults are found in rows of an embedding of which no element is kept.

    The plain training starts from the state of the first one.
    """
    script = f"{framework}_sampled.py"
    run(framework, script, "one.npz", "plain", "start")
    replay = ["one.npz"] if kind == "plain" else []
    processes = 2 if kind in ("fsdp", "workers") else 1
    for bug, node in {**WRONG[framework, kind], "": ""}.items():
        run(framework, script, "two.npz", kind, bug, *replay, processes=processes)
        one, two = (trace_file.load(tmp_path / name) for name in ("one.npz", "two.npz"))
        verdict = verify(one, two)
        assert (verdict.status, verdict.error) == (FAULT if bug else CLEAN, ""), verdict
        assert not bug or verdict.place.node == node, verdict
    first, second = (trace.named(0, "before", 0) for trace in (one, two))
    large = [name for name, array in first.items() if isinstance(array, Sampled)]
    assert len(large) > 2 and all(first[name].is_same(second[name]) for name in large)
    assert all(first[n].norm == pytest.approx(second[n].norm, rel=1e-9) for n in large)


@pytest.mark.slow
@pytest.mark.parametrize("framework", [pytest.param(f, marks=needs(f)) for f in FRAMEWORKS])
def test_large_models_are_sampled_without_being_asked(framework, run, tmp_path):
    run(framework, f"{framework}_sampled.py", "large.npz", "large")
    trace = trace_file.load(tmp_path / "large.npz")
    assert trace.about.sample == {"elements": 4096, "sums": 8, "seed": 0}
    assert trace.steps == (0,) and (tmp_path / "large.npz").stat().st_size < 1 << 20
