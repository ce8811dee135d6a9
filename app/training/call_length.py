"""Decides how many steps one compiled call makes."""

# The number of steps grows until a call takes this long, so that the bar is updated and the host is
# mostly idle.
_CALL_SEC = 0.5
# After each call the workers synchronise, which takes several round trips through the network. Over
# a slow one calls last this many times as long, but no longer than the limit: a signal waits.
_RATIO, _LONGEST_CALL_SEC = 10, 5.0


def num_steps_of_call(step_sec: float, network_sec: float) -> int:
    """Returns the number of steps of a call, at least 1.

    Args:
        step_sec: duration of a step; infinite if it is not known yet.
        network_sec: duration of the synchronisation after the call.
    """
    call_sec = max(_CALL_SEC, min(_RATIO * network_sec, _LONGEST_CALL_SEC))
    return max(1, int(call_sec / step_sec))
