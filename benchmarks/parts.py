"""Defines what is measured: the programs, the parts in which they are timed, their environment."""

import dataclasses

import machine

KERNELS = "TF_ENABLE_ONEDNN_OPTS"
EIGEN, ONEDNN = f"{KERNELS}=0", f"{KERNELS}=1"

# Name in the tables → framework and flags of `program.py`, after an environment variable.
PROGRAMS = {
    "manual × 2": "lockstep",
    "manual × 2, Eigen": f"{EIGEN} lockstep",
    "manual × 2, bfloat16": "lockstep --precision=bfloat16",
    "mirrored × 2": "lockstep --strategy=mirrored",
    "single × 1": "lockstep --strategy=single --num_devices=1",
    "sharded × 2": "lockstep --strategy=sharded",
    "PyTorch DDP × 2": "torch_ddp",
    "PyTorch DDP × 2, bfloat16": "torch_ddp --precision=bfloat16",
    "PyTorch FSDP2 × 2": "torch_fsdp",
    "JAX × 1": "jax --num_devices=1",
    "d2l, eager loop × 2": "d2l",
    "Keras fit × 2": "keras",
    "Keras fit × 2, oneDNN": f"{ONEDNN} keras",
    "Keras fit × 2, bfloat16": "keras --precision=bfloat16",
    "Keras fit × 1": "keras --num_devices=1",
    "Keras fit × 1, oneDNN": f"{ONEDNN} keras --num_devices=1",
    "Keras fit × 1, bfloat16": "keras --num_devices=1 --precision=bfloat16",
}
PEERS = ("PyTorch", "JAX", "Keras")
OWN = ("manual × 2", "manual × 2, bfloat16")
NETWORK = (
    *OWN, "manual × 2, Eigen", "mirrored × 2", "single × 1", "PyTorch DDP × 2",
    "PyTorch DDP × 2, bfloat16", "JAX × 1",
)  # fmt: skip
# Apart: its stalls disturb others.
KERAS = (*OWN, "Keras fit × 2", "Keras fit × 2, oneDNN", "Keras fit × 2, bfloat16")
RATIOS = (
    (OWN[1], OWN[0]), (OWN[0], "manual × 2, Eigen"), ("mirrored × 2", OWN[0]),
    (OWN[0], "single × 1"),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Part:
    """Programs that are measured in turn, with the same flags.

    `ratios` has programs and bases to compare besides each peer's best. `num_steps` are those of a
    block, which is an epoch, with the test accuracy after the first; 0 for as many as `BLOCK_SEC`
    says.
    """

    title: str
    flags: str
    programs: tuple[str, ...]
    ratios: tuple[tuple[str, str], ...] = ()
    num_steps: int = 0


LENET = "--model=lenet --global_batch_size=256"
RESNET = "--model=resnet18 --global_batch_size=64"
PARTS = {
    "lenet": Part(
        "LeNet, batch 256", LENET, (*NETWORK, "d2l, eager loop × 2"),
        (*RATIOS, (OWN[0], "d2l, eager loop × 2")),
    ),
    "lenet_keras": Part(
        "LeNet, batch 256, beside Keras", LENET,
        (*KERAS, "Keras fit × 1", "Keras fit × 1, oneDNN", "Keras fit × 1, bfloat16"),
    ),
    "resnet18": Part("ResNet-18, batch 64", RESNET, NETWORK, RATIOS),
    "resnet18_keras": Part(
        "ResNet-18, batch 64, beside Keras", RESNET, KERAS
    ),
    "lenet_fast": Part(
        "LeNet, batch 256, recipe fast",
        f"{LENET} --recipe=fast",
        (OWN[0], "sharded × 2", "PyTorch DDP × 2", "PyTorch FSDP2 × 2"),
        (("sharded × 2", OWN[0]), ("sharded × 2", "PyTorch FSDP2 × 2")),
        num_steps=235,  # The last batch is short.
    ),
}  # fmt: skip
# Where TensorFlow 2.21 finds one of them, it switches oneDNN on.
_FLAGS_OF_TENSORFLOW = {
    *("avx512_vnni", "avx512_bf16", "avx_vnni", "amx_tile", "amx_int8", "amx_bf16")
}


def environment_of(name: str) -> dict[str, str | None]:
    """Returns the variables of a program, whatever kernels the user of this one has chosen.

    None removes a variable: then each program computes with its kernels after an installation.
    """
    words = PROGRAMS[name].split()
    return {KERNELS: words[0].partition("=")[2] or None}


def why_left_out(name: str, flags: frozenset[str]) -> str:
    """Returns why a program is not measured on a processor with these flags; "" if it is."""
    if "bfloat16" in name and flags and not machine.computes_in_bfloat16(flags):
        return "bfloat16, which this processor emulates: several times slower than float32"
    if name.startswith("Keras") and "oneDNN" in name and flags & _FLAGS_OF_TENSORFLOW:
        return f"Keras with {ONEDNN}, which TensorFlow chooses on this processor"
    return ""
