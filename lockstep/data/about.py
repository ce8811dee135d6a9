"""Parses the description of a trace: JSON text, which another program may have written.

The annotations of `About` say which types its keys have.
"""

import dataclasses
import functools
import itertools
import json
import math
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from lockstep.data.trace import (
    CLIP_FIRST,
    REDUCE_FIRST,
    SEED,
    STATE,
    STATISTIC,
    WEIGHT,
    About,
    Shard,
)

FORMAT, VERSION = "lockstep trace", 2

_MAX_DEPTH, _MAX_TEXT, _MAX_SHOWN, _MAX_AXES = 50, 2_000, 60, 16
MAX_REPLICAS, MAX_MICRO_BATCHES = 16_384, 65_536
_SETTINGS = {  # Setting of a parameter group → its types.
    **dict.fromkeys(("learning_rate", "momentum", "dampening", "weight_decay"), (int, float)),
    **dict.fromkeys(("beta_1", "beta_2", "rho", "epsilon"), (int, float)),
    **dict.fromkeys(("nesterov", "amsgrad"), (bool,)),
    "betas_in": (str,),
}
_PER_STEP = {  # Key → what it has of each step, or nothing.
    **{"settings": "list of groups", "micro_batches": "number", "loss_scale": "number"},
    **{"in_evaluation": "list of layers", "calls": "list of texts", "passes": "list of texts"},
}
_NAMES = {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}


class Fault(Exception):
    """An error in a file, with advice; `trace_file` prepends the file's name."""


def about_from(text: str) -> tuple[About, dict[str, str]]:
    """Returns the description, and the aliases: name of an array → name of an equal array.

    Raises:
        Fault: the text does not describe a trace of this version.
    """
    try:
        values = json.loads(text)
    except (RecursionError, ValueError):
        raise Fault("has an 'about' that is not JSON text; record it again") from None
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise Fault("is not a trace; pass a file that a recorder of Lockstep wrote")
    if values.get("version") != VERSION:
        raise Fault(
            f"has the format version {shown(values.get('version'))}, and this version of Lockstep"
            f" reads {VERSION}; record it again with its recorder, or update Lockstep"
        )
    _check_tree(values)
    about = _parsed(values, About, "")
    if not (about.steps or about.variables):
        asked = f" of {[*about.asked]}" if about.asked else ""
        raise Fault(f"has no steps{asked}, as the training ended before; record it again")
    for key, is_right, required in _requirements(about):
        if not is_right:
            raise Fault(f"{key} of 'about' must be {required}; record it again")
    if sorted(about.replicas) == [*range(about.num_replicas)]:
        about = dataclasses.replace(about, replicas=())
    return about, _parsed(values.get("aliases", {}), Mapping[str, str], "aliases")


def json_of(about: About | Mapping[str, Any], aliases: Mapping[str, str]) -> str:
    """Returns the JSON text that `about_from` parses, of a description or of its keys."""
    keys = about if isinstance(about, Mapping) else dataclasses.asdict(about)
    values = {"format": FORMAT, "version": VERSION, **keys}
    return json.dumps({**values, "aliases": aliases}, default=_plain)


def _plain(value: Any) -> Any:
    """Returns a number of NumPy as Python's, and other objects as text."""
    return value.item() if hasattr(value, "item") else str(value)


def _check_tree(node: Any, depth: int = 0) -> None:
    """Checks depth, texts and integers, which messages may show."""
    if depth > _MAX_DEPTH or (type(node) is int and not -(2**64) < node < 2**64):
        raise Fault("has deep nesting or more than 64 bits in 'about'; record it again")
    if isinstance(node, str) and (len(node) > _MAX_TEXT or not node.isprintable()):
        raise Fault(
            f"has the text {shown(node)} in 'about'; texts must be printable and have at most"
            f" {_MAX_TEXT:,} characters"
        )
    if isinstance(node, dict | list):
        for child in [*node, *node.values()] if isinstance(node, dict) else node:
            _check_tree(child, depth + 1)


@functools.cache
def _fields_of(wanted: Any) -> dict[str, tuple[Any, bool]]:
    """Returns the keys of a class, with their annotations and whether they are required."""
    hints = typing.get_type_hints(wanted)
    return {
        x.name: (hints[x.name], {x.default, x.default_factory} == {dataclasses.MISSING})
        for x in dataclasses.fields(wanted)
    }


def _parsed(value: Any, wanted: Any, key: str) -> Any:
    """Returns a value as an annotation says: a tuple for a list, an object of a class."""
    origin, (first, *more) = typing.get_origin(wanted), typing.get_args(wanted) or (None,)
    if wanted is Any or (origin is types.UnionType and value is None):
        return value
    if origin is types.UnionType:
        return _parsed(value, first, key)
    if dataclasses.is_dataclass(wanted) and isinstance(value, dict):
        parsed, start = dict[str, Any](), f"{key}." if key else ""
        for name, (annotation, is_required) in _fields_of(wanted).items():  # type: ignore[arg-type]
            if name in value:
                parsed[name] = _parsed(value[name], annotation, f"{start}{name}")
            elif is_required:
                raise Fault(f"{start}{name} of 'about' is missing; record it again")
        return wanted(**parsed)  # type: ignore[operator]
    if wanted is Shard and isinstance(value, list) and len(value) == 2:
        return Shard(_parsed(value[0], int, key), _parsed(value[1], float, key))
    if origin is not None and isinstance(value, list) and not issubclass(origin, Mapping):
        return tuple(_parsed(each, first, f"{key}[{i}]") for i, each in enumerate(value))
    if origin is not None and isinstance(value, dict) and issubclass(origin, Mapping):
        return {name: _parsed(each, more[0], f"{key}.{name}") for name, each in value.items()}
    if type(value) is wanted or (wanted is float and type(value) is int):
        return value
    is_object = origin is None or issubclass(origin, Mapping)
    required = _NAMES.get(wanted, "an object" if is_object else "a list")
    raise Fault(f"{key} of 'about' is {shown(value)}, must be {required}; record it again")


def _requirements(about: About) -> Iterator[tuple[str, Any, str]]:
    """Yields a key, whether its value is possible, and the requirement."""
    num, steps = about.num_replicas, about.steps
    unique = [v.name for v in about.variables if v.kind in (WEIGHT, STATISTIC)]
    weights = {variable.name for variable in about.variables if variable.kind == WEIGHT}
    replicas = [*about.replicas, *(shard.replica for shard in about.shards)]
    yield from _requirements_of_mesh(about)
    yield "framework", about.framework, "a name"
    yield "num_replicas", 0 < num <= MAX_REPLICAS, f"from 1 to {MAX_REPLICAS}"
    yield "num_copies", 0 <= about.num_copies <= MAX_REPLICAS, f"from 0 to {MAX_REPLICAS}"
    ascending = all(a < b for a, b in itertools.pairwise((-1, *steps)))
    yield "steps", ascending, "whole numbers from 0, in ascending order"
    asked = all(a < b for a, b in itertools.pairwise((-1, *about.asked)))
    yield "asked", asked, "whole numbers from 0, in ascending order"
    yield "replicas", len(set(about.replicas)) == len(about.replicas), "different numbers"
    yield "replicas", all(0 <= number < num for number in replicas), f"from 0 to {num - 1}"
    yield "shards", all(shard.weight > 0 for shard in about.shards), "of positive weights"
    yield "variables", len(set(unique)) == len(unique), "of unique weights and statistics"
    kinds = (WEIGHT, STATISTIC, STATE, SEED)
    yield "variables", all(v.name for v in about.variables), "of names"
    of_kinds = all(v.kind in kinds for v in about.variables)
    yield "variables", of_kinds, f"of the kinds {', '.join(kinds)}"
    yield "variables", weights.issuperset(v.of for v in about.variables if v.of), "of weights"
    yield "gradients", weights.issuperset(about.gradients), "names of weights"
    yield "gradients", len(set(about.gradients)) == len(about.gradients), "different names"
    yield "modules", len(set(about.modules)) == len(about.modules), "different names"
    sample = about.sample
    is_sample = not sample or {*sample} == {"elements", "sums", "seed"}
    yield "sample", is_sample, "elements, sums and seed"
    yield "sample", all(0 <= x < 2**32 for x in sample.values()), "whole numbers from 0"
    yield "sample", all(sample[x] for x in sample if x != "seed"), "numbers of elements and sums"
    yield "reduction", about.reduction in ("", "sum", "mean"), "'', 'sum' or 'mean'"
    orders = REDUCE_FIRST, CLIP_FIRST
    yield "order", about.order in orders, " or ".join(map(repr, orders))
    yield from _requirements_of_steps(about)


def _requirements_of_steps(about: About) -> Iterator[tuple[str, Any, str]]:
    """Yields the same for what is known of each step, and of layers."""
    steps = about.steps
    weights = {variable.name for variable in about.variables if variable.kind == WEIGHT}
    for key, what in _PER_STEP.items():
        yield key, len(getattr(about, key)) in (0, len(steps)), f"one {what} for each step"
    for group in itertools.chain(*about.settings):
        names = group.get("weights", [])
        are_texts = isinstance(names, list) and all(isinstance(name, str) for name in names)
        is_right = are_texts and weights.issuperset(names)
        yield "weights in settings", is_right, "names of weights"
        yield "optimizer in settings", isinstance(group.get("optimizer", ""), str), "a class"
        for key, wanted in _SETTINGS.items():
            is_right = group.get(key) is None or type(group[key]) in wanted
            yield f"{key} in settings", is_right, "a number, true or false"
    for layer in about.layers:
        weights_of, texts = layer.get("weights", []), [layer.get("name"), layer.get("class")]
        is_right = isinstance(weights_of, list) and all(
            isinstance(text, str) for text in (*texts, *weights_of)
        )
        yield "layers", is_right, "names, classes and weights"
    yield "calls", all(map(_is_call, itertools.chain(*about.calls))), "'clip norm 1' and the like"
    are_positive = all(0 < scale < math.inf for scale in about.loss_scale)
    yield "loss_scale", are_positive, "positive numbers"
    are_counts = all(0 < count <= MAX_MICRO_BATCHES for count in about.micro_batches)
    yield "micro_batches", are_counts, f"whole numbers from 1 to {MAX_MICRO_BATCHES}"


def _requirements_of_mesh(about: About) -> Iterator[tuple[str, Any, str]]:
    """Yields the same for the keys of several parallel axes."""
    mesh, unique = about.on_mesh, {*about.ranks}
    if mesh is None:
        others = about.data_axes, about.ranks, about.placements
        yield "mesh", not any(others), "given, as other keys describe its ranks"
        return
    yield "mesh", all(mesh.axes) and all(n > 0 for n in mesh.axes.values()), "of positive sizes"
    yield "mesh", len(mesh.axes) <= _MAX_AXES, f"of at most {_MAX_AXES} axes"
    yield "mesh", mesh.size <= MAX_REPLICAS, f"of at most {MAX_REPLICAS} ranks"
    are_axes = {*about.data_axes} <= {*mesh.axes}
    yield "data_axes", are_axes and len({*about.data_axes}) == len(about.data_axes), "axes of mesh"
    number = mesh.num_replicas
    yield "num_replicas", about.num_replicas == number, f"{number}, as data_axes of mesh have"
    is_local = not (about.shards or about.num_copies or about.replicas)
    yield "mesh", is_local, "given without shards, num_copies and replicas"
    yield "ranks", len(unique) == len(about.ranks) > 0, "different numbers"
    yield "ranks", all(0 <= r < mesh.size for r in unique), f"from 0 to {mesh.size - 1}"


def _is_call(text: str) -> bool:
    """Returns whether a call is not clipping, or clipping with a number."""
    name, *words = text.split(" ")
    if name != "clip":
        return True
    try:
        kind, limit = words
        float(limit)
    except ValueError:
        return False
    return kind in ("norm", "value")


def shown(value: Any) -> str:
    """Formats a value from a file as short, printable text."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else f"a list of {len(value)}"
    text = repr(value[:_MAX_SHOWN]) if isinstance(value, str) else repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"
