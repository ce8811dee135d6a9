"""Reads traces of training scripts, in the format of docs/trace_format.md, version 1.

A trace is one `.npz` file, or one per process (`two.rank0.npz`, `two.rank1.npz`). Opening it reads
only names, headers and `about`; the arrays of a step, a kind and a replica are read on request.
"""

import collections
import dataclasses
import io
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from app.records.trace_about import About, Variable
from app.records.trace_file import errors_of
from app.records.trace_member import Member, read_array
from app.records.trace_parts import Part, Stored, check_indices, open_part, shape_of, size_of
from app.records.trace_values import TraceError

_RANK = re.compile(r"(.*)\.rank(0|[1-9][0-9]{0,5})\.npz", re.DOTALL)
# Attributes that all processes of a training have in common.
_SHARED = (
    *("framework", "num_replicas", "steps", "variables", "gradients"),
    *("reduction", "order", "data_layout", "replayed"),
)


class Rows(NamedTuple):
    """A gradient of some rows of a weight; rows that occur several times are to be added.

    Attributes:
        values: `(n, …)`, one entry per index.
        indices: `(n,)`, row numbers.
        num_rows: length of the weight's first axis.
    """

    values: np.ndarray
    indices: np.ndarray
    num_rows: int

    def dense(self) -> np.ndarray:
        """Returns the dense gradient."""
        whole = np.zeros((self.num_rows, *self.values.shape[1:]), self.values.dtype)
        np.add.at(whole, self.indices, self.values)
        return whole


Array = np.ndarray | Rows


@dataclasses.dataclass(frozen=True)
class ScriptTrace:
    """A trace of a training, of all its processes.

    Positions count the recorded steps from 0: `steps[position]` is the number of a step.

    Attributes:
        name: path of the trace for messages, without ranks.
        framework: "keras", "torch", "jax" or another name.
        num_replicas: number of replicas of the training.
        steps: numbers of the recorded steps, ascending.
        variables: the variables of the arrays in "before" and "after".
        gradients: the weights of the arrays in "raw", "sums" and "clipped".
        reduction: result of the all-reduce, "sum" or "mean"; "" if unknown.
        order: "reduce, clip" or "clip, reduce".
        optimizer: class and constant settings.
        layers: name, class, weights and settings of each layer, if the framework has layers.
        data_layout: "NHWC", "NCHW" or "".
        permuted: seed of the permutation of the examples; None without one.
        replayed: name of the trace whose state was loaded before each step, or None.
        versions: versions of the framework.
        extra: further keys of `about`, from the first file.
    """

    name: str
    framework: str
    num_replicas: int
    steps: tuple[int, ...]
    variables: tuple[Variable, ...]
    gradients: tuple[str, ...]
    reduction: str
    order: str
    optimizer: Mapping[str, Any]
    layers: tuple[Mapping[str, Any], ...]
    data_layout: str
    permuted: int | None
    replayed: str | None
    versions: Mapping[str, str]
    extra: Mapping[str, Any]
    _parts: Mapping[int, Part]  # Replica → its file.

    def settings(self, position: int, replica: int) -> list[dict[str, Any]]:
        """Returns the optimizer's parameter groups in a step of a replica."""
        groups = self._about(replica).settings
        return groups[position] if groups else []

    def micro_batches(self, position: int, replica: int) -> int:
        """Returns the number of micro-batches that a replica accumulated in a step."""
        return self._about(replica).micro_batches[position]

    def shapes(self, position: int, kind: str, replica: int) -> list[tuple[int, ...] | None] | None:
        """Returns the shapes of the arrays; for `Rows`, the shape of the dense gradient."""
        stored = self._part(replica).listed(position, kind, replica)
        return None if stored is None else [None if s is None else shape_of(s) for s in stored]

    def arrays(self, position: int, kind: str, replica: int) -> list[Array | None] | None:
        """Reads the arrays of a kind; None if there are none.

        "before" and "after" have one array per item of `variables`; "raw", "sums" and "clipped"
        per item of `gradients`. None replaces an array that did not exist: optimizer state before
        the first update, or the gradient of a weight that the loss does not use.

        Raises:
            DataError: the file is damaged, or was changed after it was opened.
        """
        part = self._part(replica)
        stored = part.listed(position, kind, replica)
        if stored is None:
            return None
        with part.file.reading() as file:
            needed_bytes = sum(size_of(item) for item in stored if item is not None)
            if needed_bytes > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
                raise MemoryError
            return [None if item is None else _read(file, item) for item in stored]

    def _part(self, replica: int) -> Part:
        if replica not in self._parts:
            raise IndexError(f"{self.name} has no replica {replica}")
        return self._parts[replica]

    def _about(self, replica: int) -> About:
        return self._part(replica).file.about


def _read(file: io.BufferedReader, stored: Stored) -> Array:
    if isinstance(stored, Member):
        return read_array(file, stored)
    values, indices = read_array(file, stored.values), read_array(file, stored.indices)
    check_indices(stored, indices)
    return Rows(values, indices, stored.num_rows)


def load_trace(path: pathlib.Path) -> ScriptTrace:
    """Opens a trace: `two.npz`, or all files `two.rank*.npz`.

    Args:
        path: `two.npz`, for one file or one per rank, or any of the rank files.

    Raises:
        DataError: a file is missing, incomplete, damaged, or of a later version.
    """
    name, paths = _find_files(path)
    parts = tuple(open_part(found) for found in paths)
    with errors_of(name):
        _check_parts(parts)
    by_replica = {replica: part for part in parts for replica in part.file.about.replicas}
    about = by_replica[0].file.about
    fields = {field.name for field in dataclasses.fields(About)}
    own = {field.name for field in dataclasses.fields(ScriptTrace)} & fields
    values = {field: getattr(about, field) for field in own}
    return ScriptTrace(name=str(name), _parts=by_replica, **values)


def _find_files(path: pathlib.Path) -> tuple[pathlib.Path, list[pathlib.Path]]:
    """Returns the name of the whole trace, and its files in order of ranks."""
    match = _RANK.fullmatch(path.name)
    name = path.with_name(f"{match[1]}.npz") if match else path
    stem = name.name.removesuffix(".npz")
    ranks: dict[int, pathlib.Path] = {}
    with errors_of(path):
        if path.parent.is_dir():
            for file in path.parent.iterdir():
                found = _RANK.fullmatch(file.name)
                if found and found[1] == stem:
                    ranks[int(found[2])] = file
        if match is None and os.path.lexists(path):
            if ranks:
                raise TraceError(
                    f"there is {ranks[min(ranks)].name}, too; remove the older recording, or pass"
                    " the name of a rank's file"
                )
            return name, [path]
        if not ranks:
            raise TraceError(
                f"does not exist, nor does {stem}.rank0.npz; pass a file that a recorder of"
                " Lockstep wrote"
            )
        return name, [ranks[rank] for rank in sorted(ranks)]


def _check_parts(parts: Sequence[Part]) -> None:
    """Checks that the files belong to one trace and hold each replica once."""
    first = parts[0].file
    for part in parts[1:]:
        about = part.file.about
        for key in _SHARED:
            if getattr(about, key) != getattr(first.about, key):
                raise TraceError(
                    f"{key!r} of {part.file.path.name} differs from that of {first.path.name};"
                    " remove files of other recordings, or record it again"
                )
        if (about.permuted is None) != (first.about.permuted is None):
            raise TraceError(
                f"only some of its files are permuted, {part.file.path.name} unlike"
                f" {first.path.name}; record it again"
            )
    counts = collections.Counter(r for part in parts for r in part.file.about.replicas)
    for replica in range(first.about.num_replicas):
        if counts[replica] != 1:
            raise TraceError(
                f"has replica {replica} {counts[replica]} times, of"
                f" {first.about.num_replicas} replicas; pass one file for each process of one"
                " training"
            )
