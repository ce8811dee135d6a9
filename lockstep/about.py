"""Parses the description of a trace: JSON text, which another program may have written."""

import dataclasses
import itertools
import json
from collections.abc import Callable, Mapping
from typing import Any

from lockstep.trace import (
    CLIP_FIRST,
    REDUCE_FIRST,
    SEED,
    STATE,
    STATISTIC,
    WEIGHT,
    About,
    Shard,
    Variable,
)

FORMAT, VERSION = "lockstep trace", 2

_MAX_DEPTH, _MAX_TEXT, _MAX_SHOWN, _MAX_REPLICAS = 50, 2_000, 60, 65_536
_KINDS = (WEIGHT, STATISTIC, STATE, SEED)
_NUMBERS = (
    *("learning_rate", "momentum", "dampening", "weight_decay"),
    *("beta_1", "beta_2", "rho", "epsilon"),
)
_SWITCHES = ("nesterov", "amsgrad")

Test = Callable[[Any], Any]


class Fault(Exception):
    """An error in a file, with advice; `trace_file` prepends the file's name."""


def _whole(low: int, high: int) -> Test:
    return lambda value: type(value) is int and low <= value <= high


def _one_of(*choices: str) -> Test:
    return lambda value: isinstance(value, str) and value in choices


def _list_of(test: Test) -> Test:
    return lambda value: isinstance(value, list) and all(map(test, value))


def _object_of(test: Test) -> Test:
    return lambda value: isinstance(value, dict) and all(map(test, value.values()))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _is_variable(value: Any) -> bool:
    texts = [value.get(field.name, "") for field in dataclasses.fields(Variable)]
    return all(map(_is_text, texts)) and texts[0] and texts[1] in _KINDS


def _is_group(value: Any) -> bool:
    numbers = [value[name] for name in _NUMBERS if value.get(name) is not None]
    switches = [value[name] for name in _SWITCHES if value.get(name) is not None]
    return (
        all(map(_is_number, numbers))
        and all(isinstance(switch, bool) for switch in switches)
        and _list_of(_is_text)(value.get("weights", []))
    )


def _is_layer(value: Any) -> bool:
    names = value.get("name"), value.get("class")
    return all(map(_is_text, names)) and _list_of(_is_text)(value.get("weights", []))


def _is_shard(value: Any) -> bool:
    is_pair = isinstance(value, list) and len(value) == 2
    return is_pair and _whole(0, _MAX_REPLICAS)(value[0]) and _is_number(value[1]) and value[1] > 0


def _is_structure(value: Any) -> bool:
    """Tests what `record_keras.to_json` writes."""
    if not isinstance(value, dict):
        return value is None or _whole(0, 2**31)(value)
    if len(value) != 1:
        return False
    ((kind, content),) = value.items()
    of = _object_of if kind == "dict" else _list_of
    return kind in ("dict", "list", "tuple") and of(_is_structure)(content)


def _each(test: Test) -> Test:
    return lambda value: isinstance(value, dict) and test(value)


_TEXT, _COUNT = (_is_text, "a text"), _whole(0, _MAX_REPLICAS)
_IS_TRUE = (lambda value: isinstance(value, bool), "true or false")
_OBJECTS = "a list of objects with the keys of docs/trace_format.md"
_NESTED = (_is_structure, "nested objects as in docs/trace_format.md")
_KEYS: dict[str, tuple[Test, str]] = {
    "framework": (lambda value: _is_text(value) and value, "a name"),
    "num_replicas": (_whole(1, _MAX_REPLICAS), f"a whole number from 1 to {_MAX_REPLICAS}"),
    "steps": (_list_of(_whole(0, 2**62)), "a list of whole numbers"),
    "variables": (_list_of(_each(_is_variable)), _OBJECTS),
    "gradients": (_list_of(_is_text), "a list of names"),
    "replicas": (_list_of(_COUNT), "a list of whole numbers"),
    "shards": (_list_of(_is_shard), "a list of pairs [replica, weight]"),
    "num_copies": (_COUNT, f"a whole number to {_MAX_REPLICAS}"),
    "syncs_batch_norm": _IS_TRUE,
    "whole_loss": _IS_TRUE,
    "reduction": (_one_of("", "sum", "mean"), "one of '', 'sum', 'mean'"),
    "order": (_one_of(REDUCE_FIRST, CLIP_FIRST), f"{REDUCE_FIRST!r} or {CLIP_FIRST!r}"),
    "reduced_in": _TEXT,
    "optimizer": (_object_of(lambda value: True), "an object"),
    "settings": (_list_of(_list_of(_each(_is_group))), "a list of groups for each step"),
    "layers": (_list_of(_each(_is_layer)), _OBJECTS),
    "data_layout": _TEXT,
    "micro_batches": (_list_of(_whole(1, 2**31)), "a list of whole numbers from 1"),
    "permuted": (lambda value: value is None or _whole(-(2**64), 2**64)(value), "a whole number"),
    "replayed": (lambda value: value is None or _is_text(value), "a text"),
    "structure": _NESTED,
    "predicted": _NESTED,
    "parts": (_list_of(_object_of(_list_of(_whole(0, 2**48)))), "objects of shapes"),
    "versions": (_object_of(_is_text), "an object of texts"),
    "aliases": (_object_of(_is_text), "an object of names"),
}
_REQUIRED = ("framework", "num_replicas", "steps", "variables", "gradients")


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
    _check_version(values.get("version"))
    _check_tree(values)
    known = {key: value for key, value in values.items() if key in _KEYS}
    for key, (test, required) in _KEYS.items():
        if (key in known and not test(known[key])) or (key in _REQUIRED and key not in known):
            found = f"is {shown(known[key])}" if key in known else "is missing"
            raise Fault(f"{key} of 'about' {found}, must be {required}; record it again")
    aliases = known.pop("aliases", {})
    fields = [field.name for field in dataclasses.fields(Variable)]
    known["variables"] = [
        Variable(**{k: v for k, v in each.items() if k in fields}) for each in known["variables"]
    ]
    known["parts"] = [{k: tuple(v) for k, v in each.items()} for each in known.get("parts", [])]
    known["shards"] = [Shard(*each) for each in known.get("shards", [])]
    about = About(**{k: tuple(v) if isinstance(v, list) else v for k, v in known.items()})
    _check_relations(about)
    if sorted(about.replicas) == [*range(about.num_replicas)]:
        about = dataclasses.replace(about, replicas=())
    return about, aliases


def json_of(about: About, aliases: Mapping[str, str]) -> str:
    """Returns the JSON text that `about_from` parses."""
    values = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(about)}
    return json.dumps({**values, "aliases": aliases}, default=_plain)


def _plain(value: Any) -> Any:
    """Returns a number of NumPy as Python's, and other objects as text."""
    return value.item() if hasattr(value, "item") else str(value)


def _check_version(version: Any) -> None:
    if type(version) is not int or not 1 <= version < 2**31:
        raise Fault(f"has the format version {shown(version)}; record it again")
    if version < VERSION:
        raise Fault(
            f"is of version {version}, which this version of Lockstep does not read; record it"
            " again with its recorder"
        )
    if version > VERSION:
        raise Fault(
            f"has version {version}, and this version of Lockstep reads {VERSION}; update Lockstep"
        )


def _check_tree(root: Any) -> None:
    """Checks depth, texts and integers, which messages may show, without recursion."""
    nodes = [(root, 0)]
    while nodes:
        node, depth = nodes.pop()
        texts = [node] if isinstance(node, str) else [*node] if isinstance(node, dict) else []
        for text in texts:
            if len(text) > _MAX_TEXT or not text.isprintable():
                raise Fault(
                    f"has the text {shown(text)} in 'about'; texts must be printable and have at"
                    f" most {_MAX_TEXT:,} characters"
                )
        if depth > _MAX_DEPTH or (type(node) is int and not -(2**64) < node < 2**64):
            raise Fault("has deep nesting or more than 64 bits in 'about'; record it again")
        children = node.values() if isinstance(node, dict) else node
        if isinstance(node, dict | list):
            nodes += [(child, depth + 1) for child in children]


def _check_relations(about: About) -> None:
    """Checks values against each other."""
    unique = [v.name for v in about.variables if v.kind in (WEIGHT, STATISTIC)]
    weights = {v.name for v in about.variables if v.kind == WEIGHT}
    named = [name for step in about.settings for group in step for name in group.get("weights", [])]
    of = [variable.of for variable in about.variables if variable.of]
    replicas = [*about.replicas, *(shard.replica for shard in about.shards)]
    ascending = all(a < b for a, b in itertools.pairwise(about.steps))
    for is_right, wrong in (
        (ascending, "steps are not ascending"),
        (len(set(unique)) == len(unique), "two weights or statistics have one name"),
        (len(set(about.gradients)) == len(about.gradients), "gradients has a name twice"),
        (weights.issuperset([*about.gradients, *named, *of]), "a name is not that of a weight"),
        (len(set(about.replicas)) == len(about.replicas), "replicas has a number twice"),
        (max(replicas, default=0) < about.num_replicas, "a replica is not below num_replicas"),
        (len(about.settings) in (0, len(about.steps)), "settings do not have one list per step"),
        (len(about.micro_batches) in (0, len(about.steps)), "micro_batches are not one per step"),
    ):
        if not is_right:
            raise Fault(f"has an 'about' in which {wrong}; record it again")


def shown(value: Any) -> str:
    """Formats a value from a file as short, printable text."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else f"a list of {len(value)}"
    text = repr(value[:_MAX_SHOWN]) if isinstance(value, str) else repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"
