"""Reads what this processor computes with."""

import os
import pathlib
import platform
import re

# What decides how kernels compute: flag → name.
_WIDTHS = {"avx512f": "AVX-512", "avx2": "AVX2", "avx": "AVX", "sse4_1": "SSE4.1"}
_EXTENSIONS = {"avx512_vnni": "AVX512_VNNI", "avx512_bf16": "AVX512_BF16", "amx_bf16": "AMX"}


def _field(name: str) -> str:
    """Returns a field of the first processor; "" where the system does not list it."""
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    found = re.search(rf"^{name}\s*:(.*)$", text, re.MULTILINE)
    return found[1].strip() if found else ""


def read_flags() -> frozenset[str]:
    """Returns the flags of an x86 processor as Linux names them, for example "avx2"."""
    return frozenset(_field("flags").split())


def computes_in_bfloat16(flags: frozenset[str]) -> bool:
    """Returns whether a processor with these flags multiplies numbers in bfloat16."""
    return bool(flags & {"avx512_bf16", "amx_bf16"})


def name_of_machine() -> str:
    """Returns the name of this processor and of what its kernels compute with."""
    flags = read_flags()
    widest = next((name for flag, name in _WIDTHS.items() if flag in flags), platform.machine())
    features = [widest, *(name for flag, name in _EXTENSIONS.items() if flag in flags)]
    name = _field("model name") or platform.processor() or platform.machine()
    return f"{name}: {', '.join(features)}, {os.cpu_count()} cores"
