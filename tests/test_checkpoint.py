"""Tests checkpoints: round trip, retention, rejected files, and interruptions at every point."""

import dataclasses
import errno
import hashlib
import json
import os
import resource
import struct
import tracemalloc

import numpy as np
import pytest
from safetensors.numpy import load_file
from safetensors.numpy import save as file_bytes

from app.records import arrays as array_files
from app.records import checkpoint as checkpoints
from app.records.arrays import read_arrays, write_arrays
from app.records.checkpoint import (
    Checkpoint,
    find_newest_checkpoint,
    save_checkpoint,
)
from app.records.files import open_regular
from app.records.history import EpochRecord
from app.records.run_metadata import Progress, RunMetadata
from app.runtime.errors import CheckpointError, DiskFullError, OutputError

STATE = {
    "model/conv/kernel": np.arange(6, dtype=np.float32).reshape(2, 3),
    "model/conv/bias": np.float32(0.5) * np.ones(3, np.float32),
    "optimizer/iteration": np.array(7),
}
STATISTICS = [[np.float32([1, 2])], [np.float32([3, 4])]]
RUN_METADATA = RunMetadata(
    {"model": "lenet"}, 0.1, 10, "synthetic", "ab", "cd", 2, 2, 2, {"python": "3"}
)


def record(epoch, *, accuracy=0.5, step=None):
    step = 10 * epoch if step is None else step
    return EpochRecord(epoch, step, 1.0, 0.5, 1.0, accuracy, 2.5, 400.0)


def make(step=7, **progress):
    epoch_step = step % 10
    defaults = {"epoch_step": epoch_step, "examples": epoch_step, "epoch_sec": 0.1 * epoch_step}
    progress = Progress(step, **{**defaults, **progress})
    return Checkpoint(RUN_METADATA, progress, STATE, STATISTICS)


def save(run_dir, step=7, **progress):
    return save_checkpoint(run_dir, make(step, **progress))


def names(run_dir):
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def test_round_trip(tmp_path):
    assert find_newest_checkpoint(tmp_path) is None
    saved = make(loss_sum=0.1, history=[record(1, step=5)], changes=["seed 0 → 1"])
    save_checkpoint(tmp_path, saved)
    path = tmp_path / "checkpoints" / "step-00000007-epoch-0001"
    found = find_newest_checkpoint(tmp_path)
    loaded = found.checkpoint
    assert found.path == path and found.damaged == [] and found.warning() is None
    assert loaded.metadata == RUN_METADATA and loaded.progress == saved.progress
    assert list(loaded.state) == list(STATE)
    for name, array in STATE.items():
        np.testing.assert_array_equal(loaded.state[name], array, strict=True)
    np.testing.assert_array_equal(loaded.per_shard_statistics, STATISTICS)
    stored = load_file(path / "state.safetensors")  # Plain arrays, for anyone to read.
    assert set(stored) == {*STATE, "statistics/0/0", "statistics/1/0"}
    np.testing.assert_array_equal(stored["statistics/1/0"], STATISTICS[1][0])
    mode = (path / "MANIFEST.json").stat().st_mode
    assert (path / "state.safetensors").stat().st_mode == mode


def test_the_newest_three_by_step_and_epoch_are_kept(tmp_path):
    for step in (5, 70, 700):
        os.utime(save(tmp_path, step), (2e9 - 1e6 * step, 2e9 - 1e6 * step))  # Times do not count.
    save(tmp_path, 700, history=[record(1)])  # After the evaluation of the same step.
    assert find_newest_checkpoint(tmp_path).checkpoint.progress.epoch == 1
    assert names(tmp_path) == [
        "step-00000070-epoch-0000", "step-00000700-epoch-0000", "step-00000700-epoch-0001",
    ]  # fmt: skip


def test_temporary_ones_and_others_are_not_seen(tmp_path):
    path = save(tmp_path)
    path.rename(path.with_name(f".{path.name}.99.tmp"))
    (tmp_path / "checkpoints" / "step-9").mkdir()
    (tmp_path / "checkpoints" / "my notes").mkdir()
    assert find_newest_checkpoint(tmp_path) is None


def damage_file(path, damage):
    content = path.read_bytes()
    middle = len(content) // 2
    if damage == "remove":
        path.unlink()
    elif damage == "pipe":
        path.unlink()
        os.mkfifo(path)
    elif damage == "link":
        path.rename(path.with_name("elsewhere"))
        path.symlink_to("elsewhere")
    else:
        path.write_bytes(
            {
                "truncate": content[:middle],
                "alter": content[:middle] + b"7" + content[middle + 1 :],
                "empty": b"",
            }[damage]
        )


@pytest.mark.parametrize("file", ["state.safetensors", "MANIFEST.json"])
@pytest.mark.parametrize("damage", ["remove", "truncate", "alter", "empty", "pipe", "link"])
def test_the_one_before_a_damaged_one_is_used_and_both_are_named(tmp_path, file, damage):
    good, bad = save(tmp_path, 5), save(tmp_path, 8)
    damage_file(bad / file, damage)
    found = find_newest_checkpoint(tmp_path)
    assert found.path == good and [path for path, _ in found.damaged] == [bad]
    assert str(good) in found.warning() and str(bad) in found.warning()
    damage_file(good / file, damage)
    with pytest.raises(
        CheckpointError, match=r"step-00000008\S+: does not verify .*, as all 2 here do"
    ):
        find_newest_checkpoint(tmp_path)


def test_a_digit_of_the_manifest_does_not_change_unseen(tmp_path):
    path = save(tmp_path) / "MANIFEST.json"
    path.write_text(path.read_text().replace('"loss_sum": 0.0', '"loss_sum": 1.0'))
    with pytest.raises(CheckpointError, match="another SHA-256"):
        find_newest_checkpoint(tmp_path)


def forge(path, change, content=None):
    """Changes the manifest of a checkpoint so that all its hashes are right again."""
    if content is not None:
        (path / "state.safetensors").write_bytes(content)
    manifest = json.loads((path / "MANIFEST.json").read_text())
    manifest["files"]["state.safetensors"] = {
        "size_bytes": (path / "state.safetensors").stat().st_size,
        "sha256": hashlib.sha256((path / "state.safetensors").read_bytes()).hexdigest(),
    }
    change(manifest)
    del manifest["sha256"]
    manifest["sha256"] = checkpoints._manifest_sha256(manifest)
    (path / "MANIFEST.json").write_text(json.dumps(manifest))


ARRAYS = {**STATE, "statistics/0/0": STATISTICS[0][0], "statistics/1/0": STATISTICS[1][0]}
KERNEL = "model/conv/kernel"
HUGE = [1 << 20, 1 << 20, 1 << 10]


def file_of(arrays, order=None):
    """Returns a file of these arrays, with an order that may be any text."""
    order = json.dumps(list(arrays)) if order is None else order
    return file_bytes(arrays, metadata={"order": order})


def with_header(**changes):
    """Returns the arrays' file with a header that says something else of one array."""
    content = file_of(ARRAYS)
    (size,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + size])
    header[KERNEL].update(changes)
    return with_text(json.dumps(header), content[8 + size :])


def with_text(header, content=b""):
    return struct.pack("<Q", len(header)) + header.encode() + content


def without(name):
    return {other: array for other, array in ARRAYS.items() if other != name}


def set_counts(counts):
    return lambda manifest: manifest.update(per_shard_statistics=counts)


def as_it_is(manifest):
    pass


# What was made up → how the manifest is changed, the file of arrays, why it is refused.
CRAFTED = {
    "pickled": (as_it_is, b"cos\nsystem\n(S'true'\ntR.", "header too large"),
    "objects": (as_it_is, with_header(dtype="O"), "unknown variant `O`"),
    "a dtype that NumPy has not": (
        as_it_is, with_header(dtype="BF16", shape=[12]), "kernel has dtype BF16",
    ),
    "huge": (as_it_is, with_header(shape=HUGE), "invalid shape, data type, or offset"),
    "beyond the file": (
        as_it_is, with_header(shape=HUGE, data_offsets=[0, 4 << 50]), "Error while deserializing",
    ),
    "beyond all numbers": (as_it_is, with_header(shape=[1 << 40] * 8), "overflow"),
    "negative": (as_it_is, with_header(shape=[-1, 3]), "invalid value"),
    "offsets that overlap": (as_it_is, with_header(data_offsets=[8, 32]), "invalid offset"),
    "another shape": (as_it_is, with_header(shape=[3, 3]), "invalid shape, data type, or offset"),
    "another dtype": (as_it_is, with_header(dtype="F64"), "invalid shape, data type, or offset"),
    "more dimensions than NumPy has": (as_it_is, with_header(shape=[6] + [1] * 90), "dimension"),
    "a header of another length": (as_it_is, struct.pack("<Q", 1 << 60), "header too large"),
    "a header that is nested": (as_it_is, with_text("[" * 99_999), "invalid JSON"),
    "more than the arrays": (as_it_is, file_of(ARRAYS) + b"7", "not fully covered"),
    "no such file": (as_it_is, b"PK nothing" * 100, "header too large"),
    "an order of others": (
        as_it_is, file_of(ARRAYS, '["../x"]'), "does not name each of its arrays once",
    ),
    "one of the order twice": (
        as_it_is, file_of(ARRAYS, json.dumps([*ARRAYS, KERNEL])), "does not name each",
    ),
    "an order that is none": (as_it_is, file_of(ARRAYS, "7"), "not iterable"),
    "an order that is nested": (as_it_is, file_of(ARRAYS, "[" * 99_999), "recursion"),
    "one replica too many": (set_counts([1, 1, 1]), None, "statistics/2/0' is missing"),
    "one replica too few": (set_counts([1]), None, "statistics/1/0 belongs to no replica"),
    "a replica without its own": (
        as_it_is, file_of(without("statistics/1/0")), "statistics/1/0' is missing",
    ),
    "more than there can be": (set_counts([1 << 60]), None, "statistics/0/1' is missing"),
    "counts that are none": (set_counts(["1"]), None, "cannot be interpreted as an integer"),
    "another file": (
        lambda m: m["files"].update({"../x": m["files"].pop("state.safetensors")}), None,
        "'state.safetensors'",
    ),
    "another step": (lambda m: m["progress"].update(step=8), None, "says step 8"),
    "a step that is none": (lambda m: m["progress"].update(step="7"), None, "step is '7'"),
    "no history": (lambda m: m["progress"].update(history=[1]), None, "must be a mapping"),
    "sums over nothing": (lambda m: m["progress"].update(examples=0), None, "over 0 examples"),
    "a sum that is none": (
        lambda m: m["progress"].update(loss_sum=float("nan")), None, "are no finite numbers",
    ),
    "a number beyond all": (
        lambda m: m["progress"].update(total_sec=10**400), None, "too large",
    ),
    "an epoch of another number": (
        lambda m: m["progress"].update(history=[dataclasses.asdict(record(2, step=3))]), None,
        "do not follow one another",
    ),
    "steps that shrink": (
        lambda m: m["progress"].update(history=[dataclasses.asdict(record(1, step=8))]), None,
        "steps do not rise",
    ),
    "more replicas than there are": (
        lambda m: m.update(per_shard_statistics=[[]] * 5000), None, "5000 replicas",
    ),
    "beyond the epoch": (lambda m: m["metadata"].update(steps_per_epoch=3), None, "of the epoch 7"),
    "another version": (lambda m: m.update(format_version=5), None, "format version 5"),
    "a list": (lambda m: m.update(metadata=[]), None, "must be a mapping"),
}  # fmt: skip


@pytest.mark.parametrize("case", CRAFTED)
def test_crafted_ones_are_refused_before_anything_is_allocated(tmp_path, case):
    change, content, reason = CRAFTED[case]
    forge(save(tmp_path), change, content)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=rf"step-00000007\S+: does not verify .*{reason}"):
            find_newest_checkpoint(tmp_path)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 4 << 20


def test_an_error_that_may_pass_is_no_damage(tmp_path, monkeypatch):
    save(tmp_path, 5)
    save(tmp_path, 8)

    def fail(path):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(checkpoints, "read_json", fail)
    with pytest.raises(OutputError, match=r"cannot be read \(Too many open files"):
        find_newest_checkpoint(tmp_path)


def test_a_link_that_leads_nowhere_is_damage(tmp_path):
    good = save(tmp_path, 5)
    (tmp_path / "checkpoints" / "step-00000009-epoch-0000").symlink_to("nowhere")
    assert find_newest_checkpoint(tmp_path).path == good


def test_links_lead_nowhere(tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to("../outside")
    with pytest.raises(OutputError, match="symbolic link"):
        save(tmp_path / "run")
    assert list((tmp_path / "outside").iterdir()) == []


def read_back(path):
    with open_regular(path) as file:
        return read_arrays(file)


def test_arrays_of_every_form(tmp_path):
    arrays = {
        "z": np.array(3), "no rows": np.zeros((0, 3), np.float32), "true": np.array([True, False]),
        "transposed": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "in steps": np.arange(12, dtype=np.uint8)[::3], "half": np.float16([[1, 2]]),
        "scalar": np.float32(2.5), "large": np.array([1 << 63], np.uint64),
        "é/../\n": np.int64([-1]), "big endian": np.arange(3, dtype=">f4"),
    }  # fmt: skip
    write_arrays(tmp_path / "a", arrays)
    read = read_back(tmp_path / "a")
    assert list(read) == list(arrays)
    for name, array in arrays.items():
        expected = np.asarray(array)
        expected = expected.astype(expected.dtype.newbyteorder("="))
        np.testing.assert_array_equal(read[name], expected, strict=True)


@pytest.mark.parametrize("dtype", ["complex64", "object"])
def test_what_could_not_be_read_again_is_not_written(tmp_path, dtype):
    with pytest.raises(ValueError, match=f"kernel has dtype {dtype}"):
        write_arrays(tmp_path / "a", {"kernel": np.zeros(2, dtype)})
    assert not (tmp_path / "a").exists()


def test_a_disk_that_is_full_within_the_file_is_told_as_such(tmp_path, monkeypatch):
    """The library tells the error's number within its text."""
    save(tmp_path, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(OutputError, match=r"step-00000002\S+: File too large"):
            save(tmp_path, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    def full(*_, **__):
        raise array_files.SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(array_files, "save_file", full)
    with pytest.raises(DiskFullError, match=r"No space left .* [\d,]+ bytes needed"):
        save(tmp_path, 3)
    assert names(tmp_path) == ["step-00000001-epoch-0000"]


def test_a_checkpoint_of_the_format_before_is_refused_in_a_line(tmp_path):
    path = save(tmp_path)
    path = path.rename(path.with_name("step-00000007"))
    manifest = json.loads((path / "MANIFEST.json").read_text())
    manifest["format_version"] = 3
    (path / "MANIFEST.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError) as refusal:
        find_newest_checkpoint(tmp_path)
    assert str(refusal.value) == (
        f"{path}: does not verify (format version 3, which another version of this program wrote;"
        " this one reads 4); train in another directory, or use --overwrite"
    )


def test_the_hash_is_of_the_model_in_order():
    whole = checkpoints.weights_sha256(STATE)
    assert whole == checkpoints.weights_sha256({**STATE, "optimizer/iteration": np.array(8)})
    changed = STATE["model/conv/bias"].copy()
    changed[2] = np.nextafter(changed[2], np.float32(1))
    assert whole != checkpoints.weights_sha256({**STATE, "model/conv/bias": changed})
