"""`demo allreduce`: sums tensors over all devices."""

from app.config import DemoConfig
from app.data.dataset import IMAGE_SHAPE, NUM_CLASSES
from app.demos import demo_setup, presentation
from app.devices.device_setup import Devices
from models import load_model_builder
from strategies import ALL_REDUCE_ALGORITHMS

_MANY = 8


def run(config: DemoConfig) -> None:
    """Sums the two small tensors of d2l with every algorithm."""
    prepared = demo_setup.set_up(config)
    from strategies.collectives import ALL_REDUCE_FUNCTIONS
    from strategies.manual import all_reduce

    names = prepared.names
    default = "reduce_to_one" if config.all_reduce == "auto" else config.all_reduce
    presentation.begin(
        "After an all-reduce, every device has the sum of the tensors of all devices."
        " Device i starts with a tensor of i + 1, as in d2l.",
        prepared,
    )
    before = tensors_to_add(names)
    functions = {"reduce_to_one": all_reduce, **ALL_REDUCE_FUNCTIONS}
    after = functions[default](before, names)
    presentation.show(
        f"all_reduce, algorithm {default}",
        ["it is on", "before", "after"],
        [
            [
                presentation.device_of(new),
                presentation.numbers(old, 0),
                presentation.numbers(new, 0),
            ]
            for (old,), (new,) in zip(before, after, strict=True)
        ],
    )
    results = {name: functions[name](before, names) for name in ALL_REDUCE_ALGORITHMS["manual"]}
    _compare_costs(prepared, results)
    presentation.end(
        "A training step does this with the gradients: each device contributes the"
        " gradient of its shard and receives the sum. So all devices make the same update.",
        "The algorithms differ in which devices communicate. reduce_to_one, that of d2l,"
        " is simple: one device receives all tensors and sends the sum to all, which is a"
        " bottleneck with many devices. ring and direct send less than twice a device's"
        " bytes over each connection, however many devices there are; ring needs more"
        " steps. tree takes few steps with whole tensors.",
        then=[
            f"demo allreduce --device=cpu --num_devices={_MANY} --all_reduce=ring",
            "demo replicate",
        ],
    )


def tensors_to_add(names: list[str]) -> list[list]:
    """Returns for each device r a list with one tensor `(1, 2)`, filled with r + 1."""
    import tensorflow as tf

    per_replica_tensors = []
    for replica_id, name in enumerate(names):
        with tf.device(name):
            per_replica_tensors.append([tf.fill([1, 2], tf.cast(replica_id + 1, tf.float32))])
    return per_replica_tensors


def _compare_costs(prepared: Devices, results: dict) -> None:
    """Prints each algorithm's result here, and its cost for the gradients of LeNet."""
    from app.performance.all_reduce_model import all_reduce_cost

    lenet = load_model_builder("lenet")(image_shape=IMAGE_SHAPE, num_classes=NUM_CLASSES)
    num_numbers = lenet.count_params()
    size_bytes = 4 * num_numbers
    counts = sorted({len(prepared.names), _MANY})
    rows = []
    for name, per_replica_totals in results.items():
        values = {presentation.numbers(total, 0) for (total,) in per_replica_totals}
        row = [name, " and ".join(sorted(values))]
        for count in counts:
            steps, passes = all_reduce_cost(name, count)
            row += [steps, f"{passes * size_bytes:,.0f}"]
        rows.append(row)
    header = ["algorithm", "each device has"]
    for count in counts:
        header += [f"steps, {count} devices", "bytes"]
    presentation.show(
        f"the same by every algorithm; steps, and bytes through the busiest connection, for LeNet's"
        f" gradient ({num_numbers:,} numbers, {size_bytes:,} bytes)",
        header,
        rows,
    )
