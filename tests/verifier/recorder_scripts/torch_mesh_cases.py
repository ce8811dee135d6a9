"""Trainings of four processes on a mesh, and checks of what each of them recorded.

They need PyTorch itself: `torch_cases.py` starts them.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from lockstep import compare, record_torch
from recording import node_of
from torch_training import adamw, assert_equal, of_all_ranks, refused, train

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


def train_part(model, path, data=(0, 1), finish=None, part=None, loss_of=F.mse_loss, **options):
    """Trains three steps; `finish` is called after backward, `part` cuts each batch."""

    def steps_of(model, optimizer, step):
        x, y = map(part or (lambda whole: whole), batch(step, data))
        loss_of(model(x), y).backward()
        if finish:
            finish(model)
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


def placements(trace, kind):
    """Returns the placements of arrays by the names of variables or weights."""
    names = trace.about["gradients"]
    if kind in ("before", "after"):
        names = [variable["name"] for variable in trace.about["variables"]]
    texts = trace.about["placements"]
    found = {name: texts.get(f"{kind}/{index}") for index, name in enumerate(names)}
    return {name: text for name, text in found.items() if text is not None}


def meshes(*names):
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=names)


def case_fsdp_uneven():
    """A weight of five rows on four processes: the last one has none; hybrid sharding."""
    mesh = meshes("replicate", "shard")
    for name, given, replay in (
        ("uneven", {}, ONE), ("hybrid", {"mesh": mesh}, "uneven.npz"),
        ("submesh", {"mesh": mesh["shard"]}, ONE),
    ):  # fmt: skip
        model = fully_shard(Network(), **given)
        train_part(model, f"{name}.npz", (dist.get_rank(), 4), replay=replay)
        dist.barrier()  # Each process replays the parts of all.
    trace = assert_same_as_one("uneven")
    shapes = [trace.kind("before", 0, rank)["down.weight"].shape for rank in range(4)]
    assert shapes == [(2, 12), (2, 12), (1, 12), (0, 12)]
    assert placements(trace, "after")["down.weight/exp_avg"] == "d0[data] d1"
    trace = assert_same_as_one("hybrid")
    assert trace.about["data_axes"] == ["replicate", "shard"]
    assert placements(trace, "clipped")["last.weight"] == "d0[shard] d1"
    assert of_all_ranks("submesh").about["data_axes"] == ["shard"]
    verdict = compare(ONE, "submesh.npz")
    assert (node_of(verdict), verdict.name) == ("sum", "not_all_reduced"), str(verdict)


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
    train_part(sequence_parallel(mesh), "dtensors_again.npz", replay="dtensors.npz", **options)
    assert_equal(trace.arrays, of_all_ranks("dtensors_again").arrays)
    found = [
        train_part(sequence_parallel(mesh), x, **options) for x in ("bits.npz", "bits_again.npz")
    ]
    assert all(map(torch.equal, *found))
    assert trace.about["mesh"] == {"dp": 2, "tp": 2} and trace.about["data_axes"] == ["dp"]
    assert (trace.about["num_replicas"], trace.abouts[3]["ranks"]) == (2, [3])
    of_weights = placements(trace, "before")
    assert of_weights["fused.weight"] == "d0[tp,dp] d1" and of_weights["norm.bias"] == "d0[dp]"
    assert of_weights["down.weight"] == "d0[dp] d1[tp]"
    assert [trace.kind("after", 2, r)["last.weight"].shape for r in range(4)] == [
        (1, 5), (1, 5), (1, 5), (0, 5),
    ]  # fmt: skip
    assert trace.about["placements"]["y_pred/0"] == "d0 d1 d2[tp]"
    shapes = [trace.kind("y_grad", 0, rank)["0"].shape for rank in range(2)]
    assert shapes == [(2, 8, 2), (2, 8, 1)]


class TensorParallel(Network):
    """Has half of each of two parts of `fused`, and half of the inputs of `down`."""

    def __init__(self, mesh):
        super().__init__()
        self.mesh, rank = mesh, mesh.get_local_rank()
        fused, bias = (x.unflatten(0, (2, 6)) for x in (self.fused.weight, self.fused.bias))
        self.fused.weight = nn.Parameter(fused.chunk(2, 1)[rank].flatten(0, 1).detach().clone())
        self.fused.bias = nn.Parameter(bias.chunk(2, 1)[rank].flatten().detach().clone())
        down = self.down.weight.unflatten(1, (2, 6)).chunk(2, 2)[rank].flatten(1)
        self.down.weight = nn.Parameter(down.detach().clone())

    def forward(self, x):
        x = Copy.apply(self.norm(x), self.mesh)
        x = F.linear(F.gelu(self.fused(x)), self.down.weight)
        return self.last(Reduce.apply(x, self.mesh) + self.down.bias)


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, mesh):
        ctx.mesh = mesh
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return Reduce.forward(None, gradient, ctx.mesh), None


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, mesh):
        x = x.clone()
        dist.all_reduce(x, group=mesh.get_group())
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def case_plain_weights():
    """DDP over weights that the script splits itself, as `dims` says; without it, it is asked."""
    mesh = meshes("dp", "tp")
    data, group = (mesh.get_local_rank("dp"), 2), mesh["dp"].get_group()
    split = {"fused.weight": "2*o[tp] i", "fused.bias": "2*o[tp]", "down.weight": "o 2*i[tp]"}
    split["inputs"] = "b[dp] s"
    model = TensorParallel(mesh["tp"])
    options = {"mesh": mesh, "dims": {}, "replay": ONE}
    expected = f"replay={ONE}: fused.weight is (6, 6), and (12, 6) there; if it is a part, pass"
    expected += " dims={'fused.weight': 'd0[tp] d1'}"
    refused(expected, record_torch.record, "x.npz", model, adamw(model), **options)
    for path, replay in (("plain.npz", ONE), ("again.npz", None), ("plain_again.npz", "plain.npz")):
        model = DistributedDataParallel(TensorParallel(mesh["tp"]), process_group=group)
        train_part(model, path, data, mesh=mesh, dims=split, replay=replay)
        trace = assert_same_as_one(path.removesuffix(".npz"))
        assert trace.about["data_axes"] == ["dp"]
        shapes = {name: x.shape for name, x in trace.kind("before", 1).items()}
        assert shapes["fused.weight"] == (6, 6) and shapes["down.weight/exp_avg"] == (5, 6)
        assert placements(trace, "before")["down.weight/exp_avg"] == "o 2*i[tp]"
        assert placements(trace, "sums")["fused.bias"].startswith("2*")


def case_parts_of_sequences():
    """Ranks of "cp" have other parts of the sequences, of which their loss is the mean."""
    mesh = meshes("dp", "cp")
    place, options = mesh.get_local_rank("cp"), {"mesh": mesh, "dims": "b[dp] s[cp:zigzag]"}

    def part(x):
        chunks = x.chunk(4, 1)
        return torch.cat([chunks[place], chunks[3 - place]], 1)

    def reduce(model):
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= 4

    for path, wrap, finish in (
        ("parts.npz", DistributedDataParallel, None),
        ("parts_fsdp.npz", fully_shard, None),
        ("parts_by_hand.npz", None, reduce),
    ):
        model, data = Network(), (mesh.get_local_rank("dp"), 2)
        model = wrap(model) if wrap else model
        train_part(model, path, data, finish, part, replay=ONE, **options)
        trace = assert_same_as_one(path.removesuffix(".npz"))
        assert trace.about["data_axes"] == ["dp"] and trace.about["num_replicas"] == 2
        texts = trace.about["placements"]
        assert texts["data/0"] == "b[dp] s[cp:zigzag] d2" == texts["y_pred/0"]
        assert ("loss/0" in texts) == (wrap is not None) == bool(trace.kind("y_grad"))
        assert texts.get("loss/0", "mean(cp)") == "mean(cp)"
        if wrap is DistributedDataParallel:
            assert placements(trace, "raw")["last.weight"] == "d0 d1 mean(cp)"


class SplitsInside(Network):
    """Splits the sequences itself: the ranks of "cp" get equal examples."""

    def __init__(self, place):
        super().__init__()
        self.place = place

    def forward(self, x):
        return super().forward(x.chunk(2, 1)[self.place])


def case_sequences_that_the_model_splits():
    """DDP reduces over all ranks; the examples are split over "dp" only, as `dims` says."""
    mesh = meshes("dp", "cp")
    place, data = mesh.get_local_rank("cp"), (mesh.get_local_rank("dp"), 2)
    dims = {"inputs": "b[dp] s", "outputs": "b[dp] s[cp] d"}

    def loss_of(y_pred, y):
        return F.mse_loss(y_pred, y.chunk(2, 1)[place])

    for path, own in (("inside.npz", data), ("inside_same.npz", (0, 2))):
        model = DistributedDataParallel(SplitsInside(place))
        train_part(model, path, own, loss_of=loss_of, mesh=mesh, replay=ONE, dims=dims)
    assert assert_same_as_one("inside").about["data_axes"] == ["dp"]
    assert node_of(compare(ONE, "inside_same.npz")) == "examples"


class Stage(nn.Module):
    """Half of the layers, under their names in the whole model, or under others."""

    def __init__(self, stage):
        super().__init__()
        whole = Network()
        if stage == 0:
            self.norm, self.fused = whole.norm, whole.fused
        else:
            self.below, self.last = whole.down, whole.last

    def forward(self, x):
        if hasattr(self, "norm"):
            return F.gelu(self.fused(self.norm(x)))
        return self.last(self.below(x))


def case_pipeline():
    """Examples are recorded on the first stage, the loss on the last."""
    mesh = meshes("dp", "pp")
    stage, group = mesh.get_local_rank("pp"), mesh["pp"].get_group()
    names = {"below.weight": "down.weight", "below.bias": "down.bias"}
    options = {"steps": 3, "mesh": mesh, "replay": ONE}
    if stage:
        expected = f"replay={ONE}: no weight fits below.weight (5, 12); it has"
        model = Stage(stage)
        refused(expected, record_torch.record, "x.npz", model, adamw(model), **options)
    model = Stage(stage)
    fully_shard(model, mesh=mesh["dp"])
    pipeline = PipelineStage(model, stage, 2, torch.device("cpu"), group=group)
    schedule = ScheduleGPipe(pipeline, 2, loss_fn=F.mse_loss)

    def steps_of(model, optimizer, step):
        x, y = batch(step, (mesh.get_local_rank("dp"), 2))
        schedule.step(x) if stage == 0 else schedule.step(target=y)
        optimizer.step()
        optimizer.zero_grad()

    train(model, adamw(model), "stages.npz", steps_of, 3, names=names, **options)
    trace = assert_same_as_one("stages")
    keys = [key.split("/") for key in trace.arrays]
    kinds = [{kind for _, kind, rank, *_ in keys if rank == str(number)} for number in range(4)]
    assert kinds[0] == kinds[2] and kinds[1] == kinds[3]
    assert kinds[0] ^ kinds[1] == {"data", "loss", "y_pred", "y_grad"}
    assert "data" in kinds[0] and "sums" in kinds[0] and "sums" in kinds[1]
    assert trace.about["micro_batches"] == [2, 2, 2]
    assert trace.abouts[1]["names"] == names and trace.abouts[0]["names"] == {}


def case_parts_of_the_processes():
    both = [DeviceMesh("cpu", ranks) for ranks in ([0, 1], [2, 3])]
    model = nn.Linear(2, 2)
    fully_shard(model, mesh=both[dist.get_rank() // 2])
    expected = "mesh: has 2 of 4 processes; pass a mesh of all, of which others are parts"
    refused(expected, record_torch.record, "x.npz", model, adamw(model), steps=1)


CASES = [
    *(case_fsdp_uneven, case_dtensors, case_plain_weights, case_parts_of_sequences),
    *(case_pipeline, case_parts_of_the_processes),
]
