"""Workers: how they are found and waited for, share a machine, and are restarted."""

import json
import os
import socket
import types

import pytest

from app.devices import cluster as clusters
from app.devices import local_workers, setup
from app.devices.cluster import Cluster, find_cluster, wait_for_workers
from app.devices.local_workers import Share, find_culprit, split_machine
from app.errors import ConfigError, DeviceError, LockstepError, PeerLostError
from app.options import Config
from tests.conftest import CPUS


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


# Exit code of each start → exit code at the end, starts with and without `--overwrite`.
@pytest.mark.parametrize(
    ("codes", "code", "overwriting"),
    [
        ([137] * 4, 138, [True, True, False, False]),
        ([7], 7, [True]),  # What another try does not fix ends it.
        ([137, 137, 0], 0, [True, True, False]),
    ],
)
def test_workers_are_restarted_three_times_and_overwrite_no_start(
    codes, code, overwriting, monkeypatch, tmp_path
):
    started = []

    def run_all(words, shares):
        started.append("--overwrite" in words)
        if len(started) == 2:
            (tmp_path / "config.json").write_text("{}")
        return (1 if codes[len(started) - 1] else 0), codes[len(started) - 1]

    monkeypatch.setattr(local_workers, "_run_all", run_all)
    monkeypatch.setattr(local_workers.time, "sleep", lambda sec: None)
    config = Config.of("train", strategy="multi_worker", device="cpu", overwrite=True)
    found = 0
    try:
        local_workers.train_with_local_workers(config, 2, tmp_path)
    except LockstepError as error:
        found = error.exit_code
        assert "worker 1 " in str(error) and str(codes[-1]) in str(error)
    assert (found, started) == (code, overwriting)


def test_a_worker_that_does_not_come_is_named_and_a_port_in_use_refused(capsys, monkeypatch):
    monkeypatch.setattr(clusters, "_SEC_BETWEEN_LINES", 0.2)
    monkeypatch.setattr(clusters, "_START_SEC", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.create_server(("", 0)) as free:
        addresses = [f"127.0.0.1:{each.getsockname()[1]}" for each in (free, taken)]
        free.close()
        with pytest.raises(ConfigError, match=rf"port of {addresses[1]}: Address already in use"):
            wait_for_workers(Cluster((addresses[1], addresses[0]), 0))
        taken.close()
        missing = f"worker 1 \\({addresses[1]}\\)"
        with pytest.raises(PeerLostError, match=f"timed out after 1 s waiting for {missing}"):
            wait_for_workers(Cluster(tuple(addresses), 0))
    assert f"waiting for worker 1 ({addresses[1]}), 0 s of 1 s" in capsys.readouterr().out


def test_workers_with_different_flags_are_refused():
    def gather(message):
        return [message, message.replace(b'"--seed": 0', b'"--seed": 5')]

    workers, devices = types.SimpleNamespace(gather=gather), setup.Devices(CPUS[:1], False)
    with pytest.raises(ConfigError, match=r"--seed: worker 0 has 0, worker 1 has 5"):
        setup._compare_settings(workers, Config.of(), devices)


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


def test_a_cluster_is_read_from_tf_config_and_from_slurm(monkeypatch):
    assert find_cluster({}) is None
    jobs = {"chief": ["c:3"], **WORKER}
    text = json.dumps({"cluster": jobs, "task": {"type": "worker", "index": 1}})
    assert find_cluster({"TF_CONFIG": text}) == Cluster(("c:3", "a:1", "b:2"), 2)
    with monkeypatch.context() as patch:
        patch.setenv("TF_CONFIG", text)
        with pytest.raises(ConfigError, match="num_workers=2, but the cluster has 3 workers"):
            setup.set_up(Config.of(strategy="multi_worker", num_workers=2))
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
