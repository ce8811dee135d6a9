"""The list of bugs of `make mutations` follows the program, and bugs can be drawn."""

import pytest

from campaigns import mutations
from conftest import ROOT

LISTED = mutations.listed()


@pytest.mark.parametrize("mutation", [*LISTED, *mutations.drawn(20, seed=1)], ids=lambda m: m.name)
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
