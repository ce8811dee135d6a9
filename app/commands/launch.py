"""`launch`: trains with several worker processes on this machine."""

import dataclasses

from app.cluster.launcher import Launcher
from app.cluster.resource_split import split_resources
from app.commands.train import print_result
from app.config import LaunchConfig
from app.records.history import Summary, load_required_summary
from app.records.run_naming import default_out, named_path
from app.runtime import console


def run(config: LaunchConfig) -> Summary:
    """Trains with `--num_workers` processes and returns the summary.

    Raises:
        DeviceError: there are fewer GPUs than the workers need.
        WorkerFailedError: a worker failed with an error that a retry cannot fix.
        PeerLostError: workers failed too often.
    """
    path = named_path(config.out or default_out("launch", config.model_label(config.model)))
    console.set_run_directory(path)
    console.set_overwriting(config.overwrite)
    shares = split_resources(config.num_workers, config.train_config())
    cores = console.count(len(shares[0].cores), "core")
    gpus = f", {console.count(len(shares[0].gpus), 'GPU')}" if shares[0].gpus else ""
    console.say(f"{console.count(len(shares), 'worker')} on this machine, {cores}{gpus} each")
    Launcher(dataclasses.replace(config, out=str(path)), shares).run()
    summary = load_required_summary(path)
    print_result(config, summary)
    return summary
