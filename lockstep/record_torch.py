"""Records what a PyTorch training computes, step by step, in a file of plain arrays.

It needs PyTorch 2.6 or newer (2.8 for `fully_shard` and pipelines).

    from lockstep import record_torch

    with record_torch.record("two.npz", model, optimizer, steps=3):
        train(model, optimizer)  # Your own loop, unchanged.

Of several processes, each writes one file: `two.rank0.npz`, `two.rank1.npz`, with the parts of
weights and batches that it has, and their places in the whole ones. Recording does not change the
bits of the training; between recorded steps, the model has one hook, which counts. A gradient is
copied when autograd has computed it (`raw`: before DDP reduces it; not visible with FSDP), at the
end of `backward` if DDP or FSDP has reduced it (`sums`), when it is clipped (`unclipped`), and in
the `step` of its optimizer (`clipped`). All but the last are divided by the loss scale of a
`GradScaler`. What does not exist has no array: optimizer state before the first update, `sums` if
DDP is bypassed. Outputs with one row for each example (`y_pred`) and the gradients of the loss with
respect to them (`y_grad`) are copied, too, up to 64 MiB of outputs in a step. If the model returns
the loss only, they are those of the layer that was called last.
"""

from lockstep.recorders.common import DEFAULT_STEPS
from lockstep.recorders.notes import note
from lockstep.recorders.torch.recorder import record

__all__ = ["DEFAULT_STEPS", "note", "record"]
