"""Small traces, written with NumPy as a recorder writes them."""

import json

import numpy as np

from lockstep.data.about import about_from
from lockstep.data.trace import Trace

WEIGHTS = {"dense/kernel": (3, 2), "dense/bias": (2,), "embedding": (5, 2)}
VARIABLES = [
    {"name": "dense/kernel", "kind": "weight", "layout": "IO"},
    {"name": "dense/bias", "kind": "weight", "layout": ""},
    {"name": "embedding", "kind": "weight", "layout": ""},
    {"name": "m/kernel", "kind": "optimizer state", "of": "dense/kernel", "slot": "momentum"},
]
SHAPES = [(3, 2), (2,), (5, 2), (3, 2)]


def about(**changes):
    """Returns the description of a trace of 2 steps and 2 replicas, with some keys changed."""
    group = {"learning_rate": 0.1, "momentum": 0.9, "nesterov": False, "weights": list(WEIGHTS)}
    return {
        "format": "lockstep trace", "version": 2,
        "framework": "torch", "versions": {"torch": "2.13.0"},
        "num_replicas": 2, "replicas": [0, 1],
        "steps": [0, 234],
        "variables": VARIABLES,
        "gradients": list(WEIGHTS),
        "reduction": "mean", "order": "reduce, clip",
        "optimizer": {"class": "SGD", "framework": "torch"},
        "settings": [[group], [group]],
        "layers": [{"name": "dense", "class": "Linear", "weights": ["dense/kernel"]}],
        "permuted": None, "replayed": None,
        "micro_batches": [1, 1],
    } | changes  # fmt: skip


def arrays(num_steps=2, replicas=(0, 1)):
    """Returns name → array of all members, but for `about`; the values tell their places."""
    members = {}
    for position in range(1, num_steps + 1):
        for replica in replicas:
            for kind in ("before", "after"):
                for index, shape in enumerate(SHAPES):
                    value = 100 * position + 10 * replica + index + (kind == "after") / 2
                    members[f"{position}/{kind}/{replica}/{index}"] = np.full(
                        shape, value, np.float32
                    )
            for kind in ("raw", "sums"):
                place = f"{position}/{kind}/{replica}"
                members[f"{place}/0"] = np.ones((3, 2), np.float32)
                members[f"{place}/1"] = np.arange(2, dtype=np.float32)
                members[f"{place}/2/values"] = np.ones((3, 2), np.float32)
                members[f"{place}/2/indices"] = np.array([4, 0, 4])
                members[f"{place}/2/rows"] = np.array(5)
            members[f"{position}/loss/{replica}/0"] = np.float32(position)
            members[f"{position}/data/{replica}/0"] = np.arange(8, dtype=np.uint8).reshape(4, 2)
    return members


def write_trace(path, description=None, members=None, save=np.savez):
    """Writes a trace, by default of 2 steps and 2 replicas."""
    text = json.dumps(about() if description is None else description)
    with open(path, "wb") as file:
        save(file, about=np.array(text), **(arrays() if members is None else members))
    return path


def write_ranks(folder, **changes):
    """Writes `two.rank0.npz` and `two.rank1.npz`; returns their common name."""
    for rank in (0, 1):
        description = about(replicas=[rank], **changes)
        write_trace(folder / f"two.rank{rank}.npz", description, arrays(replicas=(rank,)))
    return folder / "two.npz"


def trace(**changes):
    """Returns the trace of `about` and `arrays` in memory."""
    return Trace(about_from(json.dumps(about(**changes)))[0], arrays())
