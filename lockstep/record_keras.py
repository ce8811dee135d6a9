"""Records each replica's results in some training steps of Keras, in a file of plain arrays.

It needs Keras 3.6 or newer on TensorFlow.

    from lockstep import record_keras

    with record_keras.record("two.npz", model, steps=[0, 1, 2]):
        model.fit(dataset)  # The model is compiled under `strategy.scope()`.

A custom loop passes its optimizer, or a list of all, and wraps the function of a replica:

    with record_keras.record("two.npz", model, optimizer, steps=3) as recorder:
        recorded_step = recorder.wrap(replica_step)

        @tf.function  # Traced within the block.
        def train_step(batch):
            strategy.run(recorded_step, args=(batch,))

`python -m lockstep one.npz two.npz` compares such files: of the script on one device, and on two.

The hooks replace methods of the model and of the classes of optimizers, and
`GradientTape.gradient`, until the end of the block. Each optimizer that a step applies is recorded.
Recording does not change the training bitwise; other steps are not copied. `record` writes arrays
to the file as they come; above 64 MiB of weights, or with `sample=N`, samples of large ones: see
`docs/verify_scripts.md`.

XLA does not run the hooks: `jit_compile=True` may stand on a function that the step calls, but not
around the step.
"""

from lockstep.recorders.common import DEFAULT_STEPS
from lockstep.recorders.keras.recorder import record
from lockstep.recorders.notes import note

__all__ = ["DEFAULT_STEPS", "note", "record"]
