"""The recorder of PyTorch: its files hold what was trained, and recording changes nothing.

The trainings and checks of `torch_cases.py` run in processes.
"""

import pytest

from tests.verifier.recorder_scripts import FOLDER, needs, run_cases, run_script

pytestmark = needs("torch")


def test_recordings_of_torch(tmp_path):
    done = run_cases("torch", tmp_path, "two", "one")
    assert "exception.npz: the training ended before steps [2]" in done.stderr


@pytest.mark.slow
def test_further_recordings_of_torch(tmp_path):
    run_cases("torch", tmp_path, "four", "sharded", "more")


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["clamp", "average", "hook", "checkpoint", "sparse", "clamp fsdp", "clamp tensor"]
)
def test_what_a_script_changes_after_the_update_belongs_to_the_step(kind, tmp_path):
    script = FOLDER / "torch_later_changes.py"

    def run(*command):
        done = run_script("torch", *command, cwd=tmp_path)
        return done.returncode, done.stdout + done.stderr[-3000:]

    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    kind, *split = kind.split()
    assert run(script, kind)[0] == 0
    for wrong, code in (((), 0), (("wrong",), 9)):
        ended, printed = run(*launcher, script, kind, *split, *wrong)
        assert ended == 0, printed
        found, printed = run("-m", "lockstep", "one.npz", "two.npz")
        assert found == code, printed
        assert "one.npz has no fault in itself" in printed
