"""Records steps of a JAX training, with each replica's results, in a file of plain arrays.

It needs JAX 0.8 or newer.

    from lockstep import record_jax

    recorder = record_jax.record(
        "two.npz", train_step,  # train_step(params, opt_state, images, labels, key)
        arguments={"params": 0, "opt_state": 1, "batch": (2, 3), "key": 4},
        outputs={"params": 0, "opt_state": 1, "loss": 2},
        optimizer={"class": "SGD", "learning_rate": 0.1, "momentum": 0.9})
    with recorder as train_step:
        ...  # The training loop, unchanged.

`arguments` and `outputs` say where arrays are in the arguments and in the result of `train_step`:
position, name of a keyword argument, path such as "0/params", or a tuple of these. "state" stands
for BatchNorm statistics. Other arrays that the step takes and returns under the same path, such as
averages of weights and step counters, are recorded as well, except keys. Within the step, `keep`
records gradients and returns them:

    grads = record_jax.keep("raw", grads)      # In shard_map or pmap: before psum or pmean.
    grads = record_jax.keep("sums", grads)     # After psum or pmean.
    grads = record_jax.keep("unclipped", grads)  # Before clipping, if that is not "sums".
    grads = record_jax.keep("clipped", grads)  # After clipping, if the step clips.
    key = record_jax.keep("random", key)       # The key that this device draws numbers with.
    logits = record_jax.keep("y_pred", logits) # In the loss function: also keeps its gradient.
    x = record_jax.module("block1.mlp", x)     # An output of a part of the model: the same.

Keep "raw" and "sums" after gradients are divided by the number of examples, or by the sum of their
weights, as on one device. Gradients that are divided later are compared as "clipped", unless
clipping hides the factor. A step that clips keeps "clipped", and "sums" or "unclipped", without
which a factor that clipping hides is not seen. A chain of Optax can keep both:

    kept = [optax.stateless(lambda g, _, kind=k: record_jax.keep(kind, g))
            for k in ("unclipped", "clipped")]
    tx = optax.chain(kept[0], optax.clip_by_global_norm(1.0), kept[1], optax.sgd(0.1))

What is kept in each iteration of a scan, or under `jax.vmap`, becomes one array with a row for each
example; a module in a scan over layers has a number, as "mlp[0]". Iterations have parts of the
batch in its order: if not, also keep the examples, `keep("data", (x, y))`. Gradients and losses
are kept once, where the step has added them up.

Under `jax.jit` with shardings the step is one program for all devices, and the gradient of a single
device does not exist: keep "sums" and "clipped" only. Keys and losses are those of the whole batch.

If weights are split over an axis of the mesh, or an axis does not split the batch, the file has the
part of each device. In `shard_map`, what is kept is split as its weight is if its shape says so;
`keep(kind, tree, specs)` takes `PartitionSpec`s as `out_specs` does for anything else, such as
`P("data", "model")` for logits, or `P(unreduced={"model"})` for terms of a sum.

All steps run the compiled function unchanged. Before a recorded step, a second compiled version
with callbacks runs on copies of the arguments: recording does not change the training, and takes
about twice the time and memory in these steps, and the memory of the host for their arrays.
`train_step` must be a pure function. With several processes, each writes a file: "two.rank0.npz",
"two.rank1.npz". Above 64 MiB of weights, or with `sample=N`, the file has samples of large arrays:
see `docs/verify_scripts.md`.
"""

from lockstep.recorders.common import DEFAULT_STEPS
from lockstep.recorders.jax.keeping import keep, module
from lockstep.recorders.jax.recorder import record
from lockstep.recorders.notes import note

__all__ = ["DEFAULT_STEPS", "keep", "module", "note", "record"]
