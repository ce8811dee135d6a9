"""Tests how the cluster is read from the environment, and errors before TensorFlow starts."""

import json

import pytest

from app.devices.cluster import find_cluster
from app.devices.local_workers import free_ports
from app.runtime.errors import ConfigError
from tests.conftest import run_main
from tests.in_process import run_here


def tf_config(cluster, kind="worker", index=0):
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})}


def test_tf_config_whose_chief_comes_first():
    cluster = find_cluster(tf_config({"worker": ["a:1", "[::1]:65535"]}, index=1))
    assert (cluster.addresses, cluster.index) == (("a:1", "[::1]:65535"), 1)
    assert not cluster.is_chief
    assert find_cluster(cluster.as_environment()) == cluster
    jobs = {"worker": ["b:1", "c:1"], "chief": ["a:1"]}
    assert find_cluster(tf_config(jobs, "chief")).is_chief
    worker = find_cluster(tf_config(jobs, "worker", 1))
    assert (worker.addresses, worker.index) == (("a:1", "b:1", "c:1"), 2)


def worker(cluster='["a:1", "b:1"]', task='{"type": "worker", "index": 0}'):
    return f'{{"cluster": {{"worker": {cluster}}}, "task": {task}}}'


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("not json", "the value is not json, not a JSON object"),
        ("[" * 100_000, "not a JSON object"),
        ('{"task": {}}', "cluster is null"),
        ('{"cluster": {"worker": ["a:1"]}}', "task is null"),
        ('{"cluster": {"ps": ["a:1"]}, "task": {}}', 'a job of cluster is ["ps"]'),
        ('{"cluster": {"chief": ["a:1", "b:1"]}, "task": {}}', "cluster.chief is"),
        (worker("[]"), "cluster.worker is []"),
        (worker('["a:1", 7]'), "cluster.worker[1] is 7, not host:port"),
        (worker('["a:0"]'), "cluster.worker[0] is a:0"),
        (worker('["a:65536"]'), "cluster.worker[0] is a:65536"),
        (worker('["a:1", "a:1"]'), "addresses that differ"),
        (worker(task='{"type": "worker", "index": 2}'), "task.index is 2, not 0 to 1"),
        (worker(task='{"type": "worker", "index": -1}'), "task.index is -1"),
        (worker(task='{"type": "worker", "index": true}'), "task.index is true"),
        (worker(task='{"type": "ps", "index": 0}'), "task.type is ps, not worker"),
        (worker(task='{"type": ["worker"], "index": 0}'), "task.type is"),
    ],
)
def test_a_bad_key_is_named(text, named):
    with pytest.raises(ConfigError) as refused:
        find_cluster({"TF_CONFIG": text})
    assert str(refused.value).startswith("TF_CONFIG: ")
    assert named in str(refused.value)
    assert len(str(refused.value)) < 300


@pytest.fixture
def slurm(monkeypatch):
    """A function that sets the variables of a task of srun; None removes one."""

    def set_variables(**changes):
        variables = {
            "SLURM_JOB_ID": "7", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "3",
            "SLURM_STEP_NODELIST": "gpu[9-10]", "SLURM_STEP_TASKS_PER_NODE": "2,1",
            "SLURMD_NODENAME": "gpu9", "SLURM_LOCALID": "1",
        } | changes  # fmt: skip
        for name, value in variables.items():
            monkeypatch.delenv(name, raising=False)
            if value is not None:
                monkeypatch.setenv(name, value)
        return find_cluster()

    return set_variables


def test_slurm_tasks_find_their_own_addresses(slurm):
    port = 20_000 + 7 * 64
    cluster = slurm()
    assert cluster.addresses == (f"gpu10:{port}", f"gpu9:{port}", f"gpu9:{port + 1}")
    assert (cluster.index, cluster.source) == (2, "SLURM")
    assert slurm(SLURM_PROCID="2", SLURMD_NODENAME="gpu10", SLURM_LOCALID="0").is_chief


@pytest.mark.parametrize(
    "changes", [{"SLURM_STEP_NUM_TASKS": "4"}, {"SLURM_LOCALID": "2"}, {"SLURMD_NODENAME": None}]
)
def test_slurm_variables_that_do_not_fit_are_refused(slurm, changes):
    with pytest.raises(ConfigError, match=r"SLURM's variables: .*; start the workers with srun"):
        slurm(**changes)


def test_the_secret_comes_from_a_variable_or_a_file(tmp_path):
    path, environ = tmp_path / "secret", tf_config({"worker": ["a:1"]})
    path.write_text("a secret of 16 or more\n")
    for variable in {"LOCKSTEP_SECRET": path.read_text()}, {"LOCKSTEP_SECRET_FILE": str(path)}:
        cluster = find_cluster(environ | variable)
        assert cluster.secret == "a secret of 16 or more"
        assert "secret of" not in repr(cluster)
    assert find_cluster(environ).secret == ""


@pytest.mark.parametrize(
    ("variable", "value", "told"),
    [
        ("LOCKSTEP_SECRET", "short", "LOCKSTEP_SECRET must have 16 to 4096 characters, got 5"),
        ("LOCKSTEP_SECRET", "x" * 5000, "got 5000"),
        ("LOCKSTEP_SECRET_FILE", "/nowhere/secret", "LOCKSTEP_SECRET_FILE=/nowhere/secret: "),
        ("LOCKSTEP_SECRET_FILE", "/dev/zero", "LOCKSTEP_SECRET_FILE=/dev/zero: not a file"),
    ],
)
def test_a_secret_that_cannot_be_used_is_refused(variable, value, told):
    with pytest.raises(ConfigError, match=told):
        find_cluster(tf_config({"worker": ["a:1"]}) | {variable: value})


def test_the_program_refuses_at_once():
    one_worker = tf_config({"worker": ["a:1"]})
    for words, told in (
        (["train", "--strategy=multi_worker", "--num_workers=2"], "TF_CONFIG"),
        (["compare", "--strategies=manual,multi_worker"], "compare starts"),
    ):
        result = run_here(*words, env=one_worker)
        assert result.returncode == 2 and result.stderr.count("\n") == 1
        assert told in result.stderr


@pytest.mark.slow
def test_a_worker_that_does_not_come_ends_the_program(tmp_path):
    addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
    words = ["train", "--strategy=multi_worker", "--device=cpu", f"--out={tmp_path / 'run'}"]
    result = run_main(*words, "--start_timeout_sec=1", env=tf_config({"worker": addresses}))
    assert result.returncode == 138
    told = f"error: --start_timeout_sec=1: timed out waiting for worker 1 ({addresses[1]}); check"
    assert told in result.stderr
