"""What is recorded beside arrays, and differs: settings of optimizers and layers, what is trained.

It is evidence for a difference that arrays show; alone it is no fault.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from lockstep.data.trace import STATISTIC, WEIGHT, About, Trace
from lockstep.engine.pair import Pair
from lockstep.engine.step import Step
from lockstep.numeric.arrays import Array, blocks, same_bits

# Settings are numbers of float32, which frameworks keep with 7 digits.
DIGITS = 1e-6


def other_settings(pair: Pair) -> dict[str, tuple[Any, Any]]:
    """Returns setting of an optimizer → values in both, of weights and ranks where they differ."""
    trace, found = pair.training.trace, dict[str, tuple[Any, Any]]()
    abouts = [trace.about_of(shard) for shard in pair.shards]
    classes = [str(x.optimizer.get("class")) for x in (pair.reference.trace.about, abouts[0])]
    if classes[0] != classes[1]:
        found["class"] = classes[0], classes[1]
    right = _settings_of(pair.reference.trace.about, pair.reference.position)
    for about in abouts:
        own = _settings_of(about, pair.training.position)
        for variable in pair.variables:
            if variable.kind != WEIGHT:
                continue
            first, second = right.get(variable.first, {}), own.get(variable.second, {})
            for key in first.keys() & second.keys() - {"weights"}:
                both = first[key], second[key]
                are_numbers = all(isinstance(x, int | float) for x in both)
                are_close = are_numbers and math.isclose(*both, rel_tol=DIGITS)
                if first[key] != second[key] and not are_close:
                    found.setdefault(key, both)
    return found


def _settings_of(about: About, position: int) -> dict[str, Mapping[str, Any]]:
    """Returns weight → settings of its group."""
    groups = about.settings[position] if position < len(about.settings) else ()
    weights = [v.name for v in about.variables if v.kind == WEIGHT]
    return {name: group for group in groups for name in group.get("weights", weights)}


def has_nan(step: Step) -> bool:
    """Returns whether outputs, losses or new state are NaN, or weights infinite.

    Where they are in both recordings, nothing compares them.

    A step that is skipped leaves its weights finite, whatever its outputs are.
    """
    ends = step.ends[0] if step.has("after") else {}
    names, starts = [name for name in ends if step.trace.kinds[name] == WEIGHT], step.starts[0]
    is_same = all(name in starts and same_bits(ends[name], starts[name]) for name in names)
    if is_same and not _have_nan(ends[name] for name in names):
        return False
    kinds = [kind for kind in ("y_pred", step.kind_of_loss) if step.has(kind)]
    outputs = [array for kind in kinds for own in step.arrays(kind) for array in own]
    is_infinite = any(np.isinf(part).any() for name in names for (part,) in blocks(ends[name]))
    return is_infinite or _have_nan(itertools.chain(outputs, (ends[name] for name in ends)))


def _have_nan(arrays: Iterable[Array]) -> bool:
    return any(np.isnan(part).any() for array in arrays for (part,) in blocks(array))


def rate_changes(pair: Pair) -> bool:
    """Returns whether the learning rate is another one than in the first recorded step.

    Frameworks keep the velocity with or without the learning rate, which makes a difference then.
    """
    about, position = pair.reference.trace.about, pair.reference.position
    rates = [
        {n: g.get("learning_rate") for n, g in _settings_of(about, at).items()}
        for at in (0, position)
    ]
    return rates[0] != rates[1]


def other_layers(pair: Pair) -> dict[str, str]:
    """Returns what is recorded of layers and differs, in words: "mode", "dtype", "settings"."""
    found, reference, training = {}, pair.reference, pair.training
    right_mode = reference.trace.in_evaluation(reference.position, 0)
    has_modes = reference.trace.about.in_evaluation and training.trace.about.in_evaluation
    for shard in pair.shards:
        own = training.trace.in_evaluation(training.position, shard)
        if has_modes and own != right_mode:
            found["mode"] = f"layers in evaluation mode differ: {sorted(own ^ right_mode)[:3]}"
        dtype = training.trace.about_of(shard).computed_in
        if dtype != reference.trace.about.computed_in:
            found["dtype"] = f"layers compute in {dtype or 'float32'}"
    first, second = ([*step.trace.about.layers] for step in (reference, training))
    is_port = reference.trace.about.framework != training.trace.about.framework
    if [x.get("class") for x in first] == [x.get("class") for x in second]:
        for a, b in zip(first, second, strict=True):
            # Layers of two frameworks have other settings.
            keys = a.keys() & b.keys() if is_port else a.keys() | b.keys()
            for key in keys - {"name", "weights"}:
                if a.get(key) != b.get(key):
                    values = f"{a.get(key, 'none')} and {b.get(key, 'none')}"
                    found["settings"] = f"{key} of {b.get('name')}: {values}"
    return found


# --- What is trained ------------------------------------------------------------------------------


def optimized_weights(trace: Trace) -> set[str] | None:
    """Returns the weights that the optimizers of all ranks have; None if that is not recorded."""
    abouts = [trace.about_of(shard) for shard in trace.shards]
    groups = [group for about in abouts for step in about.settings for group in step]
    if not groups or not all("weights" in group for group in groups):
        return None
    return {name for group in groups for name in group["weights"]}


def trained_elsewhere(pair: Pair) -> Iterator[tuple[str, bool]]:
    """Yields the weights that only one training changes, and whether it is the reference.

    Only those whose optimizers, or whose kinds, differ: others have another gradient.
    """
    traces = pair.reference.trace, pair.training.trace
    changed, optimized = [t.changed_weights for t in traces], [*map(optimized_weights, traces)]
    for names in pair.matching.pairs:
        both = [name in own for name, own in zip(names[:2], changed, strict=True)]
        has = [own is None or name in own for name, own in zip(names[:2], optimized, strict=True)]
        if traces[0].kinds[names.first] == WEIGHT and both == has and both[0] != both[1]:
            yield names.first, both[0]
    for own, other, is_first in ((*traces, True), (*traces[::-1], False)):
        for name, kind in own.kinds.items():
            if (
                kind == WEIGHT
                and other.kinds.get(name) == STATISTIC
                and name in changed[not is_first]
            ):
                yield name, is_first


def tied_elsewhere(reference: Trace, training: Trace) -> tuple[str, ...]:
    """Returns weights that are one in one training, and several in the other."""
    for own, other in ((reference, training), (training, reference)):
        for names in own.about.tied:
            apart = [n for n, kind in other.kinds.items() if kind == WEIGHT and n in names]
            if len(apart) > 1:
                return tuple(apart)
    return ()
