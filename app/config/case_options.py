"""Options of a case: a file that defines a model, its loss, its optimizer and its data."""

import dataclasses
import pathlib
from typing import Any

from app.config.distribution_options import DeviceOptions
from app.config.names import CASE_STRATEGIES, KERAS_FIT, MODEL_AND_DATA
from app.config.option import option, options_of
from app.runtime.errors import ConfigError

# The built-in models with their recipes.
BUILT_IN_CASES = ("lenet", "resnet18")
_BUILT_IN = pathlib.Path(__file__).parents[1] / "training" / "builtin_cases"
_SEE = "see docs/verify_your_own.md"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CaseOptions:
    """Selects the case to verify."""

    case: str | None = option(
        None,
        "Your own training: a Python file with model(), which returns a compiled Keras model, and"
        " data(global_batch_size), which returns a tf.data.Dataset. FILE:NAME takes the model of"
        " function NAME; lenet and resnet18 are built in. See docs/verify_your_own.md.",
        MODEL_AND_DATA,
        metavar="FILE",
    )

    @property
    def case_path(self) -> pathlib.Path:
        """The path of the case file."""
        name, _ = _split_name(self.case or "")
        path = pathlib.Path(name)
        if name in BUILT_IN_CASES and not path.exists():
            return _BUILT_IN / f"case_{name}.py"
        return path

    @property
    def case_function(self) -> str:
        """The name of the function that returns the model."""
        return _split_name(self.case or "")[1]


def _split_name(case: str) -> tuple[str, str]:
    """Splits FILE:NAME; other colons belong to the file name."""
    path, _, name = case.rpartition(":")
    return (path, name) if path and name.isidentifier() else (case, "model")


# Options that apply to a case; its file defines the rest.
_USED = {
    *(each.name for each in options_of(DeviceOptions)),
    *("case", "strategies", "global_batch_size", "seed", "steps", "keep_traces"),
    *("out", "overwrite", "verbosity"),
}


def check_verified_case(config: Any) -> None:
    """Checks the options of `verify` with a case.

    Raises:
        ConfigError: the file does not exist, or an option does not apply to a case.
    """
    for each in options_of(config):
        if each.name not in _USED and getattr(config, each.name) != each.default:
            raise ConfigError(
                f"--{each.name} has no part in --case, whose file defines model, data and training;"
                " leave the flag out"
            )
    for name in config.strategies:
        if name not in CASE_STRATEGIES:
            advice = f"--strategies={','.join(CASE_STRATEGIES)}"
            raise ConfigError(f"--strategies={name} does not run a case; use {advice}")
    path = config.case_path
    if not path.is_file():
        raise ConfigError(
            f"--case={config.case}: there is no file {path}; name a Python file, or"
            f" {' or '.join(BUILT_IN_CASES)}"
        )
    if path.suffix != ".py":
        raise ConfigError(f"--case={config.case} must be a Python file, whose name ends in .py")


def check_no_case(config: Any) -> None:
    """Checks that strategies of a case are given only with a case.

    Raises:
        ConfigError: such a strategy is given.
    """
    if KERAS_FIT in config.strategies:
        raise ConfigError(f"--strategies={KERAS_FIT} needs --case=FILE; {_SEE}")
