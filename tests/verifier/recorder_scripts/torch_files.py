"""Cases of PyTorch: what is in a file, and what cannot be recorded."""
# ruff: noqa: F403, F405 (the names of `torch_training`)

import contextlib
import copy
import functools
import importlib
import itertools
import os
import sys
import tracemalloc
import types

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import lockstep
from lockstep import compare, record_torch
from lockstep.recorders.torch.values import rounds_to_tf32
from recording import Trace
from torch_training import *


def evaluated(model, optimizer, step):
    """Trains one step, halves the learning rates, and calls the model without training."""
    record_torch.note("ids", np.arange(12) + 100 * step)
    plain(model, optimizer, step)
    for group in optimizer.param_groups:
        group["lr"] /= 2
    model.eval()
    model(batch(step)[0])
    model.train()
    with torch.no_grad():
        model(batch(step)[0])


def case_format():
    model = network(dropout=0.3)
    groups = [
        {"params": [*model[0].parameters()]},
        {"params": [*model[1:].parameters()], "lr": 0.5},
    ]
    optimizer = torch.optim.AdamW(groups, 0.01, betas=(0.8, 0.99), weight_decay=0.1)
    original = torch.autograd.backward
    train(model, optimizer, "format.npz", evaluated, steps=[0, 2])
    hooks = [model._forward_pre_hooks, model._forward_hooks]
    hooks += [optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks]
    assert not any(hooks) and torch.autograd.backward is original
    trace = Trace("format")
    check_about(trace.about)
    check_arrays(trace)
    assert compare("format.npz", "format.npz").is_bitwise


def check_about(about):
    weights = ["0.weight", "0.bias", "1.weight", "1.bias", "4.weight", "4.bias"]
    expected = {
        **{"framework": "torch", "num_replicas": 1, "replicas": [0], "steps": [0, 2]},
        **{"order": "reduce, clip", "micro_batches": [1, 1]},
        **{"gradients": weights, "permuted": None, "replayed": None},
    }
    assert about.items() >= expected.items()
    described = {v["name"]: v for v in about["variables"]}
    assert described["0.weight"] == {"name": "0.weight", "kind": "weight", "layout": "OIHW"}
    assert described["1.num_batches_tracked"]["kind"] == "statistic"
    state = {"kind": "optimizer state", "layout": "", "of": "4.bias", "slot": "exp_avg"}
    assert described["4.bias/exp_avg"] == {"name": "4.bias/exp_avg", **state}
    convolution, norm, dropout, _ = about["layers"]
    assert (convolution["class"], convolution["strides"]) == ("Conv2d", [2, 2])
    assert (norm["epsilon"], norm["momentum"], dropout["rate"]) == (1e-5, 0.1, 0.3)
    first, last = about["settings"]
    assert [group["learning_rate"] for group in first + last] == [0.01, 0.5, 0.0025, 0.125]
    expected = {"beta_1": 0.8, "beta_2": 0.99, "epsilon": 1e-8, "weight_decay": 0.1}
    assert first[0]["weights"] == weights[:2] and first[1].items() >= expected.items()


def check_arrays(trace):
    kinds = {"data", "random", "random_after", "loss", "raw", "clipped", "before", "after"}
    found = {tuple(key.split("/")[:2]) for key in trace.arrays}
    assert found == {*itertools.product("12", {*kinds, "y_pred", "y_grad", "ids"})}
    assert trace.kind("ids", 2)["0"].tolist() == [*range(200, 212)]
    assert not np.array_equal(trace.kind("random")["0"], trace.kind("random_after")["0"])
    y_pred, y_grad = trace.kind("y_pred")["0"], trace.kind("y_grad")["0"]
    y = batch(0)[1].numpy()
    np.testing.assert_allclose(trace.kind("loss")["0"], np.square(y_pred - y).mean(), rtol=1e-5)
    np.testing.assert_allclose(y_grad, 2 * (y_pred - y) / y.size, rtol=1e-4, atol=1e-6)
    before, after = trace.kind("before"), trace.kind("after")
    assert "0.weight/step" not in before and after["0.weight/step"] == 1
    assert trace.kind("before", 2)["0.weight/step"] == 2


def case_no_bit_changes():
    """Also of a compiled model; a weight has its name there."""
    for build, options in (
        (lambda: network(0.3), {}), (lambda: network(0.3), {"steps": [1]}),
        (lambda: torch.compile(network(), backend="eager"), {}),
    ):  # fmt: skip
        assert_no_bit_changes(build, "bits.npz", **options)
        trace = Trace("bits")
        assert trace.about["gradients"][0] == "0.weight" and trace.get(1, "data")


class Rotated(nn.Module):
    """Returns an output with rotations, as of RoPE, a mask, and an output that no loss has."""

    def __init__(self, angle=0):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(64, 4)
        self.register_buffer("rotations", torch.polar(torch.ones(2), torch.arange(2.0) + angle))

    def forward(self, images):
        x = self.layer(images.flatten(1))
        pairs = torch.view_as_complex(x.unflatten(1, (-1, 2))) * self.rotations
        return [torch.view_as_real(pairs).flatten(1), x > 0, [2 * x, len(x)]]


def case_outputs():
    """The loss uses one of several outputs; masks and complex buffers are recorded, too."""
    first = functools.partial(plain, loss=lambda model, step, *_: model(batch(step)[0])[0].sum())
    given = {"steps_of": first, "num_steps": 1, "steps": 1}
    trace, model = recorded("outputs", Rotated(), **given), Rotated(angle=1)
    y_grad = trace.kind("y_grad")
    assert (y_grad["0"] == 1).all() and not y_grad["1"].any()
    recorded("turned", model, **given, replay="outputs.npz")
    assert torch.allclose(model.rotations.angle(), torch.arange(2.0), atol=1e-6)
    place = compare("outputs.npz", "turned.npz").place
    assert (place.node, place.tensors) == ("start", ("rotations",))


def case_sparse_gradients():
    model = nn.Sequential(nn.Embedding(10, 3, sparse=True), nn.Flatten())
    tokens = torch.tensor([[1, 2], [2, 7]])
    steps_of = functools.partial(plain, loss=lambda model, *_: model(tokens).sum())
    raw = recorded("sparse", model, momentum, steps_of, 1, steps=1).kind("raw")
    assert sorted(raw["0.weight/indices"].tolist()) == [1, 2, 2, 7]
    assert raw["0.weight/values"].shape == (4, 3) and raw["0.weight/rows"] == 10
    assert "0.weight" not in raw and compare("sparse.npz", "sparse.npz").ok


def case_rounding_of_a_gpu():
    """The settings of PyTorch, and a variable, say whether products round to TF32."""

    def rounds(*axes):
        kind = {"dtype": torch.float32, "is_cuda": True}
        weights = {n: types.SimpleNamespace(dim=lambda n=n: n, **kind) for n in axes}
        return rounds_to_tf32(weights)

    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    assert not rounds(2) and rounds(2, 4) and not rounds_to_tf32({"": torch.ones(2, 2, 2)})
    os.environ["NVIDIA_TF32_OVERRIDE"] = "0"
    assert not rounds(2, 4)
    del os.environ["NVIDIA_TF32_OVERRIDE"]
    matmul.allow_tf32 = True
    assert rounds(2)
    matmul.allow_tf32 = cudnn.allow_tf32 = False
    assert not rounds(2, 4)
    cudnn.conv.fp32_precision = "tf32"  # The other setting now refuses to be read.
    assert rounds(4) and not rounds(2)


def copied(model, optimizer, step):
    """Saves the model, and trains a copy of it before the step."""
    torch.save(model, "model.pt")
    copy.deepcopy(model)(batch(step)[0]).sum().backward()
    plain(model, optimizer, step)


def case_copies():
    """A script may copy and save a model while it is recorded; copies are not recorded."""
    first, second = (
        recorded("copies", None, momentum, steps_of, 2, modules=True, steps=2)
        for steps_of in (plain, copied)
    )
    assert_equal(first.arrays, second.arrays)


def case_memory():
    """It holds less than one step, as arrays are written as they come."""
    model = nn.Sequential(nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 1))

    def loss(model, step, *_):
        if step == 2:
            tracemalloc.start()  # Of arrays of NumPy, not of tensors.
        return model(torch.randn(8, 300)).square().mean()

    train(model, adamw(model), "memory.npz", functools.partial(plain, loss=loss), 6, steps=6)
    # A step has eight arrays for each weight. In memory are those that the next ones may equal (of
    # the weight, its state and its gradient), the gradient before it is reduced, and a copy.
    size = sum(p.nbytes for p in model.parameters())
    assert 0 < tracemalloc.get_traced_memory()[1] < 6.5 * size


def case_an_early_end():
    """A training that ends early leaves its steps, and why it has ended."""

    def loss(model, step, *shard):
        if step == 2:
            raise RuntimeError("a step\nfailed")
        return loss_of(model, step, *shard)

    def ended():
        with contextlib.suppress(RuntimeError):
            recorded("ended", None, momentum, functools.partial(plain, loss=loss), 6, steps=6)

    (told,) = warnings_of(ended)
    assert "the training ended before steps [2, 3, 4, 5]" in told
    about = Trace("ended").about
    assert about["steps"] == [0, 1] and about["asked"] == [0, 1, 2, 3, 4, 5]
    assert about["ended_with"] == "RuntimeError: a step failed"


def case_errors():
    model, larger, in_zero = network(), nn.Linear(7, 5), nn.Linear(7, 5)
    in_zero.weight._hp_mapping = None  # As DeepSpeed marks weights.
    own, other = adamw(model), adamw(larger)
    recorded("first", num_steps=1, steps=1)
    first, average = {"replay": "first.npz"}, {"4": {"bias": torch.ones(5)}}
    sharded = type("FullyShardedDataParallel", (nn.Module,), {})()
    for expected, model_of, optimizer, options in (
        ("model: DataParallel is not recorded", nn.DataParallel(model), own, {}),
        ("model: weight is torch.complex64", nn.Linear(2, 2, dtype=torch.complex64), own, {}),
        ("model: FullyShardedDataParallel is not recorded", sharded, own, {}),
        ("model: DeepSpeed's ZeRO is not recorded", in_zero, own, {}),
        ("optimizer: updates no weight of the model", larger, own, {}),
        ("steps=[-1]: ", model, own, {"steps": [-1]}),
        ("steps='a': ", model, own, {"steps": "a"}),
        ("steps=[1]: must be numbers from 2", model, own, {"steps": [1], "first_step": 2}),
        ("first_step=-1: ", model, own, {"first_step": -1}),
        ("sample=4294967296: ", model, own, {"sample": 2**32}),
        ("permute=1.5: ", model, own, {"permute": 1.5}),
        ("steps=count(100001): must be numbers", model, own, {"steps": itertools.count()}),
        ("others: have names of the model's own weights", model, own, {"others": average}),
        ("replay=first.npz: no weight fits weight (5, 7)", larger, other, {"steps": 1, **first}),
        ("replay=first.npz: no weight fits 1.bias (4,)", model, own,
         {"steps": [0], "names": {"1.bias": "4.weight"}, **first}),
        ("shards='each': must be", model, own, {"shards": "each"}),
        ("model: must be a torch.nn.Module", {}, None, {}),
        ("optimizer: an object of the type int is no optimizer", model, 5, {}),
        ("mesh: must be a DeviceMesh, and is an object of the type int", model, own, {"mesh": 5}),
        ("dims: must be a text", model, own, {"dims": 5}),
        ("others: must be modules by names", model, own, {"others": [model]}),
        ("others: must be modules by names", model, own, {"others": {"ema": None}}),
        ("replay: must be the path of a recording", model, own, {"replay": 5}),
    ):  # fmt: skip
        refused(expected, record_torch.record, "x.npz", model_of, optimizer, **options)
    for optimizer in (own, [own], None):
        lockstep.record(model, optimizer)
    refused("optimizer: an object of the type int is no optimizer", lockstep.record, model, [1])
    for path in ("x.npy", "nowhere/x.npz", b"x.npy"):
        text = f"{os.fsdecode(path)}: must be an .npz"
        refused(text, record_torch.record, path, model, own)
    with (again := record_torch.record("again.npz", model, own, steps=1)):
        plain(model, own, 0)
    refused("the recording has begun already", again.__enter__)
    # Two optimizers have state of a weight: the script must say which one trains.
    second = momentum(model)
    plain(model, second, 0)
    text = "optimizer: 2 optimizers have state of 0.weight"
    refused(text, record_torch.record, "x.npz", model)
    record_torch.record("x.npz", model, own)


def case_versions():
    """A PyTorch that is too old is refused: when the recorder is imported, or for a model."""
    here = f"file://{os.getcwd()}/alone"
    dist.init_process_group("gloo", init_method=here, rank=0, world_size=1)
    sharded = nn.Sequential(nn.Linear(4, 2))
    fully_shard(sharded)
    for name in [name for name in sys.modules if name.startswith("lockstep.record")]:
        del sys.modules[name]
    torch.__version__ = "2.5.1+cu124"
    expected = "record_torch: PyTorch 2.5.1+cu124, needs 2.6 or newer"
    refused(expected, importlib.import_module, "lockstep.record_torch")
    torch.__version__ = "2.7.1"
    expected = "model: fully_shard of PyTorch 2.7.1; needs 2.8 or newer"
    refused(expected, record_torch.record, "x.npz", sharded, momentum(sharded))
