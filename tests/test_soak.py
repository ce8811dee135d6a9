"""Five of the cycles of `make soak`."""

import pytest

from soak import Soak


@pytest.mark.slow
def test_a_training_that_is_interrupted_again_and_again_ends_with_the_same_weights(tmp_path):
    soak = Soak(tmp_path, seed=3)
    told = [soak.cycle() for _ in range(5)]
    soak.finish()
    assert len(told) == 5 and sum(soak.counts.values()) == 5 and soak.laps
