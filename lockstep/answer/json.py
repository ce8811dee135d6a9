"""Returns verdicts as plain data for programs: the record that docs/for_agents.md describes.

`verify.schema.json` is its JSON Schema.
"""

import math
from collections.abc import Mapping
from typing import Any

import lockstep
from lockstep.answer.causes import code_of, words_of
from lockstep.answer.text import advice_of, notes_of, sentence_of
from lockstep.answer.verdict import EXIT_CODE_OF, STAGES, Finding, Verdict, worst

EXIT_CODES = {  # The same as of `verify`.
    0: "no fault",
    9: "a fault",
    3: "a recording cannot be read, has nothing to verify, or is not verified or not compared",
    2: "wrong arguments",
}


def record_of_all(verdicts: Mapping[str, Verdict]) -> dict[str, Any]:
    """Returns verdicts as plain data, as in `verify.json`, with the exit code of the command."""
    status = worst(verdict.status for verdict in verdicts.values())
    code = EXIT_CODE_OF[status]
    return {
        "format": "lockstep verify",
        "version": 3,
        "lockstep": lockstep.__version__,
        "status": status,
        "exit_code": code,
        "exit_code_means": EXIT_CODES[code],
        "trainings": {name: record_of(verdict) for name, verdict in verdicts.items()},
    }


def record_of(verdict: Verdict) -> dict[str, Any]:
    """Returns a verdict as plain data, without its measurements."""
    stages = {stage: verdict.status_of(stage) for stage in STAGES}
    return {
        "reference": verdict.reference,
        "framework": verdict.framework,
        "status": verdict.status,
        "sentence": sentence_of(verdict),
        "num_replicas": verdict.num_replicas,
        "steps": [verdict.name_of(step) for step in verdict.steps],
        "stages": {stage: s for stage, s in stages.items() if s != "not checked"},
        "findings": [_record_of_finding(finding, verdict) for finding in verdict.findings],
        "tolerance": verdict.tolerance,
        "notes": notes_of(verdict),
        "not_checked": {
            "stages": [stage for stage, status in stages.items() if status == "not checked"],
            "steps": {verdict.name_of(step): why for step, why in verdict.idle.items()},
            "training": list(verdict.unverified),
            "elements": verdict.unknown_elements,
            "weights": list(verdict.unknown_weights),
        },
    }


def _record_of_finding(finding: Finding, verdict: Verdict) -> dict[str, Any]:
    code = code_of(finding.detail, verdict.framework, finding.seen)
    shown = ("stage", "status", "cause", "detail", "text", "module", "items", "tensors")
    return {name: getattr(finding, name) for name in shown} | {
        "title": words_of(finding.detail),
        "steps": [verdict.name_of(step) for step in finding.steps],
        "remedy": advice_of(finding, verdict),
        "code": "\n".join(f"{sign} {line}" for sign, line in code.items()),
        "distance": finite(finding.distance),
        "allowed": finite(finding.allowed),
    }


def columns_of(verdict: Verdict) -> dict[str, list]:
    """Returns the measurements of a verdict as columns, so that each name is written once.

    Steps are positions in the list of the checked steps.
    """
    position = {step: index for index, step in enumerate(verdict.steps)}
    names = ("stage", "tensor", "item", "distance", "allowed", "same_bits")
    columns: dict[str, list] = {"step": [position[m.step] for m in verdict.measurements]}
    columns |= {name: [getattr(m, name) for m in verdict.measurements] for name in names}
    for name in ("distance", "allowed"):
        columns[name] = [finite(value) for value in columns[name]]
    return columns


def finite(value: float) -> float | None:
    """Returns a number that JSON has; None for NaN and infinity."""
    return value if math.isfinite(value) else None
