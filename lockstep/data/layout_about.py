"""Puts the descriptions of the ranks of a mesh together, which may hold other weights."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lockstep.data.trace import OF_BACKWARD, OF_GRADIENTS, OF_MODULES, OF_VARIABLES, About, Variable


def renamed(about: About) -> About:
    """Returns a description in which weights have their names in the reference."""
    kept = {variable.name for variable in about.variables if variable.name not in about.names}
    names = {name: new for name, new in about.names.items() if new not in kept}
    if not names:
        return about

    def new(name: str) -> str:
        return names.get(name, name)

    def with_name(variable: Variable) -> Variable:
        of, name = new(variable.of), new(variable.name)
        if variable.of and variable.name.startswith(variable.of):
            name = of + variable.name.removeprefix(variable.of)
        return dataclasses.replace(variable, name=name, of=of)

    settings = tuple(
        [
            {**group, **({"weights": [*map(new, group["weights"])]} if "weights" in group else {})}
            for group in step
        ]
        for step in about.settings
    )
    layers = tuple(
        {**layer, "weights": [*map(new, layer.get("weights", ()))]} for layer in about.layers
    )
    return dataclasses.replace(
        about,
        variables=tuple(map(with_name, about.variables)),
        gradients=tuple(map(new, about.gradients)),
        not_updated=tuple(map(new, about.not_updated)),
        settings=settings,
        layers=layers,
    )


def merged(abouts: Sequence[About]) -> About:
    """Returns one description for those of several ranks, which may hold other weights."""
    first, keys = abouts[0], dict[str, Variable]()
    for about in abouts:
        for key, variable in zip(about.keys, about.variables, strict=True):
            keys.setdefault(key, variable)
    settings = tuple(_groups(step) for step in zip(*(a.settings for a in abouts), strict=False))
    layers = {str(layer.get("name")): layer for about in reversed(abouts) for layer in about.layers}
    names = dict.fromkeys(str(layer.get("name")) for about in abouts for layer in about.layers)
    modes = zip(*(about.in_evaluation for about in abouts), strict=False)
    return dataclasses.replace(
        first,
        variables=tuple(keys.values()),
        gradients=tuple(dict.fromkeys(name for about in abouts for name in about.gradients)),
        modules=tuple(dict.fromkeys(name for about in abouts for name in about.modules)),
        not_updated=tuple(dict.fromkeys(name for a in abouts for name in a.not_updated)),
        settings=settings,
        layers=tuple(layers[name] for name in names),
        in_evaluation=tuple(tuple(dict.fromkeys(itertools.chain(*step))) for step in modes),
        computed_in=next((a.computed_in for a in abouts if a.computed_in), ""),
        ranks=(), placements={}, names={},
    )  # fmt: skip


def _groups(of_ranks: Sequence[Sequence[Mapping[str, Any]]]) -> tuple[Mapping[str, Any], ...]:
    """Returns the parameter groups of a step: of each weight, those of the first rank with it."""
    seen, found = set[str](), list[Mapping[str, Any]]()
    for group in itertools.chain(*of_ranks):
        weights = [name for name in group.get("weights", ()) if name not in seen]
        if weights or "weights" not in group:
            found.append({**group, "weights": weights} if "weights" in group else group)
            seen.update(weights)
    return tuple(found)


def moves(own: About, common: About) -> Callable[[str, int], int]:
    """Returns a function from a kind and an INDEX in a rank's file to the common INDEX."""
    tables: list[tuple[set[str], Sequence[str], dict[str, int]]] = [
        (kinds, names, {name: place for place, name in enumerate(all_names)})
        for kinds, names, all_names in (
            ({*OF_VARIABLES}, own.keys, common.keys),
            ({*OF_GRADIENTS, *OF_BACKWARD}, own.gradients, common.gradients),
            ({*OF_MODULES}, own.modules, common.modules),
        )
    ]

    def move(kind: str, index: int) -> int:
        for kinds, names, places in tables:
            if kind in kinds and names:
                number, place = divmod(index, len(names))
                return number * len(places) + places[names[place]]
        return index

    return move
