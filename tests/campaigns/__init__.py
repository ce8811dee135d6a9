"""Campaigns: faults, bugs and damage at random or from a list, as `make campaign ARGS=kills`."""

from collections.abc import Sequence
from typing import NamedTuple


class Options(NamedTuple):
    """Options of the command line.

    Attributes:
        cycles: how many cycles to run; 0: each that there is, once.
        seed: seed of random choices.
        only: words of the names or kinds to which the campaign is limited; empty: no limit.
        all: whether the tests that are marked `slow` run, too.
    """

    cycles: int
    seed: int
    only: Sequence[str] = ()
    all: bool = False

    def wants(self, name: str) -> bool:
        """Whether a name has one of the words of `only`, or there is no limit."""
        return not self.only or any(word in name for word in self.only)


class CampaignError(Exception):
    """A check that failed."""


def check(holds: object, what: str) -> None:
    """Raises an error if something does not hold."""
    if not holds:
        raise CampaignError(what)
