"""Defines the results of `verify`: verified trainings, and pairs of them."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.verdict import Verdict

IDENTICAL, EQUAL, DIFFERENT = "bit-identical", "equal within rounding", "different"
BY_DESIGN = "another training by design"


@dataclasses.dataclass(frozen=True)
class Run:
    """A verified training.

    Attributes:
        verdict: the result of its verification.
        devices: names of the devices of all workers; empty if unknown.
        simulated_devices: whether several devices share a processor.
        versions: name → version of the software that affects the results.
        about: how it was trained, in words, where other trainings differ from it.
        facts: what `verify.json` has about it in addition.
    """

    verdict: Verdict
    devices: Sequence[str] = ()
    simulated_devices: bool = False
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    about: str = ""
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two trainings, compared with each other.

    Attributes:
        names: names of the trainings.
        outcome: `IDENTICAL`, `EQUAL`, `DIFFERENT` or `BY_DESIGN`.
        absolute: the largest difference of any element after the last step.
        relative: that difference over the largest element of its array.
        where: the array with that difference, as in "weights, conv1/kernel".
        why: why they are two trainings by design; "" if they are not.
    """

    names: tuple[str, str]
    outcome: str
    absolute: float = 0.0
    relative: float = 0.0
    where: str = ""
    why: str = ""
