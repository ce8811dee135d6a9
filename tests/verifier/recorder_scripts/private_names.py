"""Checks the private names of PyTorch that its recorder uses."""

import importlib
import os


def fails(function, *arguments):
    """Checks that a name that is missing is an error with the framework's version in one line."""
    try:
        function(*arguments)
    except RuntimeError as error:
        text = str(error)
    else:
        raise AssertionError(f"{function} needs no private name")
    start = f"{NAME} {framework.__version__} has no "
    assert text.startswith(start) and "\n" not in text and "update Lockstep" in text, text


def is_checked_at_import(owner, name):
    """Checks the same of a name that is needed when the recorder is imported."""
    value = getattr(owner, name)
    delattr(owner, name)
    fails(importlib.reload, private)
    setattr(owner, name, value)
    importlib.reload(private)


def check_torch():
    nn = framework.nn
    layer = nn.BatchNorm1d(2)
    assert set(private.buffers_of(layer)) == {"running_mean", "running_var", "num_batches_tracked"}
    first = framework.ones(1, requires_grad=True) * 2
    assert private.number_of(first.grad_fn) < private.number_of((first * 2).grad_fn)
    table = nn.Embedding(4, 2, sparse=True)
    table(framework.tensor([1, 1])).sum().backward()
    assert private.values_of_sparse(table.weight.grad).shape == (2, 2)
    assert private.indices_of_sparse(table.weight.grad).tolist() == [[1, 1]]
    calls = []
    parameter = nn.Parameter(framework.ones(1))
    for number in (1, 2):
        add = parameter.register_post_accumulate_grad_hook
        handle = add(lambda _, number=number: calls.append(number))
    assert private.move_first(handle) is handle
    parameter.sum().backward()
    assert calls == [2, 1]
    assert private.uncompiled(framework.compile(layer)) is layer
    for owner, name, _ in private.clipping(None):
        private.private(owner, name)
    importlib.import_module("torch.distributed.pipelining")
    targets = private.of_pipelines(None, None)
    assert len([private.private(owner, name) for owner, name, _ in targets]) == 2
    for each in (
        *(private.buffers_of, private.number_of, private.values_of_sparse, private.move_first),
        *(private.indices_of_sparse, private.weights_of_group, private.sharded_weight),
        private.mesh_of_group,
    ):
        fails(each, object())
    is_checked_at_import(framework.utils._pytree, "tree_leaves")
    is_checked_at_import(*private.ENGINE)
    check_sharded()


def check_sharded():
    distributed = framework.distributed
    fully_shard = importlib.import_module("torch.distributed.fsdp").fully_shard
    store = distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    mesh = importlib.import_module("torch.distributed.device_mesh").init_device_mesh("cpu", (1,))
    model = framework.nn.Linear(2, 3)
    fully_shard(model, mesh=mesh)
    (group,) = private.fsdp_groups(model)
    assert len([private.sharded_weight(each) for each in private.weights_of_group(group)]) == 2
    weight = private.weights_of_group(group)[0]
    assert private.whole_weight(weight) is None
    model(framework.ones(1, 2))
    assert private.whole_weight(weight).shape == (3, 2)
    assert private.root_mesh(private.mesh_of_group(group)).mesh.numel() == 1


framework = importlib.import_module("torch")
private = importlib.import_module("lockstep.recorders.torch.private")
NAME = "record_torch: PyTorch"
check_torch()
print("checked", flush=True)
os._exit(0)  # Destroying a group aborts now and then, in a thread of gloo.
