"""Prints the plan of a split training."""

from app.performance.split_plan import SplitPlan
from app.runtime import console


def print_split_plan(plan: SplitPlan) -> None:
    """Prints the memory of each device, the traffic of a step, and a pipeline's idle time.

    Args:
        plan: plan of the training.
    """
    console.say()
    number = plan.num_like_these
    each = f", of each of {number} replicas" if number > 1 else ""
    header = ["device", "weights", "optimizer", "gradients, work", "activations", "in all"]
    rows = [
        [str(i), *map(mib, (d.weights, d.optimizer, d.gradients, d.activations, d.total))]
        for i, d in enumerate(plan.devices)
    ]
    if plan.stages:
        header += ["layers", "in flight"]
        for row, (first, last), alive in zip(rows, plan.stages, plan.in_flight, strict=True):
            row += [first if first == last else f"{first} … {last}", str(alive)]
    console.print_table(f"Memory of each device by estimate{each}", header, rows)
    console.say()
    rows = [[term.name, term.formula, mib(term.size_bytes)] for term in plan.terms]
    rows.append(["in all", "", mib(plan.size_bytes)])
    console.print_table("What travels between devices in a step", ["", "", "size"], rows)
    if plan.bubble is not None:
        console.say(
            f"idle: {plan.bubble:.1%} of the time if all stages take equally long,"
            " (K − 1) / (M + K − 1); more --micro_batches make it less"
        )


def mib(size_bytes: float) -> str:
    """Formats a size for a table."""
    size = size_bytes / 2**20
    if size >= 9.95:
        return f"{size:,.0f} MiB"
    return f"{size:.2g} MiB" if size >= 0.01 else "0 MiB"
