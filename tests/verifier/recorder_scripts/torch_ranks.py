"""Cases of PyTorch in two processes: DDP, `fully_shard`, and state that is split over both."""
# ruff: noqa: F403, F405 (the names of `torch_training`)

import functools

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from lockstep import compare, record_torch
from recording import Trace
from torch_training import *


def record_one_process():
    train_rows("rows_of_one.npz")


def sharded(model):
    fully_shard(model[4])
    return fully_shard(model)


def case_no_bit_changes_on_ranks():
    steps_of = functools.partial(clipped, shard=own_shard())
    for wrapped in (DistributedDataParallel, sharded):
        assert_no_bit_changes(lambda f=wrapped: f(network(0.2)), "x.npz", steps_of, steps=[1, 2])


class OwnRows(torch.optim.SGD):
    """Averages gradients itself; each rank has the sums of its rows of them, and their number."""

    @torch.no_grad()
    def step(self):
        rank, world = own_shard()
        for p in self.param_groups[0]["params"]:
            if world > 1:
                dist.all_reduce(p.grad)
            p.grad /= world
            rows, state = p.grad.chunk(world)[rank], self.state[p]
            state["number"] = state.get("number", 0) + 1
            state["sum_of_rows"] = state.get("sum_of_rows", 0) + rows
        super().step()


def train_rows(path, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Linear(8, 6))  # Rows for both ranks.

    def loss(model, step, *_):
        return model(batch(step, *own_shard())[0]).square().mean()

    steps_of = functools.partial(plain, loss=loss)
    train(model, OwnRows(model.parameters(), 0.1), path, steps_of, 3, **options)


def case_owned_rows():
    """State that each rank has of its rows is loaded by `dims`; without them, it is asked for."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    rows = {"*.weight/sum_of_rows": "o[dp] i", "*.bias/sum_of_rows": "o[dp]"}
    asked = "pass mesh= and dims={'1.weight/sum_of_rows': 'd0[tp] d1'}"
    for name, layout in (("rows", {"mesh": mesh, "dims": rows}), ("unknown_rows", {})):
        told = "".join(warnings_of(train_rows, f"{name}.npz", replay="rows_of_one.npz", **layout))
        assert ("not loaded" in told) == (asked in told) == (not layout), told
        dist.barrier()  # Both have written their parts.
        trace = Trace(f"{name}.rank0")
        assert compare("rows_of_one.npz", f"{name}.npz").ok
        before = trace.kind("before", 2)
        assert before["1.weight/sum_of_rows"].shape == (4, 64)
        assert before["1.weight/number"] == 2
        assert bool(trace.about["not_loaded"]) == (not layout)


def case_wrong_parts():
    """A weight that the script has cut itself is asked for; a mesh has all processes."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    sharded, part = nn.Linear(2, 2), nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.Linear(8, 6))
    fully_shard(sharded, mesh=[DeviceMesh("cpu", [rank]) for rank in range(2)][dist.get_rank()])
    given = {"replay": "rows_of_one.npz", "mesh": mesh, "dims": {}}
    asked = "replay=rows_of_one.npz: 1.weight is (4, 64), and (8, 64) there; if it is a part, pass"
    for expected, model, options in (
        (f"{asked} dims={{'1.weight': 'd0[tp] d1'}}", part, given),
        ("mesh: has 1 of 2 processes", sharded, {}),
        ("dims: needs mesh=", network(), {"dims": "b[dp]"}),
        ("dims has a placement 'b[cp]' with an axis", network(), {"dims": "b[cp]", "mesh": mesh}),
        ("dims has a placement 'b[dp', which cannot", network(), {"dims": "b[dp", "mesh": mesh}),
        ("dims: 'o i' is not that of 4.bias", network(), {"dims": {"4.*": "o i"}, "mesh": mesh}),
    ):
        refused(expected, record_torch.record, "x.npz", model, adamw(model), **options)
