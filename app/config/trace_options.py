"""Options of traces: the files that `verify --traces` compares, and how."""

import dataclasses
from typing import Any

from app.config.names import VERIFICATION
from app.config.option import option, options_of
from app.runtime.errors import ConfigError

_SEE = "see docs/verify_your_own.md"
_USED = {"out", "overwrite", "verbosity"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TraceOptions:
    """Selects the traces to verify."""

    traces: tuple[str, ...] = option(
        (),
        "Recordings of your own script, in any framework. The first is the reference, the"
        " others are compared with it. A recording with permute= sets the tolerance. See "
        "docs/trace_format.md.",
        VERIFICATION,
        metavar="FILE,FILE,…",
    )
    name_map: tuple[str, ...] = option(
        (),
        "Names of weights in the other recordings and in the first one, where names and "
        "shapes do not match.",
        VERIFICATION,
        metavar="OTHER=FIRST,…",
    )
    tolerance: float | None = option(
        None,
        "Relative difference of gradients that counts as rounding. Default: from a "
        "recording with permute=, else 1e-4.",
        VERIFICATION,
        metavar="X",
        above=0,
        high=1,
    )

    @property
    def names(self) -> dict[str, str]:
        """The name map: name in the other traces → name in the first trace."""
        return dict(pair.split("=", 1) for pair in self.name_map)


def check_traces(config: Any) -> None:
    """Checks the options of `verify` with traces.

    Raises:
        ConfigError: an option does not apply, or the name map is invalid.
    """
    used = {*_USED, *(each.name for each in options_of(TraceOptions))}
    for each in options_of(config):
        default = each.default if each.name != "strategies" else config.strategies
        if each.name not in used and getattr(config, each.name) != default:
            raise ConfigError(
                f"--{each.name} has no part in --traces, which only reads recordings; leave the"
                " flag out"
            )
    for pair in config.name_map:
        if pair.count("=") != 1 or not all(pair.split("=")):
            raise ConfigError(
                f"--name_map={pair} must be OTHER=FIRST, the names of a weight in two recordings"
            )


def check_no_traces(config: Any) -> None:
    """Checks that options of traces are given only with `--traces`.

    Raises:
        ConfigError: such an option is given without it.
    """
    for each in options_of(TraceOptions):
        if getattr(config, each.name) != each.default:
            raise ConfigError(f"--{each.name} needs --traces=FILE,FILE; {_SEE}")
