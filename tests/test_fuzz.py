"""Some of the bad input that `make fuzz` tries for ten minutes each."""

import pytest

import fuzz


@pytest.mark.parametrize("target", fuzz.TARGETS)
def test_bad_input_is_refused_in_a_line(target):
    outcomes = fuzz.run(target, max_examples=150)
    assert outcomes["refused"] > 30


def test_the_guard_sees_what_it_has_to(tmp_path):
    inside, outside = tmp_path / "in", tmp_path / "out"
    inside.mkdir()
    with fuzz.guarded(inside):
        (inside / "file").write_text("x")
    for act in (
        lambda: outside.write_text("x"),
        lambda: (tmp_path / "new").mkdir(),
        lambda: (inside / "file").rename(outside),
        lambda: __import__("pickle").loads(b"cos\nsystem\n."),
    ):
        with pytest.raises(AssertionError), fuzz.guarded(inside):
            act()
    assert not outside.exists()
