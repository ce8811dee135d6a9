"""Trainings for `test_torch_recorder.py`, with PyTorch or what stands in for it.

`python torch_cases.py FOLDER one` writes traces of one process to FOLDER, and results as JSON;
`two` trains with two processes.
"""

import contextlib
import json
import os
import shutil
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from lockstep import record_torch

torch.set_num_threads(1)
HAS_TORCH = not torch.__version__.endswith("stand.in")


def network(dropout=0.0):
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 4, 2, stride=2), nn.BatchNorm2d(4), nn.Flatten()]
    return nn.Sequential(*layers, nn.Dropout(dropout), nn.Linear(64, 5))


def batch(step, shard=0, num_shards=1):
    generator = torch.Generator().manual_seed(100 + step)
    x = torch.randn(12, 1, 8, 8, generator=generator)
    y = torch.randn(12, 5, generator=generator)
    return x[shard::num_shards], y[shard::num_shards]


def train(model, optimizer, path=None, num_steps=4, shards=(0, 1), **options):
    """Trains, with a recording if there is a path, and returns the final bits."""
    record = record_torch.record(path, model, optimizer, **options) if path else None
    with record or contextlib.nullcontext():
        for step in range(num_steps):
            x, y = batch(step, *shards)
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
    return [x.clone() for x in model.state_dict().values()]


def adamw(model, **options):
    return torch.optim.AdamW(model.parameters(), 0.01, **options)


def is_equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def message(function, *args, **options):
    try:
        function(*args, **options)
    except ValueError as error:
        return str(error)
    return "no error"


# --- One process -----------------------------------------------------------------------------


def case_format():
    model = network(dropout=0.3)
    groups = [
        {"params": [*model[0].parameters()]},
        {"params": [*model[1:].parameters()], "lr": 0.5},
    ]
    optimizer = torch.optim.AdamW(groups, 0.01, betas=(0.8, 0.99), weight_decay=0.1)
    original = torch.autograd.backward
    with record_torch.record("format.npz", model, optimizer, steps=[0, 2]):
        for step in range(4):
            x, y = batch(step)
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            for group in optimizer.param_groups:
                group["lr"] /= 2
            model.eval()
            model(x)
            model.train()
            with torch.no_grad():
                model(x)
    hooks = [model._forward_pre_hooks, model._forward_hooks]
    hooks += [optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks]
    return {"hooks": sum(map(len, hooks)), "is_restored": torch.autograd.backward is original}


def case_bits():
    results = {}
    for options in ({"steps": 3}, {"steps": [1]}):
        bits = []
        for path in (None, "bits.npz"):
            model = network(0.3)
            bits.append(train(model, adamw(model), path, **options if path else {}))
        results[str(options)] = is_equal(*bits)
    return results


def case_replay():
    for path, options in {
        "first.npz": {},
        "again.npz": {"replay": "first.npz"},
        "permuted.npz": {"replay": "first.npz", "permute": 1},
        "of_rank.npz": {"replay": "ranks.npz"},  # A recording of several processes.
    }.items():
        model = network()
        if path != "first.npz":
            nn.init.ones_(model[0].weight)  # The weights are those of the other trace.
        train(model, adamw(model), path, steps=[0, 1, 3], **options)
        shutil.copy("first.npz", "ranks.rank0.npz")
    model = network(0.3)
    train(model, adamw(model), "random.npz", steps=3)
    torch.manual_seed(1)
    train(model, adamw(model), "random_again.npz", steps=3, replay="random.npz")


def case_other_optimizer():
    """State is replayed where the other optimizer has the same slots."""
    model = network()
    train(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), "sgd.npz", steps=3)
    model = network()
    train(model, adamw(model), "sgd_adamw.npz", steps=3, replay="sgd.npz")
    model = network()
    train(model, torch.optim.Adam(model.parameters(), 0.01), "adam.npz", steps=3)
    model = network()
    train(model, adamw(model), "adam_adamw.npz", steps=3, replay="adam.npz")


def case_port():
    """Replays a trace with Keras' layouts."""
    names = {"0.weight": "conv/kernel", "4.weight": "dense/kernel"}
    swapped = {"1.weight": "bn/beta", "1.bias": "bn/gamma"}
    for path, given in {"port": {}, "port_names": names, "swapped": swapped}.items():
        model = network()
        options = {"replay": "keras.npz", "names": given}
        train(model, adamw(model), f"{path}.npz", num_steps=1, steps=1, **options)


class Parts(nn.Module):
    """Has a part that is not used, and one that is not trained."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(5, 5), nn.Linear(5, 5)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)

    def forward(self, x):
        return self.frozen(self.used(x))


def case_no_gradient():
    model = Parts()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with record_torch.record("no_gradient.npz", model, optimizer, steps=1):
        model(torch.ones(4, 5)).sum().backward()
        optimizer.step()


def case_sparse():
    model = nn.Sequential(nn.Embedding(10, 3, sparse=True), nn.Flatten())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with record_torch.record("sparse.npz", model, optimizer, steps=1):
        model(torch.tensor([[1, 2], [2, 7]])).sum().backward()
        optimizer.step()


def case_bfloat16():
    for path, replay in {"bfloat16.npz": None, "bfloat16_again.npz": "bfloat16.npz"}.items():
        model = nn.Linear(5, 5).bfloat16()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        with record_torch.record(path, model, optimizer, steps=2, replay=replay):
            for _ in range(2):
                optimizer.zero_grad()
                model(torch.ones(4, 5).to(torch.bfloat16)).sum().backward()
                optimizer.step()


def case_skipped():
    """The update of the second batch is skipped, as a GradScaler does."""
    model = network()
    optimizer = adamw(model)
    with record_torch.record("skipped.npz", model, optimizer, steps=2):
        for step in range(3):
            x, y = batch(step)
            F.mse_loss(model(x), y).backward()
            if step != 1:
                optimizer.step()
            optimizer.zero_grad()


def case_accumulation():
    model = network()
    optimizer, losses = adamw(model), []
    with record_torch.record("accumulation.npz", model, optimizer, steps=1):
        for step in range(2):
            x, y = batch(step)
            loss = F.mse_loss(model(x), y) / 2
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
    return sum(losses)


def case_two_models():
    """Trains a generator; the discriminator's loss is not part of its step."""
    model, other = nn.Linear(5, 5), nn.Linear(5, 1)
    optimizer, other_optimizer = adamw(model), adamw(other)
    with record_torch.record("two_models.npz", model, optimizer, steps=1):
        made = model(torch.ones(4, 5))
        (other(made.detach()).sum() + 1000).backward()
        other_optimizer.step()
        made.square().sum().backward()
        optimizer.step()
    return made.square().sum().item()


def case_exception():
    model = network()
    optimizer = adamw(model)
    try:
        with record_torch.record("exception.npz", model, optimizer, steps=3):
            for step in range(3):
                x, y = batch(step)
                optimizer.zero_grad()
                F.mse_loss(model(x), y).backward()
                if step == 2:
                    raise RuntimeError("out of memory")
                optimizer.step()
    except RuntimeError as error:
        return str(error)


def case_nested():
    models = [nn.Linear(5, 5), nn.Linear(5, 5)]
    optimizers = [torch.optim.SGD(x.parameters(), 0.1) for x in models]
    original = torch.autograd.backward
    records = [
        record_torch.record(f"nested{i}.npz", models[i], optimizers[i], steps=[i]) for i in range(2)
    ]
    with records[0], records[1]:
        for _ in range(3):
            for model, optimizer in zip(models, optimizers, strict=True):
                model(torch.ones(2, 5)).sum().backward()
                optimizer.step()
    return torch.autograd.backward is original


def case_errors():
    model = network()
    optimizer, record, larger = adamw(model), record_torch.record, nn.Linear(7, 5)

    def with_closure():
        with record("closure.npz", model, optimizer, steps=1):
            F.mse_loss(model(batch(0)[0]), batch(0)[1]).backward()
            optimizer.step(lambda: 0)

    def in_evaluation():
        model.eval()
        train(model, optimizer, "evaluation.npz", steps=1, replay="first.npz")

    with open("damaged.npz", "wb") as file:
        file.write(b"PK\x03\x04 damaged")
    with record_torch.np.load("first.npz") as file:
        later = str(file["about"]).replace('"version": 2', '"version": 3')
    record_torch.np.savez("later.npz", about=later)
    misnamed = {"1.bias": "4.weight"}
    replayed = {"steps": [0], "replay": "first.npz"}
    return {
        "data parallel": message(record, "x.npz", nn.DataParallel(model), optimizer),
        "closure": message(with_closure),
        "other model": message(record, "x.npz", larger, optimizer),
        "steps": message(record, "x.npz", model, optimizer, steps=[-1]),
        "no steps": message(record, "x.npz", model, optimizer, steps=0),
        "suffix": message(record, "x.npy", model, optimizer),
        "folder": message(record, "nowhere/x.npz", model, optimizer),
        "missing step": message(record, "x.npz", model, optimizer, steps=[9], replay="first.npz"),
        "no trace": message(record, "x.npz", model, optimizer, replay="absent.npz"),
        "later": message(record, "x.npz", model, optimizer, replay="later.npz"),
        "damaged": message(record, "x.npz", model, optimizer, replay="damaged.npz"),
        "unmatched": message(record, "x.npz", larger, adamw(larger), **replayed),
        "misnamed": message(record, "x.npz", model, optimizer, **replayed, names=misnamed),
        "evaluation": message(in_evaluation),
    }


def case_compiled():
    model = network()
    expected = train(model, adamw(model))
    model = network()
    compiled = torch.compile(model, backend="eager") if HAS_TORCH else model
    return is_equal(expected, train(compiled, adamw(model), "compiled.npz", steps=3))


# --- Two processes ---------------------------------------------------------------------------


def ddp(path, model=None, **options):
    model = DistributedDataParallel(network() if model is None else model)
    return train(model, adamw(model), path, shards=(dist.get_rank(), 2), **options)


def case_ddp():
    ddp("ddp.npz", steps=3)
    for path, seed in {"ddp_again.npz": None, "ddp_permuted.npz": 1}.items():
        ddp(path, steps=3, replay="ddp.npz", permute=seed)
    bits = ddp(None, network(0.2)), ddp("ddp_bits.npz", network(0.2), steps=[1, 2])
    return is_equal(*bits)


def case_bypass():
    """The bugs of scripts: no all-reduce, in the first step; clipping on one replica."""
    model = DistributedDataParallel(network())
    optimizer = adamw(model)
    with record_torch.record("bypass.npz", model, optimizer, steps=2):
        for step in range(2):
            x, y = batch(step, dist.get_rank(), 2)
            optimizer.zero_grad()
            F.mse_loss((model if step else model.module)(x), y).backward()
            if dist.get_rank():
                nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()


def case_no_sync():
    model = DistributedDataParallel(network())
    optimizer = adamw(model)
    with record_torch.record("no_sync.npz", model, optimizer, steps=2):
        for is_synchronised in (True, False):
            optimizer.zero_grad()
            for step in range(2):
                x, y = batch(step, dist.get_rank(), 2)
                is_sent = is_synchronised and step == 1
                with contextlib.nullcontext() if is_sent else model.no_sync():
                    F.mse_loss(model(x), y).backward()
            optimizer.step()


def case_fsdp():
    bits = []
    for path, options in {
        "fsdp.npz": {"steps": 3},
        "fsdp_again.npz": {"steps": 3, "replay": "fsdp.npz"},
        "ddp_fsdp.npz": {"steps": 3, "replay": "ddp.npz"},
        "": {},
        "fsdp_bits.npz": {"steps": [1]},
    }.items():
        model = network()
        fully_shard(model[4])
        fully_shard(model)
        train(model, adamw(model), path, shards=(dist.get_rank(), 2), **options)
        bits.append([p.full_tensor() for p in model.parameters()])
    return is_equal(*bits[-2:])


def case_other_meshes():
    """Tensor parallelism, with and without a mesh of data, and a mesh of some processes."""

    def refused(split):
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
        split(model)
        return message(record_torch.record, "x.npz", model, adamw(model))

    def split_both(model):
        parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel()})
        fully_shard(model, mesh=mesh["data"])

    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    plan = {"0": ColwiseParallel()}
    return [
        refused(lambda model: parallelize_module(model, mesh["tensor"], plan)),
        refused(split_both),
        refused(lambda model: fully_shard(model, mesh=mesh["data"])),
    ]


CASES = {
    "one": [
        *(case_format, case_bits, case_replay, case_other_optimizer, case_port, case_no_gradient),
        *(case_sparse, case_bfloat16, case_skipped, case_accumulation, case_two_models),
        *(case_exception, case_nested, case_errors, case_compiled),
    ],
    "two": [case_ddp, case_bypass, case_no_sync, case_fsdp, case_other_meshes],
}


def run(rank, kind):
    if kind == "two":
        init = f"file://{os.getcwd()}/rendezvous"
        dist.init_process_group("gloo", init_method=init, rank=rank, world_size=2)
    results = {case.__name__.removeprefix("case_"): case() for case in CASES[kind]}
    with open(f"results.{kind}.{rank}.json", "w") as file:
        json.dump(results, file)
    if kind == "two":
        dist.barrier()
        os._exit(0)  # Destroying the group aborts now and then, in a thread of gloo.


if __name__ == "__main__":
    os.chdir(sys.argv[1])
    if sys.argv[2] == "two":
        torch.multiprocessing.spawn(run, (sys.argv[2],), nprocs=2)
    else:
        run(0, sys.argv[2])
