"""Products of a GPU in TF32: what recorders note of them, and recordings that are made here."""

import numpy as np
import pytest

from lockstep.comparison import verify_against
from lockstep.reference import tolerance_of
from tests.verifier.recorder_scripts import needs, run_script
from tests.verifier.script_samples import Script

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
    tolerance = tolerance_of(one.trace(), None, {}, None)
    assert ("NVIDIA_TF32_OVERRIDE=0" in tolerance.text) == (reference is IN_TF32)
    verdict = verify_against(one.trace(), two.trace("two.npz"), {}, tolerance)
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
    tolerance = tolerance_of(one.trace(), None, {}, None)
    verdict = verify_against(one.trace(), two.trace("two.npz"), {}, tolerance)
    assert verdict.ok == is_right, str(verdict)


ASKED = """
import torch
from lockstep.recorders.torch.values import rounds_to_tf32

class Weight:
    dtype = torch.float32
    def __init__(self, num_axes, is_cuda):
        self.dim, self.is_cuda = lambda: num_axes, is_cuda

def rounds(*axes, is_cuda=True):
    return rounds_to_tf32({str(n): Weight(n, is_cuda) for n in axes})
"""
BY_SETTINGS = """
matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
assert not rounds(2) and rounds(2, 4) and not rounds(2, 4, is_cuda=False)
matmul.allow_tf32 = True
assert rounds(2)
matmul.allow_tf32 = cudnn.allow_tf32 = False
assert not rounds(2, 4)
cudnn.conv.fp32_precision = "tf32"  # The other setting now refuses to be read.
assert rounds(4) and not rounds(2)
"""


@needs("torch")
@pytest.mark.parametrize(
    ("override", "code"), [("", BY_SETTINGS), ("0", "assert not rounds(2, 4)")]
)
def test_settings_of_torch_say_whether_a_gpu_rounds_to_tf32(override, code):
    done = run_script("torch", "-c", ASKED + code, NVIDIA_TF32_OVERRIDE=override)
    assert done.returncode == 0, done.stderr


PRODUCTS = """
import jax, jax.numpy as jnp
from lockstep.recorders.jax.compiled import dtype_of
x = jnp.ones((2, 2))
found = {}
for precision in (None, "high", "highest"):
    with jax.default_matmul_precision(precision):
        text = jax.jit(lambda x: x @ x).lower(x).as_text()
    found[precision] = [dtype_of(text, platform) for platform in ("cpu", "gpu", "tpu")]
assert found[None] == ["", "tensorfloat32", "bfloat16"]
assert found["high"] == ["", "tensorfloat32", ""] and found["highest"] == ["", "", ""]
short = jax.jit(lambda x: x @ x).lower(x.astype(jnp.bfloat16)).as_text()
assert dtype_of(short, "gpu") == "bfloat16" and not dtype_of("add f32", "gpu")
"""


@needs("jax")
def test_a_step_of_jax_says_to_which_dtype_its_products_round():
    done = run_script("jax", "-c", PRODUCTS)
    assert done.returncode == 0, done.stderr
