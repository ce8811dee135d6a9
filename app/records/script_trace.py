"""Recordings of training scripts: the trace format of docs/trace_format.md, version 1.

A recording is one `.npz` file, or one for each process (`two.rank0.npz`, `two.rank1.npz`). At first
only names, headers and `about` are read; the arrays of a step, a kind and a replica are read when
they are asked for.
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
# What all processes of a training have in common.
_SHARED = (
    *("framework", "num_replicas", "steps", "variables", "gradients"),
    *("reduction", "order", "data_layout", "replayed"),
)


class Rows(NamedTuple):
    """A gradient of some rows of a weight; rows that occur several times are to be added.

    Attributes:
        values: `(n, …)`, one entry for each index.
        indices: `(n,)`, numbers of the rows.
        num_rows: length of the weight's first axis.
    """

    values: np.ndarray
    indices: np.ndarray
    num_rows: int

    def dense(self) -> np.ndarray:
        """Returns the gradient of the whole weight."""
        whole = np.zeros((self.num_rows, *self.values.shape[1:]), self.values.dtype)
        np.add.at(whole, self.indices, self.values)
        return whole


Array = np.ndarray | Rows


@dataclasses.dataclass(frozen=True)
class ScriptTrace:
    """A recording of a training, of all its processes.

    Positions count the recorded steps from 0: `steps[position]` is the number of a step.

    Attributes:
        name: path that names the recording in messages, without ranks.
        framework: "keras", "torch", "jax" or another name.
        num_replicas: of the training.
        steps: numbers of the recorded steps, ascending.
        variables: one for each array of "before" and "after".
        gradients: the weight that each array of "raw", "sums" and "clipped" belongs to.
        reduction: what the all-reduce computes, "sum" or "mean"; "" where it is unknown.
        order: "reduce, clip" or "clip, reduce".
        optimizer: class and constant settings.
        layers: name, class, weights and settings of each layer, as far as the framework has layers.
        data_layout: "NHWC", "NCHW" or "".
        permuted: the seed that the examples were permuted with, None where they were not.
        replayed: name of the trace whose state was loaded before each step, or None.
        versions: of the framework.
        extra: further keys of `about`, of the first file.
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
    _parts: Mapping[int, Part]  # Replica → the file that holds it.

    def settings(self, position: int, replica: int) -> list[dict[str, Any]]:
        """Returns the optimizer's groups in a step; processes may differ, in a wrong training."""
        groups = self._about(replica).settings
        return groups[position] if groups else []

    def micro_batches(self, position: int, replica: int) -> int:
        """Returns how many micro-batches the step of a replica accumulated."""
        return self._about(replica).micro_batches[position]

    def shapes(self, position: int, kind: str, replica: int) -> list[tuple[int, ...] | None] | None:
        """Returns the shapes that `arrays` would have, of the whole weight for `Rows`."""
        stored = self._part(replica).listed(position, kind, replica)
        return None if stored is None else [None if s is None else shape_of(s) for s in stored]

    def arrays(self, position: int, kind: str, replica: int) -> list[Array | None] | None:
        """Reads the arrays of a kind, None where there are none.

        Of "before" and "after" there is one for each of `variables`, of "raw", "sums" and "clipped"
        one for each of `gradients`; None in place of an array that did not exist: the optimizer
        state before the first update, the gradient of a weight that the loss does not use.

        Raises:
            DataError: the file is damaged, or was changed since it was opened.
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
    """Opens a recording: `two.npz`, or all of its files `two.rank*.npz`.

    Args:
        path: `two.npz`, whether there is one file or one for each rank, or any of the latter.

    Raises:
        DataError: it is missing, incomplete, damaged, or of a later version.
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
    """Returns the name of the whole recording, and its files in the order of the ranks."""
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
    """Checks that files belong to one recording, and hold each replica once."""
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
