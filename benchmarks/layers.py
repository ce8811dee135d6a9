"""Times each kind of layer of LeNet and ResNet-18 on one core: Keras', the project's, PyTorch's.

    python benchmarks/layers.py [--isa=avx2] [--precision=bfloat16] [--rounds=7] [--only=conv]

Prints milliseconds of a forward pass, and of both passes with all gradients, for half of a batch:
128 images of LeNet, 32 of ResNet-18. The programs are timed in turn, on the same core; each has its
own process. A figure is the median over the rounds.
"""

import argparse
import contextlib
import functools
import json
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

FOLDER = pathlib.Path(__file__).parent
sys.path[:0] = [str(FOLDER.parent), str(FOLDER.parent / "frameworks")]

# Name → value of TF_ENABLE_ONEDNN_OPTS; PyTorch does not read it.
PROGRAMS = {"Keras, Eigen": "0", "Keras": "1", "Lockstep": "1", "PyTorch": ""}
LEAST_SEC = 0.05  # Of a timed block.


class Layer(NamedTuple):
    """A layer.

    Attributes:
        kind: "same" and "valid" are convolutions with that padding; "pool" averages; "dense";
            "norm" and "add" end in a ReLU.
        shape: shape of the inputs, channels last.
        width: number of outputs.
        size: size of the kernel.
        stride: its stride.
    """

    kind: str
    shape: tuple[int, ...]
    width: int
    size: int = 1
    stride: int = 1

    @property
    def has_relu(self) -> bool:
        """Whether a ReLU follows."""
        return self.kind in ("norm", "add")


LAYERS = {
    "LeNet conv1": Layer("valid", (128, 28, 28, 1), 20, 3),
    "LeNet conv2": Layer("valid", (128, 13, 13, 20), 50, 5),
    "LeNet pool1": Layer("pool", (128, 26, 26, 20), 20, 2, 2),
    "LeNet hidden": Layer("dense", (128, 800), 128),
    "stem conv": Layer("same", (32, 28, 28, 1), 64, 3),
    "conv 64": Layer("same", (32, 28, 28, 64), 64, 3),
    "conv 64 to 128, stride 2": Layer("same", (32, 28, 28, 64), 128, 3, 2),
    "conv 128": Layer("same", (32, 14, 14, 128), 128, 3),
    "conv 128 to 256, stride 2": Layer("same", (32, 14, 14, 128), 256, 3, 2),
    "conv 256": Layer("same", (32, 7, 7, 256), 256, 3),
    "conv 256 to 512, stride 2": Layer("same", (32, 7, 7, 256), 512, 3, 2),
    "conv 512": Layer("same", (32, 4, 4, 512), 512, 3),
    "shortcut 64 to 128": Layer("same", (32, 28, 28, 64), 128, 1, 2),
    "shortcut 256 to 512": Layer("same", (32, 7, 7, 256), 512, 1, 2),
    "norm and ReLU 64": Layer("norm", (32, 28, 28, 64), 64),
    "norm and ReLU 128": Layer("norm", (32, 14, 14, 128), 128),
    "norm and ReLU 256": Layer("norm", (32, 7, 7, 256), 256),
    "norm and ReLU 512": Layer("norm", (32, 4, 4, 512), 512),
    "add and ReLU 64": Layer("add", (32, 28, 28, 64), 64),
}
Passes = tuple[Callable[[], Any], Callable[[], Any]]


def keras_passes(layer: Layer, precision: str, *, own: bool) -> Passes:
    """Returns functions that compute a layer's forward pass, and both passes.

    Args:
        layer: the layer.
        precision: "float32" or "bfloat16".
        own: whether the layer is the project's, if it has one, or Keras'.
    """
    import keras
    import tensorflow as tf

    from models import layers as project

    for kind in ("intra", "inter"):
        getattr(tf.config.threading, f"set_{kind}_op_parallelism_threads")(1)
    keras.config.set_dtype_policy("mixed_bfloat16" if precision == "bfloat16" else precision)
    source, relu = project if own else keras.layers, keras.layers.ReLU()
    create = {
        "pool": lambda: keras.layers.AveragePooling2D(layer.size),
        "dense": lambda: keras.layers.Dense(layer.width),
        "norm": source.BatchNormalization,
        "add": lambda: keras.layers.Lambda(lambda x: x + 1),
    }
    convolution = functools.partial(
        source.Conv2D, layer.width, layer.size, strides=layer.stride, padding=layer.kind
    )
    module = create.get(layer.kind, convolution)()
    module.build(layer.shape)
    arguments = {"training": True} if layer.kind == "norm" else {}
    inputs = tf.Variable(tf.cast(tf.random.stateless_normal(layer.shape, (0, 0)), precision))
    upstream = tf.ones(module.compute_output_shape(layer.shape), precision)

    def outputs() -> Any:
        y = module(tf.convert_to_tensor(inputs), **arguments)
        return relu(y) if layer.has_relu else y

    def first_number(tensor: Any) -> Any:
        return tf.cast(tf.reshape(tensor, [-1])[0], "float32")

    @tf.function(autograph=False)
    def forward() -> Any:
        return first_number(outputs())

    @tf.function(autograph=False)
    def both() -> Any:
        with tf.GradientTape() as tape:
            y = outputs()
        sources = [inputs, *(variable.value for variable in module.trainable_variables)]
        gradients = tape.gradient(y, sources, output_gradients=upstream)
        # Without a result of the forward pass, TensorFlow would leave the pass out.
        return tf.add_n([first_number(each) for each in (y, *gradients)])

    return lambda: forward().numpy(), lambda: both().numpy()


def torch_passes(layer: Layer, precision: str) -> Passes:
    """Returns functions that compute a layer's forward pass, and both passes."""
    import torch
    import torch_models
    from torch import nn

    class Add(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    torch.set_num_threads(1)
    channels = layer.shape[-1]
    create = {
        "same": lambda: torch_models.SameConv2d(channels, layer.width, layer.size, layer.stride),
        "valid": lambda: nn.Conv2d(channels, layer.width, layer.size),
        "pool": lambda: nn.AvgPool2d(layer.size),
        "dense": lambda: nn.Linear(channels, layer.width),
        "norm": lambda: nn.BatchNorm2d(layer.width),
        "add": Add,
    }
    module = create[layer.kind]().to(memory_format=torch.channels_last)
    inputs = torch.randn(layer.shape, dtype=getattr(torch, precision))
    if layer.kind != "norm":  # As `torch.autocast` does.
        module = module.to(inputs.dtype)
    if layer.has_relu:
        module = nn.Sequential(module, nn.ReLU())
    if len(layer.shape) == 4:
        inputs = inputs.permute(0, 3, 1, 2)  # In memory, channels stay last.
    sources = [inputs.requires_grad_(True), *module.parameters()]
    upstream = torch.ones_like(module(inputs))

    def forward() -> None:
        with torch.no_grad():
            module(inputs)

    return forward, lambda: torch.autograd.grad(module(inputs), sources, upstream)


def answer(program: str, precision: str) -> None:
    """Answers names of layers with the milliseconds of a forward pass, and of both passes."""
    os.sched_setaffinity(0, [max(os.sched_getaffinity(0))])
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    print("{}", file=answers, flush=True)
    passes: dict[str, Passes] = {}
    for line in sys.stdin:
        name = line.strip()
        if name not in passes:
            if program == "PyTorch":
                passes[name] = torch_passes(LAYERS[name], precision)
            else:
                passes[name] = keras_passes(LAYERS[name], precision, own=program == "Lockstep")
            for function in passes[name]:
                function()
        print(json.dumps([timed(function) for function in passes[name]]), file=answers, flush=True)


def timed(function: Callable[[], Any]) -> float:
    """Returns the milliseconds of the fastest call of a block."""
    end, fastest = time.perf_counter() + LEAST_SEC, float("inf")
    while time.perf_counter() < end:
        start = time.perf_counter()
        function()
        fastest = min(fastest, time.perf_counter() - start)
    return 1000 * fastest


def main() -> None:
    """Times all layers, and prints a row of a table for each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--answer", choices=PROGRAMS, help=argparse.SUPPRESS)
    parser.add_argument("--isa", help="avx2: compute as on a processor with AVX2 alone")
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default="", help="a part of the layers' names")
    options = parser.parse_args()
    if options.answer:
        answer(options.answer, options.precision)
        return
    from run import ISA, Running

    names = [name for name in LAYERS if options.only in name]
    if not names:
        parser.error(f"--only={options.only} is in no name; the names are {', '.join(LAYERS)}")
    print("| Layer |", *(f"{name} |" for name in PROGRAMS), "Lockstep / PyTorch |")
    print("| --- |", *("--- |" for _ in PROGRAMS), "--- |")
    with contextlib.ExitStack() as stack:
        running = []
        for name, value in PROGRAMS.items():
            venv = ".venv-bench" if name == "PyTorch" else ".venv"
            command = [FOLDER.parent / venv / "bin" / "python", __file__, f"--answer={name}"]
            command += [f"--precision={options.precision}"]
            environment = {"TF_ENABLE_ONEDNN_OPTS": value, **ISA.get(options.isa, {})}
            running.append(stack.enter_context(Running(name, command, environment)))
        for each in running:
            each.ask()
        for name in names:
            rounds = []
            for number in range(options.rounds):
                order = running if number % 2 == 0 else running[::-1]
                rounds.append({each.name: each.ask(name) for each in order})
            cells = [
                " ".join(f"{statistics.median(r[program][i] for r in rounds):.2f}" for i in (0, 1))
                for program in PROGRAMS
            ]
            ratio = statistics.median(r["Lockstep"][1] / r["PyTorch"][1] for r in rounds)
            print(f"| {name} |", *(f"{cell} |" for cell in cells), f"{ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
