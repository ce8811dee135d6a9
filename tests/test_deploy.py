"""What deploy/ holds, as far as it can be tried without a cluster."""

import inspect
import os
import pathlib
import shlex
import subprocess

import kubernetes_validate
import pytest
import yaml

from app.devices.cluster import find_cluster
from app.runtime import errors
from conftest import ROOT
from in_process import parse_here

DEPLOY = ROOT / "deploy"
DOCUMENTS = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text(encoding="utf-8")))
KINDS = {document["kind"]: document for document in DOCUMENTS}
JOB = KINDS["Job"]["spec"]
POD = JOB["template"]["spec"]
(WORKER,) = POD["containers"]
ENVIRONMENT = {variable["name"]: variable["value"] for variable in WORKER["env"]}
# The oldest that has all that the manifest uses, and the newest that the schemas are known of.
KUBERNETES_VERSIONS = ("1.31", "1.37")
DOCKERFILE = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
SBATCH = DEPLOY / "slurm.sbatch"

# In place of srun: two tasks side by side, and the largest exit code of theirs.
SRUN = """#!/usr/bin/env bash
printf '%s\\n' "$@" > "$CALLS/srun"
while [[ $1 == --* ]]; do shift; done
SLURM_PROCID=0 "$@" & first=$!
SLURM_PROCID=1 "$@" & second=$!
wait $first; code=$?
wait $second; other=$?
exit $((code > other ? code : other))
"""
SCONTROL = """#!/bin/sh
echo "$@" > "$CALLS/scontrol"
"""
# In place of the program: ends with the code of its worker.
PROGRAM = """#!/usr/bin/env bash
codes=($CODES)
exit "${codes[SLURM_PROCID]}"
"""


def final_codes():
    """Returns the exit codes of the program's exceptions that another try does not change."""
    classes = [c for _, c in inspect.getmembers(errors, inspect.isclass)]
    codes = {getattr(c, "exit_code", 0) for c in classes if issubclass(c, errors.LockstepError)}
    return sorted(code for code in codes if 0 < code < 128)


def write_program(path: pathlib.Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)


@pytest.mark.parametrize("version", KUBERNETES_VERSIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_manifest_follows_the_schemas(kind, version):
    assert len(KINDS) == len(DOCUMENTS)
    assert kubernetes_validate.validate(KINDS[kind], version, strict=True) == version


def test_parts_of_the_manifest_and_the_image_belong_together():
    num_workers = int(ENVIRONMENT["NUM_WORKERS"])
    assert JOB["completions"] == JOB["parallelism"] == num_workers == 2
    assert JOB["completionMode"] == "Indexed" and JOB["backoffLimit"] % (num_workers + 1) == 0
    service, policy = KINDS["Service"]["spec"], KINDS["NetworkPolicy"]["spec"]
    assert KINDS["Service"]["metadata"]["name"] == POD["subdomain"] == "lockstep"
    assert service["clusterIP"] == "None" and service["publishNotReadyAddresses"] is True
    (port,) = WORKER["ports"]
    assert [p["port"] for p in service["ports"]] == [port["containerPort"]]
    labels = JOB["template"]["metadata"]["labels"]
    assert service["selector"] == policy["podSelector"]["matchLabels"] == labels
    (rule,) = policy["ingress"]
    assert rule["from"] == [{"podSelector": {"matchLabels": labels}}]

    volumes = {volume["name"]: volume for volume in POD["volumes"]}
    mounts = {mount["mountPath"]: mount for mount in WORKER["volumeMounts"]}
    assert sorted(mount["name"] for mount in mounts.values()) == sorted(volumes)
    claim = volumes["out"]["persistentVolumeClaim"]["claimName"]
    assert claim == KINDS["PersistentVolumeClaim"]["metadata"]["name"]
    assert mounts[ENVIRONMENT["FASHION_MNIST_DIR"]]["readOnly"] is True
    assert "emptyDir" in volumes[mounts[ENVIRONMENT["HOME"]]["name"]]
    assert "emptyDir" in volumes[mounts["/tmp"]["name"]]
    folder, _, key = ENVIRONMENT["LOCKSTEP_SECRET_FILE"].rpartition("/")
    secret = volumes[mounts[folder]["name"]]["secret"]["secretName"]
    text = (DEPLOY / "kubernetes.yaml").read_text(encoding="utf-8")
    assert f"create secret generic {secret} --from-literal={key}=" in text

    copied = [line.split()[1] for line in DOCKERFILE.splitlines() if line.startswith("COPY ")]
    packages = {"app", "lockstep", "models", "strategies"}
    assert {*copied} == {"requirements.txt", "main.py", *packages}
    assert all((ROOT / name).exists() for name in copied)
    user = POD["securityContext"]["runAsUser"], POD["securityContext"]["runAsGroup"]
    assert f"\nUSER {user[0]}:{user[1]}\n" in DOCKERFILE
    assert f"--tag {WORKER['image']} " in DOCKERFILE


def test_a_pod_may_do_no_more_than_it_has_to():
    assert POD["securityContext"]["runAsNonRoot"] is True
    assert POD["automountServiceAccountToken"] is False
    assert KINDS["NetworkPolicy"]["spec"]["policyTypes"] == ["Ingress"]
    assert WORKER["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def test_final_exit_codes_fail_the_job_and_others_do_not():
    assert len(final_codes()) > 5
    rules = JOB["podFailurePolicy"]["rules"]
    (rule,) = (rule for rule in rules if rule["action"] == "FailJob")
    assert rule["onExitCodes"] == {
        "containerName": WORKER["name"],
        "operator": "In",
        "values": final_codes(),
    }
    assert POD["restartPolicy"] == "Never"


@pytest.mark.parametrize(("num_workers", "index"), [(1, 0), (11, 10)])
def test_container_derives_its_cluster(num_workers, index, tmp_path):
    stub = '#!/bin/sh\nprintf "%s\\n" "$TF_CONFIG" "$@"\n'
    write_program(tmp_path / "python", stub)
    result = subprocess.run(
        [*WORKER["command"], *WORKER["args"]],
        env={
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "NUM_WORKERS": str(num_workers),
            "JOB_COMPLETION_INDEX": str(index),
        },
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    tf_config, *arguments = result.stdout.splitlines()
    cluster = find_cluster({"TF_CONFIG": tf_config})
    assert cluster.index == index
    assert cluster.addresses == tuple(f"lockstep-{i}.lockstep:2222" for i in range(num_workers))
    assert arguments[:3] == ["main.py", "train", "--strategy=multi_worker"]
    assert "--out=/out/run" in arguments


@pytest.fixture
def submit(tmp_path):
    """A function that runs the batch script with stubs; returns its result and what was called."""
    folder, calls = tmp_path / "bin", tmp_path / "calls"
    folder.mkdir()
    calls.mkdir()
    write_program(folder / "srun", SRUN)
    write_program(folder / "scontrol", SCONTROL)
    write_program(folder / "program", PROGRAM)

    def run(codes, **variables):
        result = subprocess.run(
            ["bash", str(SBATCH)],
            env={
                "PATH": f"{folder}:{os.environ['PATH']}",
                "PYTHON": str(folder / "program"),
                "CALLS": str(calls),
                "CODES": " ".join(map(str, codes)),
                "SLURM_JOB_ID": "77",
                **variables,
            },
            cwd=tmp_path, capture_output=True, text=True, check=False, timeout=30,
        )  # fmt: skip
        called = {path.name: path.read_text().splitlines() for path in calls.iterdir()}
        return result, called

    return run


# Exit codes of both workers, restarts before → whether it is started again.
JOBS = [
    ((138, 138), 0, True),
    ((134, 0), 9, True),
    ((143, 143), 10, False),
    ((138, 3), 0, False),
    ((2, 138), 0, False),
    ((0, 0), 0, False),
    *[((code, code), 0, False) for code in final_codes()],
]


@pytest.mark.parametrize(("codes", "restarts", "is_again"), JOBS)
def test_batch_job_is_started_again_from_128_on_so_often(submit, codes, restarts, is_again):
    """A final code of one worker counts more than what follows from it."""
    result, called = submit(codes, SLURM_RESTART_COUNT=str(restarts), OUT="a place")
    final = [code for code in codes if 0 < code < 128]
    assert result.returncode == min(final, default=max(codes)), result.stderr
    assert called.get("scontrol", []) == (["requeue 77"] if is_again else [])
    assert (f"restart {restarts + 1} of 10" in result.stderr) == is_again
    assert ("giving up" in result.stderr) == (restarts == 10)
    assert "--wait=60" in called["srun"] and called["srun"][-1] == "--out=a place"


def test_worker_that_is_asked_to_stop_may_finish(submit, tmp_path):
    """SLURM sends the signal to all processes of a task; the wrapper must outlive the program."""
    program = tmp_path / "bin" / "program"
    write_program(
        program,
        "#!/usr/bin/env bash\n"
        "trap 'sleep 0.2; touch saved-$SLURM_PROCID; exit 143' TERM\n"
        "kill -TERM $PPID $$\n"
        "while :; do sleep 0.1; done\n",
    )
    result, called = submit((0, 0))
    assert result.returncode == 143, result.stderr
    assert sorted(path.name for path in tmp_path.glob("saved-*")) == ["saved-0", "saved-1"]
    assert called["scontrol"] == ["requeue 77"]


COMMANDS = [
    next(line for line in text.replace("\\\n", " ").splitlines() if " train --strategy" in line)
    for text in (SBATCH.read_text(encoding="utf-8"), WORKER["args"][0])
]


@pytest.mark.parametrize("command", COMMANDS, ids=["slurm", "kubernetes"])
def test_commands_have_flags_that_exist(command):
    words = shlex.split(command)
    config = parse_here(*words[words.index("main.py") + 1 :])
    assert config.distribution.strategy == "multi_worker"
