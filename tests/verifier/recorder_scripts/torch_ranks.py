"""Cases of PyTorch in two processes: DDP, `fully_shard`, and state that is split over both."""
# ruff: noqa: F403, F405 (the names of `torch_training`)

import functools

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from lockstep import compare, record_torch
from recording import Trace
from torch_training import *


def record_one_process():
    train_rows("rows_of_one.npz")


def ddp(path, model=None, **options):
    model = DistributedDataParallel(network() if model is None else model)
    steps_of = functools.partial(clipped, shard=own_shard())
    return train(model, adamw(model), path, steps_of, **options)


def case_ddp():
    replay = {"replay": "ddp.npz"}
    for path, options in {"ddp.npz": {}, "permuted.npz": {"permute": 1, **replay}}.items():
        ddp(path, **options)
        dist.barrier()
    assert is_equal(ddp(None, network(0.2)), ddp("bits.npz", network(0.2), steps=[1, 2]))
    trace, permuted = of_all_ranks("ddp"), Trace("permuted")
    assert [about["replicas"] for about in trace.abouts] == [[0], [1]]
    assert trace.about["num_replicas"] == 2 and trace.about["reduction"] == "mean"
    assert trace.about["passes"] == [["ddp"]] * 3
    for step in range(3):
        for replica in range(2):
            assert_equal(trace.kind("sums", step, replica), mean_of_raw(trace, step))
        assert_equal(trace.kind("clipped", step), trace.kind("clipped", step, 1))
        assert norm_of(trace.kind("clipped", step)) <= 0.5 + 1e-6
        a, b = (trace.kind("data", step, replica)["0"] for replica in range(2))
        assert len(a) == len(b) == 6 and not np.array_equal(a, b)
        assert not np.array_equal(a, permuted.kind("data", step)["0"])
        assert_close(trace.kind("sums", step), permuted.kind("sums", step))


# --- Weights and state of which each process has a part ------------------------------------------


def whole(trace, kind, step):
    """Returns arrays of which each of two processes has a part of the first dimension."""
    of_rank = [trace.kind(kind, step, rank) for rank in range(2)]
    parts = [name for name, x in of_rank[0].items() if x.ndim and "running" not in name]
    return of_rank[0] | {name: np.concatenate([x[name] for x in of_rank]) for name in parts}


def case_fsdp():
    ddp("ddp.npz")
    dist.barrier()
    bits = []
    for path, options in {
        "fsdp.npz": {},
        "ddp_fsdp.npz": {"replay": "ddp.npz"},
        None: {},
        "fsdp_bits.npz": {"steps": [1]},
    }.items():
        model = network()
        fully_shard(model[4])
        fully_shard(model)
        steps_of = functools.partial(clipped, shard=own_shard())
        bits.append(train(model, adamw(model), path, steps_of, **options))
        dist.barrier()  # Each process replays the parts of both.
    assert is_equal(*bits[-2:])
    trace, replayed, original = of_all_ranks("fsdp"), Trace("ddp_fsdp"), Trace("ddp")
    assert trace.about["reduction"] == ""
    about = trace.abouts[1]
    assert (about["mesh"], about["data_axes"]) == ({"data": 2}, ["data"])
    assert about["ranks"] == [1] and about["num_replicas"] == 2 and "replicas" not in about
    assert not trace.kind("raw")
    # Rows of parts, of which the last may have less.
    assert [trace.kind("before", 0, r)["4.weight"].shape for r in (0, 1)] == [(3, 64), (2, 64)]
    index = trace.about["gradients"].index("4.weight")
    assert about["placements"][f"clipped/{index}"] == "d0[data] d1"
    for step in range(3):
        assert_close(whole(replayed, "sums", step), original.kind("sums", step))
        assert_equal(original.kind("before", step), whole(replayed, "before", step))


class OwnRows(torch.optim.SGD):
    """Sums gradients itself; each rank has the momentum of its rows, and updates these."""

    @torch.no_grad()
    def step(self):
        rank, world = own_shard()
        for group in self.param_groups:
            for p in group["params"]:
                gradient = p.grad.clone()
                if world > 1:
                    dist.all_reduce(gradient)
                    gradient /= world
                rows = torch.arange(len(p)).chunk(world)[rank]
                state = self.state[p]
                if not state:
                    state["number"], state["momentum_of_rows"] = 0, torch.zeros_like(p[rows])
                state["number"] += 1
                state["momentum_of_rows"].mul_(0.9).add_(gradient[rows])
                own = p[rows] - group["lr"] * state["momentum_of_rows"]
                parts = [torch.empty_like(own) for _ in range(world)]
                if world > 1:
                    dist.all_gather(parts, own)
                p.copy_(torch.cat(parts) if world > 1 else own)


def train_rows(path, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Linear(8, 6))  # Rows for both ranks.

    def steps_of(model, optimizer, step):
        x, _ = batch(step, *own_shard())
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    train(model, OwnRows(model.parameters(), 0.1), path, steps_of, 3, **options)


def case_owned_rows():
    """State that each rank has of its rows is loaded by `dims`; without them, it is asked for."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    rows = {"*.weight/momentum_of_rows": "o[dp] i", "*.bias/momentum_of_rows": "o[dp]"}
    asked = "pass mesh= and dims={'1.weight/momentum_of_rows': 'd0[tp] d1'}"
    for name, layout in (("rows", {"mesh": mesh, "dims": rows}), ("unknown_rows", {})):
        told = "".join(warnings_of(train_rows, f"{name}.npz", replay="rows_of_one.npz", **layout))
        assert ("not loaded" in told) == (asked in told) == (not layout), told
        trace = of_all_ranks(name)
        assert compare("rows_of_one.npz", f"{name}.npz").ok
        before = trace.kind("before", 2)
        assert before["1.weight/momentum_of_rows"].shape == (4, 64)
        assert before["1.weight/number"] == 2
        assert bool(trace.about["not_loaded"]) == (not layout)


def case_mesh():
    """DDP and a mesh that is given: only its data axis makes replicas."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    ddp("mesh.npz", steps=1, mesh=mesh, dims="b[dp]")
    about = of_all_ranks("mesh").abouts[1]
    assert (about["mesh"], about["data_axes"]) == ({"dp": 2, "tp": 1}, ["dp"])
    assert (about["num_replicas"], about["ranks"]) == (2, [1])
    assert about["placements"]["data/0"] == "b[dp] d1 d2 d3"
    for expected, options in (
        ("dims: needs mesh=", {"dims": "b[dp]"}),
        ("dims has a placement 'b[cp]' with an axis", {"dims": "b[cp]", "mesh": mesh}),
        ("dims has a placement 'b[dp', which cannot be read", {"dims": "b[dp", "mesh": mesh}),
        ("dims: 'o i' is not that of 4.bias", {"dims": {"4.*": "o i"}, "mesh": mesh}),
    ):
        model = network()
        refused(expected, record_torch.record, "x.npz", model, adamw(model), **options)
