"""A short run of each campaign; what they need of the machine is a reason to skip it."""

import re
import shlex
import shutil
import subprocess
import sys

import pytest

from lockstep.answer.causes import DETAILS
from lockstep.answer.verdict import NOTHING
from tests.campaigns import (
    CampaignError,
    copies,
    fuzz,
    mutations,
    network,
    public,
    scripts,
    sensitivity,
)
from tests.conftest import ROOT
from tests.in_process import parse_here


def test_the_lists_of_bugs_fit_the_program():
    """`old` occurs once, and the program with `new` can still be compiled; drawn ones, too."""
    bugs, drawn, wrong = copies.listed(), mutations.drawn(60, seed=1), []
    listed = [*mutations.listed(), copies.NARROW, *(bug.mutation for bug in bugs)]
    for mutation in [*listed, *drawn]:
        source = (ROOT / mutation.file).read_text("utf-8")
        try:
            compile(mutation.changed(source), mutation.file, "exec")
        except (CampaignError, SyntaxError) as error:
            wrong.append(f"{mutation.file}: {mutation.name}: {error}")
    assert not wrong, "\n".join(wrong)
    assert len(listed) >= 126 and len({bug.mutation.name for bug in bugs}) == len(bugs)
    assert sum(bug.file.startswith("lockstep/") for bug in drawn) == 30
    for bug in bugs:
        named = {word for word in bug.words if re.fullmatch("[a-z_0-9]+", word)}
        assert bug.words and named <= set(DETAILS), bug
        parse_here("verify", *shlex.split(bug.flags))


def test_a_bug_is_drawn_of_each_kind():
    source = """
def largest(self, items):
    self.count += len(items)
    self.items[0] = items
    if self.count <= 3:
        return None
    items.sort()
    return [item for item in items if item]
"""
    changed = {source[:a] + new + source[b:] for a, b, new in mutations.changes(source)}
    assert changed == {
        source.replace(old, new)
        for old, new in [
            ("self.count += len(items)", "pass"), ("self.items[0] = items", "pass"),
            ("return None", "pass"), ("items.sort()", "pass"), ("[0]", "[1]"), ("3:", "4:"),
            ("self.count <= 3", "not (self.count <= 3)"), ("<=", "<"),
            ("if item]", "if not (item)]"),
        ]
    }  # fmt: skip


@pytest.mark.parametrize("target", fuzz.TARGETS)
def test_bad_input_is_refused_in_a_line(target):
    outcomes = fuzz.fuzz(target, examples=60, seed=1)
    assert outcomes["refused"] > 10 and outcomes["accepted"] > 0


def test_the_scripts_of_the_zoo_can_be_changed_as_listed():
    entries = scripts.listed()
    for entry in entries:
        compile(entry.source, f"{entry.script}: {entry.name}", "exec")
    assert not {c for entry in entries for c in entry.causes} - {*DETAILS, NOTHING}
    assert len({entry[:2] for entry in entries}) == len(entries)
    assert sum(bool(entry.causes) for entry in entries) >= 60


def test_faults_of_each_size_can_be_injected():
    for fault, causes in sensitivity.CAUSES.items():
        compile(sensitivity.source_of(sensitivity.SIZES, FAULT=fault), fault, "exec")
        assert not {*causes} - {*DETAILS}
    assert sensitivity.smallest([True, True, False, True, False]) == "1e-03"
    assert sensitivity.smallest([False, True]) == "none"


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        *("kills --cycles=2 --seed=3 --only=manual", "bits --cycles=20"),
        "network --only=worker-killed",
        "sensitivity --only=whole-loss",
        "bounds --cycles=1 --seed=0 --only=MLP",
    ],
)
def test_a_short_campaign(words):
    if words.startswith("network") and (reason := network.unavailable()):
        pytest.skip(reason)
    if words.startswith(("sensitivity", "bounds")) and not shutil.which(scripts.python_of("torch")):
        pytest.skip("no interpreter with PyTorch: make frameworks")
    command = [sys.executable, "-m", "tests.campaigns", *words.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ": all held; " in done.stdout.splitlines()[-1]


PROPOSED = (  # Details that would be right, and that the verifier does not have.
    *("other_average", "other_recomputation", "lost_error_feedback", "other_state_precision"),
    *("updated_in_each_micro_batch", "misaligned_parts", "stale_master_weights"),
    "statistics_not_updated",
)


def test_the_public_cases_say_what_is_right():
    """Each has a report, a date and one to three mistakes; their first faults have names."""
    cases = public.listed()
    for case in cases:
        compile(case.path.read_text("utf-8"), case.name, "exec")
        assert case.told.endswith(".") and case.reference, case
        assert re.fullmatch(r"20\d\d-(0\d|1[0-2])", case.date), case
        assert case.framework in public.FRAMEWORKS and 1 <= len(case.wrong) <= 3, case
        details = {detail for each in case.wrong.values() for detail in each}
        assert all(case.wrong.values()) and not details - {*DETAILS, NOTHING, *PROPOSED}, case
        text = case.path.read_text("utf-8")
        assert all(f'BUG == "{name}"' in text or f'"{name}"' in text for name in case.wrong), case
    assert len(cases) >= 100 and public.sealed() < {case.name for case in cases}
    assert len(public.sealed()) >= 30
