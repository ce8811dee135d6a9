"""The recorder of PyTorch: its files hold what was trained, and recording changes nothing.

The trainings and checks of `torch_cases.py` run in processes.
"""

import pytest

from lockstep import __main__ as command
from tests.verifier.recorder_scripts import Scripts, needs, run_cases

pytestmark = needs("torch")


def test_recordings_of_torch(tmp_path):
    done = run_cases("torch", tmp_path, "two", "one")
    assert "exception.npz: the training ended before steps [2]" in done.stderr


@pytest.mark.slow
def test_further_recordings_of_torch(tmp_path):
    run_cases("torch", tmp_path, "four", "sharded", "more")


@pytest.fixture(scope="module")
def scripts():
    with Scripts() as scripts:
        yield scripts


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["clamp", "average", "hook", "checkpoint", "sparse", "clamp fsdp", "clamp tensor"]
)
def test_what_a_script_changes_after_the_update_belongs_to_the_step(
    kind, scripts, tmp_path, capsys
):
    def run(*words, **options):
        options["folder"] = tmp_path
        code, printed = scripts("torch", "torch_later_changes.py", *words, **options)
        assert code == 0, printed

    kind, *split = kind.split()
    run(kind)
    for wrong, code in (((), 0), (("wrong",), 9)):
        run(kind, *split, *wrong, processes=2)
        found = command.main([str(tmp_path / name) for name in ("one.npz", "two.npz")])
        printed = capsys.readouterr().out
        assert found == code, printed
        assert "one.npz has no fault in itself" in printed
