"""The page of verdicts: `python -m lockstep … --html FILE`."""

import dataclasses
import errno
import os
import shutil

import pytest

from lockstep.__main__ import main
from lockstep.answer import html
from lockstep.answer.verdict import (
    BY_DESIGN,
    CLEAN,
    FAULT,
    NOT_COMPARED,
    NOT_VERIFIED,
    NOTHING,
    STAGES,
    Finding,
    Verdict,
)  # fmt: skip
from tests.cli.report_samples import CLIPPED, LOCAL, LOST
from tests.cli.test_report import HOSTILE, Page
from tests.conftest import ROOT, run_python
from tests.verifier.script_samples import Script
from tests.verifier.test_lockstep_command import COMMANDS

VERDICT = Verdict(
    "two.npz", "training of one.npz", (0, 1, 2, 4), 2, (), ("start", "all-reduce"), "64 units"
)


def page_of(*verdicts):
    return Page(html.page_of(verdicts))


def test_a_notebook_shows_the_page_in_a_frame_of_its_own():
    hostile = dataclasses.replace(VERDICT, name='"></iframe><b>two')
    (frame,) = [attrs for tag, attrs in Page(hostile._repr_html_()).elements if tag == "iframe"]
    assert frame["srcdoc"] == html.page_of([hostile])
    assert len(Page(hostile._repr_html_()).elements) == 1


@pytest.fixture(scope="module")
def recordings(tmp_path_factory):
    """On one device, on two, without an all-reduce."""
    folder, one = tmp_path_factory.mktemp("recordings"), Script()
    one.write(folder / "one.npz")
    Script(replicas=2, replay=one).write(folder / "two.npz")
    Script(replicas=2, replay=one, reduce=None).write(folder / "wrong.npz")
    return folder


@pytest.fixture
def files(recordings, tmp_path):
    return shutil.copytree(recordings, tmp_path / "files")


def test_a_page_has_the_sentence_the_findings_and_the_stages(files, capsys):
    names = [str(files / f"{name}.npz") for name in ("one", "two", "wrong")]
    assert main([*names, f"--html={files / 'page.html'}"]) == 9
    text = (files / "page.html").read_text("utf-8")
    page, printed = Page(text), capsys.readouterr().out.splitlines()
    assert page.paragraphs("good") == printed[:2] and page.paragraphs("bad") == [printed[2]]
    at = page.text.index("wrong.npz, fault: not all-reduced")
    assert page.text[at + 1 :: 2][:3] == ["where", "why", "remedy"]
    shown = page.text[at + 1 :]
    assert shown[shown.index("code") + 1] == "- output = ddp.module(x)"
    assert "+ output = ddp(x)" in shown
    (wrong,) = [row for row in page.rows if "✗ fault" in row]
    assert wrong[:3] == ["all-reduce", "✗ fault", "1.3"]
    assert page.rows.count(["stage", "steps 0 to 3", "difference", "allowed"]) == 3
    assert [stage for stage in STAGES if stage not in page.text] == []
    tags = {tag for tag, _ in page.elements}
    assert not {"script", "img", "iframe"} & tags and "http" not in text.replace("http-equiv", "")


def test_steps_with_equal_stages_share_a_column():
    found = dataclasses.replace(LOST, steps=(1,)), dataclasses.replace(LOCAL, steps=(4,))
    verdict = dataclasses.replace(
        VERDICT,
        findings=found,
        idle={2: "every gradient is 0"},
        steps=(0, 1, 2, 3, 4),
        step_names={4: "the last step"},
    )
    page = page_of(verdict)
    assert page.rows == [
        ["stage", "step 0, 3", "step 1", "step 2", "the last step", "difference", "allowed"],
        ["start", "clean", "clean", "–", "clean", "–", "–"],
        ["forward", "–", "–", "–", "by design", "–", "–"],
        ["all-reduce", "clean", "✗ fault", "–", "clean", "–", "–"],
    ]
    assert any("nothing to verify in step 2: every gradient is 0" in text for text in page.text)


@pytest.mark.parametrize(
    "changes, kind, status",
    [
        ({}, "good", CLEAN),
        ({"findings": (LOCAL,)}, "design", BY_DESIGN),
        ({"findings": (CLIPPED,)}, "bad", FAULT),
        ({"findings": (dataclasses.replace(LOCAL, status=NOT_COMPARED),)}, "bad", NOT_COMPARED),
        ({"unverified": ("it ended with an exception",)}, "bad", NOT_VERIFIED),
        ({"idle": dict.fromkeys(VERDICT.steps, "no gradient")}, "bad", NOTHING),
    ],
)
def test_only_what_was_compared_and_is_right_is_green(changes, kind, status):
    verdict = dataclasses.replace(VERDICT, **changes)
    page = page_of(verdict)
    assert verdict.status == status
    assert len(page.paragraphs(kind)) == len(page.paragraphs("verdict")) == 1
    assert ("to compare" in page.text) == (status == NOT_COMPARED)


def test_hostile_names_are_text_and_a_long_list_of_names_is_folded():
    names = (HOSTILE, *(f"layers.{i}.weight" for i in range(99)))
    found = Finding("all-reduce", FAULT, "lost_replica", HOSTILE, (0,), (HOSTILE,), names)
    verdict = dataclasses.replace(
        VERDICT, name=HOSTILE, reference=HOSTILE, findings=(found,), notes=(HOSTILE, "a `b` `c"),
        step_names={0: HOSTILE}, tolerance=HOSTILE,
    )  # fmt: skip
    page = page_of(verdict)
    assert not {"script", "b"} & {tag for tag, _ in page.elements}
    assert HOSTILE in page.rows[0][1] and HOSTILE in page.text
    at = page.text.index("variables")
    assert page.text[at + 1].endswith("…") and page.text[at + 2] == ", ".join(names)


def test_a_page_is_replaced_and_no_other_file(files, capsys):
    one, page = str(files / "one.npz"), files / "page.html"
    for _ in range(2):
        assert main([one, "--html", str(page)]) == 0
    (files / "link.html").symlink_to("page.html")
    before = {path: path.read_bytes() for path in files.iterdir()}
    for name, told in [
        ("one.npz", "exists and is no page of this program; give another name"),
        ("link.html", "exists and is no page of this program; give another name"),
        ("", "is a folder; give the name of a file"),
        ("none/page.html", "the folder does not exist"),
    ]:
        capsys.readouterr()
        for words in ([one], ["run", "--reference=false", "--variant=false"]):
            with pytest.raises(SystemExit) as refused:
                main([*words, f"--html={files / name}"])
            (line,) = capsys.readouterr().err.splitlines()
            assert refused.value.code == 2 and line.startswith("error: argument --html: ")
            assert told in line
    assert {path: path.read_bytes() for path in files.iterdir()} == before


def test_a_page_that_fails_keeps_the_verdict_and_leaves_nothing(files, capsys, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.replace", fail)
    before = {*files.iterdir()}
    for name, code in (("two", 2), ("wrong", 9)):
        words = [str(files / f"{each}.npz") for each in ("one", name)]
        assert main([*words, f"--html={files / 'page.html'}"]) == code
        shown = capsys.readouterr()
        assert f"{name}.npz is" in shown.out and {*files.iterdir()} == before
        assert shown.err == f"error: --html: {files / 'page.html'}: No space left on device\n"


def test_run_writes_a_page(tmp_path, capsys):
    words = [f"--variant=w={COMMANDS['not_all_reduced']}", "--tolerance=1e-4", "--steps=1"]
    page = tmp_path / "page.html"
    assert main(["run", f"--reference={COMMANDS['one']}", *words, f"--html={page}"]) == 9
    (sentence,) = Page(page.read_text("utf-8")).paragraphs("bad")
    assert sentence == capsys.readouterr().out.splitlines()[0]


def test_after_an_error_there_is_no_page(files):
    one, page = str(files / "one.npz"), files / "page.html"
    for words in (
        [one, str(files / "none.npz")],
        ["run", "--reference=false", "--variant=false", "--timeout=60"],
    ):
        assert main([one, f"--html={page}"]) == 0 and page.exists()
        assert main([*words, f"--html={page}"]) in (2, 3) and not page.exists()


def test_a_page_needs_numpy_alone(files):
    code = (
        "import sys; from lockstep.__main__ import main; assert main(sys.argv[1:]) == 0;"
        "assert not {'matplotlib', 'jinja2', 'tensorflow', 'app'} & set(sys.modules)"
    )
    result = run_python("-c", code, "one.npz", "--html=p.html", cwd=files,
                        env={"PYTHONPATH": str(ROOT)})  # fmt: skip
    assert result.returncode == 0 and (files / "p.html").exists(), result.stderr
