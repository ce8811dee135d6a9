"""Parses the member `about` of a trace: recorded steps, variables and settings.

Another program wrote its JSON text, so that each value is checked before use.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from app.records.trace_values import (
    TraceError,
    check_tree,
    int_of,
    mapping_of,
    parse_json,
    shown,
    text_of,
    texts_of,
    wrong_value,
)

FORMAT, VERSION = "lockstep trace", 1
VARIABLE_KINDS = ("weight", "statistic", "optimizer state", "seed")
REDUCTIONS = ("", "sum", "mean")
ORDERS = ("reduce, clip", "clip, reduce")

_MAX_REPLICAS = 65_536
_NUMBERS = (
    *("learning_rate", "momentum", "dampening", "weight_decay"),
    *("beta_1", "beta_2", "rho", "epsilon"),
)
_SWITCHES = ("nesterov", "amsgrad")


@dataclasses.dataclass(frozen=True)
class Variable:
    """A variable whose arrays are in "before" and "after".

    Attributes:
        name: name in the framework.
        kind: one of `VARIABLE_KINDS`.
        layout: order of the axes, for example "HWIO"; "" if unknown or without meaning.
        of: for optimizer state, the name of its weight; "" if it belongs to none.
        slot: for optimizer state, the framework's name for it, for example "momentum".
    """

    name: str
    kind: str
    layout: str = ""
    of: str = ""
    slot: str = ""


@dataclasses.dataclass(frozen=True)
class About:
    """The checked content of `about`; the attributes are its keys (see docs/trace_format.md)."""

    framework: str
    num_replicas: int
    replicas: tuple[int, ...]
    steps: tuple[int, ...]
    variables: tuple[Variable, ...]
    gradients: tuple[str, ...]
    versions: Mapping[str, str]
    reduction: str
    order: str
    optimizer: Mapping[str, Any]
    settings: tuple[list[dict[str, Any]], ...]
    layers: tuple[Mapping[str, Any], ...]
    data_layout: str
    permuted: int | None
    replayed: str | None
    micro_batches: tuple[int, ...]
    extra: Mapping[str, Any]


def parse_about(text: str) -> About:
    """Parses and checks the JSON text of `about`.

    Raises:
        TraceError: it does not describe a trace of this version.
    """
    values = parse_json(text)
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        found = shown(values.get("format") if isinstance(values, dict) else values)
        raise TraceError(
            f"is not a trace (its format is {found}, not {FORMAT!r}); pass a file that a recorder"
            " of Lockstep wrote"
        )
    _check_version(values.get("version"))
    check_tree(values)
    return _Reader(values).read()


def _check_version(version: Any) -> None:
    if type(version) is not int or not 1 <= version < 2**31:
        raise wrong_value("version", version, "a whole number from 1")
    if version > VERSION:
        raise TraceError(
            f"is of trace format version {version}, and this version of Lockstep reads {VERSION};"
            " update Lockstep"
        )


class _Reader:
    """Reads the keys of `about` and checks their types."""

    def __init__(self, values: dict[str, Any]):
        self._values = values

    def read(self) -> About:
        """Returns all keys, each checked, also against the others."""
        num_replicas = self._int("num_replicas", 1, _MAX_REPLICAS)
        steps = self._ints("steps", 2**62)
        if not steps or any(b <= a for a, b in itertools.pairwise(steps)):
            raise wrong_value("steps", list(steps), "at least one number, in ascending order")
        replicas = self._ints("replicas", num_replicas - 1)
        if not replicas or len(set(replicas)) < len(replicas):
            raise wrong_value("replicas", list(replicas), "at least one number, each once")
        variables = tuple(
            _read_variable(item, f"variables[{i}]")
            for i, item in enumerate(self._list("variables"))
        )
        weights = _check_names(variables)
        gradients = texts_of(self._list("gradients"), "gradients")
        _check_are_weights("gradients", gradients, weights)
        if len(set(gradients)) < len(gradients):
            raise wrong_value("gradients", list(gradients), "each weight once")
        extra = {k: v for k, v in self._values.items() if k not in About.__dataclass_fields__}
        return About(
            framework=self._framework(),
            num_replicas=num_replicas,
            replicas=replicas,
            steps=steps,
            variables=variables,
            gradients=gradients,
            versions=self._versions(),
            reduction=self._choice("reduction", REDUCTIONS),
            order=self._choice("order", ORDERS),
            optimizer=mapping_of(self._values.get("optimizer", {}), "optimizer"),
            settings=self._settings(len(steps), weights),
            layers=self._layers(),
            data_layout=text_of(self._values.get("data_layout", ""), "data_layout"),
            permuted=self._permuted(),
            replayed=self._replayed(),
            micro_batches=self._micro_batches(len(steps)),
            extra={k: v for k, v in extra.items() if k not in ("format", "version")},
        )

    def _list(self, key: str, default: list | None = None) -> list:
        value = self._values.get(key, default)
        if not isinstance(value, list):
            raise wrong_value(key, value, "a list")
        return value

    def _int(self, key: str, low: int, high: int) -> int:
        return int_of(self._values.get(key), key, low, high)

    def _ints(self, key: str, high: int) -> tuple[int, ...]:
        return tuple(int_of(v, f"{key}[{i}]", 0, high) for i, v in enumerate(self._list(key)))

    def _framework(self) -> str:
        framework = text_of(self._values.get("framework"), "framework")
        if not framework:
            raise wrong_value("framework", framework, "a name")
        return framework

    def _versions(self) -> dict[str, str]:
        versions = mapping_of(self._values.get("versions", {}), "versions")
        return {name: text_of(value, f"versions.{name}") for name, value in versions.items()}

    def _choice(self, key: str, choices: Sequence[str]) -> str:
        value = self._values.get(key, choices[0])
        if not isinstance(value, str) or value not in choices:
            raise wrong_value(key, value, f"one of {', '.join(map(repr, choices))}")
        return value

    def _permuted(self) -> int | None:
        value = self._values.get("permuted")
        return None if value is None else int_of(value, "permuted", -(2**64), 2**64)

    def _replayed(self) -> str | None:
        value = self._values.get("replayed")
        return None if value is None else text_of(value, "replayed")

    def _micro_batches(self, num_steps: int) -> tuple[int, ...]:
        counts = self._list("micro_batches", [1] * num_steps)
        if len(counts) != num_steps:
            raise wrong_value("micro_batches", counts, f"one count for each of {num_steps} steps")
        return tuple(int_of(v, f"micro_batches[{i}]", 1, 2**31) for i, v in enumerate(counts))

    def _layers(self) -> tuple[Mapping[str, Any], ...]:
        layers = []
        for index, item in enumerate(self._list("layers", [])):
            key = f"layers[{index}]"
            layer = mapping_of(item, key)
            text_of(layer.get("name"), f"{key}.name")
            text_of(layer.get("class"), f"{key}.class")
            texts_of(layer.get("weights", []), f"{key}.weights")
            layers.append(layer)
        return tuple(layers)

    def _settings(self, num_steps: int, weights: set[str]) -> tuple[list[dict[str, Any]], ...]:
        settings = self._list("settings", [[]] * num_steps)
        if len(settings) != num_steps:
            raise wrong_value(
                "settings", settings, f"one list of groups for each of {num_steps} steps"
            )
        for step, groups in enumerate(settings):
            if not isinstance(groups, list):
                raise wrong_value(f"settings[{step}]", groups, "a list")
            for index, group in enumerate(groups):
                _check_group(group, f"settings[{step}][{index}]", weights)
        return tuple(settings)


def _read_variable(item: Any, key: str) -> Variable:
    values = mapping_of(item, key)
    fields = (field.name for field in dataclasses.fields(Variable))
    variable = Variable(**{f: text_of(values.get(f, ""), f"{key}.{f}") for f in fields})
    if not variable.name:
        raise wrong_value(f"{key}.name", values.get("name"), "a name")
    if variable.kind not in VARIABLE_KINDS:
        raise wrong_value(f"{key}.kind", variable.kind, f"one of {', '.join(VARIABLE_KINDS)}")
    return variable


def _check_names(variables: Sequence[Variable]) -> set[str]:
    """Checks that names of weights and statistics are unique; returns the weights' names."""
    seen: set[str] = set()
    for variable in variables:
        if variable.kind in ("weight", "statistic"):
            if variable.name in seen:
                raise TraceError(
                    f"has two variables named {shown(variable.name)}; give each weight and"
                    " statistic another name"
                )
            seen.add(variable.name)
    weights = {variable.name for variable in variables if variable.kind == "weight"}
    _check_are_weights("variables", [v.of for v in variables if v.of], weights)
    return weights


def _check_are_weights(key: str, names: Sequence[str], weights: set[str]) -> None:
    for name in names:
        if name not in weights:
            raise TraceError(
                f"names {shown(name)} in {key!r} of 'about', which is no weight of 'variables';"
                " record it again"
            )


def _check_group(item: Any, key: str, weights: set[str]) -> None:
    group = mapping_of(item, key)
    names = texts_of(group.get("weights", []), f"{key}.weights")
    _check_are_weights("settings", names, weights)
    for name in _NUMBERS:
        value = group.get(name)
        if value is not None and type(value) not in (int, float):
            raise wrong_value(f"{key}.{name}", value, "a number")
    for name in _SWITCHES:
        if not isinstance(group.get(name), bool | None):
            raise wrong_value(f"{key}.{name}", group[name], "true or false")
