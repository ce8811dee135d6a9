"""The table of options: one row for each, a field of the group that it belongs to.

The flags, `--help`, `docs/options.md`, the checks of values and the config of a command come from
the rows. The groups are in the order of `--helpfull`.
"""

import dataclasses
import pathlib
from typing import Any, NamedTuple

from app.options import names
from app.options.fault import FAULTS, Fault
from app.options.option import Option, option, rows_of
from strategies import ALL_REDUCE_ALGORITHMS

# Groups of commands.
_RUNS = ("train", "compare")
_TRAIN = (*_RUNS, "verify")
_STEPS = (*_TRAIN, "benchmark")
_DATA = (*_STEPS, "doctor", "demo")
_DEVICES = ("train", "compare", "verify", "evaluate", "doctor", "demo")
_ALL = ("train", "compare", "verify", "evaluate", "benchmark", "doctor", "demo")

_ALGORITHMS = "; ".join(f"{name}: {', '.join(a)}" for name, a in ALL_REDUCE_ALGORITHMS.items())
_MANY: Any = {"metavar": "A,B,…"}
_N: Any = {"metavar": "N", "low": 1}
_RESULT: Any = {"affects_result": True}
_IN_FRAMEWORKS = "torch_ddp, jax_jit and jax_pmap train in PyTorch and JAX: see make frameworks."
_COMMON: Any = {"common": True}
_RARE_IN_VERIFY: Any = {"differs": {"verify": {"common": False}}}
# What `verify` verifies; an option has the parts that can have it.
PARTS = {
    "strategies": "Strategies of this program",
    "case": "Your own Keras training, in a file with model() and data()",
}
_ALL_PARTS: Any = {"parts": tuple(PARTS)}
# Options of earlier versions → what to do instead.
REMOVED = dict.fromkeys(
    ("traces", "name_map", "tolerance"), "use `python -m lockstep one.npz two.npz --html FILE`"
)


def split_case(case: str) -> tuple[str, str]:
    """Splits `FILE:NAME` into the file and the function; other colons belong to the file."""
    path, _, name = case.rpartition(":")
    return (path, name) if path and name.isidentifier() else (case, "model")


# fmt: off


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """What is trained, and for how long."""

    model: str = option("lenet",
        "Network to train.", _TRAIN, choices=names.MODEL_NAMES, **_RESULT, **_COMMON)
    recipe: str = option("d2l",
        'Learning rate, schedule, initial weights and augmentation: d2l as in "Dive into Deep'
        ' Learning", fast a modern recipe.', _STEPS, choices=names.RECIPE_NAMES, **_RESULT,
        **_COMMON, **_RARE_IN_VERIFY)
    epochs: int = option(10,
        "Number of passes over the training set.", _TRAIN, **_N, high=100_000, alias="num_epochs",
        **_RESULT, **_COMMON, **_RARE_IN_VERIFY)
    global_batch_size: int = option(256,
        "Examples in a step, over all replicas.", _TRAIN, **_N, high=names.NUM_TRAIN_EXAMPLES,
        alias="batch_size", **_RESULT, **_COMMON, **_ALL_PARTS)
    learning_rate: float | None = option(None,
        "Peak learning rate. Default: the recipe's.", _TRAIN, metavar="X", above=0.0,
        high=names.MAX_FLOAT32, alias="lr", **_RESULT, **_COMMON, **_RARE_IN_VERIFY)
    seed: int = option(0,
        "Seed of the initial weights and of the order of examples.", (*_STEPS, "demo"), metavar="N",
        low=0, high=2**32 - 1, **_RESULT, **_ALL_PARTS)
    last_batch: str = option("keep",
        "Keep or drop the smaller batch at the end of an epoch.", _TRAIN, choices=("keep", "drop"),
        **_RESULT)
    precision: str = option("float32",
        "Dtype that layers compute in; weights, updates and the loss are float32.", _TRAIN,
        choices=names.PRECISIONS, **_RESULT, **_COMMON, **_RARE_IN_VERIFY)
    jit_compile: bool = option(False,
        "Compile the forward and backward pass with XLA.", _STEPS, **_RESULT)
    deterministic: bool = option(False,
        "Use only kernels whose results are bitwise identical in every run.", _STEPS, **_RESULT,
        **_ALL_PARTS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Data:
    """The images."""

    dataset: str = option("auto",
        "auto uses Fashion-MNIST where it is available, else generated images.", _DATA,
        choices=("auto", "fashion_mnist", "synthetic"), **_RESULT)
    num_train_examples: int | None = option(None,
        "Train on a class-balanced random subset of N examples, chosen by the seed.", _STEPS, **_N,
        high=names.NUM_TRAIN_EXAMPLES, **_RESULT)
    data_dir: str | None = option(None,
        "Folder with the four Fashion-MNIST files, or a TFDS data directory. Without it:"
        " $FASHION_MNIST_DIR, then TFDS.", _ALL, metavar="DIR",
        differs={"doctor": {"common": True}})
    allow_unverified_data: bool = option(False,
        "Accept data files whose hash is not that of Fashion-MNIST.", _ALL)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Distribution:
    """How a training is distributed over devices."""

    strategy: str = option("manual",
        "Distribution strategy. manual and mirrored split the batch, sharded the batch and the"
        " weights, pipeline the layers, tensor each layer; multi_worker has several processes, on"
        " one or more machines.", ("train", "evaluate"), choices=names.STRATEGY_NAMES, **_RESULT,
        differs={"evaluate": {"choices": names.ONE_MACHINE_STRATEGIES}}, **_COMMON)
    strategies: tuple[str, ...] = option(names.COMPARED_BY_DEFAULT,
        "The strategies, separated by commas.",
        ("compare", "verify", "benchmark", "doctor"), **_MANY, choices=names.STRATEGY_NAMES,
        differs={
            "compare": {
                "choices": (*names.STRATEGY_NAMES, *names.FRAMEWORKS),
                "help": f"The strategies, separated by commas. {_IN_FRAMEWORKS}"},
            "verify": {
                "choices": (*names.STRATEGY_NAMES, names.KERAS_FIT, *names.FRAMEWORKS),
                "help": f"The strategies, separated by commas. {_IN_FRAMEWORKS} With --case:"
                " keras_fit, Keras' own fit under MirroredStrategy (the default), and single, its"
                " fit on one device."},
            "doctor": {"choices": names.ONE_MACHINE_STRATEGIES, "default": ("manual", "mirrored")}},
        **_COMMON, **_ALL_PARTS)
    num_gpus: int | None = option(None,
        "Number of GPUs. On a machine without GPUs: N logical CPU devices.", _DEVICES, **_N,
        high=names.MAX_DEVICES, **_COMMON, **_ALL_PARTS)
    device: str = option("auto",
        "Device type: gpu fails without a GPU, cpu uses logical CPU devices.", _ALL,
        choices=("auto", "gpu", "cpu"), **_COMMON, **_ALL_PARTS)
    num_devices: int | None = option(None,
        "Number of devices (multi_worker: of each worker). Default: all GPUs, or 2 logical CPU"
        " devices.", _DEVICES, **_N, high=names.MAX_DEVICES, **_COMMON, **_ALL_PARTS)
    all_reduce: str = option("auto",
        f"All-reduce algorithm. {_ALGORITHMS}. mirrored and multi_worker have nccl on GPUs only,"
        " mirrored has ring on CPUs only.", (*_STEPS, "doctor", "demo"),
        choices=("auto", *names.ALL_REDUCE_NAMES), **_RESULT,
        differs={"demo": {"choices": ("auto", *ALL_REDUCE_ALGORITHMS["manual"])}})
    communication_dtype: str = option("float32",
        "Dtype of the gradient all-reduce.", ("verify", "benchmark"),
        choices=("float32", "bfloat16"), **_RESULT)
    batch_norm: str = option("average",
        "average: each shard of the batch is normalised by its own statistics; moving statistics"
        " are averaged. sync: all use the statistics of the whole batch.", _STEPS,
        choices=("average", "sync"), **_RESULT)
    accumulate_steps: int = option(1,
        "Gradient accumulation: each replica splits its shard into A parts and adds their gradients"
        " before the update. Needs less memory.", _STEPS, metavar="A", low=1,
        high=1024, **_RESULT)
    shard_weights: tuple[int, ...] = option((),
        "Shares of the batch for unequal devices: with 3,1 the first replica gets three quarters.",
        _STEPS, metavar="W,W,…",
        low=1, high=1000, repeats=True, **_RESULT)
    shard: str = option("weights",
        "sharded: divide the optimizer state (ZeRO-1), the gradients too (ZeRO-2), or the weights"
        " too (ZeRO-3).", _STEPS,
        choices=("optimizer", "gradients", "weights"), **_RESULT)
    model_parallel: int | None = option(None,
        "pipeline, tensor: devices that share one copy of the weights; must divide the number of"
        " devices. Each copy trains on a part of the batch. Default: all devices.", _STEPS,
        metavar="K", low=1, high=names.MAX_DEVICES, **_RESULT)
    micro_batches: int = option(4,
        "pipeline: micro-batches into which each replica's batch is split.", _STEPS,
        metavar="M", low=1, high=1024, **_RESULT)
    schedule: str = option("1f1b",
        "pipeline: gpipe runs all forward passes first; 1f1b starts each backward pass as early as"
        " possible: less memory, same result.", _STEPS, choices=("gpipe", "1f1b"), **_RESULT)
    recompute: bool = option(False,
        "pipeline: recompute a stage's activations in its backward pass: less memory, more time,"
        " same result.", _STEPS, **_RESULT)
    pipeline_cuts: tuple[str, ...] = option((),
        "pipeline: layers after which the network is cut into stages. Default: cuts that balance"
        " the operations.", _STEPS, metavar="LAYER,…", **_RESULT)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """The workers of multi_worker."""

    num_workers: int | None = option(None,
        "Worker processes of multi_worker, started on this machine without TF_CONFIG and outside of"
        " srun. Default: those of the cluster, or 2.", _TRAIN, **_N,
        high=names.MAX_DEVICES,
        differs={"compare": {"default": 2}, "verify": {"default": 2}})
    max_restarts: int = option(3,
        "How many times all local workers are restarted after a failure.", ("train",),
        metavar="N", low=0, high=1000)
    start_timeout_sec: int = option(300,
        "Seconds to wait for missing workers.", ("train",), metavar="SEC", low=1, high=1_000_000)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Output:
    """What is written and printed."""

    out: str | None = option(None,
        "Output directory; default runs/<time>-<strategy>-<model>.", (*_STEPS, "report", "doctor"),
        metavar="DIR", differs={
            "report": {
                "help": "The file to write; default report.html, beside a single run.",
                "metavar": "FILE"},
            "doctor": {"help": "The directory to examine."}},
        **_COMMON, **_ALL_PARTS)
    overwrite: bool = option(False,
        "Start from scratch in an output directory that holds another run.", _STEPS, **_ALL_PARTS)
    checkpoint_every: int | None = option(None,
        "Save a checkpoint every STEPS steps; default: every five minutes. One is always saved at"
        " the end of an epoch.", _RUNS, metavar="STEPS", low=1, high=1_000_000_000)
    stall_timeout_sec: int = option(1800,
        "Stop with exit code 142 after SEC seconds without progress; 0 waits forever.", _RUNS,
        metavar="SEC", low=0, high=1_000_000)
    verbosity: int = option(-1,
        "0 shows TensorFlow's warnings, 1 all of its messages.", _ALL, metavar="-1|0|1", low=-1,
        high=1, **_ALL_PARTS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verification:
    """What is verified."""

    steps: int = option(names.VERIFIED_STEPS,
        f"Number of steps to verify. With --case: {names.CASE_STEPS}, unless --thorough.",
        ("verify",), **_N, high=100_000, **_COMMON, **_ALL_PARTS)
    thorough: bool = option(False,
        f"With --case: verify {names.VERIFIED_STEPS} steps, and also the second epoch, a step after"
        " a save and resume, and an evaluation.", ("verify",), **_COMMON, parts=("case",))
    case: str | None = option(None,
        "Your own training: a Python file with model(), which returns a compiled Keras model, and"
        " data(global_batch_size), which returns a tf.data.Dataset. FILE:NAME takes the model of"
        " function NAME. See docs/verify_your_own.md.",
        ("verify",), metavar="FILE", **_COMMON, parts=("case",))
    keep_traces: bool = option(False,
        "Keep the recorded traces in a directory for each strategy.", ("verify",), **_ALL_PARTS)
    inject: str | None = option(None,
        f"Inject a fault: {' '.join(str(Fault.parse(name)) for name in FAULTS)}. verify injects it"
        " into the first strategy that can have it, or into that of strategy=NAME.",
        ("train", "verify"), metavar="FAULT", differs={"verify": {"common": True}})
    verify_every: int | None = option(None,
        "Compare every N-th step, the first one and the last one of the first epoch with the same"
        " step on one device while the training runs. 0 turns it off. Default: the first step, the"
        f" last one of each epoch and every {names.VERIFY_EVERY}th of a long epoch, where steps can"
        " be verified.", ("train",), metavar="N", low=0,
        high=1_000_000_000, **_COMMON)
    on_mismatch: str = option("stop",
        "When a verified step does not match: stop with exit code 9, or warn.", ("train",),
        choices=("stop", "warn"))

    @property
    def fault(self) -> Fault | None:
        """The fault of `--inject`."""
        return Fault.parse(self.inject) if self.inject else None

    @property
    def case_function(self) -> str:
        """The function of the case file that returns the model."""
        return split_case(self.case or "")[1]

    @property
    def case_path(self) -> pathlib.Path:
        """The path of the case file."""
        return pathlib.Path(split_case(self.case or "")[0])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Benchmark:
    """What is measured: every combination of the lists."""

    repeats: int = option(10,
        f"Number of rounds, at least {names.MIN_ROUNDS}; each round times every case once.",
        ("benchmark",), **_N, high=10_000, **_COMMON)
    breakdown: bool = option(False,
        "Show where the time of a step goes, and count the bytes between devices.",
        ("benchmark",), **_COMMON)
    model: tuple[str, ...] = option(("lenet",),
        "Networks.", ("benchmark",), **_MANY, choices=names.MODEL_NAMES, **_COMMON)
    num_devices: tuple[int, ...] = option((1, 2),
        "Numbers of devices; multi_worker has one worker for each device.", ("benchmark",),
        metavar="N,M,…", low=1, high=names.MAX_DEVICES, **_COMMON)
    global_batch_size: tuple[int, ...] = option((256,),
        "Examples in a step, over all replicas.", ("benchmark",), metavar="N,M,…", low=1,
        high=names.NUM_TRAIN_EXAMPLES, alias="batch_size", **_COMMON)
    precision: tuple[str, ...] = option(("float32",),
        "Precisions.", ("benchmark",), **_MANY, choices=names.PRECISIONS, **_COMMON)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """A finished run."""

    run: str = option("",
        "Directory of the run.", ("evaluate",), metavar="DIR", required=True, **_COMMON)
    images: tuple[str, ...] = option((),
        "Images to classify instead of the test set.", ("evaluate",), metavar="A.png,B.npy",
        **_COMMON)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Words:
    """The words after the command."""

    experiment: str | None = option(None,
        "The experiment.", ("demo",), metavar="EXPERIMENT", choices=names.EXPERIMENTS, is_word=True)
    directories: tuple[str, ...] = option((),
        "Directories of runs.", ("report",), metavar="DIR …", is_word=True)


GROUPS: dict[str, type] = {
    group.__name__.lower(): group
    for group in (Training, Data, Distribution, Cluster, Output, Verification, Benchmark,
                  Evaluation, Words)
}
TABLE: tuple[Option, ...] = tuple(
    row for name, group_class in GROUPS.items() for row in rows_of(name, group_class)
)


class Command(NamedTuple):
    """A command: its line in `--help`, and examples; the first is also the program's."""

    summary: str
    examples: tuple[str, ...]


COMMANDS = {
    "train": Command("trains a model; writes history, plots and checkpoints", (
        "--strategy=manual --device=cpu --num_devices=2 --epochs=3",
        "--recipe=fast --epochs=1 --out=runs/first",
        "--strategy=mirrored --num_gpus=2 --model=resnet18",
        "--strategy=multi_worker --num_workers=2 --device=cpu --epochs=1",
        "--strategy=pipeline --num_devices=2 --micro_batches=8",
        "--strategy=sharded --num_devices=2 --shard=gradients")),
    "compare": Command("trains several strategies from the same weights and data", (
        "--recipe=fast --epochs=1",
        "--strategies=single,manual --num_gpus=2",
        "--strategies=single,torch_ddp,jax_pmap --epochs=1")),
    "verify": Command(
        "compares trainings step by step and names the first mismatch", (
        "--strategies=manual,mirrored --steps=20",
        "--strategies=manual --inject=drop_gradient:replica=1",
        "--case=examples/case_fit.py --num_devices=2",
        "--strategies=single,manual,mirrored,torch_ddp,jax_pmap")),
    "evaluate": Command("computes the test accuracy of a run, or classifies images", (
        "--run=runs/NAME --strategy=mirrored --num_devices=4",
        "--run=runs/NAME --images=shoe.png,bags.npy")),
    "benchmark": Command(
        "measures throughput over strategies, devices and batch sizes", (
        "--num_devices=1,2,4 --repeats=20",
        "--breakdown --strategies=manual --num_devices=2")),
    "report": Command("writes a page about runs", (
        "runs/first runs/second --out=report.html",)),
    "doctor": Command(
        "checks this machine: what it has, what is missing, what to run", (
        "", "--data_dir=DIR --num_gpus=2")),
    "demo": Command("the experiments of d2l; without a name, lists them", (
        "allreduce --num_devices=3", "")),
}
# fmt: on


def options_of(command: str) -> dict[str, Option]:
    """Returns name → option for each option of a command, as the command has it."""
    return {
        row.name: dataclasses.replace(row, **row.differs.get(command, {}))
        for row in TABLE
        if command in row.commands
    }
