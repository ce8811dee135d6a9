"""Defines the parts of the benchmark, each an interleaved run of programs."""

import dataclasses
import sys

from programs import Program

LENET = ("--model=lenet", "--global_batch_size=256")
RESNET = ("--model=resnet18", "--global_batch_size=64")
EPOCH_STEPS = 235  # An epoch of 60,000 in batches of 256, with a short last batch.


@dataclasses.dataclass(frozen=True)
class Ratio:
    """A line of the table: the time of one program over that of another."""

    program: str
    base: str


@dataclasses.dataclass(frozen=True)
class Part:
    """Programs that are measured in turn.

    Attributes:
        title: title of the table.
        model: name of the model, for the summary.
        num_steps: steps per block.
        programs: the programs to time.
        ratios: comparisons to print, besides each peer's best.
        tests_first_block: whether the test accuracy is computed after the first block, untimed.
    """

    title: str
    model: str
    num_steps: int
    programs: list[Program]
    ratios: list[Ratio]
    tests_first_block: bool = False


def lockstep(name: str, *flags: str, precision: str = "float32") -> Program:
    """Returns Lockstep with these flags."""
    if precision == "bfloat16":
        flags = (*flags, "--precision=mixed_bfloat16")
    return Program(name, "lockstep.py", flags, precision=precision)


def torch_ddp(python: str, *flags: str, precision: str = "float32", more: str = "") -> Program:
    """Returns PyTorch with one process per device, on two devices."""
    name = "PyTorch DDP × 2" + f", {precision}" * (precision != "float32") + more
    flags = (*flags, "--num_devices=2", f"--precision={precision}")
    flags += ("--compile",) * bool(more)
    return Program(name, "torch_ddp.py", flags, python, peer="PyTorch", precision=precision)


def jax(python: str, *flags: str, num_devices: int = 1, precision: str = "float32") -> Program:
    """Returns JAX on one device with all cores, or on several."""
    name = f"JAX × {num_devices}" + f", {precision}" * (precision != "float32")
    flags = (*flags, f"--num_devices={num_devices}", f"--precision={precision}")
    return Program(name, "jax_devices.py", flags, python, peer="JAX", precision=precision)


def keras_fit(*flags: str, num_devices: int = 2, precision: str = "float32") -> Program:
    """Returns Keras' `fit` under `MirroredStrategy`, or on one device with all cores."""
    name = f"Keras fit × {num_devices}" + f", {precision}" * (precision != "float32")
    flags = (*flags, f"--num_devices={num_devices}", f"--precision={precision}")
    if num_devices == 1:  # Above 1 it fails under the strategy.
        flags = (*flags, "--steps_per_execution=10")
    return Program(name, "keras_fit.py", flags, peer="Keras", precision=precision)


def peaks() -> list[Program]:
    """Returns matrix products in both precisions."""
    return [
        Program(f"peak, {precision}", "peak.py", (f"--precision={precision}",), precision=precision)
        for precision in ("float32", "bfloat16")
    ]


def own_pair(*flags: str) -> list[Program]:
    """Returns `manual` on two devices in both precisions."""
    return [
        lockstep("manual × 2", *flags),
        lockstep("manual × 2, bfloat16", *flags, precision="bfloat16"),
    ]


def lenet_part(peers_python: str, *, quick: bool = False) -> Part:
    """Returns the part for LeNet."""
    two_devices = lockstep("mirrored × 2", *LENET, "--strategy=mirrored")
    programs = [*own_pair(*LENET), two_devices]
    ratios = [Ratio("manual × 2, bfloat16", "manual × 2"), Ratio("mirrored × 2", "manual × 2")]
    python = peers_python
    peers = [
        torch_ddp(python, *LENET),
        torch_ddp(python, *LENET, precision="bfloat16"),
        jax(python, *LENET),
    ]
    if not quick:
        others = [("single", 1), ("manual", 4), ("mirrored", 4)]
        programs += [
            lockstep(f"{s} × {n}", *LENET, f"--strategy={s}", f"--num_devices={n}")
            for s, n in others
        ]
        names = ("manual × 2", "mirrored × 2", "manual × 4", "mirrored × 4")
        ratios += [Ratio(name, "single × 1") for name in names]
        peers += [
            torch_ddp(python, *LENET, more=", compiled"),
            torch_ddp(python, *LENET, precision="bfloat16", more=", compiled"),
            jax(python, *LENET, num_devices=2),
            jax(python, *LENET, precision="bfloat16"),
            Program("d2l, eager loop × 2", "d2l_loop.py", (*LENET, "--num_devices=2")),
        ]
        ratios.append(Ratio("manual × 2", "d2l, eager loop × 2"))
        peers += peaks()
    num_steps = 40 if quick else 120
    title = f"LeNet, batch 256: blocks of {num_steps} steps"
    return Part(title, "LeNet", num_steps, programs + peers, ratios)


def resnet_part(peers_python: str, *, quick: bool = False) -> Part:
    """Returns the part for ResNet-18."""
    programs = [*own_pair(*RESNET), lockstep("mirrored × 2", *RESNET, "--strategy=mirrored")]
    ratios = [Ratio("manual × 2, bfloat16", "manual × 2"), Ratio("mirrored × 2", "manual × 2")]
    python = peers_python
    programs += [torch_ddp(python, *RESNET), torch_ddp(python, *RESNET, precision="bfloat16")]
    if not quick:
        programs += [
            torch_ddp(python, *RESNET, more=", compiled"),
            torch_ddp(python, *RESNET, precision="bfloat16", more=", compiled"),
            jax(python, *RESNET),
            *peaks(),
        ]
    num_steps = 2 if quick else 4
    title = f"ResNet-18, batch 64: blocks of {num_steps} steps"
    return Part(title, "ResNet-18", num_steps, programs, ratios)


def split_part(peers_python: str) -> Part:
    """Returns the part for three split trainings, with an epoch of `fast` per block."""
    fast = (*LENET, "--recipe=fast", "--num_devices=2")
    peers = [
        ("PyTorch DDP × 2", "torch_ddp.py", ()),
        ("PyTorch pipeline, GPipe × 2", "torch_pipeline.py", ("--schedule=gpipe",)),
        ("PyTorch pipeline, 1F1B × 2", "torch_pipeline.py", ("--schedule=1f1b",)),
        ("PyTorch FSDP2 × 2", "torch_fsdp.py", ()),
    ]
    own = [
        ("manual × 2", ("--strategy=manual",)),
        ("pipeline, GPipe × 2", ("--strategy=pipeline", "--schedule=gpipe")),
        ("pipeline, 1F1B × 2", ("--strategy=pipeline", "--schedule=1f1b")),
        ("tensor × 2", ("--strategy=tensor",)),
        ("sharded × 2", ("--strategy=sharded",)),
    ]
    programs = [lockstep(name, *fast, "--epochs=1", *flags) for name, flags in own]
    programs += [
        Program(name, file, (*fast, *flags), peers_python, peer="PyTorch")
        for name, file, flags in peers
    ]
    ratios = [Ratio(name, "manual × 2") for name, _ in own[1:]]
    pairs = [(own[1], peers[1]), (own[2], peers[2]), (own[4], peers[3])]
    ratios += [Ratio(a, b) for (a, *_), (b, *_) in pairs]
    title = "LeNet, batch 256, recipe `fast`: ways to split a training"
    return Part(f"{title}, blocks of an epoch", "LeNet", EPOCH_STEPS, programs, ratios, True)


def keras_part(model: str, *flags: str, num_steps: int, one_device: bool = False) -> Part:
    """Returns the part for Keras, a separate run because its stalls would affect others."""
    programs = own_pair(*flags)
    for num_devices in (2, 1) if one_device else (2,):
        for precision in ("float32", "bfloat16"):
            programs.append(keras_fit(*flags, num_devices=num_devices, precision=precision))
    batch = flags[-1].partition("=")[2]
    title = f"{model}, batch {batch}, and Keras `fit`"
    return Part(f"{title}: blocks of {num_steps} steps", model, num_steps, programs, [])


def all_parts(peers_python: str = sys.executable, *, quick: bool = False) -> dict[str, Part]:
    """Returns name → part.

    Args:
        peers_python: interpreter with PyTorch and JAX.
        quick: only the most important comparisons, in short blocks.
    """
    parts = {
        "lenet": lenet_part(peers_python, quick=quick),
        "lenet_keras": keras_part(
            "LeNet", *LENET, num_steps=40 if quick else 120, one_device=not quick
        ),
        "resnet18": resnet_part(peers_python, quick=quick),
    }
    if quick:
        return parts
    return parts | {
        "resnet18_keras": keras_part("ResNet-18", *RESNET, num_steps=4),
        "lenet_split": split_part(peers_python),
    }
