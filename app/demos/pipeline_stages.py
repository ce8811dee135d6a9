"""`demo pipeline`: shows the stages of LeNet, the schedules, and bitwise equality with `manual`."""

from typing import TYPE_CHECKING

from app.config import DemoConfig
from app.demos import demo_setup, presentation, split_training
from app.runtime import console

if TYPE_CHECKING:  # Not imported before its devices are set up.
    from strategies.pipeline import PipelineStrategy


def run(config: DemoConfig) -> None:
    """Cuts LeNet into one stage per device and trains it with micro-batches."""
    prepared = demo_setup.set_up(config)
    from app.training.training_spec import load_data

    training = demo_setup.training(config)
    dataset = load_data(training)
    num = len(prepared.names)
    presentation.begin(
        "The layers of LeNet are cut into one stage for each device. The batch is split"
        f" into {num} micro-batches, which pass through the stages one after another.",
        prepared,
    )
    pipeline, train_pipeline = split_training.build(
        training, prepared, dataset, "pipeline", micro_batches=num
    )
    _show_stages(pipeline)
    _print_schedules(num, num)
    split_training.show_traffic(pipeline, training.global_batch_size)
    manual, train_manual = split_training.build(training, prepared, dataset, "manual")
    losses = train_pipeline(), train_manual()
    apart = split_training.difference(pipeline, manual)
    verdict = "are bitwise identical" if apart.identical else f"differ by {apart.absolute:.3g}"
    presentation.end(
        f"{split_training.NUM_STEPS} steps: mean loss {losses[0]:.6f} here, {losses[1]:.6f}"
        f" with {num} replicas of `manual`; their {pipeline.model.count_params():,} weights"
        f" {verdict}. A micro-batch plays the role of a shard in data parallelism: it has"
        " its own loss, divided by the size of the whole batch, and its gradients are added"
        " in order.",
        then=[
            f"verify --strategies=pipeline,manual --num_devices={num} --micro_batches={num}",
            "demo pipeline --device=cpu --num_devices=4",
            "demo tensor",
        ],
    )


def _show_stages(strategy: "PipelineStrategy") -> None:
    """Prints the layers of each stage."""
    from strategies.cuts import stage_flops

    stages = strategy.pipelines[0].stages
    flops = [stage_flops(stage.calls) for stage in stages]
    rows = []
    for device, stage, own in zip(strategy.devices, stages, flops, strict=True):
        layers = ", ".join(call.layer.name for call in stage.calls)
        weights = sum(variable.numpy().size for variable in stage.weights)
        rows.append([device, layers, f"{weights:,}", f"{own / sum(flops):.0%}"])
    presentation.show("stages", ["on", "layers", "weights", "arithmetic"], rows)


def _print_schedules(num_stages: int, num_micro_batches: int) -> None:
    """Prints both schedules as stages × time."""
    from strategies.schedules import SCHEDULES, in_time_slots

    for name, schedule in SCHEDULES.items():
        slots = in_time_slots(schedule, num_stages, num_micro_batches)
        console.say(f"schedule {name}: F forwards, B backwards, and the number of the micro-batch")
        for k in range(num_stages):
            cells = []
            for slot in slots:
                own = [task for task in slot if task.stage == k]
                cells += [f"{'FB'[not t.is_forward]}{t.micro_batch}" for t in own] or ["· "]
            console.say(f"  stage {k}  {' '.join(cells).rstrip()}")
    idle = (num_stages - 1) / (num_micro_batches + num_stages - 1)
    console.say(
        f"  idle: (K − 1) / (M + K − 1) = {num_stages - 1}/{num_micro_batches + num_stages - 1}"
        f" = {idle:.0%} of the time, while all stages take equally long"
    )
    console.say()
