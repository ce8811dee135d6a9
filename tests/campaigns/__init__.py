"""Campaigns: faults, bugs and damage at random or from a list, as `make campaign ARGS=kills`."""

from collections.abc import Sequence
from typing import NamedTuple


class Options(NamedTuple):
    """Options of the command line; `cycles` of 0 is each that there is, once."""

    cycles: int
    seed: int
    only: Sequence[str] = ()  # Words of the names to which the campaign is limited.
    all: bool = False  # Whether the tests that are marked `slow` run, too.

    def wants(self, name: str) -> bool:
        return not self.only or any(word in name for word in self.only)


class CampaignError(Exception):
    """A check that failed."""


def check(holds: object, what: str) -> None:
    if not holds:
        raise CampaignError(what)
