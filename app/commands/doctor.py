"""`doctor`: checks the machine and TensorFlow, and prints the command to run."""

import tempfile
from collections.abc import Sequence

from app.doctor.machine import (
    Check,
    check_data,
    check_output,
    check_processor,
    check_software,
    install_all,
)
from app.doctor.tensorflow_check import TensorFlowCheck, check_tensorflow
from app.options import Config
from app.runtime import console
from app.runtime.shown_command import shown_command


def run(config: Config) -> None:
    """Makes every check, prints each as soon as it is done, and prints the command to run.

    Raises:
        LockstepError: the first error found that a training would exit with.
    """
    software = _print(check_software())
    processor = _print([check_processor()])
    data = _print([check_data(config)])
    output = _print([check_output(config)])
    found = check_tensorflow(config)
    checks = [*software, *processor, *data, *output, *_print(found.checks)]
    console.say("What to run")
    if not found.has_tensorflow or any(check.error for check in software):
        console.say(install_all())
    else:
        console.say(what_to_run(config, found, has_data=not data[0].error, out=output[0]))
    for check in checks:
        if check.error:
            raise check.error


def what_to_run(config: Config, found: TensorFlowCheck, *, has_data: bool, out: Check) -> str:
    """Returns a training that works as printed, of about a minute on a CPU.

    Args:
        config: flags of `doctor`; usable ones become flags of the training.
        found: the devices, and the strategies that work on them.
        has_data: whether the data of `config` is usable.
        out: the check of the output directory.
    """
    asked = config.distribution.num_devices or config.distribution.num_gpus
    on_gpus = bool(found.devices) and "GPU" in found.devices[0]
    words = [f"--strategy={found.working[0]}" if found.working else "--strategy=single"]
    if found.working and on_gpus:
        words.append(f"--num_gpus={len(found.devices)}")
    elif found.working and asked:
        words.append(f"--num_devices={asked}")
    if not found.devices or config.distribution.device == "cpu":  # Requested GPUs may be missing.
        words.append("--device=cpu")
    if found.working and config.distribution.all_reduce != "auto":
        words.append(f"--all_reduce={config.distribution.all_reduce}")
    words += ["--recipe=fast", f"--epochs={10 if on_gpus else 1}"]
    if not has_data:
        words.append("--dataset=synthetic")
    else:
        words += [f"--data_dir={config.data.data_dir}"] if config.data.data_dir else []
        words += ["--allow_unverified_data"] if config.data.allow_unverified_data else []
        words += [f"--dataset={config.data.dataset}"] if config.data.dataset != "auto" else []
    if out.error:
        words.append(f"--out={tempfile.gettempdir()}/lockstep-first")
    elif config.output.out:
        words.append(f"--out={config.output.out}")
    return shown_command(words)


def _print(checks: Sequence[Check]) -> Sequence[Check]:
    for check in checks:
        console.say(check.text())
    return checks
