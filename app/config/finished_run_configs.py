"""Defines the options of the commands `evaluate` and `report`."""

import dataclasses
from typing import ClassVar

from app.config import constraints
from app.config.base_config import Config
from app.config.distribution_options import (
    StrategyOptions,
)
from app.config.model_options import (
    DataFileOptions,
)
from app.config.names import (
    FINISHED_RUN,
    ONE_MACHINE_STRATEGIES,
    OUTPUT,
    WORDS,
)
from app.config.option import option, same_option
from app.config.run_options import OutputOptions, VerbosityOptions
from app.runtime.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluateConfig(StrategyOptions, DataFileOptions, VerbosityOptions, Config):
    """The options of `evaluate`."""

    command: ClassVar[str] = "evaluate"
    summary: ClassVar[str] = "computes the test accuracy of a run, or classifies images"
    first_group: ClassVar[str] = FINISHED_RUN
    examples: ClassVar[tuple[str, ...]] = (
        "--run=runs/NAME --strategy=mirrored --num_devices=4",
        "--run=runs/NAME --images=shoe.png,bags.npy",
    )

    strategy: str = same_option(StrategyOptions, "strategy", choices=ONE_MACHINE_STRATEGIES)
    run: str = option("", "Directory of the run.", FINISHED_RUN, metavar="DIR", required=True)
    images: tuple[str, ...] = option((), "Images to classify.", FINISHED_RUN, metavar="A.png,B.npy")

    def check(self) -> None:
        """Checks combinations of options."""
        constraints.check_devices(self)
        constraints.check_single("--strategy", (self.strategy,), self.num_devices or self.num_gpus)
        constraints.check_data_files(self, "--images" if self.images else "")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportConfig(Config):
    """The options of `report`."""

    command: ClassVar[str] = "report"
    summary: ClassVar[str] = "writes a page about runs"
    first_group: ClassVar[str] = OUTPUT
    examples: ClassVar[tuple[str, ...]] = ("runs/first runs/second --out=report.html",)

    out: str | None = same_option(OutputOptions, "out", help="File to write.", metavar="FILE")
    directories: tuple[str, ...] = option(
        (), "Directories of runs.", WORDS, metavar="DIR …", positional=True
    )

    def check(self) -> None:
        """Checks that there is a directory."""
        if not self.directories:
            raise ConfigError("report needs the directory of a run; for example: report runs/*")
