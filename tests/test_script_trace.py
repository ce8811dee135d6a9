"""Recordings of training scripts: valid ones are read, others are refused in one line."""

import dataclasses
import io
import json
import os
import re
import struct
import subprocess
import sys
import tracemalloc
import zipfile

import numpy as np
import pytest

import trace_samples
from app.records import trace_directory, trace_member
from app.records.script_trace import Rows, load_trace
from app.records.trace_about import VARIABLE_KINDS, VERSION, About
from app.runtime.errors import DataError
from conftest import ROOT
from trace_samples import about, arrays, write_ranks, write_trace

KINDS = ("data", "loss", "raw", "sums", "clipped", "before", "after")


def read_all(trace):
    for position in range(len(trace.steps)):
        for replica in range(trace.num_replicas):
            for kind in KINDS:
                trace.arrays(position, kind, replica)


def refusal(path):
    """Returns the one line with which a trace is refused, at the latest when all is read."""
    with pytest.raises(DataError) as caught:
        read_all(load_trace(path))
    line = str(caught.value)
    assert line.startswith(f"{path}: ") or str(path.parent) in line
    assert line.isprintable() and "; " in line and len(line) < 600
    assert caught.value.exit_code == 3
    return line


def open_files():
    links = [f"/dev/fd/{name}" for name in os.listdir("/dev/fd")]
    return {os.readlink(link) for link in links if os.path.lexists(link)}


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_one_file_is_read_bit_for_bit(tmp_path, save):
    rng = np.random.default_rng(0)
    data = [
        np.asfortranarray(rng.normal(size=(3, 4, 5))), np.zeros((0, 3), np.int64), np.array(True),
        *(rng.integers(0, 2, (2, 3)).astype(dtype) for dtype in "?bBhHiIlLefd"),
        rng.normal(size=400_000).astype(np.float32),
    ]  # fmt: skip
    members = arrays() | {f"1/data/0/{index}": array for index, array in enumerate(data)}
    members |= {"1/later_kind/0/0": np.ones(2)}
    before = open_files()
    trace = load_trace(
        write_trace(tmp_path / "two.npz", about(structure=["list", []]), members, save)
    )
    for written, read in zip(data, trace.arrays(0, "data", 0), strict=True):
        assert (read.dtype, read.shape) == (written.dtype, written.shape)
        assert read.tobytes() == written.tobytes()
    assert trace.name == str(tmp_path / "two.npz")
    assert (trace.framework, trace.num_replicas, trace.steps) == ("torch", 2, (0, 234))
    assert (trace.reduction, trace.order) == ("mean", "reduce, clip")
    assert trace.gradients == tuple(trace_samples.WEIGHTS)
    assert (trace.permuted, trace.replayed, trace.micro_batches(1, 0)) == (None, None, 1)
    assert trace.variables[0].layout == "IO" and trace.variables[1].of == ""
    assert (trace.variables[3].of, trace.variables[3].slot) == ("dense/kernel", "momentum")
    assert trace.settings(1, 0)[0]["learning_rate"] == 0.1
    assert (trace.optimizer["class"], trace.layers[0]["class"]) == ("SGD", "Linear")
    after = trace.arrays(1, "after", 1)
    assert [array.shape for array in after] == trace_samples.SHAPES
    np.testing.assert_array_equal(after[2], np.full((5, 2), 212.5, np.float32))
    assert trace.arrays(0, "loss", 1)[0] == 1 and trace.arrays(1, "y_pred", 0) is None
    # Unknown keys and kinds are those of later versions.
    assert trace.extra == {"structure": ["list", []]}
    np.testing.assert_array_equal(trace.arrays(0, "later_kind", 0)[0], np.ones(2))
    gradient = trace.arrays(0, "raw", 0)[2]
    assert isinstance(gradient, Rows) and gradient.dense().dtype == np.float32
    np.testing.assert_array_equal(gradient.dense(), [[1, 1], *[[0, 0]] * 3, [2, 2]])
    read_all(trace)
    assert open_files() == before


def test_files_of_ranks_are_merged_in_the_order_of_their_numbers(tmp_path):
    for rank in range(11):
        description = about(num_replicas=11, replicas=[rank], steps=[0])
        description |= {"micro_batches": [rank + 1], "settings": [[{"learning_rate": rank / 8}]]}
        write_trace(tmp_path / f"two.rank{rank}.npz", description, arrays(1, (rank,)))
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "one.npz").symlink_to(write_trace(tmp_path / "one.npz"))
    assert load_trace(tmp_path / "link" / "one.npz").num_replicas == 2
    for path in (tmp_path / "two.npz", tmp_path / "two.rank10.npz"):
        trace = load_trace(path)
        assert (trace.name, trace.num_replicas) == (str(tmp_path / "two.npz"), 11)
        for replica in range(11):
            assert trace.micro_batches(0, replica) == replica + 1
            assert trace.settings(0, replica)[0]["learning_rate"] == replica / 8
            expected = 101.5 + 10 * replica
            np.testing.assert_array_equal(trace.arrays(0, "after", replica)[1], [expected] * 2)
        with pytest.raises(IndexError):
            trace.arrays(0, "after", 11)


def test_what_is_left_out_has_defaults(tmp_path):
    keys = ("format", "version", "framework", "num_replicas", "replicas", "steps", "variables")
    description = {key: about()[key] for key in (*keys, "gradients")}
    members = arrays()
    for name in ("1/before/0/3", "1/raw/1/0"):  # No state yet; a weight that is not used.
        del members[name]
    trace = load_trace(write_trace(tmp_path / "two.npz", description, members))
    assert (trace.reduction, trace.order, trace.settings(0, 0)) == ("", "reduce, clip", [])
    assert (trace.micro_batches(1, 1), trace.permuted, trace.data_layout) == (1, None, "")
    assert trace.layers == () and trace.optimizer == {}
    before, raw = trace.arrays(0, "before", 0), trace.arrays(0, "raw", 1)
    assert [array is None for array in before] == [False, False, False, True]
    assert [array is None for array in raw] == [True, False, False]
    np.testing.assert_array_equal(raw[1], np.arange(2))
    assert trace.shapes(0, "before", 0) == [*trace_samples.SHAPES[:3], None]
    assert all(array is not None for array in trace.arrays(0, "after", 0))


def test_arrays_are_read_when_asked_for(tmp_path):
    large = np.zeros(8 << 20, np.uint8)
    members = arrays() | {f"{p}/data/{r}/0": large for p in (1, 2) for r in (0, 1)}
    path = write_trace(tmp_path / "two.npz", members=members)
    tracemalloc.start()
    trace = load_trace(path)
    assert tracemalloc.get_traced_memory()[1] < 2 << 20
    assert trace.shapes(1, "data", 1) == [(8 << 20,)]
    trace.arrays(1, "data", 1)
    assert 8 << 20 < tracemalloc.get_traced_memory()[1] < 12 << 20
    tracemalloc.stop()


def test_few_arrays_of_many_variables_take_little_memory(tmp_path):
    variables = [{"name": f"{index}", "kind": "seed"} for index in range(4000)]
    description = about(variables=variables, gradients=[], settings=[[], []], num_replicas=400)
    members = {f"1/before/{replica}/0": np.zeros(1) for replica in range(400)}
    path = write_trace(tmp_path / "two.npz", description | {"replicas": [*range(400)]}, members)
    tracemalloc.start()
    load_trace(path)
    assert tracemalloc.get_traced_memory()[1] < 8 << 20  # A list for each of 400: 13 MB.
    tracemalloc.stop()


def test_reading_and_matching_need_no_tensorflow():
    code = (
        "import sys, app.records.script_trace, app.verification.script_match;"
        "sys.exit('tensorflow' in sys.modules or 'keras' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


# --- Which files ---------------------------------------------------------------------------------


def test_something_else_than_a_file_is_refused(tmp_path):
    (tmp_path / "two.npz").mkdir()
    os.mkfifo(tmp_path / "pipe.npz")
    for name in ("two.npz", "pipe.npz"):
        assert "is not a regular file" in refusal(tmp_path / name)
    assert "does not exist, nor does a.rank0.npz" in refusal(tmp_path / "a.npz")
    with pytest.raises(DataError) as caught:
        load_trace(tmp_path / "a\nb.npz")
    assert str(caught.value).isprintable()


def test_files_that_are_not_one_for_each_replica_are_refused(tmp_path):
    path = write_trace(write_ranks(tmp_path))
    assert "there is two.rank0.npz, too" in refusal(path)
    assert load_trace(tmp_path / "two.rank0.npz").num_replicas == 2
    path.unlink()
    write_trace(tmp_path / "two.rank2.npz", about(replicas=[1]), arrays(replicas=(1,)))
    assert "has replica 1 2 times" in refusal(path)
    (tmp_path / "two.rank1.npz").unlink()
    (tmp_path / "two.rank2.npz").unlink()
    assert "has replica 1 0 times, of 2 replicas" in refusal(path)


@pytest.mark.parametrize(
    "changes",
    [
        {"steps": [0, 235]}, {"num_replicas": 3}, {"framework": "keras"}, {"reduction": "sum"},
        {"order": "clip, reduce"}, {"replayed": "one.npz"}, {"data_layout": "NHWC"},
        {"gradients": [*trace_samples.WEIGHTS][::-1]}, {"permuted": 7},
        {"variables": [trace_samples.VARIABLES[0] | {"layout": "OI"},
                       *trace_samples.VARIABLES[1:]]},
    ],
    ids=lambda changes: next(iter(changes)),
)  # fmt: skip
def test_files_of_different_recordings_are_refused(tmp_path, changes):
    path, key = write_ranks(tmp_path), next(iter(changes))
    members = {n: a for n, a in arrays(replicas=(1,)).items() if "/before/" in n}
    write_trace(tmp_path / "two.rank1.npz", about(replicas=[1], **changes), members)
    found = f"{key!r} of two.rank1.npz differs from that of two.rank0.npz"
    assert ("only some of its files are permuted" if key == "permuted" else found) in refusal(path)


def test_a_file_that_is_replaced_meanwhile_is_refused(tmp_path):
    path = write_trace(tmp_path / "two.npz")
    trace = load_trace(path)
    write_trace(tmp_path / "new.npz", about(steps=[3, 4])).rename(path)
    with pytest.raises(DataError, match="was changed while it was read; run the command again"):
        trace.arrays(0, "before", 0)


# --- Damage: each function writes a file, and the text is part of its refusal --------------------


def repack(path, change, **options):
    """Rewrites an archive; `change(name, content)` returns its new members."""
    with zipfile.ZipFile(path) as old:
        members = [new for name in old.namelist() for new in change(name, old.read(name))]
    with zipfile.ZipFile(path, "w", **options) as new:
        for name, content in members:
            new.writestr(name, content)


def one_member(content, name="1/data/0/0.npy", **options):
    """Returns what replaces the content of a member; `content` may be a function of the old one."""

    def damage(path):
        new = content if callable(content) else lambda old: content
        repack(
            write_trace(path, members=arrays() | {"1/data/0/0": np.ones(2, bool)}),
            lambda n, old: [(n, new(old) if n == name else old)],
            **options,
        )

    return damage


def also_named(name):
    def damage(path):
        repack(write_trace(path), lambda n, old: [(n, old)] + [(name, old)] * (n == "about.npy"))

    return damage


def patched(offset, form, value, save=np.savez, entry=2):
    """Returns what overwrites a field of an entry of the zip directory."""

    def damage(path):
        content = bytearray(write_trace(path, save=save).read_bytes())
        places = [found.start() for found in re.finditer(b"PK\x01\x02", content)]
        struct.pack_into(form, content, places[entry] + offset, value)
        path.write_bytes(content)

    return damage


def cut(keep):
    return lambda path: path.write_bytes(keep(write_trace(path).read_bytes()))


def header(shape="(2,)", is_fortran="False", end=", }\n", magic=b"\x93NUMPY\x01\x00"):
    """Returns an array of 8 bytes with this header, of 90 bytes if it is short."""
    text = f"{{'descr': '<f4', 'fortran_order': {is_fortran}, 'shape': {shape}{end}"
    text = text.rstrip("\n").ljust(79) + "\n" * end.endswith("\n")
    return one_member(magic + struct.pack("<H", len(text)) + text.encode() + bytes(8))


def members(**replaced):
    """Returns what writes a trace of which some members are replaced, or removed with None."""
    return lambda path: write_trace(
        path, members={n: a for n, a in (arrays() | replaced).items() if a is not None}
    )


def flipped(save):
    def damage(path):
        with zipfile.ZipFile(write_trace(path, save=save)) as file:
            start = file.getinfo("2/after/1/2.npy").header_offset
        content = bytearray(path.read_bytes())
        content[content.index(b"PK", start + 4) - 3] ^= 4
        path.write_bytes(content)

    return damage


def saved(**arrays):
    return lambda path: np.savez(path, **arrays)


def text(content):
    return saved(about=np.array(content))


NO_ROWS = "nor one of the values, indices and rows"
ARCHIVES = {
    "page": (lambda path: path.write_bytes(b"<html>" * 99), "is not a trace (it is no .npz file)"),
    "array": (saved(x=np.ones(3)), "has a member 'x.npy', which no trace has"),
    "no about": (saved(**{"1/before/0/0": np.ones(3)}), "is not a trace (it has no member 'about'"),
    "cut": (cut(lambda content: content[:-1]), "is truncated or damaged"),
    "parent": (also_named("../1/before/0/0.npy"), ", which no trace has"),
    "digit": (also_named("1/before/0/٣.npy"), ", which no trace has"),
    "line": (also_named("1/before/0/0.npy\n"), ", which no trace has"),
    "twice": (also_named("1/before/0/0.npy"), "has the member '1/before/0/0.npy' twice"),
    "bzip2": (one_member(bytes, compression=zipfile.ZIP_BZIP2), "with compression 12"),
    "encrypted": (patched(8, "<H", 1), "has the encrypted member"),
    "two sizes": (patched(24, "<I", 60), "with two sizes"),
    "larger than the file": (patched(20, "<I", 2**31), "has members that are larger than the file"),
    "ratio": (patched(24, "<I", 2**31, np.savez_compressed), "would be more than 1,000 times as"),
    "long": (patched(24, "<I", 5000, np.savez_compressed), "has 5,000 of "),
    "place": (patched(42, "<I", 2**30), "outside of the file"),
    "other place": (patched(42, "<I", 3), "is not where the directory says"),
    "other name": (patched(42, "<I", 0), "has another name in the directory"),
    "bit": (flipped(np.savez), "'2/after/1/2.npy' is damaged (its CRC differs)"),
    "compressed bit": (flipped(np.savez_compressed), "'2/after/1/2.npy' is "),
    "object": (members(**{"1/data/0/0": np.array([{}], object)}), "0/0.npy' has dtype '|O'"),
    "record": (members(**{"1/data/0/0": np.zeros(2, [("a", "<f4")])}), "is no plain array"),
    "big-endian": (members(**{"1/data/0/0": np.zeros(2, ">f4")}), "has dtype '>f4', which no"),
    "code": (header("(__import__('os').getpid(),)"), "'1/data/0/0.npy' is no plain array"),
    "fortran": (header(is_fortran="1"), "is no plain array"),
    "no line": (header(end=", }"), "is no plain array"),
    "bytes": (header("(3,)"), "has 98 of 102 bytes"),
    "impossible": (header("(0, 999999999999, 999999999999)"), "has an impossible shape"),
    "axes": (header(f"({'1, ' * 40})"), "has an impossible shape"),
    "format 2": (header(magic=b"\x93NUMPY\x02\x00"), "is no array in NumPy's format 1.0"),
    "header": (one_member(b"\x93NUMPY\x01\x00\xff\xff" + bytes(99)), "is no array in NumPy's"),
    "truth": (one_member(lambda old: old[:-1] + b"\x07"), "has truth values other than 0 and 1"),
    "position 0": (members(**{"0/loss/0/0": np.ones(1)}), "'0/loss/0/0.npy', but 2 steps"),
    "replica": (members(**{"1/loss/2/0": np.ones(1)}), "/loss/2/0.npy', but not that replica"),
    "gap": (members(**{"1/data/0/2": np.ones(1)}), "has no array 1/data/0/1, but later ones"),
    "variable": (members(**{"1/before/0/4": np.ones(1)}), "1/before/0/4, but 4 variables"),
    "gradient": (members(**{"2/clipped/0/3": np.ones(1)}), "2/clipped/0/3, but 3 gradients"),
    "shape": (
        members(**{"1/before/1/1": np.ones(3)}), "1/before/1/1 has shape (3,), and its variable (2,"
    ),
    "shape of a gradient": (members(**{"2/raw/1/0": np.ones((2, 3))}), "has shape (2, 3), and its"),
    "no rows": (members(**{"1/raw/0/2/rows": None}), NO_ROWS),
    "rows and whole": (members(**{"1/raw/0/2": np.ones((5, 2))}), NO_ROWS),
    "count": (members(**{"1/raw/0/2/rows": np.array(6)}), "1/raw/0/2 has shape (6, 2)"),
    "real rows": (members(**{"1/raw/0/2/indices": np.ones(3)}), "are no rows of a gradient"),
    "few rows": (members(**{"1/raw/0/2/indices": np.array([4, 0])}), "has another length than"),
    "later row": (members(**{"1/raw/0/2/indices": np.array([0, 5, 1])}), "a row outside of 0 to 4"),
    "row -1": (members(**{"1/raw/0/2/indices": np.array([0, -1, 1])}), "a row outside of 0 to 4"),
    "unknown rows": (
        members(**{n: None for n in arrays() if n[2:5] in ("bef", "aft")}),
        "has rows in 1/raw/0/2, but no array 'before' or 'after'",
    ),
    "no text": (saved(about=np.array(b"{}")), "has an 'about' that is not one text"),
    "texts of about": (text([json.dumps(about())]), "has an 'about' that is not one text"),
    "no JSON": (text("{"), "has an 'about' that is not JSON text"),
    "digits": (text("9" * 5000), "has an 'about' that is not JSON text"),
    "deep value": (
        text(json.dumps(about())[:-1] + ', "x": ' + "[" * 60 + "]" * 60 + "}"), "nested too deeply"
    ),
    "characters": (one_member(lambda old: old[:-4] + b"\xff" * 4, "about.npy"), "is damaged"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("name", ARCHIVES)
def test_a_damaged_file_is_refused(tmp_path, name):
    damage, wrong = ARCHIVES[name]
    path, before = tmp_path / "two.npz", open_files()
    damage(path)
    assert wrong in refusal(path)
    assert open_files() == before


def test_a_bomb_is_not_inflated(tmp_path):
    """A member that inflates to more than its size is read to that size only."""
    path, small = tmp_path / "two.npz", io.BytesIO()
    np.save(small, np.zeros(100, np.uint8))
    bomb = small.getvalue() + bytes(16 << 20)
    one_member(bomb, compression=zipfile.ZIP_DEFLATED)(path)
    with zipfile.ZipFile(path) as file:
        entry = file.namelist().index("1/data/0/0.npy")
    content = bytearray(path.read_bytes())
    place = [found.start() for found in re.finditer(b"PK\x01\x02", content)][entry]
    struct.pack_into("<I", content, place + 24, len(small.getvalue()))
    path.write_bytes(content)
    tracemalloc.start()
    assert "'1/data/0/0.npy' is damaged" in refusal(path)
    assert tracemalloc.get_traced_memory()[1] < 2 << 20
    tracemalloc.stop()


def test_more_than_the_limits_is_refused(tmp_path, monkeypatch):
    path = write_trace(tmp_path / "two.npz")
    trace = load_trace(path)
    for module, limit, value, wrong in (
        (trace_directory, "_MAX_MEMBERS", 30, "has more than 30 members; record fewer steps"),
        (trace_directory, "_MAX_DIRECTORY_BYTES", 3000, "has more than 250,000 members"),
        (trace_member, "_MAX_TEXT_BYTES", 1000, "more than 1,000; record it again"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, limit, value)
            assert wrong in refusal(path)
    monkeypatch.setattr(os, "sysconf", lambda name: 10)
    with pytest.raises(DataError, match="needs more memory than there is; record fewer steps"):
        trace.arrays(0, "before", 0)


# --- The description -----------------------------------------------------------------------------


def test_a_later_version_is_refused_whatever_else_it_has(tmp_path):
    path = write_trace(tmp_path / "two.npz", about(version=2, steps="all"))
    assert f"{path}: is of trace format version 2, and this version of" in refusal(path)


def group(**settings):
    return {"settings": [[settings], []]}


def layer(**changes):
    return {"layers": [{"name": "a", "class": "b"} | changes]}


def variable(**changes):
    return {"variables": [trace_samples.VARIABLES[0] | changes, *trace_samples.VARIABLES[1:]]}


WRONG = [
    ({"format": "lockstep recording 1"}, "is not a trace (its format is 'lockstep recording 1'"),
    *(({"version": v}, "version of 'about' is") for v in (0, True, 1.0, None)),
    *(({"num_replicas": n}, "num_replicas of 'about' is") for n in (0, 1e3, "2", 10**7)),
    ({"num_replicas": 10**40}, "has a number of more than 64 bits in 'about'"),
    ({"replicas": [0, 0]}, "replicas of 'about' is a list of 2"),
    ({"replicas": [0, 2]}, "replicas[1] of 'about' is 2, must be a whole number from 0 to 1"),
    ({"replicas": []}, "replicas of 'about' is a list of 0"),
    ({"steps": []}, "steps of 'about' is a list of 0, must be at least one number"),
    ({"steps": [3, 3]}, "steps of 'about' is a list of 2, must be at least one"),
    ({"steps": None}, "steps of 'about' is missing, must be a list"),
    ({"framework": ""}, "framework of 'about' is '', must be a name"),
    ({"framework": "a\nb"}, r"has the text 'a\nb' in 'about'; names"),
    ({"framework": "x" * 3000}, "in 'about'; names and other texts must be printable"),
    ({"\x1b[31m": 1}, r"has the text '\x1b[31m'"),
    ({"versions": {"torch": 2}}, "versions.torch of 'about' is 2, must be a text"),
    ({"variables": ["a"]}, "variables[0] of 'about' is 'a', must be an object"),
    (variable(name=""), "variables[0].name of 'about' is '', must be a name"),
    (variable(kind="bias"), "variables[0].kind of 'about' is 'bias', must be one of weight,"),
    (variable(layout=2), "variables[0].layout of 'about' is 2"),
    (variable(of="other"), "names 'other' in 'variables' of 'about', which is no"),
    (variable(name="dense/bias"), "has two variables named 'dense/bias'"),
    ({"gradients": ["m/kernel"]}, "names 'm/kernel' in 'gradients' of 'about', which is no"),
    ({"gradients": ["dense/bias"] * 2}, "gradients of 'about' is a list of 2, must be each weight"),
    ({"reduction": "average"}, "reduction of 'about' is 'average', must be one of ''"),
    ({"optimizer": "SGD"}, "optimizer of 'about' is 'SGD', must be an object"),
    ({"settings": []}, "settings of 'about' is a list of 0, must be one list of"),
    ({"settings": [{}, {}]}, "settings[0] of 'about' is an object, must be a list"),
    ({"settings": [[], [1]]}, "settings[1][0] of 'about' is 1, must be an object"),
    (group(momentum=True), "settings[0][0].momentum of 'about' is True, must be a number"),
    (group(nesterov=1), "settings[0][0].nesterov of 'about' is 1, must be true or false"),
    (group(weights="all"), "settings[0][0].weights of 'about' is 'all', must be a list"),
    (group(weights=["x"]), "names 'x' in 'settings' of 'about', which is no weight"),
    (layer(name=None), "layers[0].name of 'about' is missing, must be a text"),
    (layer(**{"class": 1}), "layers[0].class of 'about' is 1"),
    ({"permuted": "7"}, "permuted of 'about' is '7', must be a whole number"),
    ({"replayed": 1}, "replayed of 'about' is 1, must be a text"),
    ({"micro_batches": [1]}, "micro_batches of 'about' is a list of 1, must be one count for each"),
    ({"micro_batches": [1, 0]}, "micro_batches[1] of 'about' is 0, must be a whole number from 1"),
]  # fmt: skip


def test_a_wrong_description_is_refused(tmp_path):
    for changes, wrong in WRONG:
        path = write_trace(tmp_path / "two.npz", about(**changes))
        assert wrong in refusal(path), changes


# --- The page ------------------------------------------------------------------------------------


def test_the_page_has_every_key_and_bound_and_its_example_writes_a_trace(tmp_path, monkeypatch):
    page = (ROOT / "docs" / "trace_format.md").read_text(encoding="utf-8")
    keys = {field.name for field in dataclasses.fields(About)} - {"extra"}
    assert not [key for key in keys if f"`{key}`" not in page]
    assert not [kind for kind in VARIABLE_KINDS if f'"{kind}"' not in page]
    for bound in (trace_directory._MAX_MEMBERS, trace_directory._MAX_RATIO):
        assert f"{bound:,}" in page
    assert f"version {VERSION + 1}, and this version of Lockstep reads {VERSION}" in page
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "example", "exec"), {})
    trace = load_trace(tmp_path / "two.npz")
    assert (trace.framework, trace.num_replicas, trace.steps) == ("numpy", 2, (0,))
    (before,), (after,) = (trace.arrays(0, kind, 1) for kind in ("before", "after"))
    (applied,) = trace.arrays(0, "clipped", 0)
    rate = trace.settings(0, 0)[0]["learning_rate"]
    np.testing.assert_array_equal(after, before - rate * applied)
    assert np.abs(applied).max() > 1
