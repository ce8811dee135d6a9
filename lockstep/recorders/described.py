"""The variable of an array, among those that a recording describes."""

from collections.abc import Mapping
from typing import Any

from lockstep.data.trace import OF_GRADIENTS, OF_VARIABLES, WEIGHT


def variable_of(about: Mapping[str, Any], kind: str, index: int) -> dict[str, Any]:
    """Returns the description of the variable of an array; empty if it has none.

    Args:
        about: the description of the recording.
        kind: the kind of the array.
        index: its index among the arrays of this kind.
    """
    variables: list[dict[str, Any]] = about["variables"]
    if kind in OF_VARIABLES:
        return variables[index]
    name = about["gradients"][index] if kind in OF_GRADIENTS else ""
    weights = (each for each in variables if each["kind"] == WEIGHT)
    return next((each for each in weights if each["name"] == name), {})
