"""`demo replicate`: shows one weight and its gradient on each device during a step."""

from typing import TYPE_CHECKING, Any

from app.config import DemoConfig
from app.demos import demo_setup, presentation
from app.runtime import console

if TYPE_CHECKING:  # Not imported before its devices are set up.
    from app.training.training_spec import TrainingSpec
    from app.verification.difference import WeightDifference
    from strategies.base import Strategy

_TENSOR = "logits/bias"
_SHOWN = 4  # Of ten numbers.


def run(config: DemoConfig) -> None:
    """Runs the first step of d2l's training and prints what each device holds."""
    prepared = demo_setup.set_up(config)
    from app.data.dataset import CLASS_NAMES
    from app.training.training_spec import load_data

    training = demo_setup.training(config)
    dataset = load_data(training)
    presentation.begin(
        "Every device has a full copy of LeNet. This shows one training step, with one"
        f" shard for each device, in one small tensor, {_TENSOR}: one number for each class;"
        f" {', '.join(CLASS_NAMES[:_SHOWN])} are shown.",
        prepared,
    )
    spec, strategy, iterator = demo_setup.create(training, prepared, dataset)
    moments, whole = watch_step(strategy, iterator)
    rows = []
    for moment, per_replica in moments:
        for replica_id, array in enumerate(per_replica):
            shown = "none yet" if array is None else presentation.numbers(array[:_SHOWN], 6)
            label = "" if replica_id else moment
            rows.append([label, prepared.names[replica_id], shown, _agreement(per_replica)])
    presentation.show(
        f"the first step, batch {training.global_batch_size}, learning rate {spec.learning_rate:g}",
        ["moment", "on", _TENSOR, "devices agree?"],
        rows,
    )
    verdict = "are bitwise identical" if whole.identical else f"differ by {whole.absolute:.3g}"
    _read_gradient(spec, prepared.names, moments[2][1])
    presentation.end(
        f"After the step all {strategy.model.count_params():,} weights on each of"
        f" {console.count(len(prepared.names), 'device')} {verdict}. Weights are copied"
        " once, before the first step: equal weights and equal sums give equal updates.",
        then=[
            "verify --strategies=manual,mirrored --steps=5    (checks every step like this)",
            "demo replicate --device=cpu --num_devices=4 --all_reduce=ring",
            "demo train",
        ],
    )


def watch_step(
    strategy: "Strategy", iterator: Any
) -> "tuple[list[tuple[str, list]], WeightDifference]":
    """Runs the first step of a strategy and records what each replica holds.

    Returns:
        Pairs of a moment and, for each replica, the small tensor at that moment or None; and the
        largest difference between replica 0 and another replica in the whole model after the step.
    """
    from app.verification.difference import WeightDifference

    with demo_setup.recorded(strategy, iterator, num_steps=1) as (trace, _):

        def recorded(step: int, kind: str) -> list:
            (name,) = [t for t in trace.tensors(step, kind) if t.endswith(_TENSOR)]
            count = trace.num_shards if kind == "gradients" else trace.num_copies
            return [trace.read(step, kind, r, name) for r in range(count)]

        moments = [
            ("weight, before", recorded(0, "weights")),
            ("gradient, before", [None] * trace.num_shards),
            ("gradient of its shard", recorded(1, "gradients")),
            ("gradient after all-reduce", recorded(1, "sums")),
            ("weight after the update", recorded(1, "weights")),
        ]
    states = strategy.copy_states()
    differences = [WeightDifference.between(states[0], other) for other in states[1:]]
    return moments, max(differences, key=lambda d: (not d.identical, d.absolute))


def _read_gradient(spec: "TrainingSpec", names: list[str], per_replica_gradients: list) -> None:
    """Explains the first number of each gradient, which depends on images of the first class."""
    from app.data.dataset import CLASS_NAMES
    from strategies.collectives import shard_bounds

    _, labels = next(spec.batches().as_numpy_iterator())
    presentation.say(
        "This gradient has a simple form. At first the network predicts each class for a"
        " tenth of the images; the gradient is the predicted number minus the true number"
        " of each class, divided by the size of the whole batch:"
    )
    for replica_id, (name, gradient) in enumerate(zip(names, per_replica_gradients, strict=True)):
        start, end = shard_bounds(len(labels), len(names), replica_id)
        expected = (end - start) / spec.dataset.num_classes
        seen = int((labels[start:end] == 0).sum())
        console.say(
            f"  {name} has {console.count(seen, CLASS_NAMES[0])} among {end - start} images:"
            f" ({expected:g} − {seen}) / {len(labels)} ="
            f" {(expected - seen) / len(labels):.6f}, and holds {gradient[0]:.6f}"
        )


def _agreement(per_replica: list) -> str:
    """Returns in words whether all replicas are bitwise identical."""
    if per_replica[0] is None:
        return ""
    return "yes" if len({array.tobytes() for array in per_replica}) == 1 else "no"
