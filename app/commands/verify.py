"""`verify`: compares each step of strategies with one device, and names the first mismatch."""

import shutil

from app.options import Config
from app.records.files import io_errors_as, temporary_path
from app.records.run_directory import default_out, named_path, open_command_directory
from app.verification.output import report
from app.verification.verify import Training, verify_strategies


def run(config: Config) -> dict[str, Training]:
    """Verifies strategies, and reports the verdicts in a run directory.

    Earlier results stay in the directory until the verification ends without an error.

    Returns:
        Strategy → result.

    Raises:
        MismatchError: a training has a fault.
        DivergedError: every step is right, and a training diverges.
        DataError: a training is not verified.
    """
    path = named_path(config.output.out or default_out("verify", config.training.model))
    fields = {**config.result_fields(), "command": "verify", "steps": config.verification.steps}
    with open_command_directory(path, fields, overwrite=config.output.overwrite) as run_directory:
        folder = temporary_path(path / "recordings")
        try:
            with io_errors_as(folder):
                folder.mkdir()
            trainings, pairs = verify_strategies(config, folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        run_directory.start(overwrite=True)  # An earlier verification is no run to resume.
        report(config, path, trainings, pairs)
    return trainings
