"""The whole table: every cause and every detail of the verifier is that of a fault in a row."""

from lockstep.answer.causes import CAUSES, DETAILS, cause_of
from tests.campaigns import scripts, zoo
from tests.verifier import (
    keras_models,
    keras_steps,
    modules,
    outputs,
    recordings,
    test_resumed,
    tokens,
)
from tests.verifier.zoo import CASES

ROWS = [
    *recordings.ROWS, *outputs.ROWS, *modules.ROWS, *keras_steps.ROWS,
    *tokens.ROWS,
    *(row for name in CASES for row in zoo.rows_of(name)),
]  # fmt: skip


def test_every_cause_and_every_detail_has_a_row():
    details = {detail for row in ROWS for detail in row.details}
    details |= {found[1] for *_, found in modules.ON_RANKS.values() if found}
    details |= {cause for entry in scripts.listed() for cause in entry.causes if cause in DETAILS}
    details |= {detail for _, detail, _ in test_resumed.TABLE.values() if detail}
    for *_, found in keras_models.MODELS.values():
        details |= {each.split(": ")[1].rstrip("*?") for each in found}
    # The program itself finds slow replicas, and compares evaluations: `test_straggler`,
    # `test_keras_steps`.
    elsewhere = {"slow_replica", "other_metric", "other_evaluation", "random_evaluation"}
    assert {*DETAILS} - details <= elsewhere
    assert {*CAUSES} == {*map(cause_of, details | elsewhere)}


def test_every_row_has_a_name_of_its_own():
    names = [row.name for row in ROWS]
    assert len({*names}) == len(names) > 400
