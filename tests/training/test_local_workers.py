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

from app.console import shown_python
from app.devices import local_workers
from app.devices.cluster import Cluster, find_cluster, wait_for_workers
from app.devices.local_workers import Share, find_culprit, split_machine
from app.devices.setup import set_up
from app.errors import ConfigError, DeviceError, LockstepError, PeerLostError
from app.options import Config
from app.records.history import load_summary
from models import MODELS
from tests.conftest import make_data_small, program_environment
from tests.in_process import run_here_ok

_TIMEOUT_SEC = 120
WORKERS = "--strategy=multi_worker", "--num_workers=2"


def flags(out):
    return [
        *("--dataset=synthetic", "--num_train_examples=400", "--global_batch_size=20"),
        *("--epochs=2", "--recipe=d2l", "--device=cpu", "--deterministic", "--checkpoint_every=5"),
        f"--out={out}",
    ]


@contextlib.contextmanager
def launched(program, out, *more):
    """Starts the launcher; whatever happens, it is gone in the end, and its workers with it."""
    with subprocess.Popen(
        [sys.executable, program / "main.py", "train", *WORKERS, *flags(out), *more],
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
def expected(tmp_path_factory):
    """The weights of the same training in this process."""
    out = tmp_path_factory.mktemp("manual") / "run"
    with pytest.MonkeyPatch.context() as patch:
        make_data_small(patch)
        patch.setitem(MODELS, "lenet", "tests.dense_network:build_dense_network")
        run_here_ok("train", "--strategy=manual", "--num_devices=2", *flags(out))
    return load_summary(out)["weights_sha256"]


@pytest.mark.parity
def test_a_cluster_is_one_training(expected, small_program, tmp_path):
    out = tmp_path / "run"
    with launched(small_program, out) as launcher:
        text = finish(launcher)
    assert "worker 1: training" in text
    assert text.splitlines()[-1].startswith("test acc: ") and text.count("test acc: ") == 1
    summary = load_summary(out)
    names = ("num_replicas", "num_test_examples", "steps")
    assert [summary[name] for name in names] == [2, 200, 40]
    assert summary["weights_sha256"] == expected


@pytest.mark.slow
@pytest.mark.parity
def test_a_stop_is_passed_on_and_a_killed_worker_costs_a_restart(expected, small_program, tmp_path):
    out = tmp_path / "run"
    with launched(small_program, out) as launcher:
        wait_for_checkpoint(out)
        launcher.send_signal(signal.SIGTERM)
        text = finish(launcher, 143)
    assert f"the state is saved; resume with: {shown_python()}" in text
    assert "--num_workers=2" in text.splitlines()[-1]
    with launched(small_program, out) as launcher:
        wait_until(lambda: len(environments(launcher)) == 2)
        os.kill(environments(launcher)[0][0], signal.SIGKILL)
        text = finish(launcher)
    assert "worker 0 ended with code 137" in text
    assert "restart 1 of 3" in text and "resuming after" in text
    assert load_summary(out)["weights_sha256"] == expected


@pytest.mark.slow
def test_the_death_of_the_starter_leaves_nothing(small_program, tmp_path):
    out = tmp_path / "run"
    with launched(small_program, out) as launcher:
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
        wait_until(lambda: all(map(is_free, ports)))


def is_free(port):
    with contextlib.suppress(OSError):
        socket.create_server(("127.0.0.1", port)).close()
        return True
    return False


def test_the_original_failure_counts():
    found = [find_culprit(codes) for codes in ([138, 137], [134, 3], [137, 8], [None, 138])]
    assert found == [(1, 137), (1, 3), (1, 8), (1, 138)]
    assert find_culprit([0, 138]) == (0, 0)  # Worker 0 has saved everything.


def test_cores_and_gpus_are_split(monkeypatch):
    on_cpus = Config.of(strategy="multi_worker", device="cpu", num_devices=1)
    on_gpus = Config.of(strategy="multi_worker", num_devices=1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 2, 4, 6})
    assert split_machine(2, on_cpus) == [Share((0, 2), None), Share((4, 6), None)]
    six = split_machine(6, on_cpus)
    assert [share.cores for share in six] == [(0,), (2,), (4,), (6,), (0,), (2,)]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1,GPU-abc")
    assert [share.gpus for share in split_machine(3, on_gpus)] == ["3", "1", "GPU-abc"]
    with pytest.raises(DeviceError, match="needs 4 GPUs, found 3"):
        split_machine(4, Config.of(strategy="multi_worker"))


@pytest.fixture
def train(monkeypatch, tmp_path):
    """A function that trains with workers whose starts have the exit codes of a list in turn.

    The second start writes the configuration. Returns the words of each start, and the error.
    """

    def run(codes, **options):
        started, error = [], None

        def run_all(words, shares):
            started.append(words)
            if len(started) == 2:
                (tmp_path / "config.json").write_text("{}")
            return codes[min(len(started), len(codes)) - 1]

        monkeypatch.setattr(local_workers, "_run_all", run_all)
        config = Config.of("train", strategy="multi_worker", device="cpu", **options)
        try:
            local_workers.train_with_local_workers(config, 2, tmp_path)
        except LockstepError as raised:
            error = raised
        return started, error

    monkeypatch.setattr(local_workers.time, "sleep", lambda sec: None)
    return run


@pytest.mark.parametrize(("code", "raised"), [(137, PeerLostError), (7, LockstepError)])
def test_workers_are_restarted_three_times(train, code, raised):
    """What another try does not fix ends it."""
    started, error = train([(1, code)])
    assert type(error) is raised and error.exit_code == (138 if code > 128 else code)
    assert "worker 1 " in str(error) and str(code) in str(error)
    assert len(started) == (4 if code > 128 else 1)


def test_a_restart_does_not_overwrite_what_the_first_start_has_written(train):
    started, _ = train([(1, 137), (1, 137), (0, 0)], overwrite=True)
    assert ["--overwrite" in words for words in started] == [True, True, False]


def test_a_worker_that_does_not_come_is_named_and_a_port_in_use_refused(capsys, monkeypatch):
    monkeypatch.setattr("app.devices.cluster._SEC_BETWEEN_LINES", 0.2)
    monkeypatch.setattr("app.devices.cluster._START_SEC", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.create_server(("", 0)) as free:
        addresses = [f"127.0.0.1:{each.getsockname()[1]}" for each in (free, taken)]
        free.close()
        taken_first = Cluster((addresses[1], addresses[0]), 0)
        with pytest.raises(ConfigError, match=rf"port of {addresses[1]}: Address already in use"):
            wait_for_workers(taken_first)
        taken.close()
        missing = f"worker 1 \\({addresses[1]}\\)"
        with pytest.raises(PeerLostError, match=f"timed out after 1 s waiting for {missing}"):
            wait_for_workers(Cluster(tuple(addresses), 0))
    assert f"waiting for worker 1 ({addresses[1]}), 0 s of 1 s" in capsys.readouterr().out


WORKER = {"worker": ["a:1", "b:2"]}


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ("{", "{"),
        ({"task": {}}, "cluster"),
        ({"cluster": {"worker": ["a"]}}, "'?a'?"),
        ({"cluster": {"worker": ["a:1", "a:1"]}}, "a:1"),
        ({"cluster": {"ps": ["a:1"]}}, "cluster"),
        ({"cluster": WORKER}, "task"),
        ({"cluster": WORKER, "task": {"type": "worker", "index": 2}}, "index.*2"),
    ],
)
def test_what_is_wrong_in_tf_config_is_named(config, told):
    text = config if isinstance(config, str) else json.dumps(config)
    with pytest.raises(ConfigError, match=f"^TF_CONFIG: .*{told}.*; "):
        find_cluster({"TF_CONFIG": text})


def test_another_number_of_workers_than_that_of_the_cluster_is_refused(monkeypatch):
    text = json.dumps({"cluster": WORKER, "task": {"type": "worker", "index": 0}})
    monkeypatch.setenv("TF_CONFIG", text)
    config = Config.of(strategy="multi_worker", num_workers=3)
    with pytest.raises(ConfigError, match="num_workers=3, but the cluster has 2 workers"):
        set_up(config)


def test_a_cluster_is_read_from_tf_config_and_from_slurm(monkeypatch):
    assert find_cluster({}) is None
    jobs = {"chief": ["c:3"], **WORKER}
    text = json.dumps({"cluster": jobs, "task": {"type": "worker", "index": 1}})
    assert find_cluster({"TF_CONFIG": text}) == Cluster(("c:3", "a:1", "b:2"), 2)
    slurm = {
        "SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NODELIST": "node[9-10]",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURMD_NODENAME": "node10", "SLURM_LOCALID": "0",
        "SLURM_JOB_ID": "7", "SLURM_NTASKS": "4",
    }  # fmt: skip
    for name, value in slurm.items():
        monkeypatch.setenv(name, value)
    found = find_cluster(slurm)
    assert len({*found.addresses}) == 4
    assert found.addresses[found.index].startswith("node10:")
    monkeypatch.delenv("SLURM_STEP_TASKS_PER_NODE")
    with pytest.raises(ConfigError, match="SLURM's variables"):
        find_cluster(slurm)
