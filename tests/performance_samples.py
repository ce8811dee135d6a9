"""Measurements for tests, without starting processes."""

import dataclasses

from app.options import Config
from app.performance.case import Block, Case, Facts, Sample

FACTS = Facts(
    devices=["/device:CPU:0"],
    simulated_devices=False,
    cores=2,
    intra_op_threads=1,
    dataset="fashion_mnist",
    global_batch_size=256,
    jit_compile=False,
    all_reduce="reduce_to_one",
    tensor_float_32=False,
    compile_sec=1.0,
    versions={"tensorflow": "2"},
)


def make_sample(
    strategy="manual",
    num_devices=1,
    step_secs=(1.0,) * 5,
    *,
    simulated=False,
    tracings=0,
    precision="float32",
    model="lenet",
    global_batch_size=256,
    **facts,
):
    """Returns a sample with these measurements; on real devices by default."""
    config = Config.of(
        strategy=strategy,
        model=model,
        precision=precision,
        global_batch_size=global_batch_size,
        num_devices=None if strategy == "single" else num_devices,
    )
    kind = "CPU" if simulated else "GPU"
    found = dataclasses.replace(
        FACTS,
        devices=[f"/device:{kind}:{i}" for i in range(num_devices)],
        simulated_devices=simulated,
        global_batch_size=global_batch_size,
        **facts,
    )
    blocks = [Block(10, 10 * global_batch_size, 10 * sec, tracings) for sec in step_secs]
    return Sample(Case(config), found, blocks, 1 << 20)
