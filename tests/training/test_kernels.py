"""Which kernels compute on the CPU: the decision, on made processors, and what it promises here."""

import os

import pytest
import tensorflow as tf

from app.devices import device_setup, rendezvous
from app.doctor import tensorflow_check
from app.doctor.machine import OK, WARNING
from app.options import Config
from app.records.history import load_summary
from app.runtime import kernels
from app.runtime.errors import ConfigError
from strategies.tf_private import is_onednn_enabled
from tests.conftest import run_ok

AVX2 = frozenset({"sse4_1", "avx", "avx2", "fma"})
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512vl"}
BF16 = AVX512 | {"avx512_vnni", "avx512_bf16"}
AMX = BF16 | {"amx_tile", "amx_int8", "amx_bf16"}


@pytest.mark.parametrize(
    ("machine", "flags", "given", "chosen"),
    [
        ("x86_64", AMX, None, "1"),
        ("x86_64", AVX2 - {"avx2"}, None, None),
        ("arm64", AVX2, None, None),
        ("x86_64", AVX2, "0", "0"),
        ("x86_64", AVX2, "", ""),
    ],
)
def test_onednn_is_chosen_with_avx2_unless_the_user_has_chosen(machine, flags, given, chosen):
    environ = {} if given is None else {kernels.VARIABLE: given}
    kernels.choose_kernels(environ, machine, flags)
    assert environ.get(kernels.VARIABLE) == chosen


@pytest.mark.parametrize(
    ("limit", "features", "has_bfloat16"),
    [
        ("other", ["AVX-512", "AVX512_VNNI", "AVX512_BF16", "AMX"], True),  # oneDNN ignores it.
        ("AVX512_CORE_BF16", ["AVX-512", "AVX512_VNNI", "AVX512_BF16"], True),
        ("AVX512_CORE_VNNI", ["AVX-512", "AVX512_VNNI"], False),
        ("AVX512_CORE", ["AVX-512"], False),
        ("AVX2_VNNI", ["AVX2"], False),
        ("avx2", ["AVX2"], False),
        ("SSE41", ["AVX"], False),
    ],
)
def test_what_a_processor_computes_with_within_a_limit(limit, features, has_bfloat16):
    usable = kernels.usable_flags(AMX | {"avx_vnni"}, {"ONEDNN_MAX_CPU_ISA": limit})
    assert kernels.features(usable) == features
    assert kernels.computes_in_bfloat16(usable) == has_bfloat16
    assert ("avx_vnni" in usable) == (limit not in ("avx2", "SSE41"))


def test_the_files_of_linux_are_read(tmp_path):
    path = tmp_path / "cpuinfo"
    path.write_text("processor\t: 0\nmodel name\t: A  CPU \nflags\t\t: fpu avx2\n\nflags : x\n")
    assert kernels.read_flags(path) == {"fpu", "avx2"}
    assert kernels.processor_name(path) == "A  CPU"
    path.write_text("Features\t: fp asimd bf16\n")  # ARM.
    assert kernels.read_flags(path) == frozenset() == kernels.read_flags(tmp_path / "none")
    assert kernels.processor_name(path) == kernels.processor_name(tmp_path / "none") != ""
    path.write_text("model name\t: \n")
    assert kernels.processor_name(path) != ""


def test_the_kernels_are_those_within_the_limit(monkeypatch):
    monkeypatch.setattr(kernels, "read_flags", lambda: AMX)
    assert kernels.describe_kernels(True) == "oneDNN on AVX-512"
    monkeypatch.setenv("DNNL_MAX_CPU_ISA", "AVX2")  # Its older name.
    assert kernels.describe_kernels(False) == "Eigen on AVX2"


def test_workers_may_have_other_kernels():
    config = Config.of("train", strategy="multi_worker", num_workers=2)
    settings = rendezvous._settings(config, ["/device:CPU:0"])
    assert not [name for name in settings if "kernels" in name] and "version of keras" in settings


def test_importing_the_program_chooses_before_tensorflow_is_imported():
    """`test_device_setup` has a process in which the user has chosen."""
    chosen, here = {}, os.environ.get(kernels.VARIABLE)
    kernels.choose_kernels(chosen)
    assert here is not None or not chosen
    assert here is None or is_onednn_enabled() == (here == "1")


def bfloat16_here(monkeypatch, capsys, *, flags, limit="", has_onednn=True):
    """Sets up devices for bfloat16 on a made processor; returns the warning."""
    monkeypatch.setattr(kernels, "read_flags", lambda: flags)
    monkeypatch.setattr("strategies.tf_private.is_onednn_enabled", lambda: has_onednn)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    tf.config.list_logical_devices()  # From here on, TensorFlow keeps the tests' four devices.
    device_setup.set_up(Config.of(device="cpu", precision="mixed_bfloat16"))
    return "".join(line for line in capsys.readouterr().err.splitlines(True) if "bfloat16" in line)


def test_a_precision_that_the_processor_emulates_is_told(monkeypatch, capsys):
    told = bfloat16_here(monkeypatch, capsys, flags=AVX2)
    assert told.count("\n") == 1 and "(oneDNN on AVX2) emulate bfloat16" in told
    assert "Eigen on AVX-512" in bfloat16_here(monkeypatch, capsys, flags=BF16, has_onednn=False)
    assert not bfloat16_here(monkeypatch, capsys, flags=BF16)
    assert not bfloat16_here(monkeypatch, capsys, flags=frozenset())  # Unknown, as on ARM.
    assert "emulate" in bfloat16_here(monkeypatch, capsys, flags=AMX, limit="AVX512_CORE")
    with pytest.raises(ConfigError, match=r"ONEDNN_MAX_CPU_ISA excludes .* unset the variable"):
        bfloat16_here(monkeypatch, capsys, flags=BF16, limit="AVX2")
    device_setup.set_up(Config.of(device="cpu"))  # In float32 with the same limit.


@pytest.mark.parametrize(
    ("flags", "has_onednn", "mark", "value"),
    [
        (AVX2, True, OK, "oneDNN on AVX2"),
        (AVX2, False, WARNING, f"Eigen on AVX2 with {kernels.VARIABLE}=0"),
        (AVX2 - {"avx2"}, False, OK, "Eigen on AVX"),
    ],
)
def test_doctor_tells_the_kernels(monkeypatch, flags, has_onednn, mark, value):
    monkeypatch.setattr(kernels, "read_flags", lambda: flags)
    monkeypatch.setattr("strategies.tf_private.is_onednn_enabled", lambda: has_onednn)
    monkeypatch.setenv(kernels.VARIABLE, str(int(has_onednn)))
    check = tensorflow_check._check_kernels()
    assert (check.mark, check.value) == (mark, value)


@pytest.mark.slow
@pytest.mark.parametrize(("value", "limit"), [("0", "ALL"), ("1", "AVX2")])
def test_strategies_are_bitwise_identical_with_each_kind_of_kernels(tmp_path, value, limit):
    """And the summary, the log and the verification say which kernels computed."""
    env = {kernels.VARIABLE: value, "ONEDNN_MAX_CPU_ISA": limit}
    common = ("--device=cpu", "--num_devices=2", "--dataset=synthetic", "--num_train_examples=512")
    words = ("--strategies=manual,mirrored", "--steps=3", f"--out={tmp_path}/verify")
    done = run_ok("verify", *words, *common, env=env)
    for name in ("manual", "mirrored"):
        assert f"{name}: all 168 arrays bitwise equal to one device" in done.stdout
    run_ok("train", "--strategy=manual", "--epochs=1", f"--out={tmp_path}/run", *common, env=env)
    computed = load_summary(tmp_path / "run").cpu_kernels
    assert computed.startswith("oneDNN on AVX2" if value == "1" else "Eigen")
    assert f"Kernels of the CPU: {computed}" in (tmp_path / "run" / "log.txt").read_text()
