"""Tests checkpoints: round trip, retention, rejected files, and interruptions at every point."""

import dataclasses
import errno
import json
import multiprocessing
import os
import resource
import struct
import sys
import tracemalloc

import numpy as np
import pytest
from safetensors.numpy import load_file
from safetensors.numpy import save as file_bytes

from app.records import arrays as array_files
from app.records import checkpoint as checkpoints
from app.records import files
from app.records import run_directory as run_directories
from app.records.arrays import read_arrays, write_arrays
from app.records.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from app.records.checkpoint_search import find_best_checkpoint, find_newest_checkpoint
from app.records.files import open_regular, write_json
from app.records.history import EpochRecord
from app.records.run_directory import open_run_directory
from app.records.run_metadata import Progress, RunMetadata
from app.runtime import fault_points
from app.runtime.errors import CheckpointError, ConfigError, DiskFullError, OutputError
from app.runtime.run_context import RunContext

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
    save_checkpoint(run_dir, make(step, **progress))
    return run_dir / "checkpoints" / f"step-{step:08d}"


def names(run_dir):
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def test_round_trip(tmp_path):
    assert find_newest_checkpoint(tmp_path) is None
    saved = make(loss_sum=0.1, history=[record(1, step=5)], changes=["seed 0 → 1"])
    save_checkpoint(tmp_path, saved)
    path = tmp_path / "checkpoints" / "step-00000007"
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


def test_the_newest_three_and_the_best_are_kept(tmp_path):
    history = []
    for epoch, accuracy in enumerate([0.2, 0.9, 0.5, 0.9, 0.6, 0.1, 0.3], start=1):
        history.append(record(epoch, accuracy=accuracy))
        save(tmp_path, 10 * epoch, history=history)
    assert names(tmp_path) == [f"step-{step:08d}" for step in (20, 50, 60, 70)]
    assert find_newest_checkpoint(tmp_path).checkpoint.progress.step == 70
    assert find_best_checkpoint(tmp_path).checkpoint.progress.step == 20


def test_steps_count_and_not_times(tmp_path):
    for step in (5, 70, 700):
        os.utime(save(tmp_path, step), (2e9 - 1e6 * step, 2e9 - 1e6 * step))
    assert find_newest_checkpoint(tmp_path).checkpoint.progress.step == 700
    save(tmp_path, 701)
    assert names(tmp_path) == [f"step-{step:08d}" for step in (70, 700, 701)]


def test_one_of_the_same_step_is_replaced(tmp_path):
    save(tmp_path, 10)
    save(tmp_path, 10, history=[record(1)])
    assert find_newest_checkpoint(tmp_path).checkpoint.progress.epoch == 1
    assert names(tmp_path) == ["step-00000010"]


def test_one_that_is_replaced_while_it_is_read_is_no_damage(tmp_path, monkeypatch):
    old = save(tmp_path, 5)
    load = checkpoints._load

    def replaced(path):
        if path == old:
            for step in (6, 7, 8):
                save(tmp_path, step)
        return load(path)

    monkeypatch.setattr(checkpoints, "_load", replaced)
    assert find_newest_checkpoint(tmp_path).checkpoint.progress.step == 8


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
        CheckpointError, match=r"step-00000008: does not verify .*, as all 2 here do"
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
        "sha256": checkpoints._file_sha256(path / "state.safetensors"),
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
    "another version": (lambda m: m.update(format_version=4), None, "format version 4"),
    "a list": (lambda m: m.update(metadata=[]), None, "must be a mapping"),
}  # fmt: skip


@pytest.mark.parametrize("case", CRAFTED)
def test_crafted_ones_are_refused_before_anything_is_allocated(tmp_path, case):
    change, content, reason = CRAFTED[case]
    forge(save(tmp_path), change, content)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=f"step-00000007: does not verify .*{reason}"):
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
    (tmp_path / "checkpoints" / "step-00000009").symlink_to("nowhere")
    assert find_newest_checkpoint(tmp_path).path == good


def test_the_best_of_those_that_verify(tmp_path):
    history = []
    for epoch, accuracy in enumerate([0.2, 0.9, 0.5, 0.3, 0.6], start=1):
        history.append(record(epoch, accuracy=accuracy))
        save(tmp_path, 10 * epoch, history=history)
    save(tmp_path, 57, history=history)
    damage_file(tmp_path / "checkpoints" / "step-00000020" / "state.safetensors", "truncate")
    found = find_best_checkpoint(tmp_path)
    assert found.path.name == "step-00000050" and found.damaged[0][0].name == "step-00000020"


def test_content_is_on_the_disk_before_its_name_and_then_the_name(tmp_path, monkeypatch):
    calls = []

    def fsync(descriptor):
        calls.append(("fsync", os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))))

    def replace(source, target):
        calls.append(("replace", target.name))
        rename(source, target)

    rename = os.replace
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    save(tmp_path, 7)
    temporary = f".step-00000007.{os.getpid()}.tmp"
    assert calls == [
        ("fsync", tmp_path.name),  # Of the directory "checkpoints", which is new.
        *(("fsync", temporary), ("fsync", "MANIFEST.json"), ("fsync", "state.safetensors")),
        *(("replace", "step-00000007"), ("fsync", "checkpoints")),
    ]


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


def test_a_file_of_another_program_is_read_by_name(tmp_path):
    (tmp_path / "a").write_bytes(file_bytes({"b": np.ones(2), "a": np.zeros(3, np.int8)}))
    assert list(read_back(tmp_path / "a")) == ["a", "b"]


@pytest.mark.parametrize("dtype", ["complex64", "object"])
def test_what_could_not_be_read_again_is_not_written(tmp_path, dtype):
    with pytest.raises(ValueError, match=f"kernel has dtype {dtype}"):
        write_arrays(tmp_path / "a", {"kernel": np.zeros(2, dtype)})
    assert not (tmp_path / "a").exists()


def test_a_file_that_is_there_is_not_replaced(tmp_path):
    (tmp_path / "a").write_text("notes")
    with pytest.raises(FileExistsError):
        write_arrays(tmp_path / "a", STATE)
    assert (tmp_path / "a").read_text() == "notes"


def test_a_disk_that_is_full_within_the_file_is_told_as_such(tmp_path, monkeypatch):
    """The library tells the error's number within its text."""
    save(tmp_path, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(OutputError, match="step-00000002: File too large"):
            save(tmp_path, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    def full(*_, **__):
        raise array_files.SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(array_files, "save_file", full)
    with pytest.raises(DiskFullError, match=r"step-00000003: No space left .* [\d,]+ bytes needed"):
        save(tmp_path, 3)
    assert names(tmp_path) == ["step-00000001"]


def test_a_checkpoint_of_the_format_before_is_refused_in_a_line(tmp_path):
    path = save(tmp_path)
    (path / "state.safetensors").unlink()
    np.savez(path / "state.npz", **{"00000": STATE[KERNEL]})
    manifest = json.loads((path / "MANIFEST.json").read_text())
    manifest["format_version"] = 2
    (path / "MANIFEST.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError) as refusal:
        find_newest_checkpoint(tmp_path)
    assert str(refusal.value) == (
        f"{path}: does not verify (format version 2, which another version of this program wrote;"
        " this one reads 3); train in another directory, or use --overwrite"
    )


def test_the_hash_is_of_the_model_in_order():
    whole = checkpoints.weights_sha256(STATE)
    assert whole == checkpoints.weights_sha256({**STATE, "optimizer/iteration": np.array(8)})
    changed = STATE["model/conv/bias"].copy()
    changed[2] = np.nextafter(changed[2], np.float32(1))
    assert whole != checkpoints.weights_sha256({**STATE, "model/conv/bias": changed})


POINTS = [
    point
    for point in fault_points.POINTS
    if point.startswith("checkpoint.") and point != "checkpoint.between"  # Has its own test.
]


def save_four(run_dir, fault):
    """Saves 1 to 4 where one of them fails; runs in a process of its own."""
    with RunContext(), open_run_directory(run_dir, {}) as run_directory:
        fault_points.arm({fault_points.VARIABLE: fault})
        run_directory.start(overwrite=False)
        for step in range(1, 5):
            save(run_dir, step)


@pytest.mark.parametrize("point", POINTS)
def test_a_kill_at_any_point_leaves_whole_checkpoints_only(tmp_path, point):
    """The fourth save is killed: the first that deletes an old one."""
    number = 1 if point == "checkpoint.before_delete" else 4
    context = multiprocessing.get_context("fork")  # Nothing of TensorFlow is used in it.
    process = context.Process(target=save_four, args=(tmp_path, f"{point}:{number}:kill"))
    process.start()
    process.join(30)
    assert process.exitcode == -9
    saved = point in ("checkpoint.after_rename", "checkpoint.before_delete")
    assert find_newest_checkpoint(tmp_path).checkpoint.progress.step == (4 if saved else 3)
    whole = [name for name in names(tmp_path) if name.startswith("step-")]
    assert len(whole) == (4 if saved else 3)
    with open_run_directory(tmp_path, {}):  # What the same command does first.
        assert all(name.startswith("step-") for name in names(tmp_path))
    save(tmp_path, 5)
    assert names(tmp_path)[-1] == "step-00000005" and len(names(tmp_path)) == 3


def replace_one(run_dir, fault):
    """Saves step 10 twice, the second one killed; runs in a process of its own."""
    with RunContext(), open_run_directory(run_dir, {}) as run_directory:
        run_directory.start(overwrite=False)
        save(run_dir, 10)
        fault_points.arm({fault_points.VARIABLE: fault})
        save(run_dir, 10, history=[record(1)])


def cannot_exchange(monkeypatch):
    """A system without an atomic exchange of two names."""
    monkeypatch.setattr(files, "_exchange", lambda path, other: False)


@pytest.mark.parametrize(
    ("point", "epoch"), [("before_rename", 0), ("between", 0), ("after_rename", 1)]
)
def test_a_kill_between_two_of_one_step_leaves_one(tmp_path, point, epoch, monkeypatch):
    if point == "between":
        cannot_exchange(monkeypatch)
    context = multiprocessing.get_context("fork")
    process = context.Process(target=replace_one, args=(tmp_path, f"checkpoint.{point}:1:kill"))
    process.start()
    process.join(30)
    assert process.exitcode == -9
    with open_run_directory(tmp_path, {}):
        assert names(tmp_path) == ["step-00000010"]
    assert find_newest_checkpoint(tmp_path).checkpoint.progress.epoch == epoch


def test_a_full_disk_between_two_of_one_step_leaves_the_first(tmp_path, monkeypatch):
    cannot_exchange(monkeypatch)
    save(tmp_path, 10)
    with RunContext(), pytest.raises(DiskFullError):
        fault_points.arm({fault_points.VARIABLE: "checkpoint.between:1:enospc"})
        save(tmp_path, 10, history=[record(1)])
    assert names(tmp_path) == ["step-00000010"]
    assert find_newest_checkpoint(tmp_path).checkpoint.progress.epoch == 0


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no renameat2")
def test_a_reader_sees_a_complete_checkpoint_while_it_is_replaced(tmp_path):
    """A second process replaces the only checkpoint again and again."""
    path, other = save(tmp_path, 10), tmp_path / "other"
    write_json(other, {})
    if not files._exchange(other, other):
        pytest.skip("the file system cannot exchange names")
    context = multiprocessing.get_context("fork")
    process = context.Process(target=replace_repeatedly, args=(tmp_path, 150))
    process.start()
    epochs = set()
    while process.is_alive():
        assert path.is_dir() and names(tmp_path)[-1] == path.name
        epochs.add(load_checkpoint(path).progress.epoch)
        found = find_newest_checkpoint(tmp_path)
        assert not found.damaged and not find_best_checkpoint(tmp_path).damaged
    process.join()
    assert process.exitcode == 0 and epochs == {0, 1}
    assert names(tmp_path) == [path.name]


def replace_repeatedly(run_dir, times):
    """Replaces the checkpoint of step 10; runs in a process of its own."""
    for number in range(times):
        save(run_dir, 10, history=[record(1)] * (number % 2))


def test_a_discarded_checkpoint_loses_its_name_on_disk_before_its_files(tmp_path, monkeypatch):
    """Else a power cut could leave the name with some of the files."""
    for step in (1, 2, 3):
        save(tmp_path, step)
    done = []
    monkeypatch.setattr(checkpoints, "fsync", lambda path: done.append(f"fsync {path.name}"))
    monkeypatch.setattr(checkpoints, "remove", lambda path: done.append(f"remove {path.name}"))
    save(tmp_path, 4)
    assert done[-2:] == ["fsync checkpoints", "remove .step-00000001.tmp"]


def test_names_of_a_killed_attempt_are_synced_by_the_next(tmp_path, monkeypatch):
    """It resumes from them, so that a power cut must not lose them."""
    (tmp_path / "run").mkdir()
    save(tmp_path / "run", 7)
    (tmp_path / "run" / "config.json").write_text('{"written_by": "lockstep"}')
    synced = []
    monkeypatch.setattr(run_directories, "fsync", lambda path: synced.append(path.name))
    with open_run_directory(tmp_path / "run", {}):
        assert synced == ["checkpoints", "run", tmp_path.name]


@pytest.mark.parametrize("point", POINTS)
def test_a_full_disk_leaves_the_checkpoints_before(tmp_path, point):
    for step in (1, 2, 3):
        save(tmp_path, step)
    told = r"(step-0000000[14]|checkpoints): .* [\d,]+ free"
    with RunContext(), pytest.raises(DiskFullError, match=told):
        fault_points.arm({fault_points.VARIABLE: f"{point}:1:enospc"})
        save(tmp_path, 4)
    assert {f"step-{step:08d}" for step in (2, 3)} <= set(names(tmp_path))
    assert all(name.startswith("step-") for name in names(tmp_path))


class TestFaultPoints:
    def test_unset_does_nothing(self):
        with RunContext():
            assert fault_points.arm({}) is None
            fault_points.fault_point("step")

    @pytest.mark.parametrize(
        "text",
        ["step", "step:0:kill", "step:x:kill", "nowhere:1:kill", "step:1:explode", "step:1:",
         "step:1:kill=3", "step:1:delay=x", "step:1:delay=-1", "step:-1:kill", "step:1:delay=nan"],
    )  # fmt: skip
    def test_what_cannot_be_meant_is_refused(self, text):
        with RunContext(), pytest.raises(ConfigError, match="LOCKSTEP_FAULT"):
            fault_points.arm({fault_points.VARIABLE: text})

    def test_it_happens_at_the_nth_passing_alone(self):
        with RunContext():
            fault_points.arm({fault_points.VARIABLE: "step:3:raise"})
            for _ in range(2):
                fault_points.fault_point("step")
                fault_points.fault_point("epoch")
            with pytest.raises(RuntimeError):
                fault_points.fault_point("step")
            fault_points.fault_point("step")

    def test_a_slow_disk_stays_slow(self, monkeypatch):
        slept = []
        monkeypatch.setattr(fault_points.time, "sleep", slept.append)
        with RunContext():
            fault_points.arm({fault_points.VARIABLE: "history.made:2:slow"})
            for point in ("history.made", "log", "history.made", "step", "log", "history.made"):
                fault_points.fault_point(point)
        assert len(slept) == 3

    def test_the_next_command_does_not_see_it(self):
        with RunContext():
            fault_points.arm({fault_points.VARIABLE: "step:1:raise"})
        fault_points.fault_point("step")
        with RunContext():
            fault_points.fault_point("step")


def test_the_warning_says_which_kind_of_checkpoint_is_used(tmp_path):
    history = [record(1, accuracy=0.7), record(2, accuracy=0.9), record(3, accuracy=0.5)]
    paths = [save(tmp_path, step=10 * n, history=history[:n]) for n in (1, 2, 3)]
    (paths[1] / "state.safetensors").write_bytes(b"")
    best = find_best_checkpoint(tmp_path)
    assert best.path == paths[0] and best.kind == "best"
    assert f"{paths[0]} is used, the best that verifies" in best.warning()
    (paths[2] / "state.safetensors").write_bytes(b"")
    (paths[0] / "state.safetensors").write_bytes(b"")
    within_epoch = save(tmp_path, step=37, history=history)
    (save(tmp_path, step=38, history=history) / "state.safetensors").write_bytes(b"")
    newest = find_newest_checkpoint(tmp_path)
    assert newest.path == within_epoch and newest.kind == "newest"
    assert f"{within_epoch} is used, the newest that verifies" in newest.warning()
    assert find_best_checkpoint(tmp_path).kind == "newest"  # No other one verifies.
