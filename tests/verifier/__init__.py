"""Tests of the verifier: small recordings, recorders in programs of their own, and the command."""

from lockstep.engine.verdict import CLEAN, Verdict


def shown(verdict: Verdict) -> str:
    """Returns "clean", or status, node and name of a verdict, as in "fault: sum: lost_part"."""
    if verdict.place is None:
        return verdict.status
    assert verdict.status != CLEAN, verdict
    return ": ".join(filter(None, [verdict.status, verdict.place.node, verdict.name]))
