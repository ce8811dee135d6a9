"""Prints the plan of a training."""

from collections.abc import Sequence

import numpy as np

from app.performance import interval
from app.performance.case import Sample
from app.performance.scaling_model import ScalingModel, is_pairwise
from app.performance.split_plan_output import mib, print_split_plan
from app.performance.training_plan import TrainingPlan
from app.runtime import console
from app.training.recipes import REFERENCE_GLOBAL_BATCH_SIZE, Recipe, find_recipe

_WIDTH = 12


def print_training_plan(plan: TrainingPlan) -> None:
    """Prints the plan of a training, one line per item, and its all-reduces as a table."""
    config = plan.config
    num_devices = config.num_devices_planned if plan.split else plan.num_replicas
    devices = console.count(num_devices, "device")
    if plan.split:
        devices += f", {config.strategy}"
    if config.plans_cluster:
        devices += f", {config.num_devices_planned} on each of {config.num_workers} machines"
    console.say(f"{config.model}, recipe {config.recipe}, {config.precision}, on {devices}")
    lines = {
        "parameters": _parameters(plan),
        "batch": f"{plan.batch:,} images: {_shards(plan, plan.batch)}",
        "last batch": _last_batch(plan),
        "steps": _steps(plan),
        "rate": _learning_rate_text(plan),
        "memory": _memory(plan),
    }
    if plan.split:  # Printed as a table.
        del lines["memory"]
    for name, text in lines.items():
        console.say(f"  {name:<{_WIDTH}}{text}")
    if plan.split:
        print_split_plan(plan.split)
    elif plan.num_replicas > 1:
        console.say()
        _print_all_reduces(plan)


def _parameters(plan: TrainingPlan) -> str:
    size = f"{plan.num_parameters:,}; {mib(plan.gradient_bytes)} of gradients"
    dtype = plan.config.communication_dtype
    return size if plan.split else f"{size} in {dtype} for each device to all-reduce"


def _shards(plan: TrainingPlan, batch: int) -> str:
    if plan.num_replicas == 1:
        return "all of them in the one replica" if plan.split else "all of them on the one device"
    shards, noun = plan.shards(batch), "replica" if plan.split else "device"
    if len(shards) == 1:
        return f"{next(iter(shards)):,} on each {noun}"
    return ", ".join(
        f"{size:,} on {console.count(number, noun)}" for size, number in shards.items()
    )


def _last_batch(plan: TrainingPlan) -> str:
    if plan.last_batch:
        return f"{plan.last_batch:,} images: {_shards(plan, plan.last_batch)}"
    if plan.config.last_batch == "drop" and (rest := plan.num_examples % plan.batch):
        return f"dropped: {rest:,} other images are left out in each epoch"
    return "as large as the others"


def _steps(plan: TrainingPlan) -> str:
    epochs = plan.config.epochs
    return (
        f"{plan.steps_per_epoch:,} an epoch of {plan.num_examples:,} images,"
        f" {epochs * plan.steps_per_epoch:,} in {console.count(epochs, 'epoch')}"
    )


def _learning_rate_text(plan: TrainingPlan) -> str:
    recipe = find_recipe(plan.config.recipe, plan.config.model)
    own = plan.config.learning_rate
    given = f"{own:g}, as --learning_rate says; the recipe would have " if own else ""
    num_steps = recipe.num_warmup_steps(plan.learning_rate, plan.num_steps)
    warmup = f", risen to in {console.count(num_steps, 'step')}" if num_steps else ""
    return (
        f"{given}{plan.recipe_learning_rate:.4g}{warmup}: the recipe's"
        f" {recipe.peak_learning_rate:g} for {REFERENCE_GLOBAL_BATCH_SIZE} images,"
        f" {_growth(plan, recipe)}"
    )


def _growth(plan: TrainingPlan, recipe: Recipe) -> str:
    if recipe.batch_rule == "square_root" and plan.batch > REFERENCE_GLOBAL_BATCH_SIZE:
        rule = "growing with the square root of the batch"
    else:
        rule = "in proportion to the batch"
    if plan.num_steps < recipe.steps_of_full_peak(plan.batch):
        return f"{rule}, and lower for so few steps"
    return rule


def _memory(plan: TrainingPlan) -> str:
    memory = plan.memory
    step = plan.memory_bytes - memory.weights_bytes - memory.optimizer_state_bytes
    return (
        f"{mib(plan.memory_bytes)} on each device by estimate: weights"
        f" {mib(memory.weights_bytes)}, optimizer {mib(memory.optimizer_state_bytes)},"
        f" a step {mib(step)}"
    )


def _print_all_reduces(plan: TrainingPlan) -> None:
    rows = [
        [
            name,
            str(messages),
            mib(size_bytes),
            f"{size_bytes * plan.steps_per_epoch / 2**30:,.2f} GiB",
        ]
        for name, (messages, size_bytes) in plan.all_reduces().items()
    ]
    console.print_table(
        "The all-reduce of a step, by algorithm",
        ["--all_reduce", "messages in a row", "through the busiest connection", "in an epoch"],
        rows,
    )


def print_probe(plan: TrainingPlan, samples: Sequence[Sample]) -> None:
    """Prints the measured cost of a training, and the memory estimate beside it.

    Args:
        plan: plan of the training.
        samples: samples of the planned number of devices; or of at least three smaller numbers with
            the same shard per device, from which a step is extrapolated.
    """
    sample = samples[-1]
    facts, epochs = sample.facts, plan.config.epochs
    console.say()
    step_sec = _print_step(sample) if len(samples) == 1 else _print_extrapolated(plan, samples)
    epoch_sec = plan.steps_per_epoch * step_sec
    least = "" if len(samples) == 1 else "at least "
    console.say(
        f"  an epoch  {_duration(epoch_sec)}, {console.count(epochs, 'epoch')}"
        f" {_duration(epochs * epoch_sec)}; compiling takes {least}{facts.compile_sec:.0f} s more,"
        " and evaluation a tenth of an epoch or less"
    )
    if len(samples) == 1 and sample.memory.steps_bytes is not None:
        _print_memory(plan, sample, sample.memory.steps_bytes)
    if facts.simulated_devices:
        console.say("  simulated devices: they share one processor, timing is not scaling")


def _print_step(sample: Sample) -> float:
    """Prints the time of a step on the measured devices; returns its seconds."""
    step = interval.median(sample.step_secs)
    console.say(
        f"measured here, {sample.case.config.strategy} on {', '.join(sample.facts.devices)}:"
        f" {step.value * 1e3:,.1f} ms a step ({step.low * 1e3:,.1f}–{step.high * 1e3:,.1f} in"
        f" {console.count(len(sample.blocks), 'round')})"
    )
    return step.value


def _print_extrapolated(plan: TrainingPlan, samples: Sequence[Sample]) -> float:
    """Prints the time of a step extrapolated from fewer devices; returns its seconds."""
    counts = [sample.facts.num_replicas for sample in samples]
    medians = [interval.median(sample.step_secs).value for sample in samples]
    facts = samples[-1].facts
    pairwise = is_pairwise(facts.all_reduce, shared=facts.simulated_devices)
    model = ScalingModel.fit(counts, medians, pairwise=pairwise)
    held_out = ScalingModel.hold_out(counts, medians, pairwise=pairwise)

    def predict(*secs: float) -> float:
        return ScalingModel.fit(counts, secs, pairwise=pairwise).sec(plan.num_replicas)

    step = interval.combine(np.vectorize(predict), *(sample.step_secs for sample in samples))
    *first, last = map(str, counts)
    measured = ", ".join(f"{1e3 * sec:,.1f}" for sec in medians)
    shard = facts.global_batch_size // counts[-1]
    console.say(
        f"measured here, {samples[0].case.config.strategy} on {', '.join(first)} and {last} devices"
        f" with {console.count(shard, 'image')} each: {measured} ms a step"
    )
    console.say(
        f"  predicted for {plan.num_replicas} devices: {step.value * 1e3:,.1f} ms a step"
        f" ({step.low * 1e3:,.1f}–{step.high * 1e3:,.1f}),"
        f" extrapolated from {', '.join(first)} and {last}: {model};"
        f" fitted without {held_out.num_replicas}, it was off by {held_out.error:+.1%} there"
    )
    return step.value


def _print_memory(plan: TrainingPlan, sample: Sample, steps_bytes: int) -> None:
    num_devices = len(sample.facts.devices)
    memory = plan.memory
    measured_bytes = steps_bytes / num_devices + memory.weights_bytes + memory.optimizer_state_bytes
    apart = plan.memory_bytes / measured_bytes - 1
    console.say(
        f"  memory    {mib(measured_bytes)} on each device measured, {mib(plan.memory_bytes)}"
        f" estimated: {apart:+.0%}; the process with all that it has loaded"
        f" {mib(sample.memory.peak_bytes)}"
    )


def _duration(sec: float) -> str:
    if sec < 120:
        return f"{sec:,.1f} s"
    return f"{sec / 60:,.0f} min" if sec < 7200 else f"{sec / 3600:,.1f} h"
