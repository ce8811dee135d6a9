"""Reads what this processor computes with, and chooses TensorFlow's kernels: oneDNN or Eigen.

TensorFlow has both. It switches oneDNN on only where it finds AVX512_VNNI, AVX512_BF16, AVX_VNNI or
AMX, although oneDNN is faster with AVX2 alone: LeNet needs 0.80 of Eigen's time, ResNet-18 0.38
(docs/BENCHMARKS.md).
"""

import os
import pathlib
import platform
import re
from collections.abc import Mapping, MutableMapping

VARIABLE = "TF_ENABLE_ONEDNN_OPTS"
_CPU_INFO = pathlib.Path("/proc/cpuinfo")
# oneDNN's limit for the instruction sets that it uses, and its older name.
_LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
# Limit → how the flags begin that it excludes.
_EXCLUDED = {
    **dict.fromkeys(("SSE41", "AVX"), ("avx2", "avx_vnni", "avx512", "amx")),
    "AVX2": ("avx_vnni", "avx512", "amx"),
    **dict.fromkeys(("AVX2_VNNI", "AVX2_VNNI_2"), ("avx512", "amx")),
    "AVX512_CORE": ("avx512_vnni", "avx512_bf16", "amx"),
    "AVX512_CORE_VNNI": ("avx512_bf16", "amx"),
    **dict.fromkeys(("AVX512_CORE_BF16", "AVX512_CORE_FP16"), ("amx",)),
}
# What decides how kernels compute: flag → name.
_WIDTHS = {"avx512f": "AVX-512", "avx2": "AVX2", "avx": "AVX", "sse4_1": "SSE4.1"}
_EXTENSIONS = {"avx512_vnni": "AVX512_VNNI", "avx512_bf16": "AVX512_BF16", "amx_bf16": "AMX"}


def processor_name(cpu_info: pathlib.Path = _CPU_INFO) -> str:
    """Returns the processor's name."""
    found = re.search(r"^model name\s*:(.*)$", _read(cpu_info), re.MULTILINE)
    name = found[1].strip() if found else ""
    return name or platform.processor() or platform.machine()


def read_flags(cpu_info: pathlib.Path = _CPU_INFO) -> frozenset[str]:
    """Returns the flags of an x86 processor as Linux names them, for example "avx2".

    Returns:
        The flags; empty if the system does not list them, as on ARM and on macOS.
    """
    found = re.search(r"^flags\s*:(.*)$", _read(cpu_info), re.MULTILINE)
    return frozenset(found[1].split()) if found else frozenset()


def _read(cpu_info: pathlib.Path) -> str:
    try:
        return cpu_info.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def usable_flags(
    flags: frozenset[str] | None = None, environ: Mapping[str, str] = os.environ
) -> frozenset[str]:
    """Returns the flags without the instruction sets that the user's limit of oneDNN excludes.

    Args:
        flags: flags of the processor; None to read them.
        environ: environment variables.
    """
    flags = read_flags() if flags is None else flags
    limit = next((environ[name].upper() for name in _LIMITS if environ.get(name)), "")
    excluded = _EXCLUDED.get(limit, ())
    return frozenset(flag for flag in flags if not flag.startswith(excluded))


def computes_in_bfloat16(flags: frozenset[str]) -> bool:
    """Returns whether a processor with these flags multiplies numbers in bfloat16."""
    return bool(flags & {"avx512_bf16", "amx_bf16"})


def features(flags: frozenset[str]) -> list[str]:
    """Returns the instruction sets that decide how kernels compute, the widest vectors first.

    Returns:
        Names such as "AVX2" or "AVX-512", "AVX512_BF16", "AMX"; the kind of the processor if it
        lists no flags.
    """
    widest = next((name for flag, name in _WIDTHS.items() if flag in flags), platform.machine())
    return [widest, *(name for flag, name in _EXTENSIONS.items() if flag in flags)]


def choose_kernels(
    environ: MutableMapping[str, str] = os.environ,
    machine: str = platform.machine(),
    flags: frozenset[str] | None = None,
) -> None:
    """Switches oneDNN on where the processor has AVX2, unless the user has set the variable.

    TensorFlow reads the variable once, when it is imported; importing any module of `app` calls
    this function. On ARM nothing changes.

    Args:
        environ: environment variables; changed.
        machine: the kind of processor, as `platform.machine` names it.
        flags: flags of the processor; None to read them.
    """
    if machine == "x86_64" and "avx2" in (read_flags() if flags is None else flags):
        environ.setdefault(VARIABLE, "1")


def describe_kernels(has_onednn: bool) -> str:
    """Returns which kernels compute on the CPU, for example "oneDNN on AVX2".

    Args:
        has_onednn: whether TensorFlow has switched oneDNN on; see `tf_private`.
    """
    widest = features(usable_flags())[0]
    return f"{'oneDNN' if has_onednn else 'Eigen'} on {widest}"
