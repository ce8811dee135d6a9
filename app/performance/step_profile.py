"""Profiles one real step and prints its numbers."""

import pathlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from app.config import ExplainConfig, TrainConfig
from app.runtime import console
from app.runtime.processes import call_in_child_process
from app.verification import tasks
from app.verification.trace import Trace


def profile_step(config: TrainConfig, on_message: Callable[[Any], None]) -> tuple[dict, bool]:
    """Runs the first step of a training in a separate process and returns its numbers.

    Args:
        config: options of a training on several devices.
        on_message: called with messages of the process.

    Returns:
        `shards` (examples of each replica), `losses` (each replica's part of the mean loss),
        `norms` (norm of each replica's gradient), `sum_norm` (norm of the sum), `gradient_bytes`
        (bytes that each sends), `num_tensors`, `learning_rate`, `update_norm` and `weight_norm`;
        and whether the devices are simulated.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "trace"
        recorded = call_in_child_process(tasks.record, config, 1, path, on_message=on_message)
        with Trace(path) as trace:

            def arrays(kind: str, replica_id: int = 0, step: int = 1) -> dict[str, np.ndarray]:
                return {t: trace.read(step, kind, replica_id, t) for t in trace.tensors(step, kind)}

            replicas = range(trace.num_shards)
            sums = arrays("sums")
            itemsize = 2 if config.communication_dtype == "bfloat16" else 4
            profile = {
                "shards": [len(arrays("examples", r)["examples"]) for r in replicas],
                "losses": [float(arrays("loss", r)["loss"]) for r in replicas],
                "norms": [_norm(arrays("gradients", r)) for r in replicas],
                "sum_norm": _norm(sums),
                "gradient_bytes": sum(a.nbytes for a in sums.values()) * itemsize // 4,
                "num_tensors": len(sums),
                "learning_rate": recorded.learning_rate,
                "update_norm": _norm(arrays("updates")),
                "weight_norm": _norm(arrays("weights", step=0)),
            }
    return profile, recorded.simulated_devices


def print_step_profile(config: ExplainConfig, profile: dict) -> None:
    """Prints the profile, one line per part of the step."""
    shards, gradients = profile["shards"], _listed(profile["norms"], ".4g")
    split, forward, sums, update = _LINES.get(config.strategy, _LINES["manual"])
    console.say(f"one step of {config.strategy}, the first of this training")
    console.say(f"  1. {split.format(sum(shards), _listed(shards))}")
    losses = _listed(profile["losses"], ".4f")
    in_all = f", which is {sum(profile['losses']):.4f} in all" if len(shards) > 1 else ""
    console.say(f"  2. {forward.format(sum(shards))}: {losses}{in_all}")
    console.say(
        f"     and differentiates its part: gradients with norms {gradients}"
        if len(shards) > 1
        else f"     and is differentiated: a gradient with the norm {gradients}"
    )
    tensors = console.count(profile["num_tensors"], "tensor")
    apart = (
        f", less than {sum(profile['norms']):.4g} where they point apart" if len(shards) > 1 else ""
    )
    size = f"{profile['gradient_bytes']:,} bytes{_EACH.get(config.strategy, '')}"
    console.say(
        f"  3. {sums}: {tensors}, {size}; the sum has the norm {profile['sum_norm']:.4g}{apart}"
    )
    console.say(
        f"  4. {update}, of norm {profile['update_norm']:.4g}, to weights"
        f" of norm {profile['weight_norm']:.4g} (peak learning rate {profile['learning_rate']:g})"
    )


# Strategy → how it splits the batch, computes losses, adds gradients and updates the weights.
_LINES = {
    "manual": (
        "the global batch of {} is cut into shards of {}",
        "each replica adds up the losses of its own shard and divides by {}",
        "the all-reduce adds them",
        "each replica makes the same update",
    ),
    "sharded": (
        "the global batch of {} is cut into shards of {}; each device gathers the weights",
        "each replica adds up the losses of its own shard and divides by {}",
        "the reduce-scatter adds them, a part of each tensor on each device",
        "each device updates its part of the weights: an update",
    ),
    "pipeline": (
        "the global batch of {} is cut into micro-batches of {}, which follow one another",
        "the last stage adds up the losses of each micro-batch and divides by {}",
        "each stage adds the gradients of its weights over the micro-batches",
        "each stage updates its own weights: an update",
    ),
    "tensor": (
        "the global batch of {} goes to all devices of a replica: {}",
        "the loss of the gathered logits is the sum over the images, divided by {}",
        "each device adds what the others have found for its channels",
        "each device updates its part of the weights: an update",
    ),
}
_EACH = dict.fromkeys(("manual", "mirrored"), " from each replica")


def _listed(values: Sequence[float], form: str = "d") -> str:
    return " + ".join(format(value, form) for value in values)


def _norm(arrays: Mapping[str, np.ndarray]) -> float:
    return float(np.sqrt(sum(np.sum(np.square(a, dtype=np.float64)) for a in arrays.values())))
