"""Cases of PyTorch in four processes on a mesh, which compute what one process does."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from lockstep import compare, record_torch
from torch_training import adamw, of_all_ranks, refused, train

ONE = "one.npz"  # The recording of one process.


class Network(nn.Module):
    """Computes on a batch of sequences of vectors; its parts may be those of ranks."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.fused = nn.LayerNorm(6), nn.Linear(6, 12)
        self.down, self.last = nn.Linear(12, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.last(self.down(F.gelu(self.fused(self.norm(x)))))


def batch(step, data=(0, 1)):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(4, 8, 6, generator=generator)
    y = torch.randn(4, 8, 3, generator=generator)
    return [each.chunk(data[1])[data[0]] for each in (x, y)]


def train_part(model, path, data=(0, 1), loss_of=F.mse_loss, **options):
    def steps_of(model, optimizer, step):
        x, y = batch(step, data)
        loss_of(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return train(model, adamw(model), path, steps_of, 3, **options)


def record_one_process():
    train_part(Network(), ONE)


def assert_same_as_one(name):
    """Checks that a recording is that of one process, once all have written their parts."""
    trace = of_all_ranks(name)
    verdict = compare(ONE, f"{name}.npz")
    assert verdict.ok, str(verdict)
    return trace


def placements(trace):
    """Returns the placements of variables before the step by their names."""
    names = [variable["name"] for variable in trace.about["variables"]]
    texts = trace.about["placements"]
    return {name: texts.get(f"before/{index}") for index, name in enumerate(names)}


def meshes(*names):
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=names)


def sequence_parallel(mesh):
    """Returns a model whose output is a DTensor, split over its last dimension."""
    plan = {
        "norm": SequenceParallel(),
        "fused": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
        "last": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
    }
    split = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1))
    model = parallelize_module(Network(), mesh["tp"], split)
    model = parallelize_module(model, mesh["tp"], plan)
    return fully_shard(model, mesh=mesh["dp"])


def case_dtensors():
    """FSDP2 over sequence parallelism; recording changes no bit."""
    mesh = meshes("dp", "tp")
    options = {"data": (mesh.get_local_rank("dp"), 2)}
    options["loss_of"] = lambda output, y: F.mse_loss(output.full_tensor(), y)
    train_part(sequence_parallel(mesh), "dtensors.npz", replay=ONE, **options)
    trace = assert_same_as_one("dtensors")
    found = [train_part(sequence_parallel(mesh), path, **options) for path in ("bits.npz", None)]
    assert all(map(torch.equal, *found))
    assert trace.about["mesh"] == {"dp": 2, "tp": 2} and trace.about["data_axes"] == ["dp"]
    assert (trace.about["num_replicas"], trace.abouts[3]["ranks"]) == (2, [3])
    of_weights = placements(trace)
    assert of_weights["fused.weight"] == "d0[tp,dp] d1" and of_weights["norm.bias"] == "d0[dp]"
    assert of_weights["down.weight"] == "d0[dp] d1[tp]"


def case_parts_that_are_not_said():
    """A weight that the script has cut itself is asked for; a mesh has all processes."""
    mesh, model = meshes("dp", "tp"), Network()
    model.fused = nn.Linear(6, 6)
    expected = f"replay={ONE}: fused.weight is (6, 6), and (12, 6) there; if it is a part, pass"
    expected += " dims={'fused.weight': 'd0[tp] d1'}"
    options = {"mesh": mesh, "dims": {}, "replay": ONE}
    refused(expected, record_torch.record, "x.npz", model, adamw(model), **options)
    both = [DeviceMesh("cpu", ranks) for ranks in ([0, 1], [2, 3])]
    model = nn.Linear(2, 2)
    fully_shard(model, mesh=both[dist.get_rank() // 2])
    refused("mesh: has 2 of 4 processes", record_torch.record, "x.npz", model, adamw(model))
