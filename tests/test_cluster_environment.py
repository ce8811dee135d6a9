"""Tests how the cluster is read from the environment, and errors before TensorFlow starts."""

import json
import socket

import pytest

from app.cluster import rendezvous, resource_split
from app.cluster.environment import find_cluster
from app.cluster.resource_split import find_free_ports
from app.runtime.errors import ConfigError
from conftest import run_main


def tf_config(cluster, kind="worker", index=0):
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})}


def test_tf_config():
    cluster = find_cluster(tf_config({"worker": ["a:1", "[::1]:65535"]}, index=1))
    assert (cluster.addresses, cluster.index) == (("a:1", "[::1]:65535"), 1)
    assert not cluster.is_chief
    assert find_cluster({"TF_CONFIG": cluster.as_tf_config()}) == cluster


def test_a_chief_comes_first():
    jobs = {"worker": ["b:1", "c:1"], "chief": ["a:1"]}
    assert find_cluster(tf_config(jobs, "chief")).is_chief
    worker = find_cluster(tf_config(jobs, "worker", 1))
    assert (worker.addresses, worker.index, worker.address) == (("a:1", "b:1", "c:1"), 2, "c:1")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("not json", "is not JSON: not json"),
        ("[" * 100_000, "is not JSON"),
        ("[1]", "is [1], not a JSON object"),
        ('{"task": {}}', "cluster is null"),
        ('{"cluster": {"worker": ["a:1"]}}', "task is null"),
        ('{"cluster": {"ps": ["a:1"]}, "task": {}}', "cluster has the job ps"),
        ('{"cluster": {"worker": []}, "task": {}}', "cluster.worker is []"),
        ('{"cluster": {"worker": "a:1"}, "task": {}}', "cluster.worker is a:1"),
        ('{"cluster": {"worker": ["a"]}, "task": {}}', "cluster.worker[0] is a, not host:port"),
        ('{"cluster": {"worker": ["a:1", 7]}, "task": {}}', "cluster.worker[1] is 7"),
        ('{"cluster": {"worker": ["a:0"]}, "task": {}}', "cluster.worker[0] is a:0"),
        ('{"cluster": {"worker": ["a:65536"]}, "task": {}}', "cluster.worker[0] is a:65536"),
        ('{"cluster": {"worker": ["a:1", "a:1"]}, "task": {}}', "cluster has twice a:1"),
        ('{"cluster": {"chief": ["a:1", "b:1"]}, "task": {}}', "cluster.chief is"),
    ],
)
def test_a_bad_key_is_named(text, named):
    with pytest.raises(ConfigError) as refused:
        find_cluster({"TF_CONFIG": text})
    assert str(refused.value).startswith("TF_CONFIG: ")
    assert named in str(refused.value)
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize(
    ("kind", "index", "named"),
    [
        ("worker", 2, "task.index is 2, not 0 to 1"),
        ("worker", -1, "task.index is -1"),
        ("worker", True, "task.index is true"),
        ("worker", "0", "task.index is 0"),
        ("ps", 0, "task.type is ps, not one of worker"),
        (["worker"], 0, "task.type is"),
    ],
)
def test_a_bad_task_is_named(kind, index, named):
    with pytest.raises(ConfigError) as refused:
        find_cluster(tf_config({"worker": ["a:1", "b:1"]}, kind, index))
    assert named in str(refused.value)


def slurm(**changes):
    return {
        "SLURM_JOB_ID": "7",
        "SLURM_PROCID": "2",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_NODELIST": "gpu[09-10],login",
        "SLURM_STEP_TASKS_PER_NODE": "2,1(x2)",
    } | changes


def test_slurm():
    cluster = find_cluster(slurm())
    port = 20_000 + 7 * 64
    assert cluster.addresses == (
        *(f"gpu09:{port}", f"gpu09:{port + 1}"),
        *(f"gpu10:{port}", f"login:{port}"),
    )
    assert (cluster.index, cluster.address) == (2, f"gpu10:{port}")


def test_slurm_with_one_task_on_each_host_need_not_say_so():
    environ = slurm(SLURM_STEP_NUM_TASKS="3")
    del environ["SLURM_STEP_TASKS_PER_NODE"]
    hosts = [address.partition(":")[0] for address in find_cluster(environ).addresses]
    assert hosts == ["gpu09", "gpu10", "login"]


@pytest.mark.parametrize(
    "changes",
    [
        {"SLURM_PROCID": "x"},
        {"SLURM_PROCID": "4"},
        {"SLURM_STEP_NUM_TASKS": "3"},
        {"SLURM_STEP_NODELIST": "gpu[10-09]"},
        {"SLURM_STEP_NODELIST": "gpu[1-99999999]"},
        {"SLURM_STEP_NODELIST": "a b"},
        {"SLURM_STEP_TASKS_PER_NODE": "many"},
    ],
)
def test_slurm_variables_that_do_not_fit_are_named(changes):
    with pytest.raises(ConfigError) as refused:
        find_cluster(slurm(**changes))
    assert next(iter(changes)) in str(refused.value)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, "found no cluster"),
        ({"TF_CONFIG": "{}"}, "TF_CONFIG: cluster is null"),
        ({"SLURM_PROCID": "0"}, "found no cluster"),
    ],
)
def test_the_program_refuses_at_once(environment, expected):
    result = run_main("train", "--strategy=multi_worker", env=environment, timeout=20)
    assert result.returncode == 2
    assert expected in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_port_in_use_is_named(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        other = find_free_ports(1)[0]
        result = run_main(
            *("train", "--strategy=multi_worker", "--device=cpu", f"--out={tmp_path / 'run'}"),
            env=tf_config({"worker": [f"127.0.0.1:{port}", f"127.0.0.1:{other}"]}),
        )
    assert result.returncode == 2
    assert f"error: port {port} of 127.0.0.1:{port}: Address already in use" in result.stderr


def test_ports_are_not_those_that_the_kernel_gives_away():
    ports = find_free_ports(8)
    assert len(set(ports)) == 8
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert max(ports) < server.getsockname()[1]
    with socket.create_server(("", ports[0])):
        assert not resource_split._is_free(ports[0])


LISTED = """GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-11111111-aaaa)
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-22222222-bbbb)
"""


@pytest.mark.parametrize(
    ("names", "uuids"),
    [
        (["1"], ["GPU-22222222-bbbb"]),
        (["0", "1"], ["GPU-11111111-aaaa", "GPU-22222222-bbbb"]),
        (["GPU-2222"], ["GPU-22222222-bbbb"]),
        (["GPU-33333333-cccc", "7"], ["GPU-33333333-cccc"]),  # Not listed: of no use if a number.
    ],
)
def test_gpus_are_known_by_their_uuids(monkeypatch, names, uuids):
    monkeypatch.setattr(resource_split, "output_of", lambda command, timeout_sec: LISTED)
    assert resource_split.gpu_uuids(names) == uuids


def test_workers_that_share_a_gpu_are_refused():
    rendezvous._check_own_gpus([["GPU-1", "GPU-2"], ["GPU-3"], [], []])
    with pytest.raises(ConfigError, match="workers 0 and 2 share GPU-2; give each worker its own"):
        rendezvous._check_own_gpus([["GPU-1", "GPU-2"], ["GPU-3"], ["GPU-2"]])


def test_who_is_missing_is_told_until_the_time_is_up(tmp_path):
    ports = find_free_ports(3)
    result = run_main(
        *("train", "--strategy=multi_worker", "--device=cpu", f"--out={tmp_path / 'run'}"),
        "--start_timeout_sec=12",
        env=tf_config({"worker": [f"127.0.0.1:{port}" for port in ports]}),
    )
    assert result.returncode == 138
    missing = ", ".join(f"worker {i} (127.0.0.1:{ports[i]})" for i in (1, 2))
    assert f"waiting for {missing}, 10 s of 12 s" in result.stdout
    assert f"error: --start_timeout_sec=12: timed out waiting for {missing}; check" in result.stderr
