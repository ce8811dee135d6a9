"""Options of a case: a model, its loss, its optimizer and its data in a file of one's own."""

import dataclasses
import pathlib
from typing import Any

from app.config.distribution_options import DeviceOptions
from app.config.names import KERAS_FIT, MULTI_WORKER, SINGLE, VERIFICATION
from app.config.option import option, options_of
from app.runtime.errors import ConfigError

# What a case is verified at, in this order.
PLACES = ("first", "last_batch", "second_epoch", "resume", "evaluation")
CASE_STRATEGIES = (SINGLE, "manual", "mirrored", MULTI_WORKER, KERAS_FIT)
CASE_STRATEGIES_BY_DEFAULT = (SINGLE, KERAS_FIT)
_DEFAULT_FUNCTIONS = {"model_fn": "model", "data_fn": "data", "distribute_fn": "distribute"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CaseOptions:
    """Which case, and where it is verified."""

    case: str | None = option(
        None,
        "Verify your own training: a Python file with model(), which returns a compiled Keras"
        " model, and data(global_batch_size), which returns a tf.data.Dataset. FILE:NAME takes the"
        " model of function NAME. See docs/verify_your_own.md.",
        VERIFICATION,
        metavar="FILE",
    )
    model_fn: str = option(
        _DEFAULT_FUNCTIONS["model_fn"],
        "Function of the case that returns the compiled model.",
        VERIFICATION,
        metavar="NAME",
    )
    data_fn: str = option(
        _DEFAULT_FUNCTIONS["data_fn"],
        "Function of the case that returns the data set, of (x, y) or (x, y, sample_weight).",
        VERIFICATION,
        metavar="NAME",
    )
    distribute_fn: str = option(
        _DEFAULT_FUNCTIONS["distribute_fn"],
        "Function (strategy, global_batch_size) of the case that returns what fit gets under the"
        " strategy in place of the data set. A case need not have it.",
        VERIFICATION,
        metavar="NAME",
    )
    at: tuple[str, ...] = option(
        PLACES,
        "Where a case is verified: the first --steps, the last batch of an epoch, the first step"
        " of the second epoch, the step after a save and resume, an evaluation.",
        VERIFICATION,
        metavar=",".join(PLACES),
        choices=PLACES,
    )

    @property
    def case_path(self) -> pathlib.Path:
        """The file of the case."""
        path, _, _ = _split_name(self.case or "")
        return pathlib.Path(path)

    @property
    def case_model_fn(self) -> str:
        """The name of the function that returns the model."""
        _, separator, name = _split_name(self.case or "")
        return name if separator else self.model_fn


def _split_name(case: str) -> tuple[str, str, str]:
    """Splits FILE:NAME; a colon elsewhere belongs to the file."""
    path, separator, name = case.rpartition(":")
    return (path, separator, name) if separator and name.isidentifier() else (case, "", "")


_USED = {
    *(each.name for each in options_of(CaseOptions)),
    *(each.name for each in options_of(DeviceOptions)),
    *("strategies", "global_batch_size", "seed", "steps", "out", "overwrite", "verbosity"),
    *("keep_traces", "deterministic"),
}


def check_case(config: Any) -> None:
    """Checks the options of a `verify` with a case.

    Raises:
        ConfigError: the case has no such file, or an option has no part in it.
    """
    for each in options_of(config):
        if each.name not in _USED and getattr(config, each.name) != each.default:
            raise ConfigError(
                f"--{each.name} has no part in --case, whose file defines model, data and training;"
                " leave the flag out"
            )
    for name in config.strategies:
        if name not in CASE_STRATEGIES:
            raise ConfigError(
                f"--strategies={name} does not run a case; use --strategies="
                f"{','.join(CASE_STRATEGIES)}"
            )
    path = config.case_path
    if not path.is_file():
        raise ConfigError(f"--case={config.case}: there is no file {path}; name a Python file")
    if path.suffix != ".py":
        raise ConfigError(f"--case={config.case} must be a Python file, whose name ends in .py")
    if config.case_model_fn != config.model_fn and config.model_fn != "model":
        raise ConfigError(
            f"--case={config.case} and --model_fn={config.model_fn} name two functions; name one"
        )


def check_no_case(config: Any) -> None:
    """Checks that options of a case come with one.

    Raises:
        ConfigError: one does not.
    """
    for each in options_of(CaseOptions):
        if getattr(config, each.name) != each.default:
            raise ConfigError(f"--{each.name} needs --case=FILE; see docs/verify_your_own.md")
    if KERAS_FIT in config.strategies:
        raise ConfigError(
            f"--strategies={KERAS_FIT} needs --case=FILE; see docs/verify_your_own.md"
        )
