"""The files in deploy/, as far as they can be tried without a cluster."""

import inspect
import os
import subprocess

import kubernetes_validate
import pytest
import yaml

from app import errors
from app.devices.cluster import find_cluster
from app.options import parse_command_line
from tests.conftest import ROOT

DEPLOY = ROOT / "deploy"
MANIFEST = (DEPLOY / "kubernetes.yaml").read_text(encoding="utf-8")
DOCUMENTS = list(yaml.safe_load_all(MANIFEST))
KINDS = {document["kind"]: document for document in DOCUMENTS}
JOB = KINDS["Job"]["spec"]
POD = JOB["template"]["spec"]
(WORKER,) = POD["containers"]
ENVIRONMENT = {variable["name"]: variable["value"] for variable in WORKER["env"]}
DOCKERFILE = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
SBATCH = DEPLOY / "slurm.sbatch"


def final_codes():
    """Returns the exit codes of the program's exceptions that another try does not change."""
    classes = [c for _, c in inspect.getmembers(errors, inspect.isclass)]
    codes = {getattr(c, "exit_code", 0) for c in classes if issubclass(c, errors.LockstepError)}
    return sorted(code for code in codes if 0 < code < 128)


# The oldest that has all that the manifest uses, and the newest that the schemas are known of.
@pytest.mark.parametrize("version", ["1.31", "1.37"])
def test_manifest_follows_the_schemas(version):
    assert len(KINDS) == len(DOCUMENTS)
    for document in DOCUMENTS:
        assert kubernetes_validate.validate(document, version, strict=True) == version


def test_parts_of_the_manifest_and_the_image_belong_together():
    num_workers = int(ENVIRONMENT["NUM_WORKERS"])
    assert JOB["completions"] == JOB["parallelism"] == num_workers == 2
    assert JOB["backoffLimit"] % (num_workers + 1) == 0
    service, labels = KINDS["Service"]["spec"], JOB["template"]["metadata"]["labels"]
    assert KINDS["Service"]["metadata"]["name"] == POD["subdomain"] == "lockstep"
    assert service["ports"][0]["port"] == WORKER["ports"][0]["containerPort"]
    assert service["selector"] == labels
    copied = {line.split()[1] for line in DOCKERFILE.splitlines() if line.startswith("COPY ")}
    assert copied == {"requirements.txt", "main.py", "app", "lockstep", "models", "strategies"}
    user = POD["securityContext"]["runAsUser"], POD["securityContext"]["runAsGroup"]
    assert f"\nUSER {user[0]}:{user[1]}\n" in DOCKERFILE
    (rule,) = (r for r in JOB["podFailurePolicy"]["rules"] if r["action"] == "FailJob")
    assert rule["onExitCodes"]["values"] == final_codes() and len(final_codes()) > 5


def test_container_derives_its_cluster(tmp_path):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$TF_CONFIG" "$@"\n', encoding="utf-8")
    python.chmod(0o755)
    numbers = {"NUM_WORKERS": "11", "JOB_COMPLETION_INDEX": "10"}
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **numbers}
    command = [*WORKER["command"], *WORKER["args"]]
    printed = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
    tf_config, *arguments = printed.splitlines()
    cluster = find_cluster({"TF_CONFIG": tf_config})
    assert cluster.index == 10
    assert cluster.addresses == tuple(f"lockstep-{i}.lockstep:2222" for i in range(11))
    config = parse_command_line(arguments)
    assert (config.distribution.strategy, config.output.out) == ("multi_worker", "/out/run")


# Exit code of the workers, restarts before → whether the job is started again.
@pytest.mark.parametrize(
    ("code", "restarts", "is_again"),
    [(138, 0, True), (134, 9, True), (143, 10, False), (3, 0, False), (0, 0, False)],
)
def test_batch_job_is_started_again_from_128_on_so_often(tmp_path, code, restarts, is_again):
    for name, text in {
        "srun": 'while [[ $1 == --* ]]; do shift; done; exec "$@"',
        "scontrol": f'echo "$@" > {tmp_path}/called',
        "program": f'printf "%s\\n" "$@" > {tmp_path}/words; exit {code}',
    }.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{text}\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    variables = {"SLURM_JOB_ID": "77", "SLURM_RESTART_COUNT": str(restarts), "PYTHON": "program"}
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **variables}
    done = subprocess.run(["bash", SBATCH], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    config = parse_command_line((tmp_path / "words").read_text().splitlines())
    assert config.distribution.strategy == "multi_worker"
    called = tmp_path / "called"
    assert (called.read_text() if called.exists() else "") == ("requeue 77\n" if is_again else "")
