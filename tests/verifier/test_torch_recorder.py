"""The recorder of PyTorch: its files hold what was trained, and recording changes nothing.

The trainings and checks of `torch_cases.py` run in processes.
"""

import pytest

from lockstep import compare
from tests.verifier.recorder_scripts import needs, run_cases, run_script

pytestmark = needs("torch")


def test_recordings_of_torch(tmp_path):
    done = run_cases("torch", tmp_path, "two", "one")
    assert "exception.npz: the training ended before steps [2]" in done.stderr


@pytest.mark.slow
def test_further_recordings_of_torch(tmp_path):
    run_cases("torch", tmp_path, "four", "sharded", "more")


def test_an_average_of_one_rank_and_the_rates_of_two_optimizers(tmp_path):
    run_cases("torch", tmp_path, "average", "rates")


COMPLEX = """
import sys, torch
from torch import nn
from lockstep import record_torch

class Rotated(nn.Linear):
    def forward(self, x):
        pairs = torch.view_as_complex(super().forward(x).unflatten(1, (-1, 2)))
        return torch.view_as_real(pairs * self.rotations).flatten(1)

torch.manual_seed(0)
model = Rotated(4, 6)
angles = torch.arange(3.0) + (len(sys.argv) > 3)
model.register_buffer("rotations", torch.polar(torch.ones(3), angles))
path, *replay = sys.argv[1:3]
with record_torch.record(path, model, replay=(replay or [None])[0], steps=1):
    model(torch.randn(5, 4)).square().sum().backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
print(float((model.rotations.angle() - torch.arange(3.0)).abs().max()))
"""


def test_a_complex_buffer_is_recorded_and_replayed(tmp_path):
    """As the rotations of RoPE in torchtitan: such a recording could not be read."""
    one, two = tmp_path / "one.npz", tmp_path / "two.npz"
    for words in ([one], [two, one, "other"]):
        done = run_script("torch", "-c", COMPLEX, *words)
        assert done.returncode == 0, done.stderr
        assert float(done.stdout) < 1e-6
    place = compare(one, two).place
    assert (place.node, place.tensors) == ("start", ("rotations",))
