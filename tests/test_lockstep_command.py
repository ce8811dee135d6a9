"""The package's command and function: `python -m lockstep`, `lockstep.compare`."""

import json
import os
import re
import subprocess
import sys

import jsonschema
import pytest

import lockstep
from conftest import ROOT, assert_ok, run_python
from lockstep.__main__ import main
from lockstep.answer.verdict import EXIT_CODE_OF, STAGES
from lockstep.data.file import load
from script_samples import Script


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Recordings: on one device, on two, without an all-reduce, without gradients, damaged."""
    folder = tmp_path_factory.mktemp("recordings")
    one = Script()
    one.write(folder / "one.npz")
    Script(replicas=2, replay=one).write(folder / "two.npz")
    Script(replicas=2, replay=one, reduce=None).write(folder / "wrong.npz")
    still = Script(gradient=lambda script, replica, gradients: [0 * g for g in gradients])
    still.write(folder / "still.npz")
    (folder / "damaged.npz").write_bytes((folder / "one.npz").read_bytes()[:-100])
    return folder


@pytest.mark.parametrize(
    "names, flags, code, told",
    [
        (("one", "two"), (), 0, "two.npz is the training of one.npz: every checked stage is clean"),
        (("one", "wrong"), (), 9, "wrong.npz, fault: not all-reduced"),
        (("one",), (), 0, "one.npz has no fault in itself"),
        (("one", "two"), ("--tolerance=0.5", "--details"), 0, "0.5, given by --tolerance"),
        (("one", "wrong"), ("--details",), 9, "all-reduce      fault: the gradients that each"),
        (("still",), (), 3, "still.npz: nothing to verify: every gradient is 0"),
        (("one", "still"), (), 9, "still.npz, fault: frozen"),
        (("damaged",), (), 3, "damaged.npz"),
        (("none",), (), 3, "none.npz"),
        (("one", "two"), ("--name_map=a=b",), 2, "a"),
    ],
)
def test_the_exit_code_and_the_verdict(files, capsys, names, flags, code, told):
    assert main([*(str(files / f"{name}.npz") for name in names), *flags]) == code
    shown = capsys.readouterr()
    assert told in shown.out + shown.err
    assert len(shown.err.splitlines()) == (code in (2, 3) and not shown.out)


@pytest.mark.parametrize(
    "flags, told",
    [
        (("--tolerance=2", "a.npz"), "argument --tolerance: must be at least 0 and less than 1"),
        (("--tolerance=x", "a.npz"), "less than 1, got x"),
        (("--name_map=a", "a.npz"), "argument --name_map: a is not NAME=NAME"),
        (("--detail", "a.npz"), "unrecognized arguments: --detail"),
        (("--line\nbreak", "a.npz"), "unrecognized arguments: --line break"),
        ((), "required: FILE; see lockstep --help"),
        (("show",), "required: FILE; see lockstep show --help"),
        (("show", "a.npz", "--json"), "unrecognized arguments: --json"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(capsys, flags, told):
    with pytest.raises(SystemExit) as refused:
        main(flags)
    (line,) = capsys.readouterr().err.splitlines()
    assert refused.value.code == 2 and line.startswith("error: ") and told in line


def strict(schema):
    """Returns a JSON Schema that allows no other keys than its own."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: strict(value) for key, value in schema.items()}
    if schema.get("type") == "object" and "properties" in schema:
        closed["additionalProperties"] = False
    return closed


def test_the_json_is_as_its_schema_says(files, capsys):
    schema = json.loads((ROOT / "lockstep" / "verify.schema.json").read_text("utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    definitions = schema["$defs"]
    assert definitions["stage"]["enum"] == [*STAGES]
    assert {*definitions["status"]["enum"]} == {*EXIT_CODE_OF}
    for each in (schema, definitions["training"], definitions["finding"]):
        assert each["required"] and {*each["required"]} == {*each["properties"]}
        told = ("description", "const", "enum", "$ref", "required")
        assert all({*told} & {*key} for key in each["properties"].values())
    for names in (("one",), ("one", "two", "wrong"), ("still",), ("one", "still")):
        code = main([*(str(files / f"{name}.npz") for name in names), "--json"])
        record = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
        jsonschema.validate(record, strict(schema))
        assert record["exit_code"] == code and {*record["trainings"]} == {f"{n}.npz" for n in names}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**record, "status": "well"}, schema)


def test_the_json_has_a_verdict_for_each_recording(files, capsys):
    assert main([str(files / "one.npz"), str(files / "wrong.npz"), "--json"]) == 9
    record = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert (record["format"], record["version"]) == ("lockstep verify", 3)
    assert (record["status"], record["exit_code_means"]) == ("fault", "a fault")
    assert record["trainings"]["one.npz"]["status"] == "clean"
    wrong = record["trainings"]["wrong.npz"]
    assert wrong["reference"] == "training of one.npz" and wrong["stages"]["all-reduce"] == "fault"
    assert "not_all_reduced" in [finding["detail"] for finding in wrong["findings"]]
    assert {f["detail"]: f["cause"] for f in wrong["findings"]} == {
        f.detail: f.cause for f in lockstep.compare(files / "one.npz", files / "wrong.npz").findings
    }
    assert wrong["findings"][0]["remedy"].startswith("call the wrapped model")
    assert wrong["findings"][0]["code"] == "- output = ddp.module(x)\n+ output = ddp(x)"
    assert "evaluation" in wrong["not_checked"]["stages"] and wrong["not_checked"]["steps"] == {}


def test_show_lists_what_a_recording_holds(files, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["show", *(str(files / f"{name}.npz") for name in ("one", "two"))]) == 0
    one, two = re.split(r"\n\n(?=\S*two\.npz)", capsys.readouterr().out)
    assert re.search(r"num replicas +1\n", one) and re.search(r"num replicas +2\n", two)
    assert "\n2 weights\n" in one and re.search(r"dense/kernel +12 × 3 float32\n", one)
    assert re.search(r"raw +16 in 4 steps of 2 replicas; [\d,]+ bytes\n", two)
    assert re.search(r"data +4 in 4 steps of 1 replica; .* bytes; 16 × 12 float", one)
    lines = [*one.splitlines()[1:], *two.splitlines()[1:]]  # The first has the path.
    assert not [line for line in lines if len(line) > 80]
    assert main(["show", str(files / "one.npz"), "--details"]) == 0
    assert "variables\n" in capsys.readouterr().out
    assert main(["show", str(files / "damaged.npz")]) == 3
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_any_terminal_shows_any_name_and_a_closed_pipe_keeps_the_exit_code(files, tmp_path):
    path = tmp_path / "ünï \N{CJK UNIFIED IDEOGRAPH-6728}.npz"
    path.write_bytes((files / "one.npz").read_bytes())
    result = run_python("-m", "lockstep", path, env={"PYTHONIOENCODING": "ascii"})
    assert result.returncode == 0 and result.stdout.startswith(r"\xfcn\xef \u6728.npz has no fault")
    command = f"'{sys.executable}' -m lockstep one.npz wrong.npz --json"
    for end, code, lines in (("| true; exit ${PIPESTATUS[0]}", 9, 0), ("> /dev/full", 1, 1)):
        result = subprocess.run(
            ["bash", "-c", f"{command} {end}"], cwd=files, capture_output=True, text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False,
        )  # fmt: skip
        assert (result.returncode, len(result.stderr.splitlines())) == (code, lines), result.stderr


def test_recordings_are_compared_from_python(files):
    verdict = lockstep.compare(files / "one.npz", str(files / "wrong.npz"))
    assert not verdict.ok and verdict.faults[0].detail == "not_all_reduced"
    assert json.loads(verdict.to_json())["status"] == "fault"
    one = load(files / "one.npz")
    assert lockstep.compare(one).ok and lockstep.compare(one, files / "two.npz").ok
    with pytest.raises(lockstep.TraceError, match=r"damaged\.npz"):
        lockstep.compare(files / "damaged.npz")
    with pytest.raises(ValueError, match="not both"):
        lockstep.compare(one, one, model=object())


def test_the_package_needs_no_framework(files):
    code = (
        "import sys, lockstep; assert lockstep.compare(*sys.argv[1:]).ok;"
        "assert not {'tensorflow', 'keras', 'torch', 'jax', 'absl', 'app'} & set(sys.modules)"
    )
    assert_ok(run_python("-c", code, files / "one.npz", files / "two.npz"))
