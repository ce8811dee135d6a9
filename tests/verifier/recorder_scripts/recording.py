"""What the checks of both recorders read a recording with."""

import json

import numpy as np


class Trace:
    """The arrays of a recording, by position, kind, replica and place.

    `replaced` has the own states of a training that starts each step from those of another one.
    """

    def __init__(self, name):
        with np.load(f"{name}.npz", allow_pickle=False) as file:
            self.arrays = dict(file)
        self.about = json.loads(str(self.arrays.pop("about")))
        of_aliases = {name: self.arrays[of] for name, of in self.about["aliases"].items()}
        self.arrays = {k: x for k, x in (self.arrays | of_aliases).items() if "/kept/" not in k}
        own = [name for name in self.arrays if name.split("/")[1] in ("replaced", "own_random")]
        self.replaced = {name: self.arrays.pop(name) for name in own}

    def get(self, position, kind, replica=0):
        """Returns the arrays of a kind in the order of their places."""
        prefix = f"{position}/{kind}/{replica}/"
        names = [name for name in self.arrays if name.startswith(prefix)]
        return [self.arrays[f"{prefix}{index}"] for index in range(len(names))]

    def kind(self, kind, step=0, replica=0):
        """Returns the arrays of a kind by the names of variables or gradients, else by place."""
        position = self.about["steps"].index(step) + 1
        prefix = f"{position}/{kind}/{replica}/"
        names = [variable["name"] for variable in self.about["variables"]]
        if kind in ("raw", "sums", "clipped"):
            names = self.about["gradients"]
        found = {}
        for key, array in self.arrays.items():
            if key.startswith(prefix):
                place, *rest = key.removeprefix(prefix).split("/")
                has_name = kind in ("before", "after", "raw", "sums", "clipped")
                name = names[int(place)] if has_name else place
                found["/".join([name, *rest])] = array
        return found


def node_of(verdict):
    """Returns the node of a fault; "" if the training is the reference."""
    assert verdict.ok or verdict.status == "fault", str(verdict)
    return "" if verdict.ok else verdict.place.node
