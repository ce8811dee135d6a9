"""`doctor`: what it finds out about machine, data, output and TensorFlow, and advises."""

import os
import shlex

import pytest

from app.commands import doctor
from app.options import parse_command_line
from tests.conftest import run_main
from tests.in_process import run_here, run_here_ok

pytestmark = pytest.mark.usefixtures("no_data")


@pytest.fixture
def examined(monkeypatch, tmp_path):
    """Runs `doctor` in a folder, without TensorFlow's check of two devices unless it is given."""
    monkeypatch.chdir(tmp_path)

    def answer(channel, config):
        channel.send((doctor.OK, "9.9"))
        channel.send((doctor.OK, "/device:CPU:0"))

    def run(*words, examine=answer):
        monkeypatch.setattr(doctor, "examine_tensorflow", examine)
        result = run_here("doctor", *words)
        assert list(tmp_path.iterdir()) == []
        return result, result.stdout.splitlines()[-1]

    return run


def check_line(line):
    words = shlex.split(line)
    parse_command_line(["main.py", *words[2:]])
    return words[2:]


def test_missing_data_is_a_warning_unless_it_is_asked_for(examined):
    result, line = examined()
    assert result.returncode == 0 and "! Fashion-MNIST" in result.stdout
    assert "GENERATED" in result.stdout and "--recipe=fast" in check_line(line)
    result, line = examined("--dataset=fashion_mnist")
    assert result.returncode == 3 and "✗ Fashion-MNIST" in result.stdout
    assert "--dataset=synthetic" in check_line(line)  # What is broken is not advised.


def test_a_directory_that_cannot_be_used_is_an_error_with_another_one_to_use(examined):
    result, line = examined("--dataset=synthetic", f"--out={__file__}/run")
    assert result.returncode == 5 and "✗ output" in result.stdout and __file__ not in line
    assert any(word.startswith("--out=") for word in check_line(line))


def test_packages_are_compared_with_their_pins(examined, monkeypatch, tmp_path_factory):
    pins = tmp_path_factory.mktemp("pins") / "requirements.txt"
    monkeypatch.setattr(doctor, "REQUIREMENTS", pins)
    pins.write_text("numpy==0.1\n")
    result, _ = examined("--dataset=synthetic")
    assert result.returncode == 0 and "! versions" in result.stdout
    pins.write_text("no-such-package==0.1\n")
    result, line = examined("--dataset=synthetic")
    assert result.returncode == 6 and "is not installed; " in result.stderr
    assert "pip install -r" in line


def test_an_all_reduce_that_hangs_is_ended(examined, monkeypatch):
    def hang(channel, config):
        for text in ("9.9", "/device:GPU:0, /device:GPU:1"):
            channel.send((doctor.OK, text))
        channel.receive()

    monkeypatch.setattr(doctor, "TIMEOUT_SEC", 0.5)
    result, line = examined("--dataset=synthetic", "--strategies=manual", examine=hang)
    assert result.returncode == 6 and "manual did not end within 0.5 s" in result.stderr
    assert "--strategy=single" in check_line(line)


def test_the_command_on_this_machine():
    words = "doctor", "--dataset=synthetic", "--device=cpu"
    result = run_here_ok(*words)
    for name in ("manual", "mirrored"):
        assert f"✓ {name:<14} all-reduce reduce_to_one adds every replica once" in result.stdout
    assert result.stderr == ""
    check_line(result.stdout.splitlines()[-1])
    # TensorFlow's own loses the last of an odd number.
    words = *words, "--num_devices=3", "--strategies=mirrored", "--all_reduce=hierarchical"
    result = run_here(*words)
    assert result.returncode == 6
    assert "✗ mirrored" in result.stdout and "replica 2 was lost" in result.stdout


def test_tensorflow_that_cannot_be_loaded_is_a_finding(tmp_path):
    (tmp_path / "tensorflow").mkdir()
    fails = "import os; os.write(2, b'NumPy 1 is needed'); raise ImportError('GLIBCXX_9 missing')"
    (tmp_path / "tensorflow" / "__init__.py").write_text(fails)
    paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    result = run_main("doctor", "--dataset=synthetic", env={"PYTHONPATH": paths})
    assert result.returncode == 6
    assert "NumPy 1 is needed" in result.stderr  # What the libraries say is held back until then.
    assert "TensorFlow cannot be loaded (GLIBCXX_9 missing)" in result.stderr
    assert "✗ TensorFlow " in result.stdout
    assert "pip install -r " in result.stdout.splitlines()[-1]
