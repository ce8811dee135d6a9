"""Measures the cost of a verified step: times usual and verified steps in turn.

python benchmarks/verification_cost.py [model] [batch] [number of replicas] [rounds] [precision]

Steps that are not verified use the same compiled function with and without verification. The cost
of `--verify_every=N` is therefore the extra time of one verified step in N.
"""

import math
import pathlib
import statistics
import sys
import time
from collections.abc import Callable

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from app.devices import device_setup
from app.options import Config
from app.options.names import VERIFY_EVERY
from app.performance import interval
from app.records.run_metadata import Progress


def timed(function: Callable[[], object]) -> tuple[float, float]:
    """Returns the elapsed seconds and the processor seconds of a call."""
    start, work = time.monotonic(), time.process_time()
    function()
    return time.monotonic() - start, time.process_time() - work


def main(
    model: str = "lenet",
    global_batch_size: str = "256",
    num_replicas: str = "2",
    num_rounds: str = "20",
    precision: str = "float32",
) -> None:
    """Times the steps in turn and prints what verification adds to an epoch."""
    config = Config.of("train",
        model=model, global_batch_size=int(global_batch_size), device="cpu", recipe="fast",
        num_devices=int(num_replicas), precision=precision,
    )  # fmt: skip
    devices = device_setup.set_up(config)
    from app.data.dataset_loader import load_data
    from app.training.training_spec import TrainingSpec
    from app.verification.step_verifier import StepVerifier

    spec = TrainingSpec(config, load_data(config))
    strategy = spec.build_strategy(devices)
    verifier = StepVerifier(spec, strategy)
    iterator = strategy.distribute(spec.batches())
    made = 0

    def usual() -> None:
        nonlocal made
        strategy.train_steps(iterator, 1)
        made += 1

    def verified() -> None:
        nonlocal made
        verifier.record_step(iterator, made + 1)
        finding = verifier.check(Progress(step=made, epoch_step=made))
        if finding:
            sys.exit(finding.text)
        made += 1

    strategy.train_steps(iterator, 0)
    verifier.compile(iterator)
    verified()
    usual()
    rounds = [(timed(usual), timed(verified)) for _ in range(int(num_rounds))]
    print(f"{model}, batch {global_batch_size}, {num_replicas} replicas, {precision}")
    for kind, name in enumerate(("clock", "work")):
        steps = [pair[0][kind] for pair in rounds]
        extra = [pair[1][kind] - pair[0][kind] for pair in rounds]
        for label, values in (("step", steps), ("verified: more by", extra)):
            low, middle, high = (1000 * f(values) for f in (min, statistics.median, max))
            print(f"  {name}, {label}: {middle:,.0f} ms ({low:,.0f} to {high:,.0f})")
        in_epoch = math.ceil(spec.steps_per_epoch / VERIFY_EVERY)
        for label, part in (("N=100", 0.01), ("default", in_epoch / spec.steps_per_epoch)):
            share = interval.combine(lambda a, b, part=part: 100 * part * a / b, extra, steps)
            print(f"  {name}, {label}: {share.value:.2f} % ({share.low:.2f}–{share.high:.2f})")


if __name__ == "__main__":
    main(*sys.argv[1:])
