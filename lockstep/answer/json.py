"""Returns verdicts as plain data for programs: the record that docs/for_agents.md describes.

`verify.schema.json` is its JSON Schema.
"""

import math
from collections.abc import Mapping
from typing import Any

import lockstep
from lockstep.answer.names import advice_of, code_of, details_of, title_of
from lockstep.answer.text import NOT_MEASURED, facts_of, nodes_of, notes_of, sentence_of
from lockstep.engine.verdict import EXIT_CODE_OF, Measured, Place, Verdict, worst

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
        "version": 4,
        "lockstep": lockstep.__version__,
        "status": status,
        "exit_code": code,
        "exit_code_means": EXIT_CODES[code],
        "trainings": {name: record_of(verdict) for name, verdict in verdicts.items()},
    }


def record_of(verdict: Verdict) -> dict[str, Any]:
    """Returns a verdict as plain data."""
    code = code_of(verdict)
    return {
        "reference": verdict.reference,
        "framework": verdict.framework,
        "status": verdict.status,
        "sentence": sentence_of(verdict),
        "num_replicas": verdict.num_replicas,
        "steps": [verdict.name_of(step) for step in verdict.steps],
        "place": _record_of_place(verdict.place, verdict) if verdict.place else None,
        "formula": list(verdict.formula),
        "facts": facts_of(verdict),
        "name": verdict.name,
        "was": details_of(verdict.name),
        "title": title_of(verdict) if verdict.place else "",
        "reason": verdict.reason,
        "remedy": advice_of(verdict),
        "code": "\n".join(f"{sign} {line}" for sign, line in code.items()),
        "nodes": {node: record_of_node(each) for node, each in nodes_of(verdict).items()},
        "missing": list(verdict.missing),
        "notes": notes_of(verdict),
        "remarks": list(verdict.remarks),
        "num_unknown": verdict.num_unknown,
        "tolerance": verdict.tolerance,
        "error": verdict.error,
    }


def _record_of_place(place: Place, verdict: Verdict) -> dict[str, Any]:
    return {
        "node": place.node,
        "step": verdict.name_of(place.step),
        "tensors": list(place.tensors),
        "num_tensors": place.num_tensors,
        "ranks": list(place.ranks),
        "where": place.where,
        "module": place.module,
    }


def record_of_node(measured: Measured | None) -> dict[str, Any] | str:
    """Returns how far a node is from the reference's, or that it was not measured."""
    if measured is None:
        return NOT_MEASURED
    share = measured.share if math.isfinite(measured.share) else None
    return {"share": share, "equal": measured.num_equal, "arrays": measured.num_arrays}
