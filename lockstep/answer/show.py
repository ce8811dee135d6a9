"""Lists what a recording holds, for `python -m lockstep show one.npz`; no array is read."""

import collections
import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from lockstep.answer.text import count, facts_lines, first_names, named_steps, one_line
from lockstep.data.trace import OF_BACKWARD, OF_GRADIENTS, OF_VARIABLES, WEIGHT, Trace

_MOST_WEIGHTS, _LONGEST = 10, 48
# Keys of the description that are shown otherwise.
_NOT_SHOWN = ("framework", "steps", "variables", "gradients")


def contents_of(trace: Trace, details: bool = False) -> str:
    """Returns the description, the weights and the arrays of a trace, in lines.

    Args:
        trace: the trace.
        details: whether to list all variables instead of the first weights.
    """
    about = trace.about
    of_groups = {key for step in about.settings for group in step for key in group}
    facts = {"steps": ", ".join(named_steps([f"step {step}" for step in trace.steps]))}
    for field in dataclasses.fields(about):
        value = getattr(about, field.name)
        if field.name == "optimizer":  # The groups of the settings repeat most of it.
            value = {key: value[key] for key in value if key not in of_groups}
        if value and field.name not in _NOT_SHOWN:
            facts[field.name.replace("_", " ")] = _in_words(field.name, value)
    kinds: dict[str, dict[str, Any]] = {}
    shapes: dict[str, str] = {}
    for name, array in getattr(trace.stored(), "data", trace.stored()).items():
        _, kind, _, index, *_ = name.split("/")
        kinds.setdefault(kind, {})[name] = array
        if kind in OF_VARIABLES:
            shapes[trace.keys[int(index)]] = f"{_shape_of(array)} {array.dtype}"
    listed = [key for key in trace.keys if details or trace.kinds[key] == WEIGHT]
    shown = listed if details else listed[:_MOST_WEIGHTS]
    variables = {key: shapes.get(key, "not recorded") for key in shown}
    if len(listed) > len(shown):
        variables["…"] = f"{len(listed) - len(shown)} more; all variables: --details"
    place = "rank" if about.mesh else "replica"
    rows = {kind: _arrays_in_words(kind, of_kind, place) for kind, of_kind in sorted(kinds.items())}
    title = f"{trace.name or 'the recording'}: a recording of {about.framework}"
    parts = [
        facts_lines(title, facts),
        facts_lines(count("variable" if details else "weight", len(listed)), variables, _LONGEST),
        facts_lines("arrays", rows),
    ]
    return "\n\n".join("\n".join(map(one_line, lines)) for lines in parts)


def _in_words(key: str, value: Any) -> str:
    """Returns a value of the description: of each step's values only the different ones."""
    if key == "layers":
        classes = collections.Counter(layer.get("class") for layer in value)
        return ", ".join(f"{number} {name}" for name, number in classes.most_common())
    if isinstance(value, Mapping):
        shown = {name: each for name, each in value.items() if name != "weights"}
        return ", ".join(f"{name} {_in_words('', each)}" for name, each in shown.items())
    if isinstance(value, list | tuple):
        return first_names(list(dict.fromkeys(_in_words("", each) for each in value)))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _arrays_in_words(kind: str, arrays: Mapping[str, Any], place: str) -> str:
    """Returns how many arrays of a kind there are, where, how large, and of which shapes."""
    steps, items = (len({name.split("/")[part] for name in arrays}) for part in (0, 2))
    size = sum(math.prod(array.shape) * array.dtype.itemsize for array in arrays.values())
    text = f"{len(arrays)} in {count('step', steps)} of {count(place, items)}; {size:,} bytes"
    if kind not in (*OF_VARIABLES, *OF_GRADIENTS, *OF_BACKWARD):
        shapes = dict.fromkeys(f"{_shape_of(array)} {array.dtype}" for array in arrays.values())
        text += f"; {first_names(list(shapes))}"
    return text


def _shape_of(array: Any) -> str:
    return " × ".join(map(str, array.shape)) or "scalar"
