"""Each publicly reported bug in `zoo/` is found and named, and its corrected twin is clean."""

import importlib.util
import pathlib

import pytest

RUN = pathlib.Path(__file__).parent / "zoo" / "run.py"
_spec = importlib.util.spec_from_file_location("zoo_run", RUN)
zoo = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(zoo)


@pytest.mark.parametrize("name", zoo.case_names())
def test_a_reported_bug_is_found_and_its_correction_is_clean(name):
    row = zoo.examine(name)
    assert not row.problems, "\n".join([*row.problems, *map(str, [*row.found, *row.twin])])


def test_the_zoo_has_enough_cases_with_links():
    cases = [zoo.load_case(name) for name in zoo.case_names()]
    assert len(cases) >= 20
    assert all(case.LINK.startswith("https://github.com/") for case in cases)
    assert len({case.LINK for case in cases}) == len(cases)
    assert all(case.BUG.replace("#", "/").split("/")[-1] in case.LINK for case in cases)
