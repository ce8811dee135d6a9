"""Campaigns: faults, bugs and damage at random or from a list, as `make campaign ARGS=kills`."""


class CampaignError(Exception):
    """A check that failed."""


def check(holds: object, what: str) -> None:
    """Raises an error if something does not hold."""
    if not holds:
        raise CampaignError(what)
