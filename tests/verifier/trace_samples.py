"""Files with the recording of `trainer.Script`, some keys or arrays of which are changed."""

import json

import numpy as np

from lockstep.data.about import about_from, json_of
from lockstep.data.trace import Trace
from tests.verifier.trainer import FEATURES, OUTPUTS, Script

STEPS = 0, 1


def about(**changes):
    """Returns the description of a trace of 2 steps and 2 replicas, with some keys changed."""
    return json.loads(json_of(Script(replicas=2, steps=STEPS).trace().about, {})) | changes


def arrays(num_steps=2, replicas=(0, 1)):
    """Returns name → array of all members, but for `about`; one gradient has some rows."""
    members = {}
    for name, array in Script(replicas=max(2, *replicas) + 1, steps=STEPS).arrays.items():
        position, kind, replica, index = name.split("/")
        if int(position) > num_steps or int(replica) not in replicas:
            continue
        if (kind, index) == ("raw", "0"):
            members[f"{name}/values"] = np.ones((3, OUTPUTS), np.float32)
            members[f"{name}/indices"] = np.array([4, 0, 4])
            members[f"{name}/rows"] = np.array(FEATURES)
        else:
            members[name] = array
    return members


def write_trace(path, description=None, members=None):
    """Writes a trace, by default of 2 steps and 2 replicas."""
    text = json.dumps(about() if description is None else description)
    with open(path, "wb") as file:
        np.savez(file, about=np.array(text), **(arrays() if members is None else members))
    return path


def write_ranks(folder):
    """Writes `two.rank0.npz` and `two.rank1.npz`; returns their common name."""
    for rank in (0, 1):
        members = arrays(replicas=(rank,))
        write_trace(folder / f"two.rank{rank}.npz", about(replicas=[rank]), members)
    return folder / "two.npz"


def trace():
    """Returns the trace of `about` and `arrays` in memory."""
    return Trace(about_from(json.dumps(about()))[0], arrays())
