"""Traces on disk: what is written can be read, by us and by safetensors alone."""

import errno
import os

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from app.records import arrays as array_files
from app.runtime.errors import DataError, DiskFullError
from app.verification.trace import Trace, TraceWriter, hash_examples
from app.verification.trace_comparison import compare_traces


def write_step(trace, step, *, scale=1.0, num_replicas=2):
    """Writes one step of a model with one weight tensor."""
    replicas = range(num_replicas)
    hashes = [{"examples": np.array([step, 10 + r], np.int64)} for r in replicas]
    trace.write(step, "examples", hashes)
    trace.write(step, "loss", [{"loss": np.float32(r + step)} for r in replicas])
    trace.write(step, "gradients", [{"a/kernel": np.full(3, r, np.float32)} for r in replicas])
    trace.write(step, "sums", [{"a/kernel": np.full(3, scale, np.float32)}] * num_replicas)
    write_weights(trace, step, scale=scale, num_replicas=num_replicas)


def write_weights(trace, step, *, scale=1.0, num_replicas=2):
    weights = {"a/kernel": np.full(3, scale * step, np.float32)}
    trace.write(step, "weights", [weights] * num_replicas)


def write_trace(path, **options):
    with TraceWriter(path) as trace:
        write_weights(trace, 0, **options)
        write_step(trace, 1, **options)
        write_step(trace, 2, **options)
    return Trace(path)


def test_what_was_written_is_read(tmp_path):
    with write_trace(tmp_path / "a") as trace:
        assert (trace.num_steps, trace.num_shards) == (2, 2)
        assert trace.tensors(1, "sums") == ["a/kernel"]
        np.testing.assert_array_equal(trace.read(1, "gradients", 1, "a/kernel"), np.ones(3))
        loss = trace.read(2, "loss", 1, "loss")
        assert loss == 3 and loss.shape == ()
        np.testing.assert_array_equal(trace.read(2, "updates", 1, "a/kernel"), np.ones(3))
        with pytest.raises(KeyError):
            trace.read(1, "sums", 0, "b/kernel")
    stored = load_file(tmp_path / "a" / "step-00002.safetensors")
    np.testing.assert_array_equal(stored["weights/0/a/kernel"], np.full(3, 2))


def test_replicas_that_hold_the_same_bits_are_stored_once(tmp_path):
    with write_trace(tmp_path / "a") as trace:
        assert trace.replicas(1, "sums", "a/kernel") == [0]
        assert trace.replicas(1, "gradients", "a/kernel") == [0, 1]
        np.testing.assert_array_equal(trace.read(1, "sums", 1, "a/kernel"), np.ones(3))


def test_examples_are_told_by_image_and_label():
    images = np.arange(2 * 4, dtype=np.uint8).reshape(2, 2, 2, 1)
    first = hash_examples(images, np.array([3, 4]))
    assert len(set(first)) == 2
    assert first[0] == hash_examples(images[:1], np.array([3], np.int32))[0]
    assert first[0] != hash_examples(images[:1], np.array([4]))[0]


def test_pairs_find_every_difference(tmp_path):
    first, second = write_trace(tmp_path / "a"), write_trace(tmp_path / "b")
    assert all(d.identical for d in compare_traces(first, second))
    with write_trace(tmp_path / "c", scale=1.5) as third:
        apart = [d for d in compare_traces(first, third) if not d.identical]
    assert {(d.step, d.kind) for d in apart} == {
        (1, "sums"), (1, "weights"), (1, "updates"), (2, "sums"), (2, "weights"), (2, "updates"),
    }  # fmt: skip
    assert max(d.absolute for d in apart if d.kind == "weights") == 1.0
    # Another update, from other weights to the same ones.
    with TraceWriter(tmp_path / "e") as trace:
        trace.write(0, "weights", [{"a/kernel": np.ones(3, np.float32)}] * 2)
        write_step(trace, 1)
    apart = [d for d in compare_traces(first, Trace(tmp_path / "e")) if not d.identical]
    assert [(d.step, d.kind) for d in apart] == [(0, "weights"), (1, "updates")]
    # Of other numbers of replicas, what they share.
    alone = write_trace(tmp_path / "d", num_replicas=1)
    kinds = {d.kind: d for d in compare_traces(first, alone) if d.step == 1}
    assert set(kinds) == {"loss", "sums", "weights", "updates"}
    assert kinds["loss"].absolute == 2 and kinds["sums"].identical  # 1 + 2 against 1.


def test_a_trace_of_another_program_is_read(tmp_path):
    """It needs nothing but the names."""
    (tmp_path / "a").mkdir()
    weights = {"weights/0/b": np.zeros(2, np.float32), "weights/0/a": np.ones((), np.float32)}
    save_file(weights, tmp_path / "a" / "step-00000.safetensors")
    examples = {f"examples/{r}/examples": np.int64([r]) for r in range(2)}
    save_file(weights | examples, tmp_path / "a" / "step-00001.safetensors")
    trace = Trace(tmp_path / "a")
    assert (trace.num_steps, trace.num_shards) == (1, 2)
    assert trace.tensors(1, "weights") == ["a", "b"]
    assert trace.read(1, "updates", 1, "a") == 0


def cut(path):
    os.truncate(path / "step-00002.safetensors", 100)


def replace_by_link(path):
    (path / "step-00002.safetensors").rename(path / "elsewhere")
    (path / "step-00002.safetensors").symlink_to("elsewhere")


def replace_by_pipe(path):
    (path / "step-00002.safetensors").unlink()
    os.mkfifo(path / "step-00002.safetensors")


def without_first_step(path):
    (path / "step-00001.safetensors").unlink()


def misname(path):
    save_file({"weights/first/conv1/kernel": np.zeros(2)}, path / "step-00002.safetensors")


def empty(path):
    for file in path.iterdir():
        file.unlink()


@pytest.mark.parametrize(
    "damage", [cut, replace_by_link, replace_by_pipe, without_first_step, misname, empty]
)
def test_a_damaged_trace_is_refused_in_a_line(tmp_path, damage):
    write_trace(tmp_path / "a")
    damage(tmp_path / "a")
    with pytest.raises(DataError, match=r"a: not a complete trace \(.+\); record it again"):
        Trace(tmp_path / "a")


def test_damage_that_comes_later_is_told_as_well(tmp_path):
    trace = write_trace(tmp_path / "a")
    cut(tmp_path / "a")
    with pytest.raises(DataError, match="not a complete trace"):
        trace.read(2, "weights", 0, "a/kernel")


def test_a_trace_is_replaced_and_a_full_disk_told(tmp_path, monkeypatch):
    write_trace(tmp_path / "a")
    with TraceWriter(tmp_path / "a") as trace:
        write_step(trace, 1)
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["step-00001.safetensors"]

    def full(*_, **__):
        raise array_files.SafetensorError(f"I/O error: {os.strerror(28)} (os error {errno.ENOSPC})")

    monkeypatch.setattr(array_files, "save_file", full)
    with pytest.raises(DiskFullError, match="a: No space left"):
        write_trace(tmp_path / "a")


def test_an_error_is_not_hidden_by_what_was_left_to_write(tmp_path, monkeypatch):
    monkeypatch.setattr(array_files, "save_file", None)
    with pytest.raises(ZeroDivisionError), TraceWriter(tmp_path / "a") as trace:
        write_step(trace, 1)
        trace.write(1, "loss", [{"loss": np.float32(1 / int("0"))}])
