"""`doctor`: checks the machine and TensorFlow, and prints the command to run."""

from collections.abc import Sequence

from app.config import DoctorConfig
from app.doctor.advice import what_to_run
from app.doctor.check import Check, print_group
from app.doctor.cluster_check import check_cluster
from app.doctor.data_check import check_data
from app.doctor.examination import examine
from app.doctor.gpu_check import check_all_reduce, check_devices, check_gpus
from app.doctor.output_check import check_output
from app.doctor.processor_check import check_processor
from app.doctor.software_check import check_packages, check_python
from app.runtime import console


def run(config: DoctorConfig) -> None:
    """Makes every check, prints each group as soon as it is done, and prints the command to run.

    Raises:
        LockstepError: the first error found that a training would exit with.
    """
    software = _print("Software", [check_python(), *check_packages()])
    processor = _print("Processor", check_processor())
    data = _print("Data", check_data(config))
    output = check_output(config)
    places = _print("Output and cluster", [output, check_cluster()])
    parallel = tuple(name for name in config.strategies if name != "single")
    findings = examine(config, parallel)
    gpus = _print("GPUs", check_gpus(config, findings))
    devices = _print(
        "Devices of a training", [*check_devices(findings), *check_all_reduce(findings)]
    )
    console.say("What to run")
    console.say(what_to_run(config, findings, software=software, data=data, output=output))
    for check in (*software, *processor, *data, *places, *gpus, *devices):
        if check.error:
            raise check.error


def _print(title: str, checks: Sequence[Check]) -> Sequence[Check]:
    if checks:
        print_group(title, checks)
    return checks
