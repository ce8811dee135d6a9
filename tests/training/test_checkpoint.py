"""Tests checkpoints: round trip, retention, and damaged files."""

import dataclasses
import errno
import hashlib
import json
import os
from unittest import mock

import numpy as np
import pytest
import safetensors.numpy

from app.errors import CheckpointError, OutputError
from app.options import Config
from app.records import checkpoint as checkpoints
from app.records import files
from app.records.checkpoint import (
    Checkpoint,
    find_newest_checkpoint,
    load_finished,
    save_checkpoint,
)
from app.records.history import EpochRecord, RunMetadata

STATE = {
    "model/conv/kernel": np.arange(6, dtype=np.float32).reshape(2, 3),
    "model/conv/bias": np.float32(0.5) * np.ones(3, np.float32),
    "optimizer/iteration": np.array(7),
}
ARRAYS = {
    "no rows": np.zeros((0, 3), np.float32), "true": np.array([True, False]),
    "transposed": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "in steps": np.arange(12, dtype=np.uint8)[::3], "half": np.float16([[1, 2]]),
    "scalar": np.array(2.5, np.float32), "large": np.array([1 << 63], np.uint64),
    "é/../\n": np.int64([-1]), "big endian": np.arange(3, dtype=">f4"),
}  # fmt: skip
STATISTICS = [[np.float32([1, 2])], [np.float32([3, 4])]]
RUN_METADATA = RunMetadata(
    config=Config.of(epochs=4).result_fields(), learning_rate=0.1, steps_per_epoch=10,
    dataset="synthetic", dataset_sha256="ab", test_part_sha256="cd", num_train_examples=1000,
    num_test_examples=70, devices=["/device:CPU:0", "/device:CPU:1"], simulated_devices=True,
    num_replicas=2, num_shards=2, all_reduce="reduce_to_one", num_parameters=9,
    versions={"python": "3"},
)  # fmt: skip


def make_history(num_epochs, **changes):
    """Returns finished epochs of 10 steps, whose test accuracy is 0 at first."""
    return [
        EpochRecord(i, 10 * i, 10, 1000 / i, 1000 - 900 // i, 1000, 2.5, 1.1 / i, 1 - 1 / i,
                    weights_sha256=f"{i}" * 64, **changes)
        for i in range(1, num_epochs + 1)
    ]  # fmt: skip


def make(step=7, num_finished=0):
    """Returns the checkpoint of a training after so many steps, and finished epochs."""
    epochs = make_history(num_finished) or [EpochRecord(1, 0, step, 0.1, 2, 7, 0.7)]
    epochs[-1] = dataclasses.replace(epochs[-1], step=step)
    return Checkpoint(RUN_METADATA, epochs, STATE, STATISTICS)


def save(run_dir, step=7, num_finished=0):
    return save_checkpoint(run_dir, make(step, num_finished))


def names(run_dir):
    return sorted(path.stem for path in (run_dir / "checkpoints").iterdir())


def test_round_trip(tmp_path):
    assert find_newest_checkpoint(tmp_path) is None
    saved = dataclasses.replace(make(7, 1), state=STATE | ARRAYS)
    save_checkpoint(tmp_path, saved)
    path = tmp_path / "checkpoints" / "step-00000007-epoch-0001.safetensors"
    loaded = find_newest_checkpoint(tmp_path)
    assert loaded.path == path and not loaded.damaged and loaded.warning() == ""
    assert loaded.metadata == RUN_METADATA and loaded.epochs == saved.epochs
    assert list(loaded.state) == list(saved.state)
    for name, array in saved.state.items():
        expected = array.astype(array.dtype.newbyteorder("="))
        np.testing.assert_array_equal(loaded.state[name], expected, strict=True)
    np.testing.assert_array_equal(loaded.per_shard_statistics, STATISTICS)
    stored = safetensors.numpy.load_file(path)  # Plain arrays, for anyone to read.
    assert set(stored) == {*saved.state, "statistics/0/0", "statistics/1/0"}
    np.testing.assert_array_equal(stored["statistics/1/0"], STATISTICS[1][0])


def test_the_newest_three_by_step_and_epoch_are_kept(tmp_path, monkeypatch):
    for step in (5, 70, 700):
        os.utime(save(tmp_path, step), (2e9 - 1e6 * step, 2e9 - 1e6 * step))  # Times do not count.
    save(tmp_path, 700, num_finished=1)  # After the evaluation of the same step.
    assert find_newest_checkpoint(tmp_path).epochs[-1].is_finished
    kept = ["step-00000070-epoch-0000", "step-00000700-epoch-0000", "step-00000700-epoch-0001"]
    assert names(tmp_path) == kept
    listed = [f"{name}.safetensors" for name in kept[::-1]]
    monkeypatch.setattr(checkpoints.os, "listdir", lambda path: listed)
    assert [path.stem for path in checkpoints.checkpoint_paths(tmp_path)] == kept


def test_weights_of_a_training_that_is_not_finished_are_no_result(tmp_path):
    save(tmp_path, 30, num_finished=3)
    last = save(tmp_path, 40, num_finished=4)
    assert load_finished(tmp_path).step == 40
    last.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"damaged .* the training is not finished"):
        load_finished(tmp_path)


def test_temporary_ones_and_others_are_not_seen(tmp_path):
    path = save(tmp_path)
    link = path.with_name("step-00000009-epoch-0000.safetensors")
    link.symlink_to("nowhere")
    assert find_newest_checkpoint(tmp_path).path == path
    link.unlink()
    path.rename(path.with_name(f".lockstep-99-{path.name}"))
    (tmp_path / "checkpoints" / "step-9").mkdir()
    assert find_newest_checkpoint(tmp_path) is None


def replace(path, make):
    path.rename(path.with_name("elsewhere"))
    make(path)


def craft(**values):
    """Returns a function after which the header says something else, with the right hash."""

    def damage(path):
        content, no_hash = path.read_bytes(), "0" * 64
        size = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + size])["__metadata__"]
        about = json.dumps(json.loads(header["checkpoint"]) | values)
        content = safetensors.numpy.save(
            safetensors.numpy.load(content), {"checkpoint": about, "sha256": no_hash}
        )
        sha256 = hashlib.sha256(content).hexdigest()
        path.write_bytes(content.replace(no_hash.encode(), sha256.encode(), 1))

    return damage


STEP_7 = dataclasses.asdict(make(7).epochs[0])
# Functions that change the file of a checkpoint; `campaigns/fuzz.py` has more.
DAMAGES = [
    (lambda path: os.truncate(path, 99), "fewer than its header needs"),
    (lambda path: path.write_bytes(path.read_bytes()[:-1] + b"\1"), "SHA-256"),
    (lambda path: replace(path, os.mkfifo), "not a regular file"),
    (lambda path: replace(path, lambda link: link.symlink_to("elsewhere")), "symbolic links"),
    (craft(epochs=[STEP_7]), "by its header it is step-00000007"),
    (craft(epochs=[{**STEP_7, "step": "8"}]), "step is '8'"),
]


@pytest.mark.parametrize(("damage", "reason"), DAMAGES)
def test_the_one_before_a_damaged_one_is_used_and_both_are_named(tmp_path, damage, reason):
    good, bad = save(tmp_path, 5), save(tmp_path, 8)
    damage(bad)
    found = find_newest_checkpoint(tmp_path)
    assert found.path == good and [path for path, _ in found.damaged] == [bad]
    assert reason in found.damaged[0][1]
    assert str(good) in found.warning() and str(bad) in found.warning()
    good.write_bytes(b"")
    told = r"step-00000008\S+: does not verify .*, as all 2 here do not"
    with pytest.raises(CheckpointError, match=told):
        find_newest_checkpoint(tmp_path)


def test_a_checkpoint_of_an_earlier_version_is_refused_not_overlooked(tmp_path):
    folder = tmp_path / "checkpoints" / "step-00000007"
    folder.mkdir(parents=True)
    with pytest.raises(CheckpointError, match="written by version 2 of this program"):
        find_newest_checkpoint(tmp_path)
    folder.rmdir()
    craft(format_version=5)(save(tmp_path))
    with pytest.raises(CheckpointError, match="written by version 2 of this program"):
        find_newest_checkpoint(tmp_path)


def test_an_error_that_may_pass_is_no_damage(tmp_path, monkeypatch):
    save(tmp_path, 5)
    save(tmp_path, 8)
    error = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    monkeypatch.setattr(files, "read_bytes", mock.Mock(side_effect=error))
    with pytest.raises(OutputError, match=r"cannot be read \(Too many open files"):
        find_newest_checkpoint(tmp_path)


def test_the_hash_is_of_the_model():
    whole = checkpoints.weights_sha256(STATE)
    assert whole == checkpoints.weights_sha256({**STATE, "optimizer/iteration": np.array(8)})
    changed = np.nextafter(STATE["model/conv/bias"], np.float32([1, 0.5, 0.5]))
    assert whole != checkpoints.weights_sha256({**STATE, "model/conv/bias": changed})
