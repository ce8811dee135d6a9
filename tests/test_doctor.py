"""Tests `doctor`: each check on a simulated machine, and the command on the actual one."""

import dataclasses
import importlib.machinery
import importlib.metadata
import io
import json
import os
import pathlib
import platform
import re
import shlex
import sys

import pytest

import process_functions
from app.commands import doctor
from app.config import Config
from app.data.data_sources import DOWNLOAD_URL, SHA256
from app.devices import cuda
from app.devices.cuda import LIBRARIES, Gpu, Seen, look
from app.devices.gpu_obstacles import obstacles, why_no_gpu
from app.doctor import advice, examination, output_check, software_check
from app.doctor.check import ERROR, NOTE, OK, WARNING, Check, print_group
from app.doctor.cluster_check import check_cluster
from app.doctor.data_check import check_data, check_tfds
from app.doctor.examination import DevicesSeen, Findings, SelfTestResult, TensorFlow, examine
from app.doctor.gpu_check import check_all_reduce, check_devices, check_gpus
from app.doctor.output_check import check_output
from app.doctor.processor_check import Processor, check_processor, cpu_quota
from app.doctor.software_check import check_packages, check_python
from app.runtime.errors import DataError, DeviceError, LockstepError
from conftest import run_main, run_ok
from in_process import parse_here, run_here

CONFIG = Config.of("doctor", strategies=("manual", "mirrored"))
CUDA_BUILD = TensorFlow("2.21.0", True, "12.5.1", "9")
TWO_CPUS = DevicesSeen(("/device:CPU:0", "/device:CPU:1"), ("", ""), True, 0)
TWO_GPUS = DevicesSeen(("/device:GPU:0", "/device:GPU:1"), ("A, 8.9", "B, 8.9"), False, 2)
NOTHING = Seen(None, 0, False, None, "no such file", 0, None, (), dict.fromkeys(LIBRARIES, ""))
HEALTHY = Seen(None, 2, True, "550.54.14", None, 12040, None, (Gpu("A", 24 << 30, (8, 9)),) * 2, {})
BOTH_WORK = {
    "manual": SelfTestResult("manual", "ring", 0.1),
    "mirrored": SelfTestResult("mirrored", "nccl", 0.2),
}


def findings(**changes):
    values = {
        "seen": NOTHING,
        "tensorflow": CUDA_BUILD,
        "devices": TWO_CPUS,
        "self_tests": BOTH_WORK,
    }
    return Findings(**{**values, **changes})


def write(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


# Software


@pytest.mark.parametrize(
    ("version", "state"), [((3, 11), OK), ((3, 13), OK), ((3, 14), WARNING), ((4, 0), WARNING)]
)
def test_python(version, state):
    assert check_python(version).state == state


def test_packages_are_compared_with_their_pins(tmp_path):
    pins = "# what is needed\n-r other.txt\nright==1.2\nextra[all]==3 ; python_version > '3'\n"
    path = tmp_path / "requirements.txt"
    path.write_text(pins + "older==2.0\nabsent==0.1\n")

    def find_version(name):
        if name == "absent":
            raise importlib.metadata.PackageNotFoundError(name)
        return {"right": "1.2", "extra": "3", "older": "1.9"}[name]

    right, older, absent = check_packages(path, find_version)
    assert (right.state, right.value) == (OK, "right 1.2, extra 3")
    assert (older.state, older.value, older.exit_code) == (WARNING, "1.9", 0)
    assert "pip install older==2.0" in older.advice
    assert (absent.state, absent.value, absent.exit_code) == (ERROR, "not installed", 6)
    assert "absent==0.1 is not installed" in str(absent.error) and "-r " in absent.advice


def test_the_project_s_own_pins_are_all_read():
    lines = software_check.REQUIREMENTS.read_text().split()
    assert [f"{n}=={v}" for n, v in software_check.read_pins("\n".join(lines)).items()] == lines


def test_without_a_list_nothing_is_compared(tmp_path):
    (check,) = check_packages(tmp_path / "requirements.txt")
    assert check.state == NOTE


# Processor


@pytest.mark.parametrize(
    ("machine", "text", "model", "told"),
    [
        ("x86_64", "model name\t: Xeon\nflags\t\t: avx2 avx512_bf16 amx_bf16\n", "Xeon", " pays"),
        ("x86_64", "model name\t: Xeon\nflags\t\t: avx2 amx_bf16\n", "Xeon", "should be faster"),
        ("x86_64", "model name\t: Core 2\nflags\t\t: sse avx2\n", "Core 2", "should not pay"),
        ("aarch64", "CPU part\t: 0xd0c\nFeatures\t: fp asimd\n", "arm", "for benchmark to tell"),
        ("arm64", None, "arm", "for benchmark to tell"),
    ],
)
def test_processor(tmp_path, monkeypatch, machine, text, model, told):
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(platform, "processor", lambda: "arm")
    if text:
        write(tmp_path, {"proc/cpuinfo": text})
    processor, _, features, _ = check_processor(tmp_path)
    assert Processor.of_this_machine(tmp_path).model == model
    assert model in processor.value and told in features.value
    assert features.state == (OK if told in (" pays", "should be faster") else NOTE)


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),
        ({"sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
        (
            {
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "50000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            0.5,
        ),
        (
            {
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            None,
        ),
        ({}, None),
    ],
)
def test_a_container_s_quota(tmp_path, monkeypatch, files, quota):
    write(tmp_path, files)
    assert cpu_quota(tmp_path) == quota
    monkeypatch.setattr("app.doctor.processor_check.num_cores", lambda: 8)
    cores = check_processor(tmp_path)[1]
    assert cores.state == (OK if quota is None else WARNING)
    if quota:
        assert f"quota is {quota:g}" in cores.value and "taskset -c 0-0 " in cores.advice


@pytest.mark.parametrize(("available", "state"), [(None, NOTE), (1 << 30, WARNING), (3 << 30, OK)])
def test_memory(monkeypatch, available, state):
    monkeypatch.setattr("app.doctor.processor_check.available_bytes", lambda: available)
    assert check_processor()[-1].state == state


# GPUs


class Driver:
    """A driver's library that answers as NVIDIA's does."""

    init_code, cuda = 0, 12050
    gpus = (("Fake A", 24 << 30, (8, 9)), ("Fake B", 80 << 30, (9, 0)))

    def cuDriverGetVersion(self, number):
        number._obj.value = self.cuda

    def cuInit(self, flags):
        return self.init_code

    def cuGetErrorName(self, code, name):
        name._obj.value = b"CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"

    def cuDeviceGetCount(self, number):
        number._obj.value = len(self.gpus)

    def cuDeviceGet(self, device, index):
        device._obj.value = index

    def cuDeviceGetName(self, buffer, size, device):
        buffer.value = self.gpus[device.value][0].encode()

    def cuDeviceTotalMem_v2(self, size, device):
        size._obj.value = self.gpus[device.value][1]

    def cuDeviceGetAttribute(self, number, attribute, device):
        number._obj.value = self.gpus[device.value][2][attribute - 75]


def loader(*there, driver=None):
    def load(name):
        if name == "libcuda.so.1" and driver:
            return driver
        if name not in there:
            raise OSError(f"{name}: cannot open shared object file: No such file or directory")
        return object()

    return load


def test_a_healthy_machine_is_seen(tmp_path):
    version = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.14  Release Build\n"
    bus = "sys/bus/pci/devices"
    write(tmp_path, {"dev/nvidiactl": "", "proc/driver/nvidia/version": version})
    for number, (vendor, kind) in enumerate(
        [("0x10de", "0x030200"), ("0x10de", "0x040300"), ("0x8086", "0x030000")]
    ):
        write(tmp_path, {f"{bus}/{number}/vendor": vendor, f"{bus}/{number}/class": kind})
    seen = look({"CUDA_VISIBLE_DEVICES": "0,1"}, loader(*LIBRARIES, driver=Driver()), tmp_path)
    assert seen == Seen(
        visible="0,1",
        num_on_bus=1,  # Its sound and another maker's graphics do not count.
        has_device_file=True,
        kernel_driver="550.54.14",
        driver_library=None,
        driver_cuda=12050,
        driver_error=None,
        gpus=tuple(Gpu(*gpu) for gpu in Driver.gpus),
        missing={},
    )
    assert obstacles(seen, is_cuda_build=True) == []
    config = dataclasses.replace(CONFIG, num_gpus=2)
    checks = check_gpus(config, findings(seen=seen, devices=TWO_GPUS))
    assert {check.state for check in checks} <= {OK, NOTE}
    assert "550.54.14, for CUDA up to 12.5" in checks[0].value
    told = [c.value for c in check_devices(findings(seen=seen, devices=TWO_GPUS))]
    assert told == ["A, 8.9, 24.0 GiB", "B, 8.9, 80.0 GiB"]


def test_each_missing_library_is_named_with_its_package(tmp_path):
    there = set(LIBRARIES) - {"libcudnn.so.9", "libnccl.so.2"}
    write(tmp_path, {"dev/nvidiactl": ""})
    seen = look({}, loader(*there, driver=Driver()), tmp_path)
    named = {obstacle.what: obstacle for obstacle in obstacles(seen, is_cuda_build=True)}
    assert set(named) == {"libcudnn.so.9", "libnccl.so.2"}
    assert "nvidia-cudnn-cu12" in named["libcudnn.so.9"].advice
    checks = check_gpus(CONFIG, findings(seen=seen))
    warned = {check.what: check for check in checks if check.state == WARNING}
    assert set(warned) == {"CUDA libraries", "libcudnn.so.9", "libnccl.so.2"}
    assert "8 of 10" in warned["CUDA libraries"].value
    assert "tensorflow[and-cuda]==2.21.0" in warned["CUDA libraries"].advice
    assert warned["libnccl.so.2"].value == "missing; it comes with nvidia-nccl-cu12"


def test_missing_libraries_are_shown_only_where_a_gpu_is_asked_for(tmp_path):
    seen = look({}, loader(driver=None), tmp_path)
    assert seen.missing and not seen.has_hardware
    whats = [check.what for check in check_gpus(CONFIG, findings(seen=seen))]
    assert "CUDA libraries" not in whats
    config = dataclasses.replace(CONFIG, num_gpus=2)
    shown = {check.what: check for check in check_gpus(config, findings(seen=seen))}
    assert shown["CUDA libraries"].state == NOTE and "libcudnn" in shown["CUDA libraries"].value


def test_libraries_of_packages_are_found_where_tensorflow_finds_them(tmp_path, monkeypatch):
    path = tmp_path / "nvidia" / "cudnn" / "lib" / "libcudnn.so.9"
    write(tmp_path, {str(path.relative_to(tmp_path)): ""})
    spec = importlib.machinery.ModuleSpec("tensorflow", None, is_package=True)
    spec.submodule_search_locations.append(str(tmp_path / "tensorflow"))
    monkeypatch.setattr(cuda.importlib.util, "find_spec", lambda name: spec)
    seen = look({}, loader(str(path)), tmp_path)
    assert set(seen.missing) == set(LIBRARIES) - {"libcudnn.so.9"}


def test_what_a_library_lacks_is_named():
    reason = "libnvJitLink.so.12: cannot open shared object file: No such file or directory"
    seen = HEALTHY._replace(missing={"libcusparse.so.12": reason, "libcufft.so.11": "bad ELF"})
    jit, fft = obstacles(seen, is_cuda_build=True)
    assert jit.found == "the library libcusparse.so.12 needs libnvJitLink.so.12, which is missing"
    assert fft.found == "the library libcufft.so.11 cannot be loaded (bad ELF)"


@pytest.mark.parametrize(
    ("visible", "hides"),
    [(None, False), ("", True), ("-1", True), ("-1,0", True), ("0,1", False), ("GPU-8a", False)],
)
def test_hidden_gpus(visible, hides):
    seen = HEALTHY._replace(visible=visible)
    assert seen.hides_all == hides
    named = [obstacle.what for obstacle in obstacles(seen, is_cuda_build=True)]
    assert named == (["CUDA_VISIBLE_DEVICES"] if hides else [])
    check = check_gpus(CONFIG, findings(seen=seen))[1]
    assert check.what == "CUDA_VISIBLE_DEVICES"
    assert (check.state == WARNING, "unset" in check.advice) == (hides, hides)
    quiet = check_gpus(CONFIG, findings(seen=NOTHING._replace(visible=visible)))
    assert WARNING not in {check.state for check in quiet}  # There is nothing to hide.


@pytest.mark.parametrize(
    ("changes", "found", "what_to_do"),
    [
        ({"driver_library": "no"}, "its library libcuda.so.1 is not", "--gpus=all"),
        ({"has_device_file": False}, "/dev/nvidiactl is missing", "modprobe nvidia"),
        ({"driver_cuda": 11040}, "CUDA up to 11.4", "525.60.13 or newer"),
        ({"driver_error": "CUDA_ERROR_X", "gpus": ()}, "CUDA_ERROR_X", "nvidia-smi"),
        ({"gpus": ()}, "sees no GPU", "nvidia-smi -L"),
        (
            {"driver_library": "no", "has_device_file": False, "kernel_driver": None},
            "libcuda.so.1 is missing",
            "install NVIDIA's driver",
        ),
    ],
)
def test_what_is_wrong_with_a_driver(changes, found, what_to_do):
    seen = HEALTHY._replace(**changes)
    (obstacle,) = obstacles(seen, is_cuda_build=True)
    assert found in obstacle.found and what_to_do in obstacle.advice
    check = check_gpus(CONFIG, findings(seen=seen))[0]
    assert check.state == WARNING and found in check.value and "2 GPUs on the bus" in check.value


def test_what_the_driver_says_when_it_does_not_start(tmp_path):
    driver = Driver()
    driver.init_code = 803
    seen = look({}, loader(driver=driver), write(tmp_path, {"dev/nvidiactl": ""}))
    assert (seen.driver_error, seen.gpus) == ("CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", ())


def test_a_machine_without_gpus_has_nothing_wrong():
    checks = check_gpus(CONFIG, findings())
    assert {check.state for check in checks} == {OK, NOTE}
    checks = check_gpus(dataclasses.replace(CONFIG, num_gpus=2), findings())
    assert {check.state for check in checks} == {OK, NOTE}
    assert all(name in checks[-1].value for name in LIBRARIES)
    assert "the driver's library libcuda.so.1 is missing" in why_no_gpu(is_cuda_build=True)


def test_a_build_without_cuda_is_told():
    (first, *_) = obstacles(NOTHING, is_cuda_build=False)
    assert first.found == "this build of TensorFlow has no CUDA"
    assert why_no_gpu(is_cuda_build=False).startswith(first.found)
    built = TensorFlow("2.21.0", False, "", "")
    assert "without CUDA" in check_gpus(CONFIG, findings(tensorflow=built))[2].value


# Data


def refuse(url, timeout_sec):
    raise OSError("Network is unreachable")


def test_a_named_folder_that_is_not_there_is_an_error(tmp_path):
    config = dataclasses.replace(CONFIG, data_dir=str(tmp_path / "none"))
    (check,) = check_data(config, {}, refuse)
    assert (check.state, check.exit_code) == (ERROR, 3) and "no such folder" in check.value


def test_damaged_and_other_data(small_data, tmp_path):
    named = {"FASHION_MNIST_DIR": str(small_data), "TFDS_DATA_DIR": str(tmp_path)}
    found, _ = check_data(CONFIG, named, refuse)
    assert found.exit_code == 3 and "SHA-256" in found.value
    config = dataclasses.replace(CONFIG, allow_unverified_data=True)
    found, _ = check_data(config, named, refuse)
    assert found.state == WARNING and "UNVERIFIED" in found.value
    manual = tmp_path / "downloads" / "manual"
    write(manual, {f"{name}.gz": "no gzip" for name in SHA256})
    found, tfds = check_data(CONFIG, {"TFDS_DATA_DIR": str(tmp_path)}, refuse)
    assert found.exit_code == 3 and "not an intact gzip file" in found.value
    assert "not prepared, with files" in tfds.value


def test_a_folder_that_may_not_be_read_is_an_error(tmp_path, monkeypatch):
    def forbid(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(pathlib.Path, "is_file", forbid)
    for options, environ in (
        ({"data_dir": str(tmp_path)}, {}),
        ({}, {"FASHION_MNIST_DIR": str(tmp_path)}),
    ):
        (check,) = check_data(dataclasses.replace(CONFIG, **options), environ, refuse)
        assert check.exit_code == 3 and "Permission denied" in check.value


def test_where_nothing_is_found_it_is_said_what_happens(tmp_path):
    environ = {"FASHION_MNIST_DIR": str(tmp_path), "TFDS_DATA_DIR": str(tmp_path / "tfds")}
    unusable, found, tfds = check_data(CONFIG, environ, refuse)
    assert (unusable.what, unusable.state) == ("FASHION_MNIST_DIR", NOTE)
    assert found.state == WARNING and "GENERATED" in found.value and "--data_dir" in found.advice
    assert tfds.state == NOTE and list(tmp_path.iterdir()) == []
    config = dataclasses.replace(CONFIG, dataset="fashion_mnist")
    assert [check.exit_code for check in check_data(config, environ, refuse)] == [0, 3, 0]
    _, found, _ = check_data(CONFIG, environ, lambda url, timeout_sec: None)
    assert found.state == OK and "downloads 30 MB" in found.value
    config = dataclasses.replace(CONFIG, dataset="synthetic")
    assert [check.state for check in check_data(config, environ, refuse)] == [NOTE]


def test_a_damaged_prepared_directory_is_an_error(tmp_path):
    write(tmp_path, {"fashion_mnist/3.0.1/dataset_info.json": "{}"})
    found, tfds = check_data(CONFIG, {"TFDS_DATA_DIR": str(tmp_path)}, refuse)
    assert found.exit_code == 3 and "cannot be read" in found.value
    assert tfds == check_tfds({"TFDS_DATA_DIR": str(tmp_path)}) and "prepared" in tfds.value


def test_tfds_downloads_from_where_the_connection_is_tried(tmp_path):
    import tensorflow_datasets as tfds

    assert tfds.builder("fashion_mnist", data_dir=tmp_path).URL == DOWNLOAD_URL


@pytest.mark.skipif("FASHION_MNIST_DIR" not in os.environ, reason="needs the real images")
def test_real_data_is_verified():
    found, _ = check_data(CONFIG, os.environ, refuse)
    assert found.state == OK and "SHA-256 verified" in found.value


# Output and cluster


def test_a_place_that_can_be_written_stays_as_it_is(tmp_path):
    config = dataclasses.replace(CONFIG, out=str(tmp_path / "a" / "b"))
    check = check_output(config)
    assert check.state == OK and str(tmp_path) in check.value and list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written(tmp_path):
    write(tmp_path, {"file": "", "theirs/text": ""})
    for name in (tmp_path / "file" / "run", tmp_path / "theirs", "~nobody-of-that-name/run"):
        check = check_output(dataclasses.replace(CONFIG, out=str(name)))
        assert (check.state, check.exit_code) == (ERROR, 5), name


@pytest.mark.parametrize(
    ("free", "state", "code"), [(1 << 20, ERROR, 8), (100 << 20, WARNING, 0), (1 << 30, OK, 0)]
)
def test_room_for_checkpoints(tmp_path, monkeypatch, free, state, code):
    class Room:
        f_frsize, f_bavail = 1024, free // 1024

    monkeypatch.setattr(output_check.os, "statvfs", lambda path: Room)
    check = check_output(dataclasses.replace(CONFIG, out=str(tmp_path)))
    assert (check.state, check.exit_code) == (state, code)


def test_cluster():
    workers = {"cluster": {"worker": ["a:1", "b:2"]}, "task": {"type": "worker", "index": 1}}
    good = check_cluster({"TF_CONFIG": json.dumps(workers)})
    assert good.state == OK and "2 workers (a:1, b:2), this is worker 1" in good.value
    bad = check_cluster({"TF_CONFIG": '{"cluster": {}}'})
    assert (bad.state, bad.exit_code) == (ERROR, 2) and bad.value.startswith("TF_CONFIG: ")
    step = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "n[1-2]"}
    step["SLURM_STEP_TASKS_PER_NODE"] = "1(x2)"
    assert "2 workers (n1:" in check_cluster(step).value
    assert check_cluster({**step, "SLURM_PROCID": "5"}).exit_code == 2
    assert check_cluster({}).state == NOTE
    assert "not within srun" in check_cluster({"SLURM_JOB_ID": "7"}).value


# TensorFlow, devices and the exchange, in a process of its own


def test_an_all_reduce_that_hangs_is_ended_and_the_others_are_tried(monkeypatch):
    monkeypatch.setattr(examination, "TIMEOUT_SEC", 5.0)
    found = examine(CONFIG, ("manual", "mirrored"), process_functions.hang_in_all_reduce)
    hung, fine = check_all_reduce(found)
    assert (hung.what, hung.state, hung.exit_code) == ("manual", ERROR, 6)
    assert "did not end within 5 s" in hung.value and "NCCL_P2P_DISABLE=1" in hung.advice
    assert (fine.what, fine.state) == ("mirrored", OK)
    assert advice.what_to_run(
        CONFIG, found, software=[], data=[], output=Check("output", "")
    ).endswith("--strategy=mirrored --num_gpus=2 --recipe=fast --epochs=10")


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (process_functions.hang_in_driver, "looking for GPUs did not end within 5 s"),
        (process_functions.vanish_in_examination, "ended early with exit code 137"),
        (process_functions.fail_in_examination, "setting up devices failed (ZeroDivisionError"),
        (process_functions.refuse_in_examination, "no space"),
    ],
)
def test_whatever_ends_it_is_told(monkeypatch, function, told):
    monkeypatch.setattr(examination, "TIMEOUT_SEC", 5.0)
    found = examine(CONFIG, ("manual",), function)
    (check,) = check_devices(found)
    assert check.state == ERROR and told in check.value
    assert check.exit_code == (8 if told == "no space" else 6)
    assert check_all_reduce(found) == []


def test_one_replica_has_no_all_reduce():
    one = DevicesSeen(("/device:CPU:0",), ("",), False, 0)
    (check,) = check_all_reduce(findings(devices=one, self_tests={}))
    assert check.state == NOTE and "no all-reduce" in check.value


def test_a_sum_that_loses_a_replica_is_found():
    result = run_here(
        *("doctor", "--device=cpu", "--num_devices=3", "--dataset=synthetic"),
        *("--strategies=mirrored", "--all_reduce=hierarchical"),
    )
    assert result.returncode == 6
    assert "✗ mirrored" in result.stdout and "replica 2 was lost" in result.stdout
    assert result.stderr.splitlines()[-1].startswith("error: all-reduce hierarchical of mirrored")


# What to run


def broken(code_6_or_3):
    error = DeviceError("a; c") if code_6_or_3 == 6 else DataError("a; c")
    return Check.of_error("x", error)


@pytest.mark.parametrize(
    ("options", "found", "words"),
    [
        ({}, {}, "--strategy=manual --recipe=fast --epochs=1"),
        (
            {"device": "cpu", "num_devices": 4, "data_dir": "a b"},
            {},
            "--strategy=manual --device=cpu --num_devices=4 --recipe=fast --epochs=1"
            " '--data_dir=a b'",
        ),
        (
            {"out": "runs/x"},
            {"seen": HEALTHY, "devices": TWO_GPUS},
            "--strategy=mirrored --num_gpus=2 --recipe=fast --epochs=10 --out=runs/x",
        ),
        (
            {},
            {
                "seen": HEALTHY,
                "devices": TWO_GPUS,
                "self_tests": {**BOTH_WORK, "mirrored": DeviceError("hangs")},
            },
            "--strategy=manual --num_gpus=2 --recipe=fast --epochs=10",
        ),
        (
            {},
            {"devices": DevicesSeen(("/device:GPU:0",), ("A",), False, 1), "self_tests": {}},
            "--strategy=single --recipe=fast --epochs=10",
        ),
        ({}, {"self_tests": {}}, "--strategy=single --recipe=fast --epochs=1"),
        (
            {"device": "gpu", "num_gpus": 3},
            {"devices": None, "self_tests": {}},
            "--device=cpu --num_devices=3 --recipe=fast --epochs=1",
        ),
    ],
)
def test_what_to_run(options, found, words, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["main.py", "doctor"])
    config = dataclasses.replace(CONFIG, **options)
    line = advice.what_to_run(
        config, findings(**found), software=[], data=[], output=Check("output", "")
    )
    assert line.partition(" main.py ")[2] == words
    assert_parses(line)


def test_what_has_to_be_run_first():
    fine = Check("output", "")
    empty = findings(tensorflow=None, devices=None)
    options = {"software": [], "data": [], "output": fine}
    assert "pip install -r " in advice.what_to_run(CONFIG, empty, **options)
    lacking = {**options, "software": [broken(6)]}
    assert "pip install -r " in advice.what_to_run(CONFIG, findings(), **lacking)
    seen = HEALTHY._replace(missing={"libcudnn.so.9": "no"})
    line = advice.what_to_run(CONFIG, findings(seen=seen), **options)
    assert line.endswith("pip install 'tensorflow[and-cuda]==2.21.0'")


def test_more_gpus_than_there_are_leads_to_another_look(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["main.py", "doctor"])
    config = dataclasses.replace(CONFIG, num_gpus=3)
    none = findings(seen=HEALTHY, devices=None, error=DeviceError("3, not 2; use 2"), self_tests={})
    line = advice.what_to_run(config, none, software=[], data=[], output=Check("output", ""))
    assert line.endswith(" main.py doctor --num_gpus=2")
    assert_parses(line)


def test_what_is_broken_is_not_advised():
    config = dataclasses.replace(CONFIG, data_dir="/none", out="/proc/x")
    line = advice.what_to_run(config, findings(), software=[], data=[broken(3)], output=broken(6))
    assert "/none" not in line and "/proc/x" not in line
    assert "--dataset=synthetic" in line and "--out=" in line


def assert_parses(line):
    assert isinstance(parse_here(*shlex.split(line)[2:]), Config)


# The command


@pytest.mark.parametrize(
    ("options", "environ", "found", "code"),
    [
        ({}, {}, {}, 0),
        ({"data_dir": "/none"}, {}, {}, 3),
        ({"out": f"{__file__}/run"}, {}, {}, 5),
        ({}, {"TF_CONFIG": "{"}, {}, 2),
        ({}, {}, {"error": DeviceError("a; c"), "devices": None, "self_tests": {}}, 6),
        ({}, {}, {"self_tests": {"manual": DeviceError("hangs; c")}}, 6),
        ({"out": f"{__file__}/run", "data_dir": "/none"}, {"TF_CONFIG": "{"}, {}, 3),
    ],
)
def test_all_is_printed_and_the_first_error_ends_it(
    capsys, monkeypatch, tmp_path, options, environ, found, code
):
    monkeypatch.chdir(tmp_path)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(doctor, "examine", lambda config, strategies: findings(**found))
    config = dataclasses.replace(CONFIG, **{"dataset": "auto", **options})
    if not options.get("data_dir"):
        config = dataclasses.replace(config, dataset="synthetic")
    try:
        doctor.run(config)
        ended = 0
    except LockstepError as error:
        ended = error.exit_code
    assert ended == code
    printed = capsys.readouterr().out
    titles = [line for line in printed.splitlines() if line and line[0] != " "]
    assert titles[:-1] == [
        *("Software", "Processor", "Data", "Output and cluster", "GPUs"),
        *("Devices of a training", "What to run"),
    ]
    assert ("✗" in printed) == (code != 0)
    assert list(tmp_path.iterdir()) == []


def test_lines_are_aligned_and_a_terminal_without_marks_has_others(monkeypatch):
    check = Check("a", "word " * 40, WARNING, "do " * 60)
    lines = check.lines()
    assert len(lines) > 3 and all(len(line) <= 100 for line in lines)
    assert lines[0].startswith("  ! a") and lines[0].index("word") == lines[1].index("word")
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    print_group("Title", [Check("a", "b"), Check("c", "d", NOTE)])
    assert terminal.buffer.getvalue().splitlines()[1][:5] == b"  + a"


@pytest.mark.e2e
def test_the_command_on_this_machine(tmp_path):
    temporary, current = tmp_path / "t", tmp_path / "c"
    temporary.mkdir()
    current.mkdir()
    result = run_ok("doctor", cwd=current, env={"TMPDIR": str(temporary)})
    lines = result.stdout.splitlines()
    assert len(lines) <= 45 and max(map(len, lines)) <= 120 and "\x1b" not in result.stdout
    assert result.stderr == ""
    for line in ("  ✓ manual ", "  ✓ mirrored "):
        assert re.search(f"^{line}.*adds every replica once", result.stdout, re.MULTILINE)
    assert_parses(lines[-1])
    assert lines[-2] == "What to run"
    assert list(temporary.iterdir()) == list(current.iterdir()) == []


def test_a_gpu_that_is_insisted_on(no_gpu):
    result = run_here(
        "doctor", "--device=gpu", "--dataset=synthetic", env={"CUDA_VISIBLE_DEVICES": ""}
    )
    assert result.returncode == 6
    assert '"" hides every GPU' in result.stdout
    last = result.stderr.splitlines()[-1]
    assert last.startswith("error: --device=gpu") and "CUDA_VISIBLE_DEVICES" in last
    assert "--device=cpu" in result.stdout.splitlines()[-1]


@pytest.mark.e2e
def test_tensorflow_that_cannot_be_loaded_is_a_finding(tmp_path):
    write(tmp_path, {"tensorflow/__init__.py": "raise ImportError('GLIBCXX_9 not found')"})
    paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    result = run_main("doctor", "--dataset=synthetic", env={"PYTHONPATH": paths})
    assert result.returncode == 6
    assert "TensorFlow cannot be loaded (GLIBCXX_9 not found)" in result.stderr
    assert "pip install -r " in result.stdout.splitlines()[-1]
    assert pathlib.Path(result.stdout.split()[-1]).name == "requirements.txt"
