"""Cases of PyTorch: what is in a file, and what cannot be recorded."""
# ruff: noqa: F403, F405 (the names of `torch_training`)

import importlib
import os
import pathlib
import sys

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from lockstep import compare, record_torch
from lockstep.recorders.torch.values import rounds_to_tf32
from recording import Trace
from torch_training import *


def evaluated(model, optimizer, step):
    """Trains one step, halves the learning rates, and calls the model without training."""
    plain(model, optimizer, step)
    for group in optimizer.param_groups:
        group["lr"] /= 2
    x = batch(step)[0]
    model.eval()
    model(x)
    model.train()
    with torch.no_grad():
        model(x)


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
    kinds = {key.split("/")[1] for key in trace.arrays}
    expected = {"data", "random", "random_after", "loss", "raw", "clipped", "before", "after"}
    assert kinds == {*expected, "y_pred", "y_grad"}
    assert {key.split("/")[0] for key in trace.arrays} == {"1", "2"}
    check_arrays(trace)
    verdict = compare("format.npz", "format.npz")
    assert verdict.ok and verdict.is_bitwise, str(verdict)


def check_about(about):
    weights = ["0.weight", "0.bias", "1.weight", "1.bias", "4.weight", "4.bias"]
    assert (
        about.items()
        >= {
            **{"format": "lockstep trace", "version": 2, "framework": "torch", "num_replicas": 1},
            **{"replicas": [0], "steps": [0, 2], "reduction": "", "order": "reduce, clip"},
            **{"wrapper": "", "data_layout": "NCHW", "permuted": None, "replayed": None},
            **{"micro_batches": [1, 1], "gradients": weights},
        }.items()
    )
    described = {v["name"]: v for v in about["variables"]}
    assert described["0.weight"] == {"name": "0.weight", "kind": "weight", "layout": "OIHW"}
    assert described["4.weight"]["layout"] == "OI" and described["4.bias"]["layout"] == ""
    assert described["1.num_batches_tracked"]["kind"] == "statistic"
    assert described["4.bias/exp_avg"] == {
        **{"name": "4.bias/exp_avg", "kind": "optimizer state", "layout": ""},
        **{"of": "4.bias", "slot": "exp_avg"},
    }
    convolution, norm, dropout, dense = about["layers"]
    settings = {"class": "Conv2d", "strides": [2, 2], "padding": [0, 0], "weights": weights[:2]}
    assert convolution.items() >= settings.items()
    assert norm.items() >= {"class": "BatchNorm2d", "epsilon": 1e-5, "momentum": 0.1}.items()
    assert "1.running_var" in norm["weights"]
    assert (dropout["class"], dropout["rate"]) == ("Dropout", 0.3)
    assert dense == {"name": "4", "class": "Linear", "weights": weights[4:]}
    assert about["optimizer"]["class"] == "AdamW" and about["optimizer"]["framework"] == "torch"
    first, last = about["settings"]
    assert [group["learning_rate"] for group in first + last] == [0.01, 0.5, 0.0025, 0.125]
    assert first[0]["weights"] == weights[:2]
    expected = {"beta_1": 0.8, "beta_2": 0.99, "epsilon": 1e-8, "weight_decay": 0.1}
    assert first[1].items() >= {"amsgrad": False, **expected}.items()


def check_arrays(trace):
    assert trace.kind("data")["0"].shape == (12, 1, 8, 8)
    assert trace.kind("random")["0"].dtype == np.uint8
    assert not np.array_equal(trace.kind("random")["0"], trace.kind("random_after")["0"])
    assert trace.kind("loss")["0"].shape == () and trace.kind("loss")["0"] > 0
    assert_equal(trace.kind("raw"), trace.kind("clipped"))  # Nothing is clipped in this training.
    y_pred, y_grad = trace.kind("y_pred")["0"], trace.kind("y_grad")["0"]
    y = batch(0)[1].numpy()
    np.testing.assert_allclose(y_grad, 2 * (y_pred - y) / y.size, rtol=1e-4, atol=1e-6)
    before, after = trace.kind("before"), trace.kind("after")
    assert "0.weight/step" not in before and after["0.weight/step"] == 1
    assert trace.kind("before", 2)["0.weight/step"] == 2
    assert (before["1.num_batches_tracked"], after["1.num_batches_tracked"]) == (0, 1)


def case_masks():
    """Whole numbers of outputs are recorded."""

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x):
            masks.append(torch.rand(len(x), 3) > 0.5)
            return self.layer(x * masks[-1]), masks[-1], len(x)

    model, masks = Masked(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with record_torch.record("masks.npz", model, optimizer, steps=2):
        for _ in range(3):
            output, _, _ = model(torch.randn(4, 3))
            optimizer.zero_grad()
            output.square().mean().backward()
            optimizer.step()
    trace = Trace("masks")
    for step in (0, 1):
        own = trace.kind("y_other", step)
        assert [*own] == ["0"] and np.array_equal(own["0"], masks[step].numpy())


def case_bits():
    """Recording changes no bit, also of a compiled model; a weight has its name there."""
    for dropout, compiles, options in (
        (0.3, False, {}), (0.3, False, {"steps": [1]}), (0.0, True, {}),
    ):  # fmt: skip
        model, other = network(dropout), network(dropout)
        called = torch.compile(model, backend="eager") if compiles else model
        torch.manual_seed(1)
        bits = train(called, adamw(model), "bits.npz", **options)
        torch.manual_seed(1)
        assert is_equal(bits, train(other, adamw(other)))
        trace = Trace("bits")
        assert trace.about["gradients"][0] == "0.weight" and trace.get(1, "data")


class Parts(nn.Module):
    """Has a part that is not used, and one that is not trained."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(5, 5), nn.Linear(5, 5)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)

    def forward(self, x):
        return self.frozen(self.used(x))


def case_gradients():
    """None has no array, a sparse one stays sparse, and 16 bits are written as 32."""
    trace = of_sum("no_gradient", Parts(), torch.ones(4, 5))
    assert set(trace.kind("raw")) == set(trace.kind("clipped")) == {"used.weight", "used.bias"}
    assert {"unused.weight", "frozen.weight"} <= set(trace.kind("after"))
    model = nn.Sequential(nn.Embedding(10, 3, sparse=True), nn.Flatten())
    raw = of_sum("sparse", model, torch.tensor([[1, 2], [2, 7]])).kind("raw")
    assert sorted(raw["0.weight/indices"].tolist()) == [1, 2, 2, 7]
    assert raw["0.weight/values"].shape == (4, 3) and raw["0.weight/rows"] == 10
    assert "0.weight" not in raw
    first, again = (
        of_sum(name, nn.Linear(5, 5).bfloat16(), torch.ones(4, 5).to(torch.bfloat16), 2, **options)
        for name, options in (("short", {}), ("short_again", {"replay": "short.npz"}))
    )
    assert_equal(first.arrays, again.arrays)
    assert first.kind("after")["weight"].dtype == np.float32


class TwoHeads(nn.Module):
    """Returns two outputs, the second in a nest."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, 3), nn.Linear(5, 2)

    def forward(self, x):
        return [self.first(x), [self.second(x)]]


def case_outputs():
    """The loss uses the first output only; two forward passes."""

    def steps_of(model, optimizer, step):
        for _ in range(2):
            model(torch.ones(4, 5))[0].sum().backward()
        optimizer.step()

    trace = recorded("outputs", TwoHeads(), adamw, steps_of, 1, steps=1)
    y_pred, y_grad = (trace.kind(kind) for kind in ("y_pred", "y_grad"))
    assert [len(x) for x in y_pred.values()] == [4] * 4
    assert not y_grad["1"].any() and not y_grad["3"].any()
    assert (y_grad["0"] == 1).all() and (y_grad["2"] == 1).all()


class OnGpu:
    """Stands for a weight on a GPU."""

    dtype, is_cuda = torch.float32, True

    def __init__(self, num_axes):
        self.dim = lambda: num_axes


def case_rounding_of_a_gpu():
    """The settings of PyTorch, and a variable, say whether products round to TF32."""

    def rounds(*axes):
        return rounds_to_tf32({str(number): OnGpu(number) for number in axes})

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


def case_errors():
    model, larger, in_zero = network(), nn.Linear(7, 5), nn.Linear(7, 5)
    in_zero.weight._hp_mapping = None  # As DeepSpeed marks weights.
    own, other = adamw(model), adamw(larger)
    pathlib.Path("damaged.npz").write_bytes(b"damaged")
    with np.load("first.npz") as file:
        np.savez("later.npz", about=str(file["about"]).replace('"version": 2', '"version": 3'))
    first = {"replay": "first.npz"}
    shards = "must be 'each', with replay= and in one process"
    for expected, model_of, optimizer, options in (
        ("model: DataParallel is not recorded; use DistributedDataParallel",
         nn.DataParallel(model), own, {}),
        ("model: weight is torch.complex64, which cannot be recorded; keep its real and imaginary",
         nn.Linear(2, 2, dtype=torch.complex64), own, {}),
        ("model: FullyShardedDataParallel is not recorded; use fully_shard (FSDP2)",
         type("FullyShardedDataParallel", (nn.Module,), {})(), own, {}),
        ("model: DeepSpeed's ZeRO is not recorded; use stage 0, or fully_shard", in_zero, own, {}),
        ("optimizer: updates no weight of the model: it is that of another one", larger, own, {}),
        ("steps=[-1]: must be numbers from 0", model, own, {"steps": [-1]}),
        ("steps=0: must be numbers from 0", model, own, {"steps": 0}),
        ("steps=10000000000: must be numbers from 0, or at most 100,000 steps", model, own,
         {"steps": 10**10}),
        ("steps='a': must be numbers from 0", model, own, {"steps": "a"}),
        ("steps=[0.5]: must be numbers from 0", model, own, {"steps": [0.5]}),
        ("steps=[1]: must be numbers from 2", model, own, {"steps": [1], "first_step": 2}),
        ("first_step=-1: must be a number from 0", model, own, {"first_step": -1}),
        ("others: have names of the model's own weights", model, own,
         {"others": {"4": {"bias": torch.ones(5)}}}),
        ("replay=first.npz: lacks steps [9]; it has [", model, own, {"steps": [9], **first}),
        ("replay=absent.npz: does not exist, nor does absent.rank0.npz; pass", model, own,
         {"replay": "absent.npz"}),
        ("replay=later.npz: has the format version 3, and this version of", model, own,
         {"replay": "later.npz"}),
        ("replay=damaged.npz: is no .npz file or is damaged", model, own,
         {"replay": "damaged.npz"}),
        ("replay=first.npz: no weight fits weight (5, 7); it has 0.weight (4, 1, 2, 2)", larger,
         other, {"steps": [0], **first}),
        ("replay=first.npz: no weight fits 1.bias (4,); it has 0.weight", model, own,
         {"steps": [0], "names": {"1.bias": "4.weight"}, **first}),
        (f"shards='each': {shards}", model, own, {"shards": "each"}),
        (f"shards='all': {shards}", model, own, {"shards": "all", **first}),
    ):  # fmt: skip
        refused(expected, record_torch.record, "x.npz", model_of, optimizer, **options)
    for path in ("x.npy", "nowhere/x.npz"):
        expected = f"{path}: must be an .npz file in a folder that exists"
        refused(expected, record_torch.record, path, model, own)


def case_missing_functions():
    """A function that is observed and does not exist would hide a call."""
    model, clipping = Halves(), nn.utils.clip_grad
    original = clipping._clip_grads_with_norm_
    del clipping._clip_grads_with_norm_
    try:
        expected = f"record_torch: PyTorch {torch.__version__} has no {clipping.__name__}."
        expected += "_clip_grads_with_norm_, which is observed"
        refused(expected, record_torch.record, "x.npz", model, momentum(model))
    finally:
        clipping._clip_grads_with_norm_ = original


def case_versions():
    """A PyTorch that is too old is refused: when the recorder is imported, or for a model."""
    own, here = torch.__version__, f"file://{os.getcwd()}/alone"
    dist.init_process_group("gloo", init_method=here, rank=0, world_size=1)
    sharded = nn.Sequential(nn.Linear(4, 2))
    fully_shard(sharded)
    recorders = [name for name in sys.modules if name.startswith("lockstep.record")]
    loaded = {name: sys.modules.pop(name) for name in recorders}
    try:
        torch.__version__ = "2.5.1+cu124"
        expected = "record_torch: PyTorch 2.5.1+cu124, needs 2.6 or newer"
        refused(expected, importlib.import_module, "lockstep.record_torch")
        torch.__version__ = "2.6.0"
        importlib.import_module("lockstep.record_torch")
        torch.__version__ = "2.7.1"
        expected = "model: fully_shard of PyTorch 2.7.1; needs 2.8 or newer"
        refused(expected, record_torch.record, "x.npz", sharded, momentum(sharded))
        torch.__version__ = "2.8.0"
        record_torch.record("x.npz", sharded, momentum(sharded))
    finally:
        torch.__version__ = own
        sys.modules.update(loaded)
        dist.destroy_process_group()
