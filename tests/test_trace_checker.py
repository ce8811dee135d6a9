"""Our strategies are verified by the one engine: right trainings are clean, each fault is named.

Each training is recorded once; most faults are made in the arrays of the recording.
"""

import pytest

from verification_samples import SPLITS, norm, plain, recorded

slow = pytest.mark.slow

PLAIN = ["single", "manual", "mirrored", "multi_worker", "tensor", "accumulation", "weighted"]
NORMALISED = ["manual", "sharded", "pipeline", "compiled", "sync manual", "sync mirrored"]
OTHERS = [split for split in SPLITS if split not in (*PLAIN[1:], *NORMALISED)]


@pytest.mark.parametrize(
    ("split", "build"),
    [
        *((split, plain) for split in PLAIN),
        *((split, norm) for split in NORMALISED),
        *(pytest.param(split, norm, marks=slow) for split in OTHERS),
    ],
)
def test_right_trainings_are_clean(split, build):
    """Every stage of every step is measured, and within its tolerance."""
    training = recorded(split, build)
    verdict = training.check()
    assert verdict.status == "clean", str(verdict)
    stages = {"start", "examples", "forward", "loss", "gradients", "update"}
    stages |= {"statistics"} if build is norm else set()
    assert stages <= set(verdict.checked)
    assert {m.step for m in verdict.measurements} == {0, 1, 2}
    shards = {m.item for m in verdict.measurements if m.stage == "gradients"}
    together = training.trace.about.syncs_batch_norm
    assert len(shards) == (1 if together else len(training.trace.shards))
