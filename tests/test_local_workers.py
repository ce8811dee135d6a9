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
from app.runtime.errors import DeviceError, PeerLostError
from app.runtime.shown_command import shown_python
from conftest import program_environment
from in_process import run_here_ok

_TIMEOUT_SEC = 120
WORKERS = "--strategy=multi_worker", "--num_workers=2"


@pytest.fixture(autouse=True)
def _small(small_lenet):
    """Of the processes, `small_program` has a small LeNet, too."""


def flags(small_data, out):
    return [
        *("--dataset=fashion_mnist", f"--data_dir={small_data}", "--allow_unverified_data"),
        *("--num_train_examples=400", "--global_batch_size=20", "--epochs=2", "--recipe=fast"),
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


def worker_pids(launcher):
    """Returns index → process of the workers that are there now."""
    listed = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(launcher.pid)], capture_output=True, text=True
    )
    pids = {}
    for pid in listed.stdout.split():
        with contextlib.suppress(OSError):
            environment = pathlib.Path(f"/proc/{pid}/environ").read_text()
            if found := re.search(r"TF_CONFIG=([^\0]*)", environment):
                pids[json.loads(found[1])["task"]["index"]] = int(pid)
    return pids


def wait_until(condition):
    deadline = time.monotonic() + _TIMEOUT_SEC
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_alive(pid):
    with contextlib.suppress(OSError):
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.fixture(scope="module")
def undisturbed(small_program, small_data, tmp_path_factory):
    out = tmp_path_factory.mktemp("launch") / "run"
    with launched(small_program, small_data, out) as launcher:
        text, _ = launcher.communicate(timeout=_TIMEOUT_SEC)
    assert launcher.returncode == 0, text
    assert "worker 1: training" in text
    assert text.splitlines()[-1].startswith("test acc: ") and text.count("test acc: ") == 1
    return load_summary(out)


def test_a_cluster_is_one_training(undisturbed, small_program, small_data, tmp_path):
    assert undisturbed.num_replicas == 2
    assert undisturbed.num_test_examples == 200
    assert undisturbed.steps == 40
    run_here_ok(
        *("train", "--strategy=manual", "--num_devices=2"), *flags(small_data, tmp_path / "manual")
    )
    assert load_summary(tmp_path / "manual").weights_sha256 == undisturbed.weights_sha256


@pytest.mark.parametrize("index", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_killed_worker_costs_a_restart(undisturbed, small_program, small_data, tmp_path, index):
    out = tmp_path / "run"
    with launched(small_program, small_data, out) as launcher:
        wait_until(lambda: (out / "checkpoints" / "step-00000005-epoch-0000").exists())
        os.kill(worker_pids(launcher)[index], signal.SIGKILL)
        text, _ = launcher.communicate(timeout=_TIMEOUT_SEC)
    assert launcher.returncode == 0, text
    assert f"worker {index} ended with code 137" in text
    assert "restart 1 of 3" in text
    assert load_summary(out).weights_sha256 == undisturbed.weights_sha256


def test_the_death_of_the_starter_leaves_nothing(small_program, small_data, tmp_path):
    out = tmp_path / "run"
    with launched(small_program, small_data, out) as launcher:
        wait_until(lambda: (out / "checkpoints" / "step-00000005-epoch-0000").exists())
        pids = worker_pids(launcher)
        assert set(pids) == {0, 1}
        environment = pathlib.Path(f"/proc/{pids[0]}/environ").read_text()
        ports = [int(port) for port in re.findall(r"127\.0\.0\.1:(\d+)", environment)]
        os.kill(pids[1], signal.SIGSTOP)  # One that could not end by itself.
        launcher.kill()
        launcher.wait()
        wait_until(lambda: not any(is_alive(pid) for pid in pids.values()))
        assert len(ports) == 2 and all(map(local_workers._is_free, ports))


@pytest.mark.slow
def test_a_stop_is_passed_on_and_all_of_them_save(undisturbed, small_program, small_data, tmp_path):
    out = tmp_path / "run"
    with launched(small_program, small_data, out) as launcher:
        wait_until(lambda: (out / "checkpoints" / "step-00000005-epoch-0000").exists())
        launcher.send_signal(signal.SIGTERM)
        text, _ = launcher.communicate(timeout=_TIMEOUT_SEC)
    assert launcher.returncode == 143, text
    assert f"the state is saved; resume with: {shown_python()}" in text
    assert "--num_workers=2" in text.splitlines()[-1]
    with launched(small_program, small_data, out) as launcher:
        text, _ = launcher.communicate(timeout=_TIMEOUT_SEC)
    assert launcher.returncode == 0, text
    assert "resuming after" in text
    assert load_summary(out).weights_sha256 == undisturbed.weights_sha256


@pytest.mark.slow
def test_what_another_try_does_not_mend_ends_it(small_program, small_data, tmp_path):
    with launched(small_program, small_data, tmp_path / "run", "--learning_rate=1e30") as launcher:
        text, _ = launcher.communicate(timeout=_TIMEOUT_SEC)
    assert launcher.returncode == 7, text
    assert "restart" not in text
    assert text.splitlines()[-1].startswith("error: worker ")


@pytest.mark.parametrize(
    ("codes", "index", "code"),
    [
        ([138, 137], 1, 137),
        ([134, 3], 1, 3),
        ([137, 8], 1, 8),
        ([138, None], 0, 138),
        ([None, 2], 1, 2),
        ([0, 138], 0, 0),  # Worker 0 has saved everything.
        ([0, 0], 0, 0),
    ],
)
def test_the_original_failure_counts(codes, index, code):
    assert find_culprit(codes) == (index, code)


CONFIG = Config.of(strategy="multi_worker", device="cpu", num_devices=1)


def test_cores_are_split(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 2, 4, 6})
    assert split_resources(2, CONFIG) == [Resources((0, 2), None), Resources((4, 6), None)]
    six = split_resources(6, CONFIG)
    assert [share.cores for share in six] == [(0,), (2,), (4,), (6,), (0,), (2,)]


def test_gpus_are_split(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1,GPU-abc")
    config = Config.of(strategy="multi_worker", num_devices=1)
    assert [share.gpus for share in split_resources(3, config)] == ["3", "1", "GPU-abc"]
    with pytest.raises(DeviceError, match="needs 4 GPUs, found 3"):
        split_resources(4, Config.of(strategy="multi_worker"))


def test_ports_are_free_and_differ():
    ports = free_ports(8)
    assert len({*ports}) == 8 and all(map(local_workers._is_free, ports))
    with socket.create_server(("127.0.0.1", ports[0])):
        assert not local_workers._is_free(ports[0])


def test_another_port_is_chosen_if_one_was_taken(monkeypatch, tmp_path):
    """The process that took it was faster than the worker, which refuses to share it."""
    attempts = []

    def run_all(words, clusters, shares):
        attempts.append(clusters[0].addresses)
        return (0, 0) if len(attempts) > 1 else (1, 2)

    monkeypatch.setattr(local_workers, "_run_all", run_all)
    monkeypatch.setattr(local_workers, "free_ports", lambda count: [1 + len(attempts), 5])
    monkeypatch.setattr(local_workers, "_is_free", lambda port: port != 1)
    local_workers.train_with_local_workers(CONFIG, 2, tmp_path)
    assert attempts == [("127.0.0.1:1", "127.0.0.1:5"), ("127.0.0.1:2", "127.0.0.1:5")]


@pytest.mark.parametrize("max_restarts", [0, 2])
def test_workers_are_restarted_as_often_as_asked(monkeypatch, tmp_path, max_restarts):
    starts = []
    monkeypatch.setattr(local_workers, "_run_all", lambda *_: starts.append(1) or (1, 137))
    monkeypatch.setattr(local_workers.time, "sleep", lambda sec: None)
    config = Config.of("train", strategy="multi_worker", max_restarts=max_restarts)
    with pytest.raises(PeerLostError, match=rf"worker 1 .* 137, after {max_restarts} restarts"):
        local_workers.train_with_local_workers(config, 2, tmp_path)
    assert len(starts) == max_restarts + 1
