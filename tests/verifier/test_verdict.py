"""What is said of a verdict: names and remedies, sentences, lines, the JSON, the page."""

import ast
import dataclasses
import json

import jsonschema
import pytest

from lockstep.answer.html import cell_of, page_of
from lockstep.answer.json import record_of, record_of_all
from lockstep.answer.names import CODE, FROM, MODULES, NAMES, WAS, advice_of, details_of
from lockstep.answer.text import (
    describe,
    facts_of,
    line_of,
    measured_text,
    named_steps,
    sentence_of,
)
from lockstep.engine.patterns import TABLE
from lockstep.engine.verdict import (
    BY_DESIGN,
    CLEAN,
    EXIT_CODE_OF,
    FAULT,
    NODES,
    NOT_COMPARED,
    NOT_VERIFIED,
    NOTHING,
    Measured,
    Place,
    Verdict,
)
from tests.conftest import ROOT

PLACE = Place("sum", 0, ("a.weight", "a.bias"), 14, ("replica 1",), "rows 0 to 3 of 8")
FOUND = Verdict(
    FAULT, PLACE, ("a.weight on rank 0 = 1·g0 + 0·g1; in the reference 0.5·g0 + 0.5·g1",),
    "not_all_reduced", reason="each rank has its own gradient", training="two.npz",
    reference="training of one.npz", framework="torch", num_replicas=2, steps=(0, 1),
    measured=(Measured("outputs", 0.0, 8, 8), Measured("sum", 340.0, 3, 14)), tolerance="8 units",
)  # fmt: skip
RIGHT = dataclasses.replace(FOUND, status=CLEAN, place=None, formula=(), name="", reason="")
NUM_DETAILS = 110  # Of version 3 of the JSON.


@pytest.fixture(autouse=True)
def width(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")


def but(verdict=FOUND, **changes):
    return dataclasses.replace(verdict, **changes)


def test_each_detail_has_one_name_and_each_name_is_given():
    details = [detail for name in NAMES for detail in details_of(name)]
    assert len({*details}) == len(details) == NUM_DETAILS and details_of("") == []
    assert WAS.keys() <= NAMES.keys() == {row.name for row in TABLE}


def test_each_example_of_a_remedy_is_python():
    for examples in CODE.values():
        assert examples.keys() <= NAMES.keys() and all(new for _, new in examples.values())
        assert all(ast.parse(line) for lines in examples.values() for line in filter(None, lines))


def test_without_a_name_it_is_said_where_to_look():
    assert FROM.keys() == NODES.keys() and len({*FROM.values()}) == len(NODES)
    for node in NODES:
        unknown = but(name="", place=Place(node, 1))
        assert sentence_of(unknown).endswith(f": unexplained difference in step 1 ({node})")
        advice = FROM[node] + (f"; {MODULES}" if node in ("outputs", "gradient") else "")
        assert facts_of(unknown)["next"] == advice_of(unknown) == advice
        assert advice_of(but(unknown, framework="jax")) == FROM[node]


@pytest.mark.parametrize("verdict, told", [
    (FOUND, "is not the training of one.npz: not all-reduced in step 0 (sum)"),
    (RIGHT, "is the training of one.npz: no difference beyond rounding"),
    (but(RIGHT, measured=FOUND.measured[:1]), "is the training of one.npz: bitwise equal"),
    (but(RIGHT, notes=("a", "b"), num_unknown=1), "is the training of one.npz where it was"
     " compared: no difference beyond rounding; not compared: 1 element of the state, whose"
     " gradients are rounding alone; see the 2 notes below"),
    (but(status=BY_DESIGN, name="local_statistics"), "differs from the training of one.npz by"
     " design: layers that normalise each rank's examples; no fault found"),
    (but(status=NOT_COMPARED, name=""), "was not compared with the training of one.npz:"
     " unexplained difference in step 0 (sum), which may be right"),
    (but(RIGHT, status=NOT_VERIFIED, missing=("a", "b")), "is not verified: a; b"),
    (but(RIGHT, status=NOTHING, missing=("a",)), "has nothing to verify: a"),
])  # fmt: skip
def test_the_verdict_is_one_sentence(verdict, told):
    assert sentence_of(verdict) == f"two.npz {told}"
    assert describe([verdict]).startswith(sentence_of(verdict))


def test_a_verdict_says_where_how_why_and_what_to_do():
    assert describe([but(notes=("steps 3 differ",), remarks=("reproducible",))]).splitlines() == [
        "two.npz is not the training of one.npz: not all-reduced in step 0 (sum)",
        "  where         step 0, sum: what each rank gets of the gradients of all, before clipping;"
        " 2 of 14",
        "                tensors: a.weight, a.bias; of the first, rows 0 to 3 of 8; replica 1",
        "  formula       a.weight on rank 0 = 1·g0 + 0·g1; in the reference 0.5·g0 + 0.5·g1",
        "                (gN is the gradient that rank N computed)",
        "  why           each rank has its own gradient",
        "  meaning       Ranks use their own gradients of these weights, not the sum over all"
        " ranks.",
        "  to do         all-reduce the gradients of all weights before the update; with DDP, call"
        " `ddp(x)`,",
        "                not `ddp.module(x)`, and the last backward pass of a step not under"
        " `no_sync()`",
        "  +             dist.all_reduce(weight.grad, op=dist.ReduceOp.AVG)",
        "  not compared  steps 3 differ",
        "  note          reproducible",
    ]
    assert line_of(FOUND) == (
        "not all-reduced in step 0 (sum), 2 of 14 tensors: a.weight, a.bias, of the first, rows 0"
        " to 3 of 8, replica 1: each rank has its own gradient"
    )
    shown = describe([RIGHT, FOUND, RIGHT, RIGHT]).split("\n\n")
    assert [len(block.splitlines()) for block in shown] == [1, 10, 2]


def test_a_verdict_has_at_most_12_lines_without_details(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    names = tuple(f"layers.{i}.attention.projection.weight" for i in range(9))
    for name in (*NAMES, ""):
        framework = next((f for f, examples in CODE.items() if name in examples), "torch")
        verdict = but(
            place=dataclasses.replace(PLACE, tensors=names), name=name,
            framework=framework, notes=("note " * 40,) * 3, formula=FOUND.formula * 9,
        )  # fmt: skip
        lines = describe([verdict]).splitlines()
        labels = {line[2:16].strip() for line in lines[1:] if line[2] != " "}
        assert len(lines) <= 12 and max(map(len, lines[1:])) <= 64
        assert {"where", "formula", "why", "to do" if name else "next"} <= labels
        assert names[8] not in describe([verdict])
        assert names[8] in "".join(describe([verdict], details=True).split())


def test_details_have_every_node_and_the_tolerance():
    details = describe([FOUND], details=True).splitlines()
    assert "  compared   2 steps on 2 ranks" in details and "  tolerance  8 units" in details
    assert "  outputs    bitwise equal" in details and "  start      not measured" in details
    assert "  sum        340 times what rounding allows; 3 of 14 arrays bitwise equal" in details
    for share, told in ((0.21, "0.21 of what rounding allows"), (float("nan"), "differs"),
                        (2.4e35, "differs"), (1.0, "1 of what rounding allows")):  # fmt: skip
        assert measured_text(Measured("sum", share, 0, 1)).partition(";")[0] == told
    assert describe([FOUND]).find("340") < 0


def test_a_formula_that_is_the_references_is_not_shown():
    equal = "x on rank 0 = -0.0984976·G; in the reference -0.0984976·G"
    assert "formula" not in facts_of(but(formula=(equal,)))
    both = facts_of(but(formula=(equal, *FOUND.formula)))["formula"]
    assert "0.0984976" not in both and both.startswith("a.weight")
    many = facts_of(but(formula=tuple(f"x on rank {i} = 2·G" for i in range(5))))["formula"]
    assert many.splitlines()[1:] == ["x on rank 1 = 2·G", "3 more: --details",
                                     "(G is the reference's gradient)"]  # fmt: skip


def test_what_could_not_be_compared_is_told_with_how_to_compare_it():
    doubtful = but(status=NOT_COMPARED)
    assert not doubtful.ok
    assert 'replay="two.npz", shards="each"' in facts_of(doubtful)["to compare"]
    assert "random layers to 0" in facts_of(but(doubtful, framework="jax"))["to compare"]
    assert not {"to do", "next", "+"} & {*facts_of(doubtful)}
    assert record_of(doubtful)["code"] == "" and "shards=" in record_of(doubtful)["remedy"]
    (_, note) = describe([but(RIGHT, notes=("not compared: a",))]).splitlines()
    assert note == "  not compared  a"


def test_the_json_has_each_key_and_number_that_its_schema_names():
    schema = json.loads((ROOT / "lockstep" / "verify.schema.json").read_text("utf-8"))
    definitions = schema["$defs"]
    assert definitions["node"]["enum"] == [*NODES]
    assert {*definitions["status"]["enum"]} == {*EXIT_CODE_OF}
    for each in (schema, *(definitions[name] for name in ("training", "place", "measured"))):
        assert {*each["required"]} == {*each["properties"]}
    far = but(measured=(Measured("sum", float("inf"), 0, 1),), step_names={0: "step 1"})
    record = json.loads(json.dumps(record_of_all({"two.npz": far})), parse_constant=pytest.fail)
    jsonschema.validate(record, schema)
    found = record["trainings"]["two.npz"]
    assert found["place"] == {**dataclasses.asdict(PLACE), "step": "step 1",
                              "tensors": [*PLACE.tensors], "ranks": ["replica 1"]}  # fmt: skip
    assert found["nodes"]["sum"] == {"share": None, "equal": 0, "arrays": 1}
    assert found["nodes"]["update"] == "not measured" and found["formula"] == [*FOUND.formula]
    assert found["code"] == "+ dist.all_reduce(weight.grad, op=dist.ReduceOp.AVG)"
    assert json.loads(far.to_json()) == found


def test_consecutive_steps_are_joined():
    for steps, text in (
        ((1, 2, 3, 4), "steps 1 to 4"), ((1, 2), "step 1, step 2"),
        ((1, 2, 4), "step 1, step 2, step 4"), ((), ""),
    ):  # fmt: skip
        assert ", ".join(named_steps([f"step {number}" for number in steps])) == text


def test_names_of_users_change_neither_the_terminal_nor_the_page():
    hostile = "line\nbreak\x1b[31m<script>"
    place = dataclasses.replace(PLACE, tensors=(hostile,), ranks=(hostile,), module=hostile)
    found = but(
        place=place, training=hostile, reference=hostile, reason=hostile, formula=(hostile,),
        notes=(hostile,), remarks=(hostile,), missing=(hostile,), tolerance=hostile, error=hostile,
    )  # fmt: skip
    for verdict in (found, but(found, status=NOT_VERIFIED)):
        for details in (False, True):
            text = describe([verdict], details=details)
            assert all(line.isprintable() for line in text.split("\n"))
        assert "<script>" not in page_of([verdict]) and line_of(verdict).isprintable()


def test_the_page_says_what_the_terminal_says():
    page = page_of([RIGHT, but(training="x", notes=("a note",), remarks=("a remark",))])
    for text in (sentence_of(RIGHT), *NODES.values(), *FOUND.formula, "a note", "a remark"):
        assert text.replace("'", "&#x27;") in page
    cells = [cell_of(each) for each in record_of(FOUND)["nodes"].values()]
    assert cells == ["–", "–", "–", "bitwise equal", "–", "–", "✗ 340", "–", "–", "–"]
    assert "No step without a fault" in page_of([but(measured=())]) and "<table" in page
    shares = (None, 0, "✗ differs"), (0.0, 1, "0"), (0.07, 0, "0.07")
    for share, equal, text in shares:
        assert cell_of({"share": share, "equal": equal, "arrays": 2}) == text
