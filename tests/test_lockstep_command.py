"""The package's command and function: `python -m lockstep`, `lockstep.compare`."""

import json

import pytest

import lockstep
from conftest import assert_ok, run_python
from lockstep.__main__ import main
from lockstep.trace_file import load
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
        (("one", "two"), (), 0, "two.npz is the training of one.npz: every stage is clean"),
        (("one", "wrong"), (), 9, "FAULT: not all reduced"),
        (("one",), (), 0, "one.npz has no fault in itself"),
        (("one", "two"), ("--tolerance=0.5",), 0, "tolerances: 0.5, given by --tolerance"),
        (("still",), (), 3, "still.npz: nothing to verify: every gradient is 0"),
        (("one", "still"), (), 9, "FAULT: frozen"),
        (("damaged",), (), 3, "damaged.npz"),
        (("none",), (), 3, "none.npz"),
        (("one",), ("--name_map=a",), 2, "--name_map=a: is not NAME=NAME"),
        (("one", "two"), ("--name_map=a=b",), 2, "a"),
    ],
)
def test_the_exit_code_and_the_verdict(files, capsys, names, flags, code, told):
    assert main([*(str(files / f"{name}.npz") for name in names), *flags]) == code
    shown = capsys.readouterr()
    assert told in shown.out + shown.err
    assert len(shown.err.splitlines()) == (code in (2, 3) and not shown.out)


@pytest.mark.parametrize("flags", [("--tolerance=2", "a.npz"), ("--tolerance=x", "a.npz"), ()])
def test_wrong_arguments_are_refused(flags):
    with pytest.raises(SystemExit) as refused:
        main(flags)
    assert refused.value.code == 2


def test_the_json_has_a_verdict_for_each_recording(files, capsys):
    assert main([str(files / "one.npz"), str(files / "wrong.npz"), "--json"]) == 9
    record = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert (record["format"], record["version"]) == ("lockstep verify", 2)
    assert record["trainings"]["one.npz"]["status"] == "clean"
    wrong = record["trainings"]["wrong.npz"]
    assert wrong["reference"] == "training of one.npz" and wrong["stages"]["all-reduce"] == "fault"
    assert "not_all_reduced" in [finding["cause"] for finding in wrong["findings"]]
    assert wrong["findings"][0]["remedy"].startswith("call the wrapped model")


def test_recordings_are_compared_from_python(files):
    verdict = lockstep.compare(files / "one.npz", str(files / "wrong.npz"))
    assert not verdict.ok and verdict.faults[0].cause == "not_all_reduced"
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
