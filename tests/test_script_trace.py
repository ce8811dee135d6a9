"""Tests recordings of training scripts: valid ones are read, others rejected in one line."""

import dataclasses
import io
import json
import os
import pathlib
import re
import struct
import subprocess
import sys
import time
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


def refusal(path, *, read=False):
    """Returns the one line with which a trace is refused, at the latest when all is read."""
    with pytest.raises(DataError) as caught:
        trace = load_trace(path)
        assert read, "not refused"
        read_all(trace)
    line = str(caught.value)
    assert line.startswith(f"{path}: ") or str(path.parent) in line
    assert line.isprintable() and "; " in line and len(line) < 600
    assert caught.value.exit_code == 3
    return line


def read_all(trace):
    for position in range(len(trace.steps)):
        for replica in range(trace.num_replicas):
            for kind in ("data", "loss", "raw", "sums", "clipped", "before", "after"):
                trace.arrays(position, kind, replica)


def open_files():
    return {os.readlink(f"/dev/fd/{name}") for name in os.listdir("/dev/fd") if valid(name)}


def valid(name):
    return os.path.lexists(f"/dev/fd/{name}")


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_one_file_is_read(tmp_path, save):
    trace = load_trace(write_trace(tmp_path / "two.npz", save=save))
    assert trace.name == str(tmp_path / "two.npz")
    assert (trace.framework, trace.num_replicas, trace.steps) == ("torch", 2, (0, 234))
    assert (trace.reduction, trace.order, trace.optimizer["class"]) == (
        "mean", "reduce, clip", "SGD",
    )  # fmt: skip
    assert trace.gradients == tuple(trace_samples.WEIGHTS)
    assert (trace.permuted, trace.replayed, trace.micro_batches(1, 0)) == (None, None, 1)
    assert trace.variables[0].layout == "IO" and trace.variables[1].of == ""
    assert (trace.variables[3].of, trace.variables[3].slot) == ("dense/kernel", "momentum")
    assert trace.settings(1, 0)[0]["learning_rate"] == 0.1
    assert trace.layers[0]["class"] == "Linear"
    after = trace.arrays(1, "after", 1)
    assert [array.shape for array in after] == trace_samples.SHAPES
    np.testing.assert_array_equal(after[2], np.full((5, 2), 212.5, np.float32))
    assert trace.arrays(0, "loss", 1)[0] == 1 and trace.arrays(1, "y_pred", 0) is None
    assert trace.arrays(0, "data", 0)[0].dtype == np.uint8


def test_files_of_ranks_are_merged(tmp_path):
    name = write_ranks(tmp_path)
    for path in (name, tmp_path / "two.rank1.npz"):
        trace = load_trace(path)
        assert trace.name == str(name)
        np.testing.assert_array_equal(trace.arrays(1, "after", 1)[1], [211.5, 211.5])
        np.testing.assert_array_equal(trace.arrays(1, "after", 0)[1], [201.5, 201.5])
        with pytest.raises(IndexError):
            trace.arrays(0, "after", 2)


def test_settings_of_ranks_may_differ(tmp_path):
    for rank, rate in enumerate((0.1, 0.2)):
        description = about(replicas=[rank], settings=[[{"learning_rate": rate}]] * 2)
        write_trace(tmp_path / f"two.rank{rank}.npz", description, arrays(replicas=(rank,)))
    trace = load_trace(tmp_path / "two.npz")
    assert [trace.settings(1, replica)[0]["learning_rate"] for replica in (0, 1)] == [0.1, 0.2]


def test_more_than_ten_ranks_are_sorted_by_number(tmp_path):
    for rank in range(11):
        description = about(num_replicas=11, replicas=[rank], steps=[rank >= 0], settings=[[]])
        description |= {"steps": [0], "micro_batches": [rank + 1]}
        write_trace(tmp_path / f"many.rank{rank}.npz", description, arrays(1, (rank,)))
    trace = load_trace(tmp_path / "many.npz")
    assert [trace.micro_batches(0, replica) for replica in range(11)] == list(range(1, 12))


def test_rows_are_added_up(tmp_path):
    gradient = load_trace(write_trace(tmp_path / "two.npz")).arrays(0, "raw", 0)[2]
    assert isinstance(gradient, Rows) and gradient.num_rows == 5
    expected = np.zeros((5, 2), np.float32)
    expected[0], expected[4] = 1, 2
    np.testing.assert_array_equal(gradient.dense(), expected)
    assert gradient.dense().dtype == np.float32


def test_any_plain_array_is_read_bit_for_bit(tmp_path):
    rng = np.random.default_rng(0)
    data = [
        np.asfortranarray(rng.normal(size=(3, 4, 5))), np.zeros((0, 3), np.int64), np.array(True),
        *(rng.integers(0, 2, (2, 3)).astype(dtype) for dtype in "?bBhHiIlLefd"),
        rng.normal(size=400_000).astype(np.float32),
    ]  # fmt: skip
    members = arrays() | {f"1/data/0/{index}": array for index, array in enumerate(data)}
    for save in (np.savez, np.savez_compressed):
        trace = load_trace(write_trace(tmp_path / "two.npz", members=members, save=save))
        for written, read in zip(data, trace.arrays(0, "data", 0), strict=True):
            assert (read.dtype, read.shape) == (written.dtype, written.shape)
            assert read.tobytes() == written.tobytes()


def test_arrays_that_did_not_exist_are_none(tmp_path):
    members = arrays()
    for name in ("1/before/0/3", "1/raw/1/0"):  # No state yet; a weight that is not used.
        del members[name]
    trace = load_trace(write_trace(tmp_path / "two.npz", members=members))
    before, raw = trace.arrays(0, "before", 0), trace.arrays(0, "raw", 1)
    assert [array is None for array in before] == [False, False, False, True]
    assert [array is None for array in raw] == [True, False, False]
    np.testing.assert_array_equal(raw[1], np.arange(2))
    assert trace.shapes(0, "before", 0) == [*trace_samples.SHAPES[:3], None]
    assert all(array is not None for array in trace.arrays(0, "after", 0))


def test_optional_keys_have_defaults(tmp_path):
    keys = ("format", "version", "framework", "num_replicas", "replicas", "steps", "variables")
    description = {key: about()[key] for key in (*keys, "gradients")}
    trace = load_trace(write_trace(tmp_path / "two.npz", description))
    assert (trace.reduction, trace.order, trace.settings(0, 0)) == ("", "reduce, clip", [])
    assert (trace.micro_batches(1, 1), trace.permuted, trace.data_layout) == (1, None, "")
    assert trace.layers == () and trace.optimizer == {}


def test_further_keys_and_kinds_are_accepted(tmp_path):
    members = arrays() | {"1/later_kind/0/0": np.ones(2)}
    trace = load_trace(write_trace(tmp_path / "two.npz", about(structure=["list", []]), members))
    assert trace.extra == {"structure": ["list", []]}
    np.testing.assert_array_equal(trace.arrays(0, "later_kind", 0)[0], np.ones(2))


def test_no_file_stays_open(tmp_path):
    path = write_trace(tmp_path / "two.npz")
    before = open_files()
    trace = load_trace(path)
    read_all(trace)
    assert open_files() == before
    path.write_bytes(path.read_bytes()[:-200])
    refusal(path)
    assert open_files() == before


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


def test_many_replicas_and_members_take_seconds(tmp_path):
    num_replicas = 60_000
    description = about(num_replicas=num_replicas, replicas=list(range(num_replicas)))
    members = {f"1/loss/{r}/0": np.zeros(()) for r in range(0, num_replicas, 20)}
    path = write_trace(tmp_path / "two.npz", description, members)
    start = time.monotonic()
    trace = load_trace(path)
    for replica in range(num_replicas):
        trace.settings(0, replica)
    assert time.monotonic() - start < 10


def test_few_arrays_of_many_variables_take_little_memory(tmp_path):
    variables = [{"name": f"{index}", "kind": "seed"} for index in range(20_000)]
    description = about(variables=variables, gradients=[], settings=[[], []], num_replicas=2000)
    members = {f"1/before/{replica}/0": np.zeros(1) for replica in range(2000)}
    path = write_trace(tmp_path / "two.npz", description | {"replicas": [*range(2000)]}, members)
    tracemalloc.start()
    load_trace(path)
    assert tracemalloc.get_traced_memory()[1] < 64 << 20  # A list for each of 2,000: 320 MB.
    tracemalloc.stop()


def test_reading_and_matching_need_no_tensorflow():
    code = (
        "import sys, app.records.script_trace, app.verification.script_match;"
        "sys.exit('tensorflow' in sys.modules or 'keras' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_a_link_may_name_a_trace_and_its_ranks_are_not_mixed_up(tmp_path):
    path = write_trace(tmp_path / "two.npz")
    (tmp_path / "newest.npz").symlink_to(path)
    assert load_trace(tmp_path / "newest.npz").num_replicas == 2


# --- Which files ---------------------------------------------------------------------------------


def test_a_missing_trace_is_refused(tmp_path):
    line = refusal(tmp_path / "two.npz")
    assert "does not exist, nor does two.rank0.npz; pass a file" in line


def test_something_else_than_a_file_is_refused(tmp_path):
    (tmp_path / "two.npz").mkdir()
    os.mkfifo(tmp_path / "pipe.npz")
    for name in ("two.npz", "pipe.npz"):
        assert "is not a regular file; pass a file" in refusal(tmp_path / name)


def test_one_file_besides_those_of_ranks_is_refused(tmp_path):
    path = write_trace(write_ranks(tmp_path))
    assert "there is two.rank0.npz, too; remove the older recording" in refusal(path)
    assert load_trace(tmp_path / "two.rank0.npz").num_replicas == 2


def test_a_missing_rank_is_refused(tmp_path):
    path = write_ranks(tmp_path)
    (tmp_path / "two.rank1.npz").unlink()
    assert "has replica 1 0 times, of 2 replicas; pass one file for each" in refusal(path)


def test_a_replica_in_two_files_is_refused(tmp_path):
    path = write_ranks(tmp_path)
    write_trace(tmp_path / "two.rank2.npz", about(replicas=[1]), arrays(replicas=(1,)))
    assert "has replica 1 2 times" in refusal(path)


@pytest.mark.parametrize(
    "changes",
    [
        {"steps": [0, 235]},
        {"num_replicas": 3},
        {"framework": "keras"},
        {"reduction": "sum"},
        {"order": "clip, reduce"},
        {"replayed": "one.npz"},
        {
            "variables": [
                trace_samples.VARIABLES[0] | {"layout": "OI"},
                *trace_samples.VARIABLES[1:],
            ]
        },
        {"gradients": list(trace_samples.WEIGHTS)[::-1]},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_files_of_different_recordings_are_refused(tmp_path, changes):
    path = write_ranks(tmp_path)
    members = {
        name: array for name, array in arrays(replicas=(1,)).items()
        if "gradients" not in changes or ("/raw/" not in name and "/sums/" not in name)
    }  # fmt: skip
    write_trace(tmp_path / "two.rank1.npz", about(replicas=[1], **changes), members)
    key = next(iter(changes))
    assert f"{key!r} of two.rank1.npz differs from that of two.rank0.npz" in refusal(path)


def test_files_of_which_only_some_are_permuted_are_refused(tmp_path):
    path = write_ranks(tmp_path)
    description = about(replicas=[1], permuted=7)
    write_trace(tmp_path / "two.rank1.npz", description, arrays(replicas=(1,)))
    assert "only some of its files are permuted" in refusal(path)


def test_a_file_that_is_replaced_meanwhile_is_refused(tmp_path):
    path = write_trace(tmp_path / "two.npz")
    trace = load_trace(path)
    write_trace(tmp_path / "new.npz", about(steps=[3, 4])).rename(path)
    with pytest.raises(DataError, match="was changed while it was read; run the command again"):
        trace.arrays(0, "before", 0)


# --- The archive ---------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [b"", b"PK", b"\x93NUMPY\x01\0", b"<html>" * 99, b"\x80\x04K."])
def test_another_kind_of_file_is_refused(tmp_path, content):
    (tmp_path / "two.npz").write_bytes(content)
    line = refusal(tmp_path / "two.npz")
    assert "is not a trace (it is no .npz file); pass a file that a recorder" in line


def test_an_archive_that_is_no_trace_is_refused(tmp_path):
    np.savez(tmp_path / "two.npz", x=np.ones(3))
    assert "has a member 'x.npy', which no trace has" in refusal(tmp_path / "two.npz")
    np.savez(tmp_path / "two.npz", **{"1/before/0/0": np.ones(3)})
    assert "is not a trace (it has no member 'about')" in refusal(tmp_path / "two.npz")


def test_a_truncated_file_is_refused(tmp_path):
    path = write_trace(tmp_path / "two.npz")
    content = path.read_bytes()
    for size in (4, 100, len(content) // 2, len(content) - 30, len(content) - 1):
        path.write_bytes(content[:size])
        assert "is truncated or damaged" in refusal(path)


def repack(path, change, **options):
    """Rewrites an archive; `change(name, content)` returns its new members."""
    with zipfile.ZipFile(path) as old:
        members = [new for name in old.namelist() for new in change(name, old.read(name))]
    with zipfile.ZipFile(path, "w", **options) as new:
        for name, content in members:
            new.writestr(name, content)


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize(
    "name",
    ["../1/before/0/0.npy", "/1/before/0/0.npy", "1/before/0/0", "01/before/0/0.npy",
     "1/Before/0/0.npy", "1/before/0/0/other.npy", "1/before/0/٣.npy", "1/before/-1/0.npy",
     "1/before/0/9999999999.npy", "1/before/0/", "x\n.npy", "1/before/0/0.npy\n"],
)  # fmt: skip
def test_other_names_are_refused(tmp_path, name):
    path = write_trace(tmp_path / "two.npz")
    repack(path, lambda old, content: [(old, content), (name, content)][: 1 + (old != "about.npy")])
    assert ", which no trace has; pass a file" in refusal(path)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_member_that_is_there_twice_is_refused(tmp_path):
    path = write_trace(tmp_path / "two.npz")
    twice = "1/before/0/0.npy"
    repack(path, lambda name, content: [(name, content)] * (1 + (name == twice)))
    assert f"has the member {twice!r} twice; record it again" in refusal(path)


def test_other_compressions_are_refused(tmp_path):
    path = write_trace(tmp_path / "two.npz")
    repack(path, lambda *member: [member], compression=zipfile.ZIP_BZIP2)
    assert "with compression 12; save it with np.savez" in refusal(path)


def directory_entries(content):
    """Returns where the entries of a zip directory are."""
    places, at = [], content.find(b"PK\x01\x02")
    while at >= 0:
        places.append(at)
        at = content.find(b"PK\x01\x02", at + 1)
    return places


def patch(path, offset, form, value, *, entry=2):
    """Overwrites a field of an entry of the directory."""
    content = bytearray(path.read_bytes())
    struct.pack_into(form, content, directory_entries(content)[entry] + offset, value)
    path.write_bytes(content)


def test_an_encrypted_member_is_refused(tmp_path):
    path = write_trace(tmp_path / "two.npz")
    patch(path, 8, "<H", 1)
    assert "has the encrypted member" in refusal(path)


def test_a_member_with_two_sizes_is_refused(tmp_path):
    path = write_trace(tmp_path / "two.npz")
    patch(path, 24, "<I", 60)
    assert "with two sizes; record it again" in refusal(path)


def test_sizes_that_cannot_be_are_refused(tmp_path):
    path = write_trace(tmp_path / "two.npz")
    patch(path, 20, "<I", 2**31)
    assert "has members that are larger than the file" in refusal(path)
    path = write_trace(tmp_path / "two.npz", save=np.savez_compressed)
    patch(path, 24, "<I", 2**31)
    assert "would be more than 1,000 times as large uncompressed" in refusal(path)


def test_an_array_that_is_smaller_or_larger_than_its_shape_is_refused(tmp_path):
    for save, size in ((np.savez_compressed, 5000), (np.savez_compressed, 150)):
        path = write_trace(tmp_path / "two.npz", save=save)
        patch(path, 24, "<I", size)
        assert f"has {size:,} of " in refusal(path)


def test_a_bomb_is_not_inflated(tmp_path):
    """A member that inflates to more than its size is read to that size only."""
    path = write_trace(tmp_path / "two.npz")
    small = io.BytesIO()
    np.save(small, np.zeros(100, np.uint8))
    bomb = small.getvalue() + bytes(64 << 20)
    repack(
        path,
        lambda name, content: [(name, bomb if name == "1/data/0/0.npy" else content)],
        compression=zipfile.ZIP_DEFLATED,
    )
    with zipfile.ZipFile(path) as file:
        entry = file.namelist().index("1/data/0/0.npy")
    patch(path, 24, "<I", len(small.getvalue()), entry=entry)
    tracemalloc.start()
    assert "'1/data/0/0.npy' is damaged" in refusal(path, read=True)
    assert tracemalloc.get_traced_memory()[1] < 2 << 20
    tracemalloc.stop()


def test_another_place_or_name_is_refused(tmp_path):
    path = write_trace(tmp_path / "two.npz")
    patch(path, 42, "<I", 2**30)
    assert "outside of the file" in refusal(path)
    content = path.read_bytes()  # As 64-bit number, too large to seek.
    place = directory_entries(content)[2]
    name_bytes = struct.unpack_from("<H", content, place + 28)[0]
    extra = struct.pack("<HHQ", 1, 8, 2**64 - 1)
    at = place + 46 + name_bytes
    content = bytearray(content[:at] + extra + content[at:])
    struct.pack_into("<H", content, place + 30, len(extra))
    struct.pack_into("<I", content, place + 42, 0xFFFFFFFF)
    end = content.rindex(b"PK\x05\x06")
    size = struct.unpack_from("<I", content, end + 12)[0]
    struct.pack_into("<I", content, end + 12, size + len(extra))
    path.write_bytes(content)
    assert "outside of the file" in refusal(path)
    path = write_trace(tmp_path / "two.npz")
    patch(path, 42, "<I", 3)
    assert "is not where the directory says" in refusal(path)
    path = write_trace(tmp_path / "two.npz")
    patch(path, 42, "<I", 0)
    assert "has another name in the directory" in refusal(path)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_each_bit_that_changes_in_an_array_is_seen(tmp_path, save):
    path = write_trace(tmp_path / "two.npz", save=save)
    with zipfile.ZipFile(path) as file:
        info = file.getinfo("2/after/1/2.npy")
    content = bytearray(path.read_bytes())
    end = content.index(b"PK", info.header_offset + 4)
    content[end - 3] ^= 4
    path.write_bytes(content)
    assert "'2/after/1/2.npy' is " in refusal(path, read=True)


def test_too_many_members_are_refused(tmp_path, monkeypatch):
    path = write_trace(tmp_path / "two.npz")
    monkeypatch.setattr(trace_directory, "_MAX_MEMBERS", 30)
    assert "has more than 30 members; record fewer steps" in refusal(path)
    monkeypatch.setattr(trace_directory, "_MAX_MEMBERS", 1000)
    monkeypatch.setattr(trace_directory, "_MAX_DIRECTORY_BYTES", 3000)
    assert "has more than 1,000 members; record fewer steps" in refusal(path)


def test_more_than_the_memory_is_not_read(tmp_path, monkeypatch):
    trace = load_trace(write_trace(tmp_path / "two.npz"))
    monkeypatch.setattr(os, "sysconf", lambda name: 10)
    with pytest.raises(DataError, match="needs more memory than there is; record fewer steps"):
        trace.arrays(0, "before", 0)


# --- The arrays ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("array", "wrong"),
    [
        (np.array([{}], object), "has dtype '|O'"),
        (np.zeros(2, [("a", "<f4")]), "is no plain array; record numbers only"),
        (np.zeros(2, ">f4"), "has dtype '>f4', which no trace has"),
        (np.zeros(2, "<c8"), "has dtype '<c8'"),
        (np.zeros(2, "V2"), "has dtype '|V2', which no trace has; record numbers"),
        (np.zeros(2, "U3"), "has dtype '<U3'"),
        (np.zeros(2, "<M8[s]"), "has dtype '<M8[s]'"),
        (np.zeros(2, np.longdouble), "has dtype '<f16'"),
    ],
)
def test_other_dtypes_are_refused(tmp_path, array, wrong):
    path = write_trace(tmp_path / "two.npz", members=arrays() | {"1/data/0/0": array})
    assert f"the member '1/data/0/0.npy' {wrong}" in refusal(path)


@pytest.mark.parametrize(
    "header",
    [
        "{'descr': '<f4', 'fortran_order': False, 'shape': (__import__('os').getpid(),), }\n",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (-1,), }\n",
        "{'descr': '<f4', 'fortran_order': 1, 'shape': (2,), }\n",
        "{'shape': (2,), 'descr': '<f4', 'fortran_order': False, }\n",
        "{'descr': '<f4', 'fortran_order': False, 'shape': " + "(" * 300 + "\n",
        "",
    ],
)
def test_headers_are_not_evaluated(tmp_path, header):
    content = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + bytes(8)
    path = write_trace(tmp_path / "two.npz")
    repack(path, lambda n, old: [(n, content if n == "1/data/0/0.npy" else old)])
    assert "the member '1/data/0/0.npy' is no plain array" in refusal(path)


@pytest.mark.parametrize(
    ("shape", "wrong"),
    [
        ("(3,)", "has 98 of 102 bytes"),
        ("(1000000000000,)", "has 98 of 4,000,000,000,090 bytes"),
        ("(999999999999, 999999999999)", "has an impossible shape"),
        ("(0, 999999999999, 999999999999)", "has an impossible shape"),
        (f"({'1, ' * 40})", "has an impossible shape"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(tmp_path, shape, wrong):
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}\n".ljust(80)
    header = header.replace("\n", "").rstrip() + "\n"
    header = header[:-1].ljust(79) + "\n"
    content = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + bytes(8)
    path = write_trace(tmp_path / "two.npz")
    repack(path, lambda n, old: [(n, content if n == "1/data/0/0.npy" else old)])
    assert wrong in refusal(path)


def test_other_formats_of_numpy_are_refused(tmp_path):
    path = write_trace(tmp_path / "two.npz")
    for start in (b"\x93NUMPY\x02\x00", b"\x93NUMPX\x01\x00", b"\x93NUMPY\x01\x00\xff\xff"):
        repack(path, lambda n, old, s=start: [(n, s + bytes(99) if "data" in n else old)])
        assert "is no array in NumPy's format 1.0" in refusal(path)


def test_truth_values_are_zero_or_one(tmp_path):
    path = write_trace(tmp_path / "two.npz", members=arrays() | {"1/data/0/0": np.ones(2, bool)})
    repack(path, lambda n, c: [(n, c[:-1] + b"\x07" if n == "1/data/0/0.npy" else c)])
    assert "has truth values other than 0 and 1" in refusal(path, read=True)


def changed(path, **replaced):
    """Writes a trace of which some members were replaced, or removed with None."""
    members = arrays()
    for name, array in replaced.items():
        name = name.replace("__", "/")
        members.pop(name, None)
        if array is not None:
            members[name] = array
    return write_trace(path, members=members)


@pytest.mark.parametrize(
    ("members", "wrong"),
    [
        ({"3/loss/0/0": np.ones(1)}, "has the member '3/loss/0/0.npy', but 2 steps"),
        ({"0/loss/0/0": np.ones(1)}, "has the member '0/loss/0/0.npy', but 2 steps"),
        ({"1/loss/2/0": np.ones(1)}, "has the member '1/loss/2/0.npy', but not that replica"),
        ({"1/data/0/2": np.ones(1)}, "has no array 1/data/0/1, but later ones"),
        ({"1/before/0/4": np.ones(1)}, "has an array 1/before/0/4, but 4 variables in 'about'"),
        ({"2/clipped/0/3": np.ones(1)}, "has an array 2/clipped/0/3, but 3 gradients in 'about'"),
        ({"1/loss/0/0": None, "1/loss/0/7": np.ones(1)}, "has no array 1/loss/0/0, but later ones"),
        ({"1/before/1/1": np.ones(3, np.float32)},
         "the array 1/before/1/1 has shape (3,), and its variable (2,)"),
        ({"2/raw/1/0": np.ones((2, 3), np.float32)},
         "the array 2/raw/1/0 has shape (2, 3), and its variable (3, 2)"),
        ({"1/raw/0/2/rows": None}, "is no array, nor one of the values, indices and rows"),
        ({"1/raw/0/2": np.ones((5, 2))}, "is no array, nor one of the values, indices and rows"),
        ({"1/data/0/0": None, "1/data/0/0/rows": np.array(1)}, "is no array, nor one of the"),
        ({"1/raw/0/2/rows": np.array(6)}, "the array 1/raw/0/2 has shape (6, 2)"),
        ({"1/raw/0/2/rows": np.array(-5)}, "the array 1/raw/0/2 has shape (-5, 2)"),
        ({"1/raw/0/2/rows": np.array([5])}, "and its neighbours are no rows of a gradient"),
        ({"1/raw/0/2/rows": np.array(5.0)}, "and its neighbours are no rows of a gradient"),
        ({"1/raw/0/2/indices": np.ones(3)}, "and its neighbours are no rows of a gradient"),
        ({"1/raw/0/2/indices": np.array([4, 0])}, "has another length than the values"),
    ],
)  # fmt: skip
def test_arrays_that_are_not_as_described_are_refused(tmp_path, members, wrong):
    assert wrong in refusal(changed(tmp_path / "two.npz", **members))


@pytest.mark.parametrize("row", [5, -1])
def test_a_row_that_is_not_there_is_refused(tmp_path, row):
    path = changed(tmp_path / "two.npz", **{"1/raw/0/2/indices": np.array([0, row, 1])})
    assert "has a row outside of 0 to 4; record it again" in refusal(path, read=True)


def test_rows_of_an_unknown_weight_are_refused(tmp_path):
    members = {n: a for n, a in arrays().items() if "/before/" not in n and "/after/" not in n}
    path = write_trace(tmp_path / "two.npz", members=members)
    assert "has rows in 1/raw/0/2, but no array 'before' or 'after'" in refusal(path)


# --- The description -----------------------------------------------------------------------------


def test_a_later_version_is_refused(tmp_path):
    path = write_trace(tmp_path / "two.npz", about(version=2), {"new/name": np.ones(1)})
    repack(path, lambda n, c: [(n, c)] if n == "about.npy" else [])
    assert refusal(path) == (
        f"{path}: is of trace format version 2, and this version of Lockstep reads 1; update"
        " Lockstep"
    )


def group(**settings):
    return {"settings": [[settings], []]}


def variables(**changes):
    return {"variables": [trace_samples.VARIABLES[0] | changes, *trace_samples.VARIABLES[1:]]}


NAN = float("nan")
WRONG = [
    ({"format": "lockstep recording 1"}, "is not a trace (its format is 'lockstep recording 1'"),
    ({"format": [[]]}, "is not a trace (its format is a list of 1"),
    *(({"version": v}, "version of 'about' is") for v in (0, -1, True, 1.0, "1", NAN, 10**30)),
    ({"version": None}, "version of 'about' is missing, must be a whole number from 1"),
    *(({"num_replicas": n}, "num_replicas of 'about' is")
      for n in (0, -2, 1e3, True, NAN, float("inf"), [], {}, "2", 10**7)),
    ({"num_replicas": 10**40}, "has a number of more than 64 bits in 'about'"),
    ({"replicas": [0, 0]}, "replicas of 'about' is a list of 2"),
    ({"replicas": [0, 2]}, "replicas[1] of 'about' is 2, must be a whole number from 0 to 1"),
    ({"replicas": []}, "replicas of 'about' is a list of 0"),
    ({"replicas": [0, NAN]}, "replicas[1] of 'about' is nan"),
    ({"replicas": 2}, "replicas of 'about' is 2, must be a list"),
    ({"steps": []}, "steps of 'about' is a list of 0, must be at least one number"),
    ({"steps": [3, 1]}, "steps of 'about' is a list of 2, must be at least one"),
    ({"steps": [0, 1.5]}, "steps[1] of 'about' is 1.5"),
    ({"steps": [-1, 0]}, "steps[0] of 'about' is -1"),
    ({"steps": None}, "steps of 'about' is missing, must be a list"),
    ({"framework": ""}, "framework of 'about' is '', must be a name"),
    ({"framework": "a\nb"}, r"has the text 'a\nb' in 'about'; names"),
    ({"framework": "\ud800"}, r"has the text '\ud800' in 'about'"),
    ({"framework": "x" * 3000}, "in 'about'; names and other texts must be printable"),
    ({"\x1b[31m": 1}, r"has the text '\x1b[31m'"),
    ({"versions": {"torch": 2}}, "versions.torch of 'about' is 2, must be a text"),
    ({"versions": ["torch"]}, "versions of 'about' is a list of 1, must be an object"),
    ({"variables": {}}, "variables of 'about' is an object"),
    ({"variables": ["a"]}, "variables[0] of 'about' is 'a', must be an object"),
    (variables(name=""), "variables[0].name of 'about' is '', must be a name"),
    (variables(kind="bias"), "variables[0].kind of 'about' is 'bias', must be one of weight,"),
    (variables(layout=2), "variables[0].layout of 'about' is 2"),
    (variables(of="other"), "names 'other' in 'variables' of 'about', which is no"),
    (variables(name="dense/bias"), "has two variables named 'dense/bias'; give each"),
    ({"gradients": ["m/kernel"]}, "names 'm/kernel' in 'gradients' of 'about', which is no"),
    ({"gradients": ["dense/bias"] * 3}, "gradients of 'about' is a list of 3, must be each weight"),
    ({"gradients": [1]}, "gradients[0] of 'about' is 1"),
    ({"reduction": "average"}, "reduction of 'about' is 'average', must be one of ''"),
    ({"reduction": []}, "reduction of 'about' is a list of 0"),
    ({"order": "clip"}, "order of 'about' is 'clip', must be one of 'reduce"),
    ({"optimizer": "SGD"}, "optimizer of 'about' is 'SGD', must be an object"),
    ({"settings": []}, "settings of 'about' is a list of 0, must be one list of"),
    ({"settings": [{}, {}]}, "settings[0] of 'about' is an object, must be a list"),
    ({"settings": [[], [1]]}, "settings[1][0] of 'about' is 1, must be an object"),
    (group(learning_rate="0.1"), "settings[0][0].learning_rate of 'about' is '0.1', must be"),
    (group(momentum=True), "settings[0][0].momentum of 'about' is True, must be a number"),
    (group(nesterov=1), "settings[0][0].nesterov of 'about' is 1, must be true or false"),
    (group(weights="all"), "settings[0][0].weights of 'about' is 'all', must be a list"),
    (group(weights=["x"]), "names 'x' in 'settings' of 'about', which is no weight"),
    ({"layers": {}}, "layers of 'about' is an object, must be a list"),
    ({"layers": [{"class": "Linear"}]}, "layers[0].name of 'about' is missing, must be a text"),
    ({"layers": [{"name": "a", "class": 1}]}, "layers[0].class of 'about' is 1"),
    ({"layers": [{"name": "a", "class": "b", "weights": [1]}]}, "layers[0].weights[0] of 'about'"),
    ({"data_layout": 4}, "data_layout of 'about' is 4"),
    ({"permuted": "7"}, "permuted of 'about' is '7', must be a whole number"),
    ({"replayed": 1}, "replayed of 'about' is 1, must be a text"),
    ({"micro_batches": [1]}, "micro_batches of 'about' is a list of 1, must be one count for each"),
    ({"micro_batches": [1, 0]}, "micro_batches[1] of 'about' is 0, must be a whole number from 1"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "wrong"), WRONG, ids=[str(c)[:40] for c, _ in WRONG])
def test_a_wrong_description_is_refused(tmp_path, changes, wrong):
    path = write_trace(tmp_path / "two.npz", about(**changes))
    assert wrong in refusal(path)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("", "has an 'about' that is not JSON text; record it again"),
        ("{", "has an 'about' that is not JSON text"),
        ("[]", "is not a trace (its format is a list of 0"),
        ("null", "is not a trace (its format is None"),
        ("9" * 5000, "has an 'about' that is not JSON text"),
        ("[" * 100_000, "has an 'about' that is nested too deeply; record it again"),
        ('{"a":' * 100_000, "has an 'about' that is nested too deeply"),
        (json.dumps(about())[:-1] + ', "x": ' + "[" * 60 + "]" * 60 + "}", "nested too deeply"),
    ],
    ids=lambda text: text[:12],
)
def test_a_text_that_is_no_description_is_refused(tmp_path, text, wrong):
    path = tmp_path / "two.npz"
    np.savez(path, about=np.array(text))
    assert wrong in refusal(path)


@pytest.mark.parametrize(
    "array", [np.array([json.dumps(about())]), np.array(b"{}"), np.array(3), np.zeros((0, 2))]
)
def test_a_description_that_is_no_text_is_refused(tmp_path, array):
    np.savez(tmp_path / "two.npz", about=array)
    assert "has an 'about' that is not one text" in refusal(tmp_path / "two.npz")


def test_a_description_of_impossible_characters_is_refused(tmp_path):
    path = write_trace(tmp_path / "two.npz")
    repack(path, lambda n, c: [(n, c[:-4] + b"\xff" * 4 if n == "about.npy" else c)])
    assert "is damaged" in refusal(path)


def test_a_long_description_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(trace_member, "_MAX_TEXT_BYTES", 1000)
    line = refusal(write_trace(tmp_path / "two.npz"))
    assert "has an 'about' of" in line and "more than 1,000; record it again" in line


def test_a_name_of_several_lines_is_quoted(tmp_path):
    path = pathlib.Path(tmp_path, "a\nb.npz")
    with pytest.raises(DataError) as caught:
        load_trace(path)
    assert str(caught.value).isprintable()


def test_the_example_of_the_page_writes_a_trace(tmp_path, monkeypatch):
    text = (ROOT / "docs" / "trace_format.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "example", "exec"), {})
    trace = load_trace(tmp_path / "two.npz")
    assert (trace.framework, trace.num_replicas, trace.steps) == ("numpy", 2, (0,))
    (before,), (after,) = (trace.arrays(0, kind, 1) for kind in ("before", "after"))
    (applied,) = trace.arrays(0, "clipped", 0)
    np.testing.assert_array_equal(
        after, before - trace.settings(0, 0)[0]["learning_rate"] * applied
    )
    assert np.abs(applied).max() > 1


def test_the_page_has_every_key_and_bound():
    text = (ROOT / "docs" / "trace_format.md").read_text(encoding="utf-8")
    keys = {field.name for field in dataclasses.fields(About)} - {"extra"}
    assert not [key for key in keys if f"`{key}`" not in text]
    assert not [kind for kind in VARIABLE_KINDS if f'"{kind}"' not in text]
    for bound in (trace_directory._MAX_MEMBERS, trace_directory._MAX_RATIO):
        assert f"{bound:,}" in text
    assert f"version {VERSION + 1}, and this version of Lockstep reads {VERSION}" in text
