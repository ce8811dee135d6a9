"""Runs `verify --traces`: verifies recordings of users' scripts and reports the findings."""

import pathlib
from collections.abc import Sequence

from app.options import Config
from app.records.run_directory import default_out, named_path, open_command_directory
from app.runtime.errors import ConfigError, DataError
from app.runtime.progress_bar import StepProgress
from app.verification import output
from app.verification.output import Run
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
        MismatchError: a recording has a fault.
    """
    given = config.verification
    traces = [_load(name) for name in given.traces]
    path = named_path(
        config.output.out or default_out("verify", pathlib.Path(traces[-1].name).stem)
    )
    fields = {
        "command": "verify",
        "traces": [str(pathlib.Path(name).resolve()) for name in given.traces],
        "name_map": list(given.name_map),
        "tolerance": given.tolerance,
    }
    with open_command_directory(path, fields, overwrite=config.output.overwrite) as run_directory:
        runs = _verify(config, traces)
        run_directory.start(overwrite=config.output.overwrite)
        output.report(path, runs, facts={"traces": fields["traces"]}, setup={})
        output.require_verified(path, runs)
    return runs


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
