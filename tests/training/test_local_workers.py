"""`train --num_workers`: workers on this machine that survive the loss of one."""

import contextlib
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time

import pytest

from app.devices import local_workers
from app.devices.local_workers import Resources, find_culprit, free_ports, split_resources
from app.options import Config
from app.records.history import load_summary
from app.runtime.errors import DeviceError, LockstepError, PeerLostError
from app.runtime.shown_command import shown_python
from models import MODELS
from tests.conftest import program_environment
from tests.in_process import run_here_ok

_TIMEOUT_SEC = 120
WORKERS = "--strategy=multi_worker", "--num_workers=2"


def flags(small_data, out):
    return [
        *("--dataset=fashion_mnist", f"--data_dir={small_data}", "--allow_unverified_data"),
        *("--num_train_examples=400", "--global_batch_size=20", "--epochs=2", "--recipe=d2l"),
        *("--device=cpu", "--deterministic", "--checkpoint_every=5"),
        f"--out={out}",
    ]


@contextlib.contextmanager
def launched(program, small_data, out, *more):
    """Starts the launcher; whatever happens, it is gone in the end, and its workers with it."""
    with subprocess.Popen(
        [sys.executable, program / "main.py", "train", *WORKERS, *flags(small_data, out), *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=program_environment(),
    ) as launcher:
        try:
            yield launcher
        finally:
            launcher.kill()


def finish(launcher, code=0):
    text, _ = launcher.communicate(timeout=_TIMEOUT_SEC)
    assert launcher.returncode == code, text
    return text


def environments(launcher):
    """Returns process → environment of the workers that are there now, by their indices."""
    listed = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(launcher.pid)], capture_output=True, text=True
    )
    found = {}
    for pid in listed.stdout.split():
        with contextlib.suppress(OSError):
            environment = pathlib.Path(f"/proc/{pid}/environ").read_text()
            if match := re.search(r"TF_CONFIG=([^\0]*)", environment):
                found[json.loads(match[1])["task"]["index"]] = int(pid), environment
    return found


def wait_until(condition):
    deadline = time.monotonic() + _TIMEOUT_SEC
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def wait_for_checkpoint(out):
    wait_until(lambda: (out / "checkpoints" / "step-00000005-epoch-0000.safetensors").exists())


def is_alive(pid):
    with contextlib.suppress(OSError):
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.fixture(scope="module")
def expected(small_data, tmp_path_factory):
    """The weights of the same training in this process."""
    out = tmp_path_factory.mktemp("manual") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MODELS, "lenet", "tests.dense_network:build_dense_network")
        run_here_ok("train", "--strategy=manual", "--num_devices=2", *flags(small_data, out))
    return load_summary(out).weights_sha256


@pytest.mark.parity
def test_a_cluster_is_one_training(expected, small_program, small_data, tmp_path):
    out = tmp_path / "run"
    with launched(small_program, small_data, out) as launcher:
        text = finish(launcher)
    assert "worker 1: training" in text
    assert text.splitlines()[-1].startswith("test acc: ") and text.count("test acc: ") == 1
    summary = load_summary(out)
    assert (summary.num_replicas, summary.num_test_examples, summary.steps) == (2, 200, 40)
    assert summary.weights_sha256 == expected


@pytest.mark.slow
@pytest.mark.parity
def test_a_stop_is_passed_on_and_a_killed_worker_costs_a_restart(
    expected, small_program, small_data, tmp_path
):
    out = tmp_path / "run"
    with launched(small_program, small_data, out) as launcher:
        wait_for_checkpoint(out)
        launcher.send_signal(signal.SIGTERM)
        text = finish(launcher, 143)
    assert f"the state is saved; resume with: {shown_python()}" in text
    assert "--num_workers=2" in text.splitlines()[-1]
    with launched(small_program, small_data, out) as launcher:
        wait_until(lambda: len(environments(launcher)) == 2)
        os.kill(environments(launcher)[0][0], signal.SIGKILL)
        text = finish(launcher)
    assert "worker 0 ended with code 137" in text
    assert "restart 1 of 3" in text and "resuming after" in text
    assert load_summary(out).weights_sha256 == expected


@pytest.mark.slow
def test_the_death_of_the_starter_leaves_nothing(small_program, small_data, tmp_path):
    out = tmp_path / "run"
    with launched(small_program, small_data, out) as launcher:
        wait_for_checkpoint(out)
        found = environments(launcher)
        assert set(found) == {0, 1}
        ports = [int(port) for port in re.findall(r"127\.0\.0\.1:(\d+)", found[0][1])]
        os.kill(found[1][0], signal.SIGSTOP)  # A stopped process ends only by SIGKILL.
        launcher.kill()
        launcher.wait(_TIMEOUT_SEC)
        wait_until(lambda: not any(is_alive(pid) for pid, _ in found.values()))
        assert len(ports) == 2
        # The last thread of a process closes its ports, a moment after its first thread is gone.
        wait_until(lambda: all(map(local_workers._is_free, ports)))


def test_the_original_failure_counts():
    found = [find_culprit(codes) for codes in ([138, 137], [134, 3], [137, 8], [None, 138])]
    assert found == [(1, 137), (1, 3), (1, 8), (1, 138)]
    assert find_culprit([0, 138]) == (0, 0)  # Worker 0 has saved everything.


def test_cores_and_gpus_are_split(monkeypatch):
    on_cpus = Config.of(strategy="multi_worker", device="cpu", num_devices=1)
    on_gpus = Config.of(strategy="multi_worker", num_devices=1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 2, 4, 6})
    assert split_resources(2, on_cpus) == [Resources((0, 2), None), Resources((4, 6), None)]
    six = split_resources(6, on_cpus)
    assert [share.cores for share in six] == [(0,), (2,), (4,), (6,), (0,), (2,)]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1,GPU-abc")
    assert [share.gpus for share in split_resources(3, on_gpus)] == ["3", "1", "GPU-abc"]
    with pytest.raises(DeviceError, match="needs 4 GPUs, found 3"):
        split_resources(4, Config.of(strategy="multi_worker"))


def test_ports_are_free_and_differ():
    ports = free_ports(8)
    assert len({*ports}) == 8 and all(map(local_workers._is_free, ports))
    with socket.create_server(("127.0.0.1", ports[0])):
        assert not local_workers._is_free(ports[0])


@pytest.fixture
def train(monkeypatch, tmp_path):
    """A function that trains with workers whose starts have the exit codes of a list in turn.

    The second start writes the configuration. Returns the addresses and the words of each start,
    and the error.
    """

    def run(codes, **options):
        started, error = [], None

        def run_all(words, clusters, shares):
            started.append((clusters[0].addresses[0], words))
            if len(started) == 2:
                (tmp_path / "config.json").write_text("{}")
            return codes[min(len(started), len(codes)) - 1]

        monkeypatch.setattr(local_workers, "_run_all", run_all)
        monkeypatch.setattr(local_workers, "free_ports", lambda count: [1 + len(started), 5])
        config = Config.of("train", strategy="multi_worker", device="cpu", **options)
        try:
            local_workers.train_with_local_workers(config, 2, tmp_path)
        except LockstepError as raised:
            error = raised
        return started, error

    monkeypatch.setattr(local_workers.time, "sleep", lambda sec: None)
    monkeypatch.setattr(local_workers, "_is_free", lambda port: port != 1)
    return run


def test_another_port_is_chosen_if_one_was_taken(train):
    """The process that took it was faster than the worker, which refuses to share it."""
    started, error = train([(1, 2), (0, 0)])
    assert [address for address, _ in started] == ["127.0.0.1:1", "127.0.0.1:2"] and not error


@pytest.mark.parametrize(("code", "raised"), [(137, PeerLostError), (7, LockstepError)])
def test_workers_are_restarted_as_often_as_asked(train, code, raised):
    """What another try does not fix ends it."""
    started, error = train([(1, code)], max_restarts=2)
    assert type(error) is raised and error.exit_code == (138 if code > 128 else code)
    assert "worker 1 " in str(error) and str(code) in str(error)
    assert len(started) == (3 if code > 128 else 1)


def test_a_restart_does_not_overwrite_what_the_first_start_has_written(train):
    started, _ = train([(1, 137), (1, 137), (0, 0)], overwrite=True)
    assert ["--overwrite" in words for _, words in started] == [True, True, False]
