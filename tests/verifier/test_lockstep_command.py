"""The package's command and function: `python -m lockstep`, `lockstep.compare`."""

import contextlib
import io
import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys

import jsonschema
import pytest

import lockstep
from lockstep.__main__ import main
from lockstep.data.file import load
from lockstep.running import run
from lockstep.running.launch import TrainingError, run_training
from tests.cli.report_samples import Page
from tests.conftest import ROOT, run_python, wait_until
from tests.verifier.test_same_training import command_of
from tests.verifier.trainer import Script


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Recordings: on one device, on two, without an all-reduce, and others."""
    folder, one = tmp_path_factory.mktemp("recordings"), Script()
    still = Script(gradient=lambda script, replica, gradients: [0 * g for g in gradients])
    for name, script in {
        "one": one,
        "two": Script(replicas=2, replay=one),
        "wrong": Script(replicas=2, replay=one, reduce=None),
        "ended": Script(replay=one, about={"ended_with": "RuntimeError"}),
        "still": still,
        "still2": still,
    }.items():
        script.write(folder / f"{name}.npz")
    (folder / "damaged.npz").write_bytes((folder / "one.npz").read_bytes()[:-100])
    return folder


@pytest.mark.parametrize("names, flags, code, told", [
    (("one", "two"), (), 0, "two.npz is the training of one.npz: no difference beyond"),
    (("one", "wrong"), (), 9, "not the training of one.npz: not all-reduced in step 0 (sum)"),
    (("one",), (), 3, "one.npz: a verdict comes from two recordings"),
    (("one", "ended"), (), 3, "ended.npz is not verified: the training ended with an exc"),
    (("one", "two"), ("--tolerance=0.5", "--details"), 0, "0.5, given by --tolerance"),
    (("still", "still2"), (), 3, "still2.npz has nothing to verify: no weight changes"),
    (("damaged",), (), 3, "damaged.npz"),
    (("none",), (), 3, "none.npz"),
    (("one", "two"), ("--name_map=a=b",), 2, "a"),
])  # fmt: skip
def test_the_exit_code_and_the_verdict(files, capsys, names, flags, code, told):
    assert main([*(str(files / f"{name}.npz") for name in names), *flags]) == code
    shown = capsys.readouterr()
    assert told in shown.out + shown.err
    assert len(shown.err.splitlines()) == (code in (2, 3) and not shown.out)


RUN = ("run", "--reference=a", "--variant=b")


@pytest.mark.parametrize("flags, told", [
    (("--tolerance=2", "a.npz"), "argument --tolerance: must be at least 0 and less than 1"),
    (("--name_map=a", "a.npz"), "argument --name_map: a is not NAME=NAME"),
    (("--detail", "a.npz"), "unrecognized arguments: --detail"),
    (("--line\nbreak", "a.npz"), "unrecognized arguments: --line break"),
    (("show",), "required: FILE; see lockstep show --help"),
    (("run", "--reference=a", "--variant='"), 'argument --variant: "\'" is no command (No'),
    (("run", "--reference=a", "--variant", "x=a", "--variant=x=b"), "two have the name x"),
    ((*RUN, "--steps=1,0"), "--steps: must be a number from 1"),
    ((*RUN, "--timeout=0"), "must be a positive number, got 0"),
    ((*RUN, "--keep=/dev/null"), "--keep: /dev/null: File"),
])  # fmt: skip
def test_wrong_arguments_are_refused_in_one_line(capsys, flags, told):
    with pytest.raises(SystemExit) as refused:
        main(flags)
    (line,) = capsys.readouterr().err.splitlines()
    assert refused.value.code == 2 and line.startswith("error: ") and told in line


def test_the_json_is_as_its_schema_says(files, capsys):
    schema = json.loads((ROOT / "lockstep" / "verify.schema.json").read_text("utf-8"))
    for names in (("still", "still2"), ("one", "two", "wrong")):
        code = main([*(str(files / f"{name}.npz") for name in names), "--json"])
        record = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
        jsonschema.validate(record, schema)
        assert record["exit_code"] == code
        assert {*record["trainings"]} == {f"{name}.npz" for name in names[1:]}


def test_the_page_is_replaced_and_no_other_file(files, tmp_path, capsys):
    names = [str(files / f"{name}.npz") for name in ("one", "two", "wrong")]
    for _ in range(2):
        capsys.readouterr()
        assert main([*names, f"--html={tmp_path}/page.html"]) == 9
    right, wrong = capsys.readouterr().out.split("\n\n")
    page = Page(tmp_path / "page.html")
    assert page.paragraphs("good") == [right]
    assert page.paragraphs("bad") == wrong.splitlines()[:1] and "in step 0 (sum)" in wrong
    (tmp_path / "link.html").symlink_to("page.html")
    shutil.copy(names[0], tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    for name in ("one.npz", "link.html", "", "none/page.html"):
        capsys.readouterr()
        with pytest.raises(SystemExit, match=r"^2$"):
            main([*names, f"--html={tmp_path / name}"])
        assert capsys.readouterr().err.count("\n") == 1
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


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
    path.write_bytes((files / "two.npz").read_bytes())
    environment = {"PYTHONIOENCODING": "ascii"}
    result = run_python("-m", "lockstep", files / "one.npz", path, env=environment)
    assert result.returncode == 0 and result.stdout.startswith(r"\xfcn\xef \u6728.npz is the train")
    command = f"'{sys.executable}' -m lockstep one.npz wrong.npz --json"
    for end, code, lines in (("| true; exit ${PIPESTATUS[0]}", 9, 0), ("> /dev/full", 1, 1)):
        result = subprocess.run(
            ["bash", "-c", f"{command} {end}"], cwd=files, capture_output=True, text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False,
        )  # fmt: skip
        assert (result.returncode, len(result.stderr.splitlines())) == (code, lines), result.stderr


def test_run_records_trainings_and_verifies_them(tmp_path, capsys):
    flags = "--steps=0,1", "--tolerance=1e-4", f"--keep={tmp_path}", "--json"
    variants = f"--variant={command_of('two')}", f"--variant=w={command_of('not_all_reduced')}"
    assert main(["run", f"--reference={command_of('record')}", *variants, *flags]) == 9
    shown = capsys.readouterr()
    trainings = json.loads(shown.out)["trainings"]
    assert {name: each["status"] for name, each in trainings.items()} == {
        "variant 1": "clean", "w": "fault"
    }  # fmt: skip
    assert trainings["w"]["remarks"][-1].startswith("reproducible: ")
    names = ("reference", "variant 1", "w", "w, second run")
    lines = [line for name in names for line in (f"{name}: running", f"{name}: recorded, N s")]
    told = re.sub(r"\d+ s$", "N s", shown.err, flags=re.MULTILINE).splitlines()
    first = "3 trainings, and more where one differs: reference; variant 1; w"
    assert told == [first, *lines, f"recordings and output are in {tmp_path}"]
    stems = "reference", "variant1-variant-1", "variant2-w", "variant2-w-second"
    kept = {f"{stem}.{kind}" for stem in stems for kind in ("npz", "log")}
    assert {path.name for path in tmp_path.iterdir()} == kept
    assert (tmp_path / "variant2-w.log").read_text() == "1\n"


REPORT = "print(chr(10).join(map(str, range(20)))); print(sys.argv[1]); print('x'); sys.exit(1)"


@pytest.mark.parametrize("command, told", [
    (command_of("fails"), ["ended with exit code 1: ", "Error: no such device", "--keep"]),
    ("no-such-program 1", ["there is no program no-such-program; commands are run without"]),
    (
        [sys.executable, "-c", f"import sys; {REPORT}",
         "E1127 02:40:00.123000 9 torch/distributed/elastic/multiprocessing/api.py] failed"],
        ["\n5\n6\n", "\n18\n19\n--keep"],  # Without the report of torchrun.
    ),
    (
        [sys.executable, "-c", "import time; print('at 3 %'); time.sleep(99)"],
        ["did not end within 1.5 s; let it train for few steps: ", "\nat 3 %\n"],
    ),
])  # fmt: skip
def test_a_training_that_fails_ends_run_with_what_it_printed(capsys, command, told):
    command = command if isinstance(command, str) else shlex.join(command)
    limit = "--timeout=1.5" if "sleep" in command else "--timeout=60"
    flags = f"--variant={command_of('two')}", "--tolerance=0.1", limit
    assert main(["run", f"--reference={command}", *flags]) == 2
    shown = capsys.readouterr()
    assert not shown.out and "error: reference: the training " in shown.err
    assert not [each for each in told if each not in shown.err]


SLEEPS = """import os, time
open("new", "w").write(str(os.getpid()))
os.rename("new", "pid")
time.sleep(300)"""


def wait_for_the_end_of(folder):
    """Waits until the process has ended that has written its number into a folder."""
    pid = (folder / "pid").read_text()
    wait_until(lambda: not pathlib.Path("/proc", pid).exists(), timeout_sec=30)


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_a_signal_ends_run_and_all_that_it_has_started(tmp_path, number, code):
    # As torchrun does, the command starts its process in a session of its own.
    starts = f"subprocess.run([sys.executable, '-c', {SLEEPS!r}], start_new_session=True)"
    reference = [sys.executable, "-c", f"import subprocess, sys; {starts}"]
    reference = [sys.executable, "-c", SLEEPS] if number == signal.SIGKILL else reference
    with subprocess.Popen(
        [sys.executable, "-m", "lockstep", "run", "--variant=true", "--reference",
         shlex.join(reference)],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
        stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        wait_until((tmp_path / "pid").exists, timeout_sec=30)
        process.send_signal(number)
        told = process.communicate(timeout=30)[1]
    wait_for_the_end_of(tmp_path)
    assert process.returncode == code
    if number != signal.SIGKILL:
        assert "reference: interrupted, " in told and not [*tmp_path.glob("lockstep-*")]


def test_what_has_left_a_training_that_fails_is_ended(tmp_path):
    """A child in a session of its own, whose parent has ended."""
    start = f"subprocess.Popen([sys.executable, '-c', {SLEEPS!r}], start_new_session=True)"
    wait = "[time.sleep(0.05) for _ in range(600) if not os.path.exists('pid')]"
    code = f"import os, subprocess, sys, time; {start}; {wait}; sys.exit(3)"
    with pytest.raises(TrainingError, match="ended with exit code 3"), contextlib.chdir(tmp_path):
        run_training([sys.executable, "-c", code], {}, tmp_path / "log", 60)
    wait_for_the_end_of(tmp_path)


def test_a_folder_is_that_of_one_run(tmp_path, capsys):
    asked = "--reference=true", "--variant=true", f"--keep={tmp_path}"
    with run._locked(tmp_path):
        done = run_python("-m", "lockstep", "run", *asked)
    assert done.returncode == 2
    text = "is the folder of a run that has not ended; pass another one"
    assert done.stderr == f"error: {tmp_path}: {text}\n"


def test_a_failed_training_cannot_control_the_terminal(tmp_path):
    printed = "a\x1b]0;title\x07b\x1bP1;2q\x1b\\c\x1b[31md\x07\x1b]0;without an end\ne"
    code = f"print({printed!r}); raise SystemExit(3)"
    with pytest.raises(TrainingError) as error:
        run_training([sys.executable, "-c", code], {}, tmp_path / "log", 60)
    assert error.value.tail == "abcd\ne"


def test_a_terminal_has_one_line_for_each_run(monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("COLUMNS", "50")
    flags = f"--variant={'n' * 60}={command_of('two')}", "--steps=1", "--tolerance=1e-4"
    assert main(["run", f"--reference={command_of('record')}", *flags]) == 0
    said, first, second, last = (line.split("\r") for line in terminal.getvalue().split("\n"))
    assert said[0].startswith("2 trainings, and more where one differs: reference; nnn")
    assert first[1] == "reference: running, 0 s"
    assert re.match(r"reference: recorded, \d+ s", first[-1])
    assert all(len(text) < 50 for text in second) and re.search(r"n: recorded, \d+ s", second[-1])
    assert last[-1] == "" and not last[-2].strip()


def test_recordings_are_compared_from_python(files):
    reference = load(files / "one.npz")
    assert lockstep.compare(reference, str(files / "wrong.npz")).name == "not_all_reduced"
    assert lockstep.compare(reference, files / "two.npz").ok
    with pytest.raises(lockstep.TraceError, match=r"damaged\.npz"):
        lockstep.compare(reference, files / "damaged.npz")
