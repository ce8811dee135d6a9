"""Cases of PyTorch in two processes: DDP, `fully_shard`, and state that is split over both."""
# ruff: noqa: F403, F405 (the names of `torch_training`)

import functools

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from lockstep import record_torch
from recording import Trace
from torch_training import *

ROWS = torch.arange(8 * 64.0).reshape(8, 64)


def record_one_process():
    train_rows("rows_of_one.npz", ROWS)


def sharded(model):
    fully_shard(model[4])
    return fully_shard(model)


def case_no_bit_changes_on_ranks():
    """The sums of DDP, which it averages, are those of both ranks."""
    steps_of = functools.partial(clipped, shard=own_shard())
    for wrapped in (sharded, DistributedDataParallel):
        assert_no_bit_changes(lambda f=wrapped: f(network(0.2)), "x.npz", steps_of, steps=[1, 2])
        if wrapped is sharded:
            about = Trace(f"x.rank{dist.get_rank()}").about
            assert about["placements"]["before/0"] == "d0[data] d1 d2 d3"
    dist.barrier()
    first, second = (Trace(f"x.rank{rank}") for rank in range(2))
    assert_equal(first.kind("sums", 1, 0), second.kind("sums", 1, 1))
    for name, total in first.kind("sums", 1, 0).items():
        both = first.kind("raw", 1, 0)[name], second.kind("raw", 1, 1)[name]
        np.testing.assert_allclose(total, sum(both) / 2, atol=1e-6, err_msg=name)


def train_rows(path, rows, **options):
    """Trains one step with state of the first weight that the optimizer only keeps."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Linear(8, 5))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.state[model[1].weight]["rows"] = rows
    train(model, optimizer, path, plain, 1, steps=1, **options)


def case_owned_rows():
    """State that each rank has of its rows is loaded by `dims`; without them, it is asked for."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    asked = "pass mesh= and dims={'1.weight/rows': 'd0[tp] d1'}"
    for layout in ({"mesh": mesh, "dims": {"*.weight/rows": "o[dp] i"}}, {}):
        rows, given = torch.zeros(4, 64), {"replay": "rows_of_one.npz", **layout}
        told = "".join(warnings_of(train_rows, "rows.npz", rows, **given))
        assert ("not loaded" in told) == (asked in told) == (not layout), told
        assert torch.equal(rows, ROWS.chunk(2)[dist.get_rank()]) == bool(layout)
        about = Trace(f"rows.rank{dist.get_rank()}").about
        assert about["not_loaded"] == ([] if layout else ["1.weight/rows"])


def case_parts_of_a_sequence():
    """Gradient and loss of a sequence are the means of those of its parts."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    model = DistributedDataParallel(nn.Linear(4, 2))
    steps_of = functools.partial(plain, loss=lambda *_: model(torch.ones(3, 2, 4)).mean())
    train(model, momentum(model), "cp.npz", steps_of, 1, mesh=mesh, dims="b s[cp] f", steps=1)
    placements = Trace(f"cp.rank{dist.get_rank()}").about["placements"]
    assert (placements["raw/0"], placements["loss/0"]) == ("d0 d1 mean(cp)", "mean(cp)")


def case_wrong_parts():
    """A weight that the script has cut itself is asked for; a mesh has all processes."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    sharded, part = nn.Linear(2, 2), nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.Linear(8, 5))
    fully_shard(sharded, mesh=[DeviceMesh("cpu", [rank]) for rank in range(2)][dist.get_rank()])
    given = {"replay": "rows_of_one.npz", "mesh": mesh, "dims": {}, "steps": 1}
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
