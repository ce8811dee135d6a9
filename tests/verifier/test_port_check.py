"""The default differences of a port from PyTorch to Keras, each recorded and verified."""

import json
import runpy

import pytest

from lockstep.__main__ import main
from tests.conftest import ROOT
from tests.verifier.recorder_scripts import FOLDER, Scripts, needs

pytestmark = [pytest.mark.slow, needs("torch")]

# The rows of docs/verify_scripts.md, and right ports: options of port_torch.py and port_keras.py,
# and what is found in which stages; * is by design, ? not compared. All have an unbiased variance
# but where it says so: every BatchNorm has a different batch, or no state is replayed.
COMPUTED = ("loss", "gradients", "statistics")
CASES = {
    "right": ("", "", {}),
    "right_weight_decay": ("--weight_decay=0.01", "--weight_decay=0.01", {
        "regularisation_in_the_loss*": ["gradients"]}),
    "right_class_weights": ("--class_weights", "--class_weights", {}),
    "right_adam": ("--adam", "--adam", {"epsilon_placement*": ["update"]}),
    "initialisers": ("", "--default=initialisers", {"other_initialiser": ["start"]}),
    "batch_norm_epsilon": ("", "--default=batch_norm_epsilon", {
        "other_batch_norm_epsilon": COMPUTED}),
    "batch_norm_momentum": ("", "--default=batch_norm_momentum", {
        "other_batch_norm_momentum": ["statistics"]}),
    "weight_decay": ("--weight_decay=0.01", "--weight_decay=0.01 --default=weight_decay", {
        "weight_decay_placement": ["update"]}),
    "nesterov": ("", "--default=nesterov", {"other_nesterov": ["update"]}),
    "velocity": ("--gamma=0.9", "--gamma=0.9", {"learning_rate_in_velocity*": ["update"]}),
    "drop_last": ("", "--drop_remainder", {"last_batch_dropped": ["examples"]}),
    "padding": ("", "--default=padding", {"other_padding": COMPUTED}),
    "class_weights": ("--class_weights", "--default=class_weights", {
        "other_loss_reduction": ["loss", "gradients"]}),
    "adam_epsilon": ("--adam", "--adam --default=adam_epsilon", {
        "other_epsilon": ["update"], "epsilon_placement*": ["update"]}),
    "flatten": ("", "--default=flatten", {"flatten_order": ["loss", "gradients"]}),
}  # fmt: skip


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """Records the script of PyTorch with some options, once; also with permuted examples."""
    folder, known = tmp_path_factory.mktemp("originals"), {}

    def recorded(options):
        if options not in known:
            one, permuted = (folder / f"{name}{len(known)}.npz" for name in ("one", "permuted"))
            replay = [f"--trace={permuted}", f"--replay={one}", "--permute=1"]
            for more in ([f"--trace={one}"], replay):
                words = [*options.split(), *more]
                code, printed = scripts("torch", "port_torch.py", *words, folder=folder)
                assert code == 0, printed
            known[options] = one, permuted
        return known[options]

    with Scripts() as scripts:
        yield recorded


@pytest.mark.parametrize("name", CASES)
def test_what_a_port_changes_is_named(originals, tmp_path, monkeypatch, capsys, name):
    torch, keras, causes = CASES[name]
    port, (one, permuted) = tmp_path / "keras.npz", originals(torch)
    replay = [f"--replay={one}"] * (name != "initialisers")
    arguments = ["port_keras.py", *keras.split(), f"--trace={port}", *replay]
    monkeypatch.setattr("sys.argv", arguments)
    monkeypatch.syspath_prepend(ROOT)
    runpy.run_path(str(FOLDER / "port_keras.py"), run_name="__main__")
    capsys.readouterr()  # What the script prints.
    code = main([*map(str, (one, port, permuted)), "--json"])
    assert code == (9 if any(not cause.endswith("*") for cause in causes) else 0)
    found = json.loads(capsys.readouterr().out)["trainings"]["keras.npz"]
    assert not any(note.startswith("not matched") for note in found["notes"])
    expected = [f"{stage}: {cause}" for cause, stages in causes.items() for stage in stages]
    if name not in ("initialisers", "padding"):
        expected.append("statistics: unbiased_variance*")
    marks = {"fault": "", "by design": "*", "not compared": "?"}
    shown = [f"{f['stage']}: {f['detail']}{marks[f['status']]}" for f in found["findings"]]
    assert sorted(shown) == sorted(expected)
