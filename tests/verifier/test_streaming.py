"""Recordings are written while the training runs; one that was not finished says so."""

import concurrent.futures
import errno
import subprocess
import sys
import zipfile
from unittest import mock

import numpy as np
import pytest

from lockstep import __main__ as command
from lockstep.data.file import Writer, load, save
from lockstep.recorders.output import Output
from tests.verifier import trace_samples
from tests.verifier.recorder_scripts import ROOT

UNFINISHED = (
    ": the recording was not finished: the training was killed or is still running, the disk was"
    " full, or the file is truncated; record it again\n"
)


def verdict(capsys, *paths):
    """Returns the exit code of the command, and what it prints."""
    code = command.main([*map(str, paths)])
    printed = capsys.readouterr()
    return code, printed.out + printed.err


def array(seed, size=1000):
    return np.random.default_rng(seed).normal(size=size).astype(np.float32)


@pytest.mark.parametrize("size", [0, 5_000])
def test_a_file_that_is_still_being_written_says_so(size, tmp_path, capsys):
    path = tmp_path / "one.npz"
    writer = Writer(path)
    for number in range(3 * (size > 0)):
        writer[f"1/before/0/{number}"] = array(number, size)
    assert verdict(capsys, path) == (3, f"error: {path}{UNFINISHED}")
    del writer  # As at the end of a process that was not killed; no index is written.
    assert verdict(capsys, path) == (3, f"error: {path}{UNFINISHED}")


def test_arrays_that_get_no_name_are_not_read(tmp_path):
    path, about = tmp_path / "one.npz", trace_samples.trace().about
    with Writer(path) as writer:
        forgotten, kept = (writer.add("data/0/0", array(seed)) for seed in range(2))
        writer["1/data/0/0"] = kept
        assert kept != forgotten
        writer["1/loss/0/0"] = np.float32(1)
        writer.close(about, lambda name: name.replace("data", "mask"))
    assert [*load(path).stored()] == ["1/loss/0/0", "1/mask/0/0"]
    np.testing.assert_array_equal(load(path).arrays(0, "mask", 0)[0], array(1))


def test_a_variable_with_the_bits_of_its_latest_array_is_written_once(tmp_path):
    path, zeros = tmp_path / "one.npz", np.zeros(3, np.float32)
    with Writer(path) as writer:
        first = writer.add("before/0/1", zeros)
        same = [("after/0/1", zeros), ("before/1/1", zeros.copy())]  # Of another copy of weights.
        assert all(writer.add(*each) == first for each in same)
        others = [
            ("after/0/2", zeros), ("raw/0/1", zeros), ("data/0/1", zeros), ("data/0/1", zeros),
            ("after/0/1", -zeros), ("after/0/1", zeros.view(np.int32)), ("after/0/1", zeros[None]),
            ("after/0/1", zeros),
        ]  # fmt: skip
        members = [writer.add(*each) for each in others]
        assert len({first.name, *(member.name for member in members)}) == 1 + len(others)
        writer.forget()
        assert writer.add("after/0/1", zeros) != members[-1]
        last = writer.add("after/0/3", zeros)
        zeros += 1  # As the next step does; what is written has a copy.
        assert writer.add("after/0/3", zeros) != last
        writer["1/loss/0/0"], writer["1/data/0/0"] = np.float32(1), members[4]
        writer.close(trace_samples.trace().about)
    np.testing.assert_array_equal(np.signbit(load(path).arrays(0, "data", 0)[0]), True)


def test_several_threads_write_one_file(tmp_path):
    """Autograd has a thread for each GPU, in which hooks add arrays."""
    path = tmp_path / "one.npz"
    output = Output(str(path))
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        added = list(pool.map(lambda seed: output.add("raw/0/0", array(seed, 50_000)), range(120)))
    assert not output.has_failed and len({member.name for member in added}) == 120
    output.close({})
    with zipfile.ZipFile(path) as file:
        assert file.testzip() is None


def test_an_error_of_the_file_is_one_line_and_no_exception(tmp_path, capsys):
    (tmp_path / "one.npz").mkdir()
    output = Output(str(tmp_path / "one.npz"))
    output.put("1/loss/0/0", np.ones(1))
    assert output.add("data/0/0", np.ones(1)) is None and output.has_failed
    output.close({})
    error = f"lockstep: {tmp_path}/one.npz: cannot be written (Is a directory); the training is not"
    assert capsys.readouterr().err == f"{error} recorded\n"


def test_a_full_disk_leaves_an_empty_file_and_one_line(tmp_path, capsys, monkeypatch):
    full, path = OSError(errno.ENOSPC, "No space left on device"), tmp_path / "one.npz"
    output = Output(str(path))
    assert output.add("data/0/0", array(0)) is not None and path.stat().st_size > 4000
    monkeypatch.setattr(Writer, "_write", mock.Mock(side_effect=full))
    assert output.add("data/0/1", array(1)) is None and output.has_failed
    output.close({})
    assert capsys.readouterr().err.count("(No space left on device)") == 1
    assert path.stat().st_size == 0 and verdict(capsys, path) == (3, f"error: {path}{UNFINISHED}")


HOLD = """
import numpy, sys
from lockstep.recorders.output import Output
output = Output(sys.argv[1])
output.add("data/0/0", numpy.ones(1))
print("open", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs locks of files")
def test_two_processes_cannot_write_one_file(tmp_path):
    path = str(tmp_path / "one.npz")
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, path], cwd=ROOT, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdout.readline() == "open\n"
        with pytest.raises(ValueError, match="another process writes this file; give each its own"):
            Output(path).add("data/0/0", np.ones(1))
        process.kill()
    output = Output(path)
    assert output.add("data/0/0", np.ones(1)) is not None and not output.has_failed


def test_an_older_recording_stays_until_the_first_array_of_the_new_one(tmp_path, capsys):
    path = tmp_path / "one.npz"
    save(trace_samples.trace(), path)
    older, bits = load(path), path.read_bytes()
    output = Output(str(path))
    assert path.read_bytes() == bits
    with pytest.raises(ValueError, match="an array of complex64 cannot be recorded"):
        output.add("data/0/0", np.ones(2, np.complex64))
    output.add("data/0/0", np.ones(2, np.float32))
    assert verdict(capsys, path) == (3, f"error: {path}{UNFINISHED}")
    assert older.arrays(0, "before", 0) is not None  # Who has opened it can read it.
