"""Options of a case: a file that defines a model, its loss, its optimizer and its data."""

import dataclasses
import hashlib
import pathlib
from typing import Any

from app.config.distribution_options import AllReduceOptions, DeviceOptions
from app.config.names import (
    CASE_STRATEGIES,
    KERAS_FIT,
    MODEL_AND_DATA,
    TRAINED_CASE_STRATEGIES,
    VERIFICATION,
)
from app.config.option import option, options_of
from app.config.run_options import SavingOptions
from app.runtime.errors import ConfigError, reason_of

# Stages of a case that are verified, in this order.
PLACES = ("first", "last_batch", "second_epoch", "resume", "evaluation")
# The built-in models with their recipes.
BUILT_IN_CASES = ("lenet", "resnet18")
_BUILT_IN = pathlib.Path(__file__).parents[1] / "training" / "builtin_cases"
DEFAULT_FUNCTIONS = {
    **{"model_fn": "model", "data_fn": "data"},
    **{"test_data_fn": "test_data", "distribute_fn": "distribute"},
}
_SEE = "see docs/verify_your_own.md"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CaseFileOptions:
    """Selects the case file and its functions."""

    case: str | None = option(
        None,
        "Your own training: a Python file with model(), which returns a compiled Keras model, and"
        " data(global_batch_size), which returns a tf.data.Dataset. FILE:NAME takes the model of"
        " function NAME; lenet and resnet18 are built in. See docs/verify_your_own.md.",
        MODEL_AND_DATA,
        metavar="FILE",
    )
    model_fn: str = option(
        DEFAULT_FUNCTIONS["model_fn"],
        "Function in the case file that returns the compiled model.",
        MODEL_AND_DATA,
        metavar="NAME",
    )
    data_fn: str = option(
        DEFAULT_FUNCTIONS["data_fn"],
        "Function in the case file that returns the data set, of (x, y) or (x, y, sample_weight).",
        MODEL_AND_DATA,
        metavar="NAME",
    )

    @property
    def case_path(self) -> pathlib.Path:
        """The path of the case file."""
        name, _, _ = _split_name(self.case or "")
        path = pathlib.Path(name)
        if name in BUILT_IN_CASES and not path.exists():
            return _BUILT_IN / f"case_{name}.py"
        return path

    @property
    def case_model_fn(self) -> str:
        """The name of the function that returns the model."""
        _, separator, name = _split_name(self.case or "")
        return name if separator else self.model_fn


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluatedDataOptions:
    """Selects the data that a case is evaluated on."""

    test_data_fn: str = option(
        DEFAULT_FUNCTIONS["test_data_fn"],
        "Optional function (global_batch_size) in the case file that returns the data set"
        " to evaluate on. Without it, the training data are used.",
        MODEL_AND_DATA,
        metavar="NAME",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainedCaseOptions(CaseFileOptions, EvaluatedDataOptions):
    """Selects the case to train and the data to evaluate it on."""

    def with_case(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Returns the result fields of a training; for a case, those that flags control.

        The text of the file is included: a changed file is a different training.

        Args:
            fields: the result fields of all options.
        """
        if self.case is None:
            return fields
        case = {
            "case": str(self.case_path.resolve()),
            "case_sha256": hashlib.sha256(_read(self.case_path)).hexdigest(),
            "model_fn": self.case_model_fn,
            "data_fn": self.data_fn,
            "test_data_fn": self.test_data_fn,
        }
        return {**case, **{name: v for name, v in fields.items() if name in _USED_TO_TRAIN}}

    def model_label(self, model: str) -> str:
        """Returns the case's name, or the model's, for the directory of a run."""
        return self.case_path.stem if self.case is not None else model


@dataclasses.dataclass(frozen=True, kw_only=True)
class CaseOptions(CaseFileOptions):
    """Selects the case to verify and its strategies."""

    distribute_fn: str = option(
        DEFAULT_FUNCTIONS["distribute_fn"],
        "Optional function (strategy, global_batch_size) in the case file that returns "
        "what fit gets under the strategy in place of the data set.",
        VERIFICATION,
        metavar="NAME",
    )
    at: tuple[str, ...] = option(
        PLACES,
        "Where to verify a case: the first --steps, the last batch of an epoch, the first"
        " step of the second epoch, the step after save and resume, an evaluation.",
        VERIFICATION,
        metavar=",".join(PLACES),
        choices=PLACES,
    )


def _split_name(case: str) -> tuple[str, str, str]:
    """Splits FILE:NAME; other colons belong to the file name."""
    path, separator, name = case.rpartition(":")
    return (path, separator, name) if separator and name.isidentifier() else (case, "", "")


def _read(path: pathlib.Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"--case={path} cannot be read: {reason_of(error)}") from error


# Options that apply to a case, by command; its file defines the rest.
_USED = {
    *(each.name for each in options_of(DeviceOptions)),
    *("strategy", "strategies", "global_batch_size", "seed"),
    *("out", "overwrite", "verbosity", "deterministic"),
}
_USED_TO_VERIFY = {*_USED, *(each.name for each in options_of(CaseOptions)), "steps", "keep_traces"}
_USED_TO_TRAIN = {
    *_USED,
    *(each.name for each in options_of(TrainedCaseOptions)),
    *(each.name for each in options_of(AllReduceOptions)),
    *(each.name for each in options_of(SavingOptions)),
    *("epochs", "start_timeout_sec", "num_workers", "max_restarts"),
}


def check_verified_case(config: Any) -> None:
    """Checks the options of `verify` with a case.

    Raises:
        ConfigError: the file does not exist, or an option does not apply to a case.
    """
    _check_options(config, _USED_TO_VERIFY)
    _check_strategies("--strategies", config.strategies, CASE_STRATEGIES)
    _check_file(config)


def check_trained_case(config: Any, flag: str, strategies: tuple[str, ...]) -> None:
    """Checks the case options of a command that can train a case, with or without a case.

    Args:
        config: config of the command.
        flag: the flag that selects strategies.
        strategies: all strategies that it trains with.

    Raises:
        ConfigError: the file does not exist, or an option does not apply or needs a case.
    """
    if config.case is None:
        check_no_case(config, TrainedCaseOptions)
        return
    _check_options(config, _USED_TO_TRAIN)
    _check_strategies(flag, strategies, TRAINED_CASE_STRATEGIES)
    _check_file(config)


def check_no_case(config: Any, options: type[CaseFileOptions]) -> None:
    """Checks that options of a case are given only with a case.

    Args:
        config: a config without a case.
        options: the case options of the command.

    Raises:
        ConfigError: such an option is given.
    """
    for each in options_of(options):
        if getattr(config, each.name) != each.default:
            raise ConfigError(f"--{each.name} needs --case=FILE; {_SEE}")
    if KERAS_FIT in getattr(config, "strategies", ()):
        raise ConfigError(f"--strategies={KERAS_FIT} needs --case=FILE; {_SEE}")


def _check_options(config: Any, used: set[str]) -> None:
    for each in options_of(config):
        if each.name not in used and getattr(config, each.name) != each.default:
            raise ConfigError(
                f"--{each.name} has no part in --case, whose file defines model, data and training;"
                " leave the flag out"
            )


def _check_strategies(flag: str, strategies: tuple[str, ...], able: tuple[str, ...]) -> None:
    for name in strategies:
        if name not in able:
            all_of_them = flag == "--strategies"
            advice = f"{flag}={','.join(able)}" if all_of_them else f"one of {', '.join(able)}"
            raise ConfigError(f"{flag}={name} does not run a case; use {advice}")


def _check_file(config: Any) -> None:
    path = config.case_path
    if not path.is_file():
        raise ConfigError(
            f"--case={config.case}: there is no file {path}; name a Python file, or"
            f" {' or '.join(BUILT_IN_CASES)}"
        )
    if path.suffix != ".py":
        raise ConfigError(f"--case={config.case} must be a Python file, whose name ends in .py")
    default = DEFAULT_FUNCTIONS["model_fn"]
    if config.case_model_fn != config.model_fn and config.model_fn != default:
        raise ConfigError(
            f"--case={config.case} and --model_fn={config.model_fn} name two functions; name one"
        )
