"""Records what a PyTorch training computes; `lockstep.record_torch` has the public name."""

from lockstep.recorders.torch.versions import check_version

check_version()
