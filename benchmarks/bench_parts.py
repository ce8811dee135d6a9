"""Defines the parts of the benchmark, each an interleaved run of programs."""

import dataclasses
import sys

from programs import Program

LENET = ("--model=lenet", "--global_batch_size=256")
RESNET = ("--model=resnet18", "--global_batch_size=64")
EPOCH_STEPS = 235  # An epoch of 60,000 in batches of 256, with a short last batch.


@dataclasses.dataclass(frozen=True)
class Part:
    """Programs that are measured in turn.

    Attributes:
        title: title of the table.
        model: name of the model, for the summary.
        num_steps: steps per block.
        programs: the programs to time.
        ratios: program and base of comparisons to print, besides each peer's best.
        tests_first_block: whether the test accuracy is computed after the first block, untimed.
    """

    title: str
    model: str
    num_steps: int
    programs: list[Program]
    ratios: list[tuple[str, str]]
    tests_first_block: bool = False


def lockstep(name: str, *flags: str, precision: str = "float32") -> Program:
    """Returns Lockstep with these flags."""
    if precision == "bfloat16":
        flags = (*flags, "--precision=mixed_bfloat16")
    return Program(name, "own_training.py", flags, precision=precision)


def torch_ddp(python: str, *flags: str, precision: str = "float32") -> Program:
    """Returns PyTorch with one process per device, on two devices."""
    name = "PyTorch DDP × 2" + (", bfloat16" if precision == "bfloat16" else "")
    flags = (*flags, "--num_devices=2", f"--precision={precision}")
    return Program(name, "torch_ddp.py", flags, python, peer="PyTorch", precision=precision)


def jax(python: str, *flags: str) -> Program:
    """Returns JAX on one device with all cores."""
    return Program("JAX × 1", "jax_devices.py", (*flags, "--num_devices=1"), python, peer="JAX")


def keras_fit(*flags: str, num_devices: int = 2, precision: str = "float32") -> Program:
    """Returns Keras' `fit` under `MirroredStrategy`, or on one device with all cores."""
    name = f"Keras fit × {num_devices}" + (", bfloat16" if precision == "bfloat16" else "")
    flags = (*flags, f"--num_devices={num_devices}", f"--precision={precision}")
    if num_devices == 1:  # Above 1 it fails under the strategy.
        flags = (*flags, "--steps_per_execution=10")
    return Program(name, "keras_fit.py", flags, peer="Keras", precision=precision)


def own_pair(*flags: str) -> list[Program]:
    """Returns `manual` on two devices in both precisions."""
    return [
        lockstep("manual × 2", *flags),
        lockstep("manual × 2, bfloat16", *flags, precision="bfloat16"),
    ]


def network_part(title: str, num_steps: int, flags: tuple[str, ...], peers_python: str) -> Part:
    """Returns the part for a network, in PyTorch and JAX and, for LeNet, in d2l's own loop."""
    programs = [
        *own_pair(*flags),
        lockstep("mirrored × 2", *flags, "--strategy=mirrored"),
        lockstep("single × 1", *flags, "--strategy=single"),
        torch_ddp(peers_python, *flags),
        torch_ddp(peers_python, *flags, precision="bfloat16"),
        jax(peers_python, *flags),
    ]
    ratios = [
        ("manual × 2, bfloat16", "manual × 2"), ("mirrored × 2", "manual × 2"),
        ("manual × 2", "single × 1"),
    ]  # fmt: skip
    if flags == LENET:
        d2l = Program("d2l, eager loop × 2", "d2l_loop.py", (*LENET, "--num_devices=2"))
        programs.append(d2l)
        ratios.append(("manual × 2", d2l.name))
    model = title.partition(",")[0]
    return Part(f"{title}: blocks of {num_steps} steps", model, num_steps, programs, ratios)


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
    ratios = [(name, "manual × 2") for name, _ in own[1:]]
    pairs = [(own[1], peers[1]), (own[2], peers[2]), (own[4], peers[3])]
    ratios += [(a, b) for (a, *_), (b, *_) in pairs]
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


def all_parts(peers_python: str = sys.executable) -> dict[str, Part]:
    """Returns name → part; `peers_python` is an interpreter with PyTorch and JAX."""
    return {
        "lenet": network_part("LeNet, batch 256", 120, LENET, peers_python),
        "lenet_keras": keras_part("LeNet", *LENET, num_steps=120, one_device=True),
        "resnet18": network_part("ResNet-18, batch 64", 4, RESNET, peers_python),
        "resnet18_keras": keras_part("ResNet-18", *RESNET, num_steps=4),
        "lenet_split": split_part(peers_python),
    }
