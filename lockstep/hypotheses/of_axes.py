"""Explains gradients by the axes of a mesh: parts of a sum that is not reduced, its size."""

from collections.abc import Iterator, Sequence

from lockstep.arithmetic import is_far, scaled_all
from lockstep.reference import StepPair
from lockstep.trace import Named


def not_reduced(pair: StepPair, wrong: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yields a sentence, and the weights of whose gradients each rank has a summand only.

    Along an axis of tensor, sequence, context or pipeline parallelism, the ranks then have
    different gradients, and their sum or mean is that of the reference.
    """
    step, mesh, left = pair.second, pair.second.trace.mesh, list(wrong)
    for axis in mesh.model_axes if mesh else ():
        ranks = mesh.along(axis, 0) if mesh else []
        own = [pair.matching.to_first(step.entering(r) or step.applied(r)) for r in ranks]
        odd = [
            name
            for name in left
            if all(name in each for each in own)
            and any(is_far(each[name], own[0][name]) for each in own[1:])
        ]
        for word, share in (("sum", 1.0), ("mean", 1 / len(ranks))):
            found = _that_give(pair, odd, [scaled_all(each, share) for each in own])
            left = [name for name in left if name not in found]
            if found:
                text = (
                    f"each rank along {axis} has its own part of the gradients of {len(found)}"
                    f" weights: their {word} over {axis} is right, and is not reduced"
                )
                yield text, found


def _that_give(pair: StepPair, names: Sequence[str], terms: Sequence[Named]) -> list[str]:
    """Returns the names of the gradients of the reference that are the sum of some terms."""
    first = {name: pair.gradients[0][name] for name in names}
    wrong = pair.tolerance.wrong(first, *terms)
    return [name for name in names if name not in wrong]


def sizes_of_axes(pair: StepPair) -> list[tuple[float, str, str]]:
    """Returns the factors that the sizes of axes make, with cause and reason."""
    mesh, found = pair.second.trace.mesh, list[tuple[float, str, str]]()
    for axis in mesh.model_axes if mesh else ():
        size = mesh.axes[axis] if mesh else 1
        if size > 1:
            found.append((size, "sum_instead_of_mean", f"the size of {axis}"))
            found.append((1 / size, "mean_instead_of_sum", f"one over the size of {axis}"))
    return found
