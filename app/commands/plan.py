"""`plan`: what a cluster would do, from what one device does here and from the speed of links."""

import numpy as np

from app.config import Config
from app.progress import StepProgress
from app.speed.exchange_model import LinearCost
from app.speed.plan_report import print_plan
from app.speed.point import Point
from app.speed.rounds import measure

_ROUNDS = 5
_LARGEST_SHARD = 256  # A step's time is a straight line in the shard: no larger one is measured.


def run(config: Config) -> None:
    """Measures one device, predicts the cluster and prints both; trains and writes nothing."""
    num_replicas = config.num_workers * config.num_devices_planned
    shard = -(-config.planned_batch_size // num_replicas)
    with StepProgress(1) as progress:
        first = min(shard, _LARGEST_SHARD)
        points = [_point(config, size) for size in (first, 2 * first, 4 * first)]
        sampled = measure(points, repeats=_ROUNDS, progress=progress).sampled
    compute = LinearCost.fit(
        [s.facts.global_batch_size for s in sampled],
        [float(np.median(s.step_secs)) for s in sampled],
    )
    print_plan(config, compute, sampled)


def _point(config: Config, size: int) -> Point:
    """Returns one device with a batch of its own, without input."""
    training = config.for_training(
        "single", dataset="synthetic", num_train_examples=size, global_batch_size=size
    )
    return Point(training, reads_input=False)
