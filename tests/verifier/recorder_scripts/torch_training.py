"""Networks, the loop, and what recordings are checked with, of the cases of PyTorch."""

import functools
import warnings

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from lockstep import record_torch
from recording import Trace

torch.set_num_threads(1)


def network(dropout=0.0):
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 4, 2, stride=2), nn.BatchNorm2d(4), nn.Flatten()]
    return nn.Sequential(*layers, nn.Dropout(dropout), nn.Linear(64, 5))


def batch(step, shard=0, num_shards=1):
    generator = torch.Generator().manual_seed(100 + step)
    x = torch.randn(12, 1, 8, 8, generator=generator)
    y = torch.randn(12, 5, generator=generator)
    return x[shard::num_shards], y[shard::num_shards]


def adamw(model, **options):
    return torch.optim.AdamW(model.parameters(), **{"lr": 0.01, **options})


def momentum(model):
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def loss_of(model, step, *shard):
    x, y = batch(step, *shard)
    return F.mse_loss(model(x), y)


def plain(model, optimizer, step, shard=(0, 1), limit=None, loss=loss_of):
    """Trains one step, as most scripts do; clips gradients to a limit."""
    optimizer.zero_grad()
    loss(model, step, *shard).backward()
    if limit:
        nn.utils.clip_grad_norm_(model.parameters(), limit)
    optimizer.step()


clipped = functools.partial(plain, limit=0.5)


def train(model, optimizer, path=None, steps_of=clipped, num_steps=4, given=True, **options):
    """Trains, with a recording if there is a path; returns the final bits.

    Args:
        steps_of: function that trains one step.
        given: what the recorder gets; True for the optimizer.
        options: those of the recorder.
    """
    given = optimizer if given is True else given
    with record_torch.record(path, model, given, **options):
        for step in range(num_steps):
            steps_of(model, optimizer, step)
    return [getattr(x, "_local_tensor", x).clone() for x in model.state_dict().values()]


def recorded(name, model=None, optimizer=adamw, steps_of=clipped, num_steps=4, **options):
    """Trains a network with a recording, and returns the recording."""
    model = network() if model is None else model
    train(model, optimizer(model), f"{name}.npz", steps_of, num_steps, **options)
    return Trace(name)


def assert_no_bit_changes(build, path, steps_of=clipped, optimizer=adamw, **options):
    """Trains a network without and with a recording."""
    bits = []
    for file, own in ((None, {}), (path, options)):
        model = build()
        torch.manual_seed(1)
        bits.append(train(model, optimizer(model), file, steps_of, **own))
    assert is_equal(*bits)


def own_shard():
    """Returns rank and number of the processes."""
    return (dist.get_rank(), 2) if dist.is_initialized() else (0, 1)


def refused(expected, function, *args, **options):
    """Checks that a call is refused with one line that begins so."""
    try:
        function(*args, **options)
    except (ValueError, RuntimeError, ImportError) as error:
        assert str(error).startswith(expected) and "\n" not in str(error), error
    else:
        raise AssertionError(f"not refused: {expected}")


def warnings_of(function, *args, **options):
    """Returns the texts of the warnings of a call."""
    with warnings.catch_warnings(record=True) as told:
        function(*args, **options)
    return [str(warning.message) for warning in told]


def is_equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def assert_equal(a, b):
    assert a.keys() == b.keys() and a
    for key in a:
        np.testing.assert_array_equal(a[key], b[key], err_msg=key)


def norm_of(arrays):
    return sum(np.square(x, dtype=float).sum() for x in arrays.values()) ** 0.5
