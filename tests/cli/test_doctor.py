"""Tests `doctor`: each check on a simulated machine, and the command on the actual one."""

import importlib.metadata
import os
import pathlib
import shlex

import pytest

from app.commands import doctor
from app.data.data_sources import DOWNLOAD_URL
from app.doctor import machine, tensorflow_check
from app.doctor.machine import ERROR, NOTE, OK, WARNING, Check, check_data, check_output
from app.doctor.tensorflow_check import TensorFlowCheck, check_tensorflow
from app.options import Config
from app.runtime.errors import DeviceError
from tests.conftest import run_main, run_ok
from tests.in_process import parse_here, run_here
from tests.training import process_functions


def config(**options):
    return Config.of("doctor", strategies=("manual", "mirrored"), **options)


CONFIG = config()
CPUS, GPUS = ["/device:CPU:0", "/device:CPU:1"], ["/device:GPU:0", "/device:GPU:1"]
BOTH = TensorFlowCheck([], True, CPUS, ["manual", "mirrored"])


@pytest.fixture(autouse=True)
def places(tmp_path, monkeypatch):
    """No data and no server, unless a test says otherwise."""
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "tfds"))
    monkeypatch.delenv("FASHION_MNIST_DIR", raising=False)

    def refuse(url, timeout_sec):
        raise OSError("Network is unreachable")

    monkeypatch.setattr(machine, "check_connection", refuse)


def test_packages_are_compared_with_their_pins(tmp_path, monkeypatch):
    path = tmp_path / "requirements.txt"
    path.write_text("# needed\nright==1.2\nextra[all]==3 ; python_version > '3'\nolder==2.0\nno==1")

    def find_version(name):
        if name == "no":
            raise importlib.metadata.PackageNotFoundError(name)
        return {"right": "1.2", "extra": "3", "older": "1.9"}[name]

    monkeypatch.setattr(importlib.metadata, "version", find_version)
    _, right, older, absent = machine.check_software(path)
    assert (right.mark, right.value) == (OK, "right 1.2, extra 3")
    assert (older.mark, older.value, older.error) == (WARNING, "1.9", None)
    assert absent.error.exit_code == 6 and "no==1 is not installed" in absent.value
    assert "pip install -r " in older.advice and "pip install -r " in absent.advice


def test_data(tmp_path, small_data, monkeypatch):
    assert check_data(config(data_dir=str(tmp_path / "none"))).error.exit_code == 3
    missing = check_data(CONFIG)
    assert missing.mark == WARNING and "GENERATED" in missing.value
    assert "--data_dir" in missing.advice and list(tmp_path.iterdir()) == []
    assert check_data(config(dataset="fashion_mnist")).error.exit_code == 3
    assert check_data(config(dataset="synthetic")).mark == NOTE
    monkeypatch.setattr(machine, "check_connection", lambda url, timeout_sec: None)
    assert "downloads 30 MB" in check_data(CONFIG).value
    monkeypatch.setenv("FASHION_MNIST_DIR", str(small_data))
    found = check_data(config(allow_unverified_data=True))
    assert found.mark == WARNING and "UNVERIFIED" in found.value

    def forbid(path):
        raise PermissionError(13, "Permission denied", str(path))

    for expected in ("SHA-256", "Permission denied"):
        found = check_data(CONFIG)
        assert found.error.exit_code == 3 and expected in found.value
        monkeypatch.setattr(pathlib.Path, "is_file", forbid)


def test_tfds_downloads_from_where_the_connection_is_tried(tmp_path):
    import tensorflow_datasets as tfds

    assert tfds.builder("fashion_mnist", data_dir=tmp_path).URL == DOWNLOAD_URL


def test_output_directory_memory_and_disk(tmp_path, monkeypatch):
    check = check_output(config(out=str(tmp_path / "a" / "b")))
    assert check.mark == OK and str(tmp_path) in check.value and list(tmp_path.iterdir()) == []
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "file").touch()
    for name in (tmp_path / "theirs" / "file" / "run", tmp_path / "theirs", "~no-such-user/run"):
        assert check_output(config(out=str(name))).error.exit_code == 5, name
    for pages, mark in ((1 << 18, WARNING), (3 << 18, OK)):
        sizes = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": pages}
        with monkeypatch.context() as patch:
            patch.setattr(machine.os, "sysconf", sizes.__getitem__)
            patch.setattr(machine, "num_cores", lambda: 2)
            assert machine.check_processor().mark == mark
    for free, mark in ((1 << 20, ERROR), (100 << 20, WARNING), (1 << 30, OK)):
        room = os.statvfs_result((1024, 1024, 0, 0, free // 1024, 0, 0, 0, 0, 255))
        monkeypatch.setattr(machine.os, "statvfs", lambda path, room=room: room)
        check = check_output(config(out=str(tmp_path / "run")))
        assert check.mark == mark and (mark != ERROR or check.error.exit_code == 8)


def test_an_all_reduce_that_hangs_is_ended(monkeypatch):
    monkeypatch.setattr(tensorflow_check, "TIMEOUT_SEC", 5.0)
    found = check_tensorflow(CONFIG, process_functions.hang_in_all_reduce)
    assert found.working == ["manual"] and found.devices == GPUS
    (hung,) = found.checks
    assert hung.what == "mirrored" and hung.error.exit_code == 6
    assert "did not end within 5 s" in hung.value and "NCCL_P2P_DISABLE=1" in hung.advice
    line = doctor.what_to_run(CONFIG, found, has_data=True, out=Check("output", ""))
    assert line.endswith("--strategy=manual --num_gpus=2 --recipe=fast --epochs=10")


@pytest.mark.parametrize(
    ("end", "code"),
    [("vanish_in_examination", 6), ("fail_in_examination", 6), ("refuse_in_examination", 8)],
)
def test_whatever_ends_the_examination_is_a_finding(end, code):
    found = check_tensorflow(CONFIG, getattr(process_functions, end))
    assert found.checks[-1].error.exit_code == code and not found.working


def test_what_to_run():
    mirrored = TensorFlowCheck([], True, GPUS, ["mirrored"])
    for options, found, words in (
        ({}, TensorFlowCheck([], True, GPUS[:1]), "--strategy=single --recipe=fast --epochs=10"),
        ({"device": "cpu", "num_devices": 4, "data_dir": "a b"}, BOTH, "--strategy=manual"
         " --num_devices=4 --device=cpu --recipe=fast --epochs=1 '--data_dir=a b'"),
        ({"out": "runs/x", "all_reduce": "ring"}, mirrored, "--strategy=mirrored --num_gpus=2"
         " --all_reduce=ring --recipe=fast --epochs=10 --out=runs/x"),
        ({"device": "gpu", "num_gpus": 3}, TensorFlowCheck([], True), "--strategy=single"
         " --device=cpu --recipe=fast --epochs=1"),
    ):  # fmt: skip
        line = doctor.what_to_run(config(**options), found, has_data=True, out=Check("output", ""))
        assert line.partition("main.py ")[2] == words
        parse_here(*shlex.split(line)[2:])


@pytest.mark.parametrize(
    ("options", "found", "code"),
    [
        ({}, BOTH, 0),
        ({"data_dir": "/none", "out": f"{__file__}/run"}, BOTH, 3),
        ({}, TensorFlowCheck([Check.of_error("TensorFlow", DeviceError("a; c"))]), 6),
    ],
)
def test_all_is_printed_and_the_first_error_ends_it(monkeypatch, tmp_path, options, found, code):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor, "check_tensorflow", lambda config: found)
    result = run_here("doctor", *(f"--{name}={value}" for name, value in options.items()))
    assert result.returncode == code and (ERROR in result.stdout) == (code != 0)
    *_, title, line = result.stdout.splitlines()
    assert title == "What to run" and list(tmp_path.iterdir()) == []
    assert ("pip install -r" in line) == (not found.has_tensorflow)
    assert "/none" not in line and __file__ not in line  # What is broken is not advised.


def test_the_command_on_this_machine(tmp_path):
    result = run_ok("doctor", "--dataset=synthetic", cwd=tmp_path)
    for name in ("manual", "mirrored"):
        assert f"✓ {name:<14} all-reduce reduce_to_one adds every replica once" in result.stdout
    assert result.stderr == "" and list(tmp_path.iterdir()) == []
    parse_here(*shlex.split(result.stdout.splitlines()[-1])[2:])


def test_a_sum_that_loses_a_replica_is_found():
    result = run_here(
        *("doctor", "--device=cpu", "--num_devices=3", "--dataset=synthetic"),
        *("--strategies=mirrored", "--all_reduce=hierarchical"),
    )
    assert result.returncode == 6
    assert "✗ mirrored" in result.stdout and "replica 2 was lost" in result.stdout
    assert result.stderr.splitlines()[-1].startswith("error: all-reduce hierarchical of mirrored")


def test_tensorflow_that_cannot_be_loaded_is_a_finding(tmp_path):
    (tmp_path / "tensorflow").mkdir()
    (tmp_path / "tensorflow" / "__init__.py").write_text("raise ImportError('GLIBCXX_9 missing')")
    paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    result = run_main("doctor", "--dataset=synthetic", env={"PYTHONPATH": paths})
    assert result.returncode == 6
    assert "TensorFlow cannot be loaded (GLIBCXX_9 missing)" in result.stderr
    assert "✗ TensorFlow " in result.stdout
    assert "pip install -r " in result.stdout.splitlines()[-1]
