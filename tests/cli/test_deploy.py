"""What deploy/ holds, as far as it can be tried without a cluster."""

import inspect
import os
import shlex
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

STUBS = {
    # Two tasks side by side, and the largest exit code of theirs.
    "srun": """#!/usr/bin/env bash
printf '%s\\n' "$@" > "$CALLS/srun"
while [[ $1 == --* ]]; do shift; done
SLURM_PROCID=0 "$@" & first=$!
SLURM_PROCID=1 "$@" & second=$!
wait $first; code=$?
wait $second; other=$?
exit $((code > other ? code : other))
""",
    "scontrol": '#!/bin/sh\necho "$@" > "$CALLS/scontrol"\n',
    # In place of the program: ends with the code of its worker.
    "program": '#!/usr/bin/env bash\ncodes=($CODES)\nexit "${codes[SLURM_PROCID]}"\n',
    # Asked to stop by SLURM, which sends the signal to all processes of a task.
    "stopped": """#!/usr/bin/env bash
trap 'sleep 0.2; touch saved-$SLURM_PROCID; exit 143' TERM
kill -TERM $PPID $$
while :; do sleep 0.1; done
""",
    "python": '#!/bin/sh\nprintf "%s\\n" "$TF_CONFIG" "$@"\n',
}


def final_codes():
    """Returns the exit codes of the program's exceptions that another try does not change."""
    classes = [c for _, c in inspect.getmembers(errors, inspect.isclass)]
    codes = {getattr(c, "exit_code", 0) for c in classes if issubclass(c, errors.LockstepError)}
    return sorted(code for code in codes if 0 < code < 128)


@pytest.fixture
def run(tmp_path):
    """A function that runs a command with the stubs; returns the result and what was called."""
    folder, calls = tmp_path / "bin", tmp_path / "calls"
    folder.mkdir()
    calls.mkdir()
    for name, text in STUBS.items():
        (folder / name).write_text(text, encoding="utf-8")
        (folder / name).chmod(0o755)

    def start(command, program="program", **variables):
        paths = {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHON": f"{folder}/{program}"}
        result = subprocess.run(
            command, env={**paths, "CALLS": str(calls), "SLURM_JOB_ID": "77", **variables},
            cwd=tmp_path, capture_output=True, text=True, check=False, timeout=30,
        )  # fmt: skip
        return result, {path.name: path.read_text().splitlines() for path in calls.iterdir()}

    return start


# The oldest that has all that the manifest uses, and the newest that the schemas are known of.
@pytest.mark.parametrize("version", ["1.31", "1.37"])
def test_manifest_follows_the_schemas(version):
    assert len(KINDS) == len(DOCUMENTS)
    for document in DOCUMENTS:
        assert kubernetes_validate.validate(document, version, strict=True) == version


def test_parts_of_the_manifest_and_the_image_belong_together():
    num_workers = int(ENVIRONMENT["NUM_WORKERS"])
    assert JOB["completions"] == JOB["parallelism"] == num_workers == 2
    assert JOB["completionMode"] == "Indexed" and JOB["backoffLimit"] % (num_workers + 1) == 0
    service, policy = KINDS["Service"]["spec"], KINDS["NetworkPolicy"]["spec"]
    assert KINDS["Service"]["metadata"]["name"] == POD["subdomain"] == "lockstep"
    assert service["clusterIP"] == "None" and service["publishNotReadyAddresses"] is True
    assert service["ports"][0]["port"] == WORKER["ports"][0]["containerPort"]
    labels = JOB["template"]["metadata"]["labels"]
    assert service["selector"] == policy["podSelector"]["matchLabels"] == labels
    assert policy["ingress"][0]["from"] == [{"podSelector": {"matchLabels": labels}}]
    assert policy["policyTypes"] == ["Ingress"]

    volumes = {volume["name"]: volume for volume in POD["volumes"]}
    mounts = {mount["mountPath"]: mount for mount in WORKER["volumeMounts"]}
    claim = volumes["out"]["persistentVolumeClaim"]["claimName"]
    assert claim == KINDS["PersistentVolumeClaim"]["metadata"]["name"]
    assert mounts[ENVIRONMENT["FASHION_MNIST_DIR"]]["readOnly"] is True

    copied = {line.split()[1] for line in DOCKERFILE.splitlines() if line.startswith("COPY ")}
    assert copied == {"requirements.txt", "main.py", "app", "lockstep", "models", "strategies"}
    user = POD["securityContext"]["runAsUser"], POD["securityContext"]["runAsGroup"]
    assert f"\nUSER {user[0]}:{user[1]}\n" in DOCKERFILE
    assert f"--tag {WORKER['image']} " in DOCKERFILE


def test_a_pod_has_no_rights_and_final_exit_codes_fail_the_job():
    assert POD["securityContext"]["runAsNonRoot"] is True
    assert WORKER["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert WORKER["securityContext"]["readOnlyRootFilesystem"] is True
    (rule,) = (r for r in JOB["podFailurePolicy"]["rules"] if r["action"] == "FailJob")
    codes = {"containerName": WORKER["name"], "operator": "In", "values": final_codes()}
    assert rule["onExitCodes"] == codes and len(final_codes()) > 5
    assert POD["restartPolicy"] == "Never"


def test_container_derives_its_cluster(run):
    numbers = {"NUM_WORKERS": "11", "JOB_COMPLETION_INDEX": "10"}
    result, _ = run([*WORKER["command"], *WORKER["args"]], **numbers)
    tf_config, *arguments = result.stdout.splitlines()
    cluster = find_cluster({"TF_CONFIG": tf_config})
    assert cluster.index == 10
    assert cluster.addresses == tuple(f"lockstep-{i}.lockstep:2222" for i in range(11))
    assert arguments[:3] == ["main.py", "train", "--strategy=multi_worker"]
    assert "--out=/out/run" in arguments


# Exit codes of both workers, restarts before → whether it is started again.
JOBS = [
    ((138, 138), 0, True), ((134, 0), 9, True), ((143, 143), 10, False), ((138, 3), 0, False),
    ((2, 138), 0, False), ((0, 0), 0, False), ((9, 9), 0, False),
]  # fmt: skip


@pytest.mark.parametrize(("codes", "restarts", "is_again"), JOBS)
def test_batch_job_is_started_again_from_128_on_so_often(run, codes, restarts, is_again):
    """A final code of one worker counts more than what follows from it."""
    variables = {"SLURM_RESTART_COUNT": str(restarts), "OUT": "a place"}
    result, called = run(["bash", SBATCH], CODES=" ".join(map(str, codes)), **variables)
    final = [code for code in codes if 0 < code < 128]
    assert result.returncode == min(final, default=max(codes)), result.stderr
    assert called.get("scontrol", []) == (["requeue 77"] if is_again else [])
    assert (f"restart {restarts + 1} of 10" in result.stderr) == is_again
    assert ("giving up" in result.stderr) == (restarts == 10)
    assert "--wait=60" in called["srun"] and called["srun"][-1] == "--out=a place"


def test_worker_that_is_asked_to_stop_may_finish(run, tmp_path):
    """The wrapper must outlive the program."""
    result, called = run(["bash", SBATCH], program="stopped")
    assert result.returncode == 143, result.stderr
    assert sorted(path.name for path in tmp_path.glob("saved-*")) == ["saved-0", "saved-1"]
    assert called["scontrol"] == ["requeue 77"]


@pytest.mark.parametrize(
    "text", [SBATCH.read_text("utf-8"), WORKER["args"][0]], ids=["slurm", "kubernetes"]
)
def test_commands_have_flags_that_exist(text):
    lines = text.replace("\\\n", " ").splitlines()
    words = shlex.split(next(line for line in lines if " train --strategy" in line))
    config = parse_command_line(["main.py", *words[words.index("main.py") + 1 :]])
    assert config.distribution.strategy == "multi_worker"
