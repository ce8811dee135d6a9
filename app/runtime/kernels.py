"""Chooses the library whose kernels TensorFlow computes with on CPUs: oneDNN or Eigen.

TensorFlow has both. It switches oneDNN on only where it finds AVX512_VNNI, AVX512_BF16, AVX_VNNI or
AMX, although oneDNN is faster with AVX2 alone: LeNet needs 0.80 of Eigen's time, ResNet-18 0.38
(docs/BENCHMARKS.md).
"""

import os
import platform
from collections.abc import MutableMapping

from app.runtime import processor

VARIABLE = "TF_ENABLE_ONEDNN_OPTS"
# Where TensorFlow 2.21 finds one of them, it switches oneDNN on.
_FLAGS_OF_TENSORFLOW = {
    *("avx512_vnni", "avx512_bf16", "avx_vnni", "amx_tile", "amx_int8", "amx_bf16")
}


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
    if machine == "x86_64" and "avx2" in (processor.read_flags() if flags is None else flags):
        environ.setdefault(VARIABLE, "1")


def is_tensorflows_choice(flags: frozenset[str]) -> bool:
    """Returns whether TensorFlow switches oneDNN on without the variable on an x86 processor."""
    return bool(flags & _FLAGS_OF_TENSORFLOW)


def describe_kernels(has_onednn: bool) -> str:
    """Returns which kernels compute on the CPU, for example "oneDNN on AVX2".

    Args:
        has_onednn: whether TensorFlow has switched oneDNN on; see `tf_private`.
    """
    widest = processor.features(processor.usable_flags())[0]
    return f"{'oneDNN' if has_onednn else 'Eigen'} on {widest}"
