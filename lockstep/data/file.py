"""Reads and writes traces as `.npz` files, in the format of docs/trace_format.md, version 2.

Another program may have written a file, or it may be damaged: names, sizes, dtypes and shapes are
checked when it is opened, and an array is read, with its checksum, when it is asked for.
"""

import ast
import collections
import dataclasses
import functools
import glob
import itertools
import math
import os
import pathlib
import re
import stat
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from lockstep.data.about import MAX_MICRO_BATCHES, MAX_REPLICAS, Fault, about_from, shown
from lockstep.data.archive import (
    ADVICE,
    KEPT,
    Arrays,
    Member,
    Path,
    TraceError,
    Writer,
    errors_of,
    require_finished,
)
from lockstep.data.layout import assemble, axes_of_copies
from lockstep.data.layout_about import moves
from lockstep.data.trace import (
    OF_BACKWARD,
    OF_MODULES,
    STATE,
    STATISTIC,
    About,
    Mesh,
    Trace,
    Variable,
)
from lockstep.numeric.arrays import Rows

__all__ = ["TraceError", "Writer", "load", "save"]
MAX_MEMBERS = MAX_ARRAYS = 250_000  # Several names of arrays may be one member's.

_MAX_ABOUT_BYTES, _MAX_HEADER_BYTES = 64 << 20, 1024
_MAX_AXES, _MAX_ELEMENTS = 32, 2**48
_NUMBERS, _TEXTS = re.compile(r"[<|](b1|[iu][1248]|f[248])"), re.compile(r"[<|][SU][1-9][0-9]{0,7}")
_NUMBER = r"(?:0|[1-9]\d{0,8})"
_NAME = re.compile(
    rf"{_NUMBER}/[a-z_]{{1,40}}/{_NUMBER}/{_NUMBER}(/(values|indices|rows|elements|sums))?",
    re.ASCII,
)
_OF_SAMPLE = {"elements", "sums"}  # Members.
_RANK = re.compile(r"(.*)\.rank(0|[1-9][0-9]{0,5})\.npz", re.DOTALL)
_COMMON_KEYS = (  # Keys in which the files of the ranks must not differ.
    *("framework", "num_replicas", "steps", "shards", "num_copies", "syncs_batch_norm"),
    *("reduction", "order", "replayed", "draws_apart", "mesh", "data_axes", "sample"),
)
_OF_STAGES = ("variables", "gradients")  # Neither in these, without a mesh.
_GROWING = (  # Keys that are longer with each step.
    *("steps", "variables", "settings", "micro_batches", "in_evaluation", "calls", "loss_scale"),
    "passes",
)


def save(trace: Trace, target: Path | BinaryIO) -> None:
    """Writes a trace to a path, or to an open file such as `io.BytesIO`."""
    about = trace.about
    if trace.mesh:  # Its arrays are put together.
        about = dataclasses.replace(about, mesh={}, data_axes=(), num_copies=trace.mesh.size)
    with Writer(target) as writer:
        writer.update(trace.stored())
        writer.close(about)


# --- Reading -------------------------------------------------------------------------------------


def load(source: Path | BinaryIO | Sequence[BinaryIO]) -> Trace:
    """Opens a trace; its arrays are read when they are asked for.

    Args:
        source: `two.npz`, for one file or one for each rank (`two.rank0.npz`, …), or any of the
            ranks' files; or an open file, or those of all processes.

    Raises:
        TraceError: a file is missing, incomplete, damaged, or of another version; also raised
            later, by reading a damaged array.
    """
    if isinstance(source, str | os.PathLike):
        name, paths = _find_files(pathlib.Path(source))
        files = [_read_file(str(path), _open(path)) for path in paths]
    else:
        opened: Sequence[Any] = source if isinstance(source, Sequence) else [source]
        name = "the trace"
        files = [_read_file(f"part {i} of the trace", file) for i, file in enumerate(opened)]
    files = [*_with_common_state(_with_equal_steps(files))]
    arrays = Arrays({key: array for file in files for key, array in file.arrays.data.items()})
    with errors_of(name):
        about = _common_description(files)
        if len(arrays) < sum(len(file.arrays) for file in files):
            raise Fault("has an array in two of its files; record it again")
        if about.mesh:
            return _load_on_mesh(files, name)
    trace = Trace(_with_ends(about, files), arrays, name)
    trace.of_replica = {item: file.about for file in files for item in file.items}
    return trace


def _load_on_mesh(files: Sequence["_File"], name: str) -> Trace:
    """Returns the trace of ranks of several parallel axes, put together."""
    whole = assemble([(file.about, file.arrays.data) for file in files])
    arrays = Arrays(whole.arrays)
    _check_arrays(whole.about, arrays)
    trace = Trace(_with_ends(whole.about, files), arrays, name)
    trace.of_replica, trace.views_of = whole.of_replica, whole.views
    trace.parts_of = Arrays(whole.parts)
    trace.as_data = {
        axis: functools.partial(_load_on_mesh, [_on_data_axis(file, axis) for file in files], name)
        for axis in axes_of_copies([file.about for file in files])
    }
    return trace


def _on_data_axis(file: "_File", axis: str) -> "_File":
    """Returns the file of a rank whose mesh has one more axis of data."""
    mesh = Mesh(file.about.mesh, (*file.about.data_axes, axis))
    about = dataclasses.replace(
        file.about, data_axes=mesh.data_axes, num_replicas=mesh.num_replicas
    )
    return file._replace(about=about)


class _File(NamedTuple):
    """A file whose description, names, sizes, dtypes and shapes are checked."""

    name: str
    about: About
    arrays: Arrays

    @property
    def items(self) -> Sequence[int]:
        """The replicas, or the ranks of a mesh, in this file."""
        return self.about.ranks or self.about.replicas or range(self.about.num_replicas)


def _read_file(name: str, file: BinaryIO) -> _File:
    with errors_of(name):
        require_finished(file)
        archive = zipfile.ZipFile(file)
        members = _members_of(name, archive, file.seek(0, os.SEEK_END))
        text = members.pop("about")
        if text.dtype.kind != "U" or text.shape or text.dtype.itemsize > _MAX_ABOUT_BYTES:
            raise Fault("has an 'about' that is not one text of at most 64 MiB; record it again")
        about, aliases = about_from(str(text.read()))
        named = {name: each for name, each in members.items() if name.split("/")[1] != KEPT}
        if len(named) + len(aliases) > MAX_ARRAYS:
            raise Fault(f"has more than {MAX_ARRAYS:,} arrays; record fewer steps")
        if named and not about.steps:
            raise Fault("has no steps; record it again")
        for alias, of in aliases.items():
            if alias in members or of not in members or not _NAME.fullmatch(alias):
                raise Fault(f"has a wrong alias {shown(alias)}; record it again")
        arrays = Arrays(named | {alias: members[of] for alias, of in aliases.items()})
        _check_arrays(about, arrays)
    return _File(name, about, arrays)


def _find_files(path: pathlib.Path) -> tuple[str, list[pathlib.Path]]:
    """Returns the name of the whole trace, and its files in order of ranks."""
    match = _RANK.fullmatch(path.name)
    name = path.with_name(f"{match[1]}.npz") if match else path
    stem = name.name.removesuffix(".npz")
    with errors_of(str(path)):
        found = path.parent.glob(f"{glob.escape(stem)}.rank*.npz")
        ranks = [file for file in found if _RANK.fullmatch(file.name)]
        ranks.sort(key=lambda file: (len(file.name), file.name))
        if match is None and os.path.lexists(path):
            if ranks:
                raise Fault(
                    f"there is {ranks[0].name}, too; remove the older recording, or pass the name"
                    " of a rank's file"
                )
            return str(name), [path]
        if not ranks:
            raise Fault(f"does not exist, nor does {stem}.rank0.npz; {ADVICE}")
    return str(name), ranks


def _open(path: pathlib.Path) -> BinaryIO:
    with errors_of(str(path)):
        if not stat.S_ISREG(os.stat(path).st_mode):  # Opening a pipe would wait.
            raise Fault(f"is not a regular file; {ADVICE}")
        return open(path, "rb")


def _members_of(name: str, archive: zipfile.ZipFile, size_bytes: int) -> dict[str, Member]:
    """Returns the members of a file by their names without suffix, if they are those of a trace."""
    infos, found = archive.infolist(), dict[str, zipfile.ZipInfo]()
    if len(infos) > MAX_MEMBERS:
        raise Fault(f"has more than {MAX_MEMBERS:,} members; record fewer steps")
    if sum(info.file_size for info in infos) > size_bytes:
        raise Fault("has fewer bytes than its index says; record it again, without compression")
    for info in infos:
        if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
            raise Fault(
                f"has a compressed member {shown(info.orig_filename)}; record it again, without"
                " compression"
            )
        key = info.orig_filename.removesuffix(".npy")
        if key == info.orig_filename or not (key == "about" or _NAME.fullmatch(key)):
            raise Fault(f"has a member {shown(info.orig_filename)}, which no trace has; {ADVICE}")
        if key in found:
            raise Fault(f"has the member {shown(key)} twice; record it again")
        found[key] = info
    if "about" not in found:
        raise Fault(f"has no member 'about'; {ADVICE}")
    return {key: _member_of(name, archive, info) for key, info in found.items()}


def _member_of(name: str, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Member:
    """Returns a member whose size is as its header says."""
    with archive.open(info) as member:
        if np.lib.format.read_magic(member) != (1, 0):  # Others are for longer headers.
            raise Fault(f"has a long header in {info.filename}; record it again")
        size = int.from_bytes(member.read(2), "little")
        if size > _MAX_HEADER_BYTES or (header := _header_of(member.read(size))) is None:
            raise Fault(f"has a header that no trace has in {info.filename}; record it again")
        shape, is_transposed, descr = header
        if not (_NUMBERS.fullmatch(descr) or _TEXTS.fullmatch(descr)):
            raise Fault(
                f"has dtype {shown(descr)} in {info.filename}, which no trace has; record real"
                " numbers of at most 64 bits, little-endian (bfloat16 as float32)"
            )
        dtype = np.dtype(descr)
        start = member.tell()
        expected = start + math.prod(shape) * dtype.itemsize
        if info.file_size != expected:
            sizes = f"has {info.file_size:,} of {expected:,} bytes"
            raise Fault(f"{sizes} in {info.filename}; record it again")
    return Member(name, archive, info.filename, dtype, shape, start, is_transposed)


@functools.lru_cache(maxsize=1024)  # Many arrays have the same one; parsing it takes 0.2 ms.
def _header_of(header: bytes) -> tuple[tuple[int, ...], bool, str] | None:
    """Returns shape, whether columns come before rows, and dtype of an array in a file.

    None for a header that no array of a trace has: other keys, more axes, sizes that are not whole
    numbers from 0, or more elements than any memory has.
    """
    try:
        values = ast.literal_eval(header.decode("latin-1"))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
    if not isinstance(values, dict) or values.keys() != {"descr", "fortran_order", "shape"}:
        return None
    descr, is_transposed, shape = (values[k] for k in ("descr", "fortran_order", "shape"))
    is_shape = isinstance(shape, tuple) and all(type(n) is int and n >= 0 for n in shape)
    if not (isinstance(descr, str) and type(is_transposed) is bool and is_shape):
        return None
    is_small = len(shape) <= _MAX_AXES and math.prod(max(n, 1) for n in shape) <= _MAX_ELEMENTS
    return (shape, is_transposed, descr) if is_small else None


def _check_arrays(about: About, arrays: Arrays) -> None:
    """Checks that the description has the place of each array, and its variable that shape."""
    trace, shapes = Trace(about), dict[tuple[str, bool], tuple[int, ...]]()
    is_local = bool(about.ranks)  # Each rank has its own part of an array.
    parts = collections.defaultdict[str, set[str]](set)  # "1/raw/0/2" → "values", … or "".
    for name in arrays:
        place = "/".join(name.split("/")[:4])
        parts[place].add(name.removeprefix(place).removeprefix("/"))
    counts = collections.Counter(place.rpartition("/")[0] for place in parts)
    for place in sorted(parts):
        position, kind, item, index = place.split("/")
        group = f"{position}/{kind}/{item}"
        names = about.gradients if kind in OF_BACKWARD else trace.names_of(kind)
        members = [arrays.data[f"{place}/{part}".rstrip("/")] for part in parts[place]]
        if kind != "data" and any(member.dtype.kind in "SU" for member in members):
            raise Fault(f"has a text in {place}, which no trace has; record numbers")
        items = trace.copies if is_local else trace.items(kind)
        if kind == "own_after" and f"{position}/shards/0" in counts:
            items = range(MAX_REPLICAS)  # Of the other training.
        if not (0 < int(position) <= len(about.steps) and int(item) in items):
            raise Fault(f"has arrays {group}, which 'about' does not have; record it again")
        numbered = about.modules if kind in OF_MODULES else names
        count = counts[group] if numbered is None else len(numbered)
        if kind in (*OF_MODULES, *OF_BACKWARD):  # Some of each pass may have none.
            count *= MAX_MICRO_BATCHES
        if int(index) >= count:
            raise Fault(f"has an array {place} of {count} in {group}; record it again")
        shape = _shape_of(place, parts[place], arrays, about.sample)
        if is_local or names is None:
            continue
        # Whole beside samples.
        name = names[int(index) % len(names)]
        expected = shapes.setdefault((name, kind == "start"), shape)
        if shape != expected:
            raise Fault(
                f"has shape {shape} in {place}, and {expected} for its variable elsewhere; record"
                " it again"
            )


def _shape_of(
    place: str, parts: set[str], arrays: Arrays, sample: Mapping[str, int]
) -> tuple[int, ...]:
    """Returns the shape of an array, and of the whole weight for a gradient of some rows.

    That of a sampled one is the number of its elements.
    """
    if parts == {""}:
        return arrays.data[place].shape
    if parts - {*Rows._fields} == _OF_SAMPLE:  # Earlier recorders also wrote terms of elements.
        elements, sums = (arrays.data[f"{place}/{part}"] for part in ("elements", "sums"))
        sizes = (sample.get("elements"),), (sample.get("sums", -1) + 1,)
        if (elements.shape, sums.shape) == sizes and sums.dtype == np.float64:
            return elements.shape
        raise Fault(f"has a wrong sample in {place}; record it again")
    if parts == {*Rows._fields} and (shape := _shape_of_rows(place, arrays)):
        return shape
    raise Fault(f"has wrong rows in {place}; record it again")


def _shape_of_rows(place: str, arrays: Arrays) -> tuple[int, ...]:
    """Returns the shape of the whole weight of a gradient of some rows; () if it has no such."""
    values, indices, rows = (arrays.data[f"{place}/{part}"] for part in Rows._fields)
    are_integers = {indices.dtype.kind, rows.dtype.kind} <= {"i", "u"}
    have_shapes = rows.shape == () and values.shape[:1] == indices.shape != ()
    if not (are_integers and have_shapes):
        return ()
    number, numbers = int(arrays[f"{place}/rows"]), arrays[f"{place}/indices"]
    if numbers.size and not 0 <= numbers.min() <= numbers.max() < number:
        rows_of = f"has a row outside of 0 to {number - 1} in {place}"
        raise Fault(f"{rows_of}/indices; record it again")
    return (number, *values.shape[1:])


def _with_equal_steps(files: Sequence[_File]) -> list[_File]:
    """Returns the files with equal steps: those that end early lack the arrays of later steps.

    A rank that calls its optimizer less often than the others has fewer steps.
    """
    longest = max((file.about for file in files), key=lambda about: len(about.steps))
    found = []
    for file in files:
        own, changes = file.about, dict[str, Any]()
        for key in _GROWING if own.steps != longest.steps else ():
            values, further = getattr(own, key), getattr(longest, key)
            is_part = key not in ("steps", "variables") or values == further[: len(values)]
            changes |= {key: (*values, *further[len(values) :])} if is_part else {}
        found.append(file._replace(about=dataclasses.replace(own, **changes)))
    return found


def _with_common_state(files: Sequence[_File]) -> Sequence[_File]:
    """Returns the files with equal variables: a rank may have optimizer state that others lack."""
    abouts = [file.about for file in files]
    everywhere = set.intersection(*({*about.variables} for about in abouts))

    def may_lack(variable: Variable) -> bool:
        is_average = variable.kind == STATISTIC and bool(variable.name) and not variable.of
        return variable.kind == STATE or (is_average and variable not in everywhere)

    known = {
        (tuple(v for v in about.variables if not may_lack(v)), about.gradients) for about in abouts
    }
    if abouts[0].mesh or len(known) > 1 or len({about.variables for about in abouts}) == 1:
        return files
    keys = {key: v for a in abouts for key, v in zip(a.keys, a.variables, strict=True)}
    variables, found = tuple(keys.values()), list[_File]()
    for file in files:
        about = dataclasses.replace(file.about, variables=variables)
        move, arrays = moves(file.about, about), dict[str, Any]()
        for name, array in file.arrays.data.items():
            position, kind, item, index, *rest = name.split("/")
            place = "/".join([str(move(kind, int(index))), *rest])
            arrays[f"{position}/{kind}/{item}/{place}"] = array
        found.append(file._replace(about=about, arrays=Arrays(arrays)))
    return found


def _with_ends(about: About, files: Sequence[_File]) -> About:
    """Returns a description with the exception that ended any rank, and the steps of all."""
    ended_with = next((file.about.ended_with for file in files if file.about.ended_with), "")
    asked = sorted({step for file in files for step in file.about.asked})
    trained = max(file.about.trained for file in files)
    skipped = min(file.about.skipped for file in files)
    return dataclasses.replace(
        about, ended_with=ended_with, asked=tuple(asked), trained=trained, skipped=skipped
    )


def _only_one_has(key: str, *values: Sequence[Any]) -> str:
    """Returns which weights or gradients only one of two ranks has, in words."""
    if key not in ("variables", "gradients"):
        return ""
    first, second = ({getattr(each, "name", each): each for each in value} for value in values)
    only = [name for name in (*first, *second) if (name in first) != (name in second)]
    kinds = {getattr((first | second)[name], "kind", "") for name in only}
    why = "whose gradient the other may lack"
    if kinds == {STATISTIC}:
        why = "which others= has to give to the recorders of all ranks"
    return f": only one has {', '.join(only[:3])}, {why}" if only else ""


def _common_description(files: Sequence[_File]) -> About:
    """Returns the description of a training whose files hold each replica once."""
    first = files[0]
    if not first.about.steps:
        raise Fault("has no steps; record it again")
    keys = _COMMON_KEYS if first.about.mesh else (*_COMMON_KEYS, *_OF_STAGES)
    for file, key in itertools.product(files[1:], keys):
        values = getattr(file.about, key), getattr(first.about, key)
        if values[0] != values[1]:
            raise Fault(
                f"{key!r} of {file.name} differs from that of {first.name}"
                f"{_only_one_has(key, *values)}; remove files of other recordings, or record it"
                " again, with the same arguments on every rank"
            )
    for file in files[1:]:
        if (file.about.permuted is None) != (first.about.permuted is None):
            raise Fault("only some of its files are permuted; record it again")
    counts = collections.Counter(item for file in files for item in file.items)
    mesh = first.about.on_mesh
    number, what = (mesh.size, "rank") if mesh else (first.about.num_replicas, "replica")
    for item in range(number):
        if counts[item] != 1:
            raise Fault(
                f"has {what} {item} {counts[item]} times, of {number} {what}s; pass one file for"
                " each process of one training"
            )
    return dataclasses.replace(first.about, replicas=())
