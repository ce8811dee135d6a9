"""Runs `verify --traces`: verifies recordings of users' scripts and reports the findings."""

import pathlib
from collections.abc import Sequence

from app.options import Config
from app.runtime.errors import ConfigError, DataError
from app.runtime.progress_bar import StepProgress
from app.verification.output import Results, Run, verify_in_directory
from lockstep.answer.text import count, one_line
from lockstep.comparison import compare_traces
from lockstep.data.file import load
from lockstep.data.match import NamesError
from lockstep.data.trace import Trace


def verify_traces(config: Config) -> dict[str, Run]:
    """Verifies each recording on its own, and all further ones against the first.

    Returns:
        Name of the recording → result.

    Raises:
        DataError: a recording is damaged, or has nothing in common with the first.
        ConfigError: the results would replace a recording.
        MismatchError: a recording has a fault.
    """
    given = config.verification
    _require_elsewhere(config)
    traces = [_load(name) for name in given.traces]
    fields = {
        "traces": [str(pathlib.Path(name).resolve()) for name in given.traces],
        "name_map": list(given.name_map),
        "tolerance": given.tolerance,
    }

    def verify(_: pathlib.Path) -> Results:
        return Results(_verify(config, traces), facts={"traces": fields["traces"]}, setup={})

    return verify_in_directory(config, pathlib.Path(traces[-1].name).stem, fields, verify)


def _require_elsewhere(config: Config) -> None:
    """Raises ConfigError if the results would replace the recordings."""
    out = pathlib.Path(config.output.out).expanduser().resolve() if config.output.out else None
    for name in config.verification.traces:
        if out and out in pathlib.Path(name).expanduser().resolve().parents:
            raise ConfigError(
                f"--out={config.output.out} has the recording {name}, which the results would"
                " replace; choose another directory"
            )


def _load(name: str) -> Trace:
    try:
        return load(pathlib.Path(name).expanduser())
    except ValueError as error:
        raise DataError(one_line(error)) from error


def _verify(config: Config, traces: Sequence[Trace]) -> dict[str, Run]:
    shown = [trace for trace in traces if trace.about.permuted is None]
    with StepProgress(sum(len(trace.steps) for trace in shown)) as progress:
        progress.start("comparing recordings")
        try:
            verdicts = compare_traces(
                traces,
                config.verification.names,
                config.verification.tolerance,
                lambda step: progress.message(("step", step)),
            )
        except NamesError as error:
            raise ConfigError(one_line(error)) from error
        except ValueError as error:
            raise DataError(one_line(error)) from error
    return {
        name: Run(verdict, versions=trace.about.versions, about=_about(trace))
        for trace, (name, verdict) in zip(shown, verdicts.items(), strict=True)
    }


def _about(trace: Trace) -> str:
    """Returns a description of a recording."""
    about = trace.about
    texts = [f"{about.framework} {about.versions.get(about.framework, '')}".rstrip()]
    texts.append(count("replica", about.num_replicas))
    if about.replayed:
        texts.append(f"from the states of {pathlib.Path(about.replayed).name}")
    return ", ".join(texts)
