"""Cases of PyTorch: the private names that its recorder uses."""

import importlib

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lockstep.recorders.torch import private
from torch_training import Halves, momentum, refused

NAME = f"record_torch: PyTorch {torch.__version__} has no "


def is_missed_without(owner, name, function, *arguments):
    """Checks that a missing name is an error with the framework's version in one line."""
    value = getattr(owner, name)
    delattr(owner, name)
    refused(NAME, function, *arguments)
    setattr(owner, name, value)


def case_private_names():
    layer = nn.BatchNorm1d(2)
    buffers = {"running_mean": torch.ones(2)}
    with private.with_buffers(layer, buffers):
        layer(torch.ones(4, 2))
        layer.running_mean = layer.running_mean + 1
    assert buffers["running_mean"].tolist() == [2, 2] and not layer.running_mean.any()
    first = torch.ones(1, requires_grad=True) * 2
    assert private.number_of(first.grad_fn) < private.number_of((first * 2).grad_fn)
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1, 1])).sum().backward()
    assert private.values_of_sparse(table.weight.grad).shape == (2, 2)
    assert private.indices_of_sparse(table.weight.grad).tolist() == [[1, 1]]
    calls, parameter = [], nn.Parameter(torch.ones(1))
    for number in (1, 2):
        add = parameter.register_post_accumulate_grad_hook
        handle = add(lambda _, number=number: calls.append(number))
    assert private.move_first(handle) is handle
    parameter.sum().backward()
    assert calls == [2, 1]
    assert private.uncompiled(torch.compile(layer)) is layer
    importlib.import_module("torch.distributed.pipelining")
    for owner, name, _ in private.of_pipelines(None, None):
        private.private(owner, name)
    for each in (
        *(private.number_of, private.values_of_sparse, private.move_first),
        *(private.indices_of_sparse, private.weights_of_group, private.sharded_weight),
        private.mesh_of_group,
    ):
        refused(NAME, each, object())
    for owner, name in ((torch.utils._pytree, "tree_leaves"), private.ENGINE):
        is_missed_without(owner, name, importlib.reload, private)
    record, model = importlib.import_module("lockstep.record_torch").record, Halves()
    ((owner, name, _),) = private.clipping(None)
    is_missed_without(owner, name, record, "x.npz", model, momentum(model))


def case_private_names_of_sharded_weights():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = nn.Linear(2, 3)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    (group,) = private.fsdp_groups(model)
    assert len([private.sharded_weight(each) for each in private.weights_of_group(group)]) == 2
    weight = private.weights_of_group(group)[0]
    assert private.whole_weight(weight) is None
    model(torch.ones(1, 2))
    assert private.whole_weight(weight).shape == (3, 2)
    assert private.root_mesh(private.mesh_of_group(group)).mesh.numel() == 1
