"""Files of traces: valid ones are read bit for bit, others are refused in one line."""

import dataclasses
import inspect
import io
import itertools
import os
import re
import struct
import tracemalloc
import zipfile

import numpy as np
import pytest

from lockstep.data import about as about_module
from lockstep.data import file as trace_file
from lockstep.data.file import TraceError, Writer, load, save
from lockstep.data.trace import About, Shard, Trace, Variable
from lockstep.numeric.arrays import Rows
from tests.conftest import ROOT
from tests.verifier import trace_samples
from tests.verifier.trace_samples import about, arrays, write_ranks, write_trace


def refusal(path):
    """Returns the one line with which a trace is refused, at the latest when all is read."""
    with pytest.raises(TraceError) as caught:
        dict(load(path).stored())
    line = str(caught.value)
    assert line.startswith(f"{path}: ") or str(path.parent) in line
    assert line.isprintable() and "; " in line and len(line) < 600
    return line


def assert_same_bits(first, second):
    assert sorted(first) == sorted(second)
    for name, array in first.items():
        other = second[name]
        assert (array.dtype, array.shape) == (other.dtype, other.shape), name
        assert array.tobytes() == other.tobytes(), name


def test_one_file_is_read_bit_for_bit(tmp_path):
    rng = np.random.default_rng(0)
    data = [
        np.asfortranarray(rng.normal(size=(3, 4, 5))), np.zeros((0, 3), np.int64), np.array(True),
        *(rng.integers(0, 2, (2, 3)).astype(dtype) for dtype in "?bBhHiIlLefd"),
        np.array([b"one", b"two"]),
    ]  # fmt: skip
    members = arrays() | {f"1/data/0/{index}": array for index, array in enumerate(data)}
    members |= {"1/later_kind/0/0": np.ones(2)}
    del members["1/before/0/5"], members["1/raw/1/1"]  # No state yet; a weight that is not used.
    path = write_trace(tmp_path / "two.npz", about(later_key=[1], steps=[0, 234]), members)
    trace = load(path)
    assert_same_bits(trace.stored(), members)
    assert (trace.name, trace.about.framework, trace.steps) == (str(path), "torch", (0, 234))
    assert trace.about.settings[1][0]["learning_rate"] == 0.1 and trace.about.replicas == ()
    assert trace.about.variables[4].of == "dense/kernel" and trace.about.num_copies == 0
    assert [a is None for a in trace.arrays(0, "before", 0)] == [*[False] * 5, True]
    assert [a is None for a in trace.arrays(0, "raw", 1)] == [False, True]
    assert trace.arrays(1, "y_pred", 0) is None
    gradient = trace.arrays(0, "raw", 0)[0]
    assert isinstance(gradient, Rows)
    dense = np.zeros((12, 3))
    dense[[0, 4]] = [[1], [2]]
    np.testing.assert_array_equal(gradient.dense(), dense)


def test_what_is_saved_is_loaded(tmp_path):
    description = dataclasses.replace(
        trace_samples.trace().about, num_copies=2, settings=(), micro_batches=(2, 1),
        shards=tuple(Shard(replica, weight) for replica in (0, 1) for weight in (0.5, 1.0)),
        optimizer={"class": "SGD", "momentum": np.float32(0.5)},
    )  # fmt: skip
    trace, large = Trace(description), np.arange(30_000.0)
    for shard in trace.shards:
        trace.put(0, "data", shard, [large, large[::2], np.array(shard).astype(">f4")])
    trace.put(1, "raw", 3, [None, Rows(np.ones((1, 2)), np.array([1]), 5)])
    save(trace, tmp_path / "two.npz")
    assert [path.name for path in tmp_path.iterdir()] == ["two.npz"]
    in_memory = io.BytesIO()
    save(trace, in_memory)
    for loaded in (load(tmp_path / "two.npz"), load(in_memory), load([in_memory])):
        assert loaded.about == description
        for name, array in trace.stored().items():
            np.testing.assert_array_equal(loaded.stored()[name], array)
    loaded.put(0, "data", 0, [large + 1])  # Arrays of a loaded trace can be changed.
    np.testing.assert_array_equal(loaded.arrays(0, "data", 0)[0], large + 1)


def test_only_the_array_that_is_asked_for_is_in_memory(tmp_path):
    description, size = trace_samples.trace().about, 1 << 20
    tracemalloc.start()
    with Writer(tmp_path / "two.npz") as writer:
        trace = Trace(description, writer)
        for number, kind in enumerate("abcdefgh"):
            for replica in (0, 1):
                array = np.full(size, number + 8 * replica, np.uint8)
                trace.put(number % 2, kind, replica, [array])
        assert trace.arrays(1, "b", 0)[0][0] == 1
        with pytest.raises(ValueError, match="1/a/0/0 is written already"):
            trace.put(0, "a", 0, [np.ones(3)])
        writer.close(description)
    assert load(tmp_path / "two.npz").arrays(1, "h", 1)[0][0] == 15
    assert size < tracemalloc.get_traced_memory()[1] < 5 * size
    tracemalloc.stop()


def test_a_large_array_that_is_damaged_is_refused_when_it_is_read(tmp_path):
    path, large = tmp_path / "two.npz", np.arange(300_000.0)
    trace = Trace(trace_samples.trace().about)
    trace.put(0, "data", 0, [large])
    save(trace, path)
    content, place = path.read_bytes(), path.read_bytes().index(large[1000:].tobytes())
    for damaged, told in (
        (content[:place] + b"x" + content[place + 1 :], "Bad CRC-32 for file '1/data/0/0.npy'"),
        (content[:place], "ends within 1/data/0/0.npy"),
    ):
        path.write_bytes(content)
        loaded = load(path)
        path.write_bytes(damaged)
        for _ in range(2):  # A wrong one is not taken for checked.
            with pytest.raises(TraceError, match=told):
                loaded.arrays(0, "data", 0)


def test_a_training_that_fails_leaves_no_half_file(tmp_path):
    with pytest.raises(RuntimeError), Writer(tmp_path / "two.npz"):
        raise RuntimeError
    assert not [*tmp_path.iterdir()]


def test_files_of_ranks_are_merged(tmp_path):
    members = [arrays(1, (rank,)) for rank in range(11)]
    for rank, own in enumerate(members):
        description = about(num_replicas=11, replicas=[rank], steps=[0])
        description |= {"micro_batches": [rank + 1], "settings": [[{"learning_rate": rank / 8}]]}
        write_trace(tmp_path / f"two.rank{rank}.npz", description, own)
    for path in (tmp_path / "two.npz", tmp_path / "two.rank10.npz"):
        trace = load(path)
        assert (trace.name, trace.about.num_replicas) == (str(tmp_path / "two.npz"), 11)
        assert trace.about.replicas == () and trace.has(0, "before")
        assert [trace.micro_batches(0, rank) for rank in range(11)] == [*range(1, 12)]
        assert_same_bits(trace.stored(), dict(itertools.chain(*map(dict.items, members))))


def test_a_rank_that_ends_early_has_no_arrays_in_later_steps(tmp_path):
    """As a rank that does not call its optimizer; its state has not been seen, then."""
    path = write_ranks(tmp_path)
    for number in (1, 0):
        description = about(replicas=[1], steps=[0][:number])
        description["variables"] = description["variables"][:4]
        for key in ("settings", "micro_batches"):
            description[key] = description[key][:number]
        members = {
            k: x for k, x in arrays(number, (1,)).items() if not re.match(r"1/\w+/1/[45]", k)
        }
        members["1/kept/1/0"] = np.zeros(3)  # Written before an update that did not come.
        write_trace(tmp_path / "two.rank1.npz", description, members)
        trace = load(path)
        assert trace.steps == (0, 1) and len(trace.about.variables) == 6
        assert [trace.has(position, "after") for position in (0, 1)] == [number == 1, False]
        assert trace.absent(1) == [1] * number
    write_trace(tmp_path / "two.rank0.npz", description | {"replicas": [0]}, {})
    assert "two.npz: has no steps; record it again" in refusal(path)


# --- Which files ---------------------------------------------------------------------------------


def test_something_else_than_one_file_for_each_replica_is_refused(tmp_path):
    def write_second(replica=1, members=None, **changes):
        members = arrays(replicas=(1,)) if members is None else members
        write_trace(tmp_path / "two.rank1.npz", about(replicas=[replica], **changes), members)

    (tmp_path / "folder.npz").mkdir()
    os.mkfifo(tmp_path / "pipe.npz")
    for name in ("folder.npz", "pipe.npz"):
        assert "is not a regular file" in refusal(tmp_path / name)
    assert "does not exist, nor does a.rank0.npz" in refusal(tmp_path / "a.npz")
    path = write_trace(write_ranks(tmp_path))
    assert "there is two.rank0.npz, too" in refusal(path)
    assert load(tmp_path / "two.rank0.npz").about.num_replicas == 2
    path.unlink()
    write_second(replica=0, members=arrays(replicas=(0,)))
    assert "has replica 0 2 times, of 2 replicas" in refusal(path)
    (tmp_path / "two.rank1.npz").unlink()
    assert "has replica 1 0 times, of 2 replicas" in refusal(path)
    write_second(members=arrays(replicas=(0,)))
    assert "has an array in two of its files" in refusal(path)
    write_second(framework="keras")
    assert "'framework' of" in refusal(path) and "remove files of other" in refusal(path)
    first, *others = about()["variables"]
    write_second(variables=[first | {"layout": "OI"}, *others])
    assert "'variables' of" in refusal(path)
    write_second(permuted=1)
    assert "only some of its files are permuted" in refusal(path)
    write_second(replayed="one.npz")
    assert "'replayed' of" in refusal(path) and "arguments on every rank" in refusal(path)


# --- Damage --------------------------------------------------------------------------------------


def repack(path, change):
    """Rewrites an archive; `change(name, content)` returns its new members."""
    with zipfile.ZipFile(path) as old:
        members = [new for name in old.namelist() for new in change(name, old.read(name))]
    with zipfile.ZipFile(path, "w") as new:
        for name, content in members:
            new.writestr(name, content)


def one_member(content, name="1/data/0/0.npy"):
    return lambda path: repack(
        write_trace(path), lambda n, old: [(n, content if n == name else old)]
    )


def also_named(name):
    return lambda path: repack(
        write_trace(path), lambda n, old: [(n, old)] + [(name, old)] * (n == "about.npy")
    )


def patched(offset, value):
    """Returns what overwrites 4 bytes in the second entry of the zip directory."""

    def damage(path):
        content = bytearray(write_trace(path).read_bytes())
        places = [found.start() for found in re.finditer(b"PK\x01\x02", content)]
        struct.pack_into("<I", content, places[1] + offset, value)
        path.write_bytes(content)

    return damage


def header(shape):
    text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}"
    text = text.ljust(117) + "\n"
    return one_member(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode())


def with_array(name, array):
    """Returns what writes a trace with another array of a name, or none."""
    members = {n: a for n, a in (arrays() | {name: array}).items() if a is not None}
    return lambda path: write_trace(path, members=members)


def saved(**members):
    return lambda path: np.savez(path, **members)


def described(**changes):
    return lambda path: write_trace(path, about(**changes))


def group(**settings):
    return described(settings=[[settings], []])


def variable(**changes):
    first, *others = about()["variables"]
    return described(variables=[first | changes, *others])


WRONG = {  # What writes a file, and a part of its refusal.
    "page": (lambda path: path.write_bytes(b"<html>" * 99), "is no .npz file or is damaged"),
    "no about": (saved(**{"1/before/0/0": np.ones(3)}), "has no member 'about'"),
    "digit": (also_named("1/before/0/1٣.npy"), "has a member '1/before/0/1٣.npy', which"),
    "twice": (also_named("1/before/0/0.npy"), "has the member '1/before/0/0' twice"),
    "compressed": (patched(10, zipfile.ZIP_DEFLATED), "has a compressed member '1/before/0/0.npy'"),
    "bomb": (patched(24, 2**20), "has fewer bytes than its index says"),
    "other name": (patched(42, 0), "differ"),
    "object": (with_array("1/data/0/0", np.array([{}], object)), "has dtype '|O' in 1/data"),
    "big-endian": (with_array("1/data/0/0", np.zeros(2, ">f4")), "has dtype '>f4'"),
    "alias of a member": (described(aliases={"1/data/0/0": "1/data/1/0"}), "has a wrong alias"),
    "no key of a header": (header("(2,)}, {[]: 1"), "a header that no trace has in 1/data"),
    "long text of a header": (one_member(
        b"\x93NUMPY\x01\x00\x47\x00{'descr': '<U999999999', 'fortran_order': False, 'shape': (), }"
        .ljust(80) + b"\n"), "has dtype '<U999999999'"),
    "code": (header("(__import__('os').getpid(),)"), "a header that no trace has in 1/data"),
    "more elements": (header("(0, 4611686018427387904)"), "a header that no trace has"),
    "bytes": (header("(3,)"), "has 128 of 140 bytes"),
    "position": (with_array("0/loss/0/0", np.ones(1)), "has arrays 0/loss/0, which"),
    "many ranks": (described(mesh={"dp": 2**15}), "mesh of 'about' must be of at most 16384 ranks"),
    "replica": (with_array("1/loss/2/0", np.ones(1)), "has arrays 1/loss/2, which"),
    "gap": (with_array("1/data/0/2", np.ones(1)), "has an array 1/data/0/2 of 2 in"),
    "variable": (with_array("1/before/0/6", np.ones(1)), "1/before/0/6 of 6 in"),
    "shape": (with_array("1/before/1/1", np.ones(2)), "has shape (2,) in 1/before/1/1, and"),
    "pass": (with_array("1/added/1/4", np.ones(3)), "and (3,) for its variable elsewhere"),
    "no rows": (with_array("1/raw/0/0/rows", None), "has wrong rows in 1/raw/0/0"),
    "row": (with_array("1/raw/0/0/indices", np.array([0, 12, 1])), "a row outside of 0 to 11"),
    # The description.
    "no text": (saved(about=np.array(b"{}")), "has an 'about' that is not one text"),
    "no JSON": (saved(about=np.array("{")), "has an 'about' that is not JSON text"),
    "deep": (described(x=eval("[" * 60 + "]" * 60)), "has deep nesting"),
    "large number": (described(num_replicas=10**40), "more than 64 bits in 'about'"),
    "control": (described(framework="a\nb"), r"has the text 'a\nb' in 'about'; texts"),
    "format": (described(format="lockstep recording 1"), "is not a trace"),
    "version": (described(version=3, steps="all"), "has the format version 3, and this version"),
    "missing": (described(variables=[{"kind": "weight"}]), "variables[0].name of 'about' is miss"),
    "no object": (described(settings=[[], [1]]), "settings[1][0] of 'about' is 1, must be an obj"),
    "a text": (described(versions={"torch": 2}), "versions.torch of 'about' is 2, must be a text"),
    "alias": (described(aliases={"1/data/0/1": "1/data/0/7"}), "has a wrong alias '1/data/0/1'"),
    "no replica": (described(num_replicas=0), "num_replicas of 'about' must be from 1"),
    "rank 2 of 2": (described(mesh={"dp": 2}, data_axes=["dp"], ranks=[2]), "must be from 0 to 1"),
    "replica 2 of 2": (described(replicas=[0, 2]), "replicas of 'about' must be from 0 to 1"),
    "shard of replica 2": (described(shards=[[0, 1], [2, 1]]), "must be from 0 to 1"),
    "half a shard": (described(shards=[[0, 1], [1]]), "shards[1] of 'about' is a list of 1"),
    "no steps": (described(steps=[], settings=[], micro_batches=[]), "has no steps; record it"),
    "a step twice": (described(steps=[3, 3]), "whole numbers from 0, in ascending order"),
    "kind": (variable(kind="bias"), "variables of 'about' must be of the kinds weight, statistic"),
    "no weight": (variable(of="other"), "variables of 'about' must be of weights"),
    "a weight twice": (variable(name="dense/bias"), "variables of 'about' must be of unique"),
    "no gradient": (described(gradients=["norm/moving_mean"]), "must be names of weights"),
    "settings of one step": (described(settings=[[]]), "settings of 'about' must be one list of"),
    "momentum": (group(momentum=True), "momentum in settings of 'about' must be a number"),
    "weights": (group(weights="all"), "weights in settings of 'about' must be names of weights"),
    "many micro-batches": (described(micro_batches=[1, 2**31 - 1]), "must be whole numbers from 1"),
    "call": (described(calls=[["backward", "clip norm"], []]), "must be 'clip norm 1'"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_file_is_refused(tmp_path, name):
    write, told = WRONG[name]
    write(tmp_path / "two.npz")
    assert told in refusal(tmp_path / "two.npz")


def test_more_than_the_limits_is_refused(tmp_path, monkeypatch):
    path = write_trace(tmp_path / "two.npz")
    for limit, value, wrong in (
        ("MAX_MEMBERS", 30, "has more than 30 members; record fewer steps"),
        ("MAX_ARRAYS", 30, "has more than 30 arrays; record fewer steps"),
        ("_MAX_ABOUT_BYTES", 1000, "that is not one text of at most"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(trace_file, limit, value)
            assert wrong in refusal(path)


# --- The page ------------------------------------------------------------------------------------


def test_the_page_has_every_key_and_bound_and_its_example_writes_a_trace(tmp_path, monkeypatch):
    page = (ROOT / "docs" / "trace_format.md").read_text(encoding="utf-8")
    for described in (About, Variable):
        for field in dataclasses.fields(described):
            # Python 3.13 removes the indentation of docstrings.
            assert f"    {field.name}: " in inspect.getdoc(described), field.name
    assert f"{trace_file.MAX_MEMBERS:,}" in page
    assert f"# The trace format, version {about_module.VERSION}" in page
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "example", "exec"), {})
    trace = load(tmp_path / "two.npz")
    assert (trace.about.framework, trace.about.num_replicas, trace.steps) == ("numpy", 2, (0,))
    (before,), (after,) = (trace.arrays(0, kind, 1) for kind in ("before", "after"))
    (applied,) = trace.arrays(0, "clipped", 0)
    rate = trace.about.settings[0][0]["learning_rate"]
    np.testing.assert_array_equal(after, before - rate * applied)
    assert np.abs(applied).max() > 1
