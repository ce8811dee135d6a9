"""Products of a GPU in TF32, in recordings that are made here."""

import numpy as np
import pytest

from lockstep.engine.verify import verify
from tests.verifier.trainer import Script

IN_FLOAT32 = {"about": {"layers": ()}}  # Without BatchNorm, behind which ties are allowed.
IN_TF32 = {"about": {"layers": (), "computed_in": "tensorfloat32"}}


def rounded(unit):
    """Returns gradients whose elements are moved by up to a unit, as their products are."""
    generator = np.random.default_rng(0)

    def change(script, replica, gradients):
        return [g * (1 + unit * generator.uniform(-1, 1, g.shape)) for g in gradients]

    return change


def times(factor):
    return lambda script, replica, gradients: [factor * g for g in gradients]


@pytest.mark.parametrize(
    ("reference", "gradient", "is_right"),
    [
        (IN_TF32, rounded(2.0**-10), True),
        (IN_FLOAT32, rounded(2.0**-10), False),
        (IN_TF32, times(1.1), False),
    ],
)
def test_a_reference_in_tf32_is_known_to_its_rounding_alone(reference, gradient, is_right):
    one, two = Script(**reference), Script(**reference, replicas=2, gradient=gradient)
    verdict = verify(one.trace(), two.trace("two.npz"))
    assert ("NVIDIA_TF32_OVERRIDE=0" in verdict.tolerance) == (reference is IN_TF32)
    assert verdict.ok == is_right


@pytest.mark.parametrize(
    ("device", "gradient", "is_right"),
    [
        ("cuda", rounded(5e-4), True),
        ("cpu", rounded(5e-4), False),
        ("cuda", rounded(1e-2), False),
        ("cuda", times(1.0005), False),
    ],
)
def test_units_turn_over_on_a_gpu_without_a_batch_norm(device, gradient, is_right):
    about = {"about": {"layers": (), "device": device}, "steps": (0,)}
    one, two = Script(**about), Script(**about, replicas=2, gradient=gradient)
    verdict = verify(one.trace(), two.trace("two.npz"))
    assert verdict.ok == is_right, str(verdict)
