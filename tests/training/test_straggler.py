"""Stragglers: replicas for which the others wait."""

from app.verification.recorder import find_straggler


def step(*sends):
    """Seconds and processor seconds at which replicas sent, both in milliseconds."""
    return [(sec / 1000, busy / 1000) for sec, busy in sends]


COMPILING = step((9000, 9000), (1000, 1000))


def test_a_straggler_is_late_in_every_step():
    late = [step((30, 60), (81, 160)), step((28, 56), (79, 150)), step((33, 66), (90, 180))] * 2
    replica_id, text = find_straggler([COMPILING, *late])
    assert replica_id == 1
    assert "51 ms after all others, which took 30 ms" in text
    assert find_straggler([COMPILING, *late, step((30, 60), (31, 62))]) is None
    # No longer than the others' work, and the cores are busy meanwhile.
    assert find_straggler([COMPILING, *late, step((30, 60), (60, 90))]) is None
    # Nor is it told from a few steps, or from milliseconds.
    assert find_straggler([COMPILING, *late[:3]]) is None
    assert find_straggler([COMPILING, *[step((3, 6), (11, 22))] * 5]) is None


def test_a_straggler_that_the_processor_has_nothing_to_do_for_is_told_sooner():
    idle = [step((60, 110), (110, 112))] * 4
    assert find_straggler([COMPILING, *idle])[0] == 1
    assert find_straggler([COMPILING, *idle, step((60, 110), (70, 110))]) is None


def test_a_replica_with_three_shares_may_take_three_times_as_long():
    late = [step((90, 170), (30, 60))] * 6
    assert find_straggler([COMPILING, *late])[0] == 0
    assert find_straggler([COMPILING, *late], [3, 1]) is None
    # One share takes more than a third of three: every step costs something by itself.
    assert find_straggler([COMPILING, *[step((90, 90), (80, 80))] * 6], [3, 1]) is None
    assert find_straggler([COMPILING, *[step((60, 90), (150, 160))] * 6], [3, 1])[0] == 1


def test_replicas_that_share_cores_are_no_stragglers():
    """Three replicas on two cores: the third comes after the others have finished."""
    shared = step((30, 30), (31, 61), (61, 91))
    assert find_straggler([shared] * 9) is None
    assert find_straggler([step((100, 100))] * 5) is None
    assert find_straggler([]) is None
