"""Records what a PyTorch training computes; `lockstep.record_torch` has the public name."""

import torch

from lockstep.recorders.common import check_version

check_version("record_torch", "PyTorch", str(torch.__version__), (2, 6))
