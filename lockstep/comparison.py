"""Compares recordings with a reference: which of them is what, and whether they fit together."""

import dataclasses
import itertools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lockstep.data.match import Matching
from lockstep.data.trace import Trace, Variable
from lockstep.engine.verdict import Verdict
from lockstep.engine.verify import verify


def compare_traces(
    traces: Sequence[Trace],
    names: Mapping[str, str],
    tolerance: float | None = None,
    on_step: Callable[[int], None] = lambda step: None,
) -> dict[str, Verdict]:
    """Verifies all further recordings against the first.

    Args:
        traces: the recordings; one with permuted examples only gives the bounds, and one that is
            recorded with shards= beside the reference is the reference by parts.
        names: names of weights in one recording → names in the other, where they do not match.
        tolerance: relative difference of gradients to allow; None to compute it.
        on_step: called after each step, with the number of steps that have been compared.

    Returns:
        Name of each further recording → its verdict, in their order.

    Raises:
        ValueError: there are no two recordings to compare, or they have nothing in common.
    """
    permuted = _only([x for x in traces if x.about.permuted is not None], "permute=")
    others = [trace for trace in traces if trace is not permuted]
    by_parts = _only([trace for trace in others[1:] if _is_by_parts(trace)], "shards=")
    whole = [trace for trace in others if trace is not by_parts]
    if len(whole) < 2:
        more = f"; {permuted.name} has permuted examples: it only gives bounds" if permuted else ""
        raise ValueError(
            f"{traces[0].name or 'a recording'}: a verdict comes from two recordings; pass that of"
            f" the reference first, then those to verify{more}"
        )
    reference, *trainings = whole
    count = itertools.count(1)
    short, found = _short_names([reference, *trainings]), {}
    for name, training in zip(short[1:], trainings, strict=True):
        verdict = compare_pair(
            reference, training, permuted, by_parts, names, tolerance=tolerance,
            on_step=lambda: on_step(next(count)),
        )  # fmt: skip
        found[name] = dataclasses.replace(
            verdict, training=name, reference=f"training of {short[0]}"
        )
    return found


def compare_recordings(
    reference: Trace, training: Trace, permuted: Trace | None, by_parts: Trace | None,
    names: Mapping[str, str], tolerance: float | None, on_step: Callable[[int], None],
) -> Verdict:  # fmt: skip
    """Verifies a recording against that of the reference; see `lockstep.compare`.

    Raises:
        ValueError: a recording is not what it is passed as, or they have nothing in common.
    """
    if permuted is not None and permuted.about.permuted is None:
        raise ValueError(f"permuted: {permuted.name or 'it'} was recorded without permute=")
    if by_parts is not None and not _is_by_parts(by_parts):
        raise ValueError(f"by_parts: {by_parts.name or 'it'} was recorded without shards=")
    count = itertools.count(1)
    verdict = compare_pair(
        reference, training, permuted, by_parts, names, tolerance=tolerance,
        on_step=lambda: on_step(next(count)),
    )  # fmt: skip
    one, two = _short_names([reference, training])
    return dataclasses.replace(verdict, training=two, reference=f"training of {one}")


def compare_pair(
    reference: Trace, training: Trace, permuted: Trace | None, by_parts: Trace | None,
    names: Mapping[str, str], **options: Any,
) -> Verdict:  # fmt: skip
    """Verifies a recording against that of the reference; see `engine.verify.verify`.

    Raises:
        ValueError: the recordings have nothing in common.
    """
    _require_comparable(reference, training, names)
    return verify(reference, training, permuted, by_parts, names, **options)


def _is_by_parts(trace: Trace) -> bool:
    """Returns whether a recording ran the model once for each part of another one's batch."""
    return bool(trace.steps) and trace.has(0, "shards")


def _only(found: Sequence[Trace], option: str) -> Trace | None:
    if len(found) > 1:
        raise ValueError(f"{found[1].name}: is the second recording with {option}; pass only one")
    return found[0] if found else None


def _short_names(traces: Sequence[Trace]) -> list[str]:
    """Returns file names, with as many parent folders as needed to distinguish them."""
    paths = [pathlib.Path(trace.name or "recording").absolute() for trace in traces]
    for length in range(1, max(len(path.parts) for path in paths) + 1):
        short = [str(pathlib.Path(*path.parts[-length:])) for path in paths]
        if len({*short}) == len(short):
            return short
    # The same file twice.
    return [f"{path.name} ({number})" for number, path in enumerate(paths, start=1)]


def _require_comparable(reference: Trace, training: Trace, names: Mapping[str, str]) -> None:
    """Raises a ValueError unless two recordings have steps, weights and samples in common.

    Args:
        reference: the reference.
        training: the training to verify.
        names: names in one recording → names in the other, where they cannot be matched.
    """
    for trace in (reference, training):
        if not trace.steps:
            raise ValueError(
                f"{trace.name or 'a recording'}: nothing was recorded; train within the `with`"
                " block of the recorder"
            )
    _require_equal_samples(reference, training)
    matching = Matching(reference, training, names)
    if not matching.pairs:
        raise ValueError(
            f"{training.name}: no weight matches one of {reference.name} by name or shape; pass"
            " --name_map"
        )
    if not {*reference.steps} & {*training.steps}:
        raise ValueError(
            f"{training.name}: has no step in common with {reference.name}; record the same steps"
        )
    if reference.about.sample:
        _require_equal_order(reference, training, matching)


def _require_equal_samples(reference: Trace, training: Trace) -> None:
    samples = [
        trace.about.sample if any(v.shape for v in trace.about.variables) else {}
        for trace in (reference, training)
    ]
    if samples[0] == samples[1]:
        return
    if not all(samples):
        whole, sampled = (reference, training) if samples[1] else (training, reference)
        raise ValueError(
            f"{sampled.name}: is recorded with sample=, and {whole.name} is whole; record both in"
            " the same way"
        )
    shown = (" and ".join(f"{n} {k}" for k, n in own.items() if k != "seed") for own in samples)
    raise ValueError(
        f"{training.name}: has other samples than {reference.name} ({'; '.join(shown)}; seeds"
        f" {' and '.join(str(own['seed']) for own in samples)}); record both with the same sample="
    )


def _require_equal_order(reference: Trace, training: Trace, matching: Matching) -> None:
    """Raises a ValueError if samples of a weight count its elements in other orders."""
    for pair in matching.pairs:
        own, other = reference.variables[pair.first], training.variables[pair.second]
        if own.shape and _order_of(other, pair.transpose) != _order_of(own, range(len(own.shape))):
            raise ValueError(
                f"{training.name}: {other.name} is sampled with its axes in another order than"
                f" {own.name} of {reference.name}; record both without sample="
            )


def _order_of(variable: Variable, transpose: Sequence[int]) -> list[int]:
    """Returns which axis of the reference is each axis of a sample, counted in order O, I, H, W.

    Args:
        variable: a variable that is sampled.
        transpose: for each axis of the reference, that of the variable.
    """
    layout = variable.layout if len(variable.layout) == len(transpose) else ""
    axes = sorted(range(len(transpose)), key=lambda k: "OIHW".find(layout[k]) if layout else k)
    return [[*transpose].index(axis) for axis in axes]
