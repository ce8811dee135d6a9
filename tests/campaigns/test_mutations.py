"""The lists of bugs of `make mutations` and `copies` follow the program; bugs can be drawn."""

import re
import shlex

import pytest

from lockstep.answer.causes import DETAILS
from tests.campaigns import copies, mutations
from tests.conftest import ROOT
from tests.in_process import parse_here

LISTED = mutations.listed()
IN_COPIES = copies.listed()


@pytest.mark.parametrize(
    "mutation",
    [*LISTED, copies.NARROW, *(bug.mutation for bug in IN_COPIES), *mutations.drawn(20, seed=1)],
    ids=lambda m: m.name,
)
def test_each_bug_can_be_made_in_one_place(mutation):
    source = (ROOT / mutation.file).read_text("utf-8")
    assert source.count(mutation.old) == 1
    changed = source.replace(mutation.old, mutation.new)
    assert changed != source
    compile(changed, mutation.file, "exec")


def test_every_package_of_the_program_has_one():
    packages = {
        *(path.parent.name for path in (ROOT / "app").glob("*/__init__.py")),
        *("strategies", "lockstep"),
    } - {"doctor"}  # It changes nothing.
    named = {each.file.removeprefix("app/").split("/")[0] for each in LISTED}
    assert len(LISTED) >= 80 and named == packages


def test_each_bug_in_a_copy_has_words_and_flags():
    assert len(IN_COPIES) >= 45 and len({bug.mutation.name for bug in IN_COPIES}) == len(IN_COPIES)
    for bug in IN_COPIES:
        named = {word for word in bug.words if re.fullmatch("[a-z_0-9]+", word)}
        assert bug.words and named <= set(DETAILS), bug
        parse_here("verify", *shlex.split(bug.flags))
