"""`verify` and `--inject` as a user runs them: verdicts, exit codes, files and figures."""

import dataclasses
import json
import re

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file

from app.commands import verify
from app.options import Config
from app.records.checkpoint import find_newest_checkpoint
from app.records.files import write_json
from app.records.history import load_history, load_summary
from app.report.verification_plot import plot_verification
from app.runtime.errors import ConfigError
from app.verification import tasks
from app.verification.tasks import Recorded
from conftest import run_main
from in_process import run_here, run_here_ok
from models import MODELS
from report_samples import write_verification

SMALL = [
    "--allow_unverified_data", "--device=cpu", "--num_devices=2", "--global_batch_size=15",
    "--num_train_examples=100", "--recipe=fast",
]  # fmt: skip


pytestmark = pytest.mark.e2e


@pytest.fixture(autouse=True)
def _small(small_data, small_lenet, monkeypatch):
    monkeypatch.setenv("FASHION_MNIST_DIR", str(small_data))


@pytest.fixture(scope="module")
def clean(tmp_path_factory, small_data):
    """All strategies over eight steps, the last batch of an epoch among them."""
    out = tmp_path_factory.mktemp("verify") / "run"
    env = {"FASHION_MNIST_DIR": str(small_data)}
    arguments = ["verify", *SMALL, "--steps=8", "--keep_traces", f"--out={out}"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MODELS, "lenet", "dense_network:build_dense_network")
        return out, run_here_ok(*arguments, env=env)


def load(out):
    return json.loads((out / "verify.json").read_text(encoding="utf-8"))


BLUE, RED = (0, 114, 178), (213, 94, 0)


def count_pixels(path, colour):
    """Returns how many pixels of a figure have about this colour."""
    image = np.asarray(Image.open(path).convert("RGB"), np.int64)
    assert image.shape[0] > 600 and image.shape[1] > 1000
    return int(np.all(np.abs(image - colour) < 40, axis=-1).sum())


def test_verdicts(clean):
    out, result = clean
    assert re.search(r"manual – mirrored +bit-identical +0 ", result.stdout)
    assert re.search(r"single – manual +equal within rounding ", result.stdout)
    assert "float32, TF32 off" in result.stdout
    told = result.stderr.splitlines()
    assert sum("UNVERIFIED" in line for line in told) == len(told) <= 2  # Not once for each child.
    names = {path.name for path in out.iterdir()}
    assert names == {
        ".lock", "config.json", "log.txt", "traces", "verify.json", "verify.png", "verify.svg",
        "report.html",
    }  # fmt: skip
    traces = out / "traces"
    assert {path.name for path in traces.iterdir()} == {"single", "manual", "mirrored"}
    steps = {f"step-{step:05d}.safetensors" for step in range(9)}
    assert {path.name for path in (traces / "manual").iterdir()} == steps


def test_the_record_holds_every_number(clean):
    out, _ = clean
    record = load(out)
    assert record["steps"] == 8 and record["tf32"] is False and record["injected_fault"] == ""
    outcomes = {tuple(pair["strategies"]): pair["outcome"] for pair in record["pairs"]}
    assert outcomes == {
        ("single", "manual"): "equal within rounding",
        ("single", "mirrored"): "equal within rounding",
        ("manual", "mirrored"): "bit-identical",
    }
    measured = record["strategies"]["manual"]["measurements"]
    assert len({len(column) for column in measured.values()}) == 1
    assert set(measured["step"]) == set(range(9))
    assert {"loss", "gradients", "sums", "slots", "updates", "weights"} <= set(measured["kind"])
    holds = zip(measured["error"], measured["limit"], measured["absolute32"], strict=True)
    assert all(error <= limit or exact == 0 for error, limit, exact in holds)
    step = load_file(out / "traces" / "manual" / "step-00008.safetensors")
    assert step["weights/0/logits/kernel"].shape == (784, 10)


def test_the_figure_is_one(clean):
    out, _ = clean
    assert count_pixels(out / "verify.png", BLUE) > 500
    assert count_pixels(out / "verify.png", RED) == 0
    assert "injected fault" not in (out / "verify.svg").read_text()


def test_a_fault_is_caught_named_and_marked(tmp_path, small_program):
    """In processes of their own, as ever: each strategy, and the check."""
    out = tmp_path / "run"
    result = run_main(
        "verify", *SMALL, "--steps=2", "--strategies=manual,mirrored",
        "--inject=drop_gradient:replica=1,strategy=mirrored", f"--out={out}",
        program=small_program,
    )  # fmt: skip
    assert result.returncode == 9
    last = result.stderr.splitlines()[-1]
    assert last.startswith("error: mirrored does not match: lost gradient, first at step 1, sums ")
    assert "the sum does not contain the gradient of replica 1" in last
    assert "Traceback" not in result.stderr
    assert re.search(r"manual – mirrored +different ", result.stdout)
    assert re.search(r"^ +where +first at step 1, sums of ", result.stdout, re.MULTILINE)
    assert "injected fault: drop_gradient:replica=1" in result.stderr
    assert "lost gradient" in (out / "report.html").read_text(encoding="utf-8")
    record = load(out)
    assert record["injected_fault"] == "drop_gradient:replica=1"
    assert record["strategies"]["manual"]["findings"] == []
    (finding,) = record["strategies"]["mirrored"]["findings"]
    assert finding["cause"] == "lost_gradient"
    for name in ("config.json", "log.txt"):
        assert "drop_gradient" in (out / name).read_text()
    assert not (out / "traces").exists()
    assert count_pixels(out / "verify.png", RED) > 100


def test_batch_norm_makes_single_work_shard_by_shard():
    """Of a model with BatchNorm and two replicas, `single` is what one device makes of both."""

    def recorded(**changes):
        values = dict.fromkeys(field.name for field in dataclasses.fields(Recorded))
        numbers = {"devices": ["a", "b"], "num_shards": 2, "shard_weights": [1, 1]}
        return Recorded(**(values | numbers | changes))

    config = Config.of("verify", num_devices=2, strategies=("single", "mirrored"))
    plain, child, _ = verify._recording(config, "single", {"mirrored": recorded()})
    assert plain is tasks.record
    assert (child.distribution.strategy, child.distribution.num_devices) == ("single", None)
    others = {"mirrored": recorded(has_batch_norm=True)}
    by_shards, child, more = verify._recording(config, "single", others)
    assert by_shards is tasks.record_on_one_device and more == ((1, 1),)
    assert (child.distribution.strategy, child.distribution.num_devices) == ("mirrored", 2)
    faulty = config.replace(inject="scale_gradient:strategy=single")
    with pytest.raises(ConfigError, match="cannot be injected into single"):
        verify._recording(faulty, "single", others)


def test_single_is_plain_where_the_others_normalise_over_the_whole_batch():
    """With statistics of the whole batch, and with one shard on several devices."""
    values = dict.fromkeys(field.name for field in dataclasses.fields(Recorded))
    values |= {"devices": ["a", "b"], "has_batch_norm": True}
    synchronized = Config.of("verify", strategies=("single", "manual"), batch_norm="sync")
    run = Recorded(**(values | {"num_shards": 2, "shard_weights": [1, 1]}))
    assert verify._recording(synchronized, "single", {"manual": run})[0] is tasks.record
    one_shard = Config.of("verify", strategies=("single", "tensor"), num_devices=2)
    run = Recorded(**(values | {"num_shards": 1, "shard_weights": [1]}))
    assert verify._recording(one_shard, "single", {"tensor": run})[0] is tasks.record
    # A pipeline has no other statistics than those of its micro-batches.
    both = Config.of(
        "verify", strategies=("single", "manual", "pipeline"), num_devices=2, batch_norm="sync"
    )
    runs = {"manual": Recorded(**(values | {"num_shards": 2, "shard_weights": [1, 1]}))}
    runs["pipeline"] = Recorded(**(values | {"num_shards": 4, "shard_weights": [1] * 4}))
    function, _, more = verify._recording(both, "single", runs)
    assert function is tasks.record_on_one_device and more == ((1, 1, 1, 1),)


def test_a_training_that_is_not_finite_is_refused(tmp_path):
    result = run_here(
        "verify", *SMALL, "--steps=4", "--learning_rate=1e30", "--strategies=manual",
        f"--out={tmp_path}/run",
    )  # fmt: skip
    assert result.returncode == 7 and "not finite at step" in result.stderr.splitlines()[-1]


def test_hierarchical_on_three_devices_is_refused_before_anything_is_trained(tmp_path):
    out = tmp_path / "run"
    result = run_here(
        "--strategy=mirrored", "--all_reduce=hierarchical", "--device=cpu", "--num_devices=3",
        "--allow_unverified_data", f"--out={out}",
    )  # fmt: skip
    assert result.returncode == 6
    assert "replica 2 was lost" in result.stderr.splitlines()[-1]


def test_every_file_of_a_training_with_a_fault_says_so(tmp_path):
    out = tmp_path / "run"
    fault = "--inject=scale_gradient:factor=0.5"
    command = [*SMALL, "--epochs=1", "--verify_every=0", fault, f"--out={out}"]
    result = run_here_ok(*command)
    fault = "scale_gradient:factor=0.5"
    assert result.stderr.count(f"injected fault: {fault}") == 1
    assert load_summary(out).injected_fault == fault
    assert [record.injected_fault for record in load_history(out)] == [fault]
    assert find_newest_checkpoint(out).checkpoint.metadata.config["inject"] == fault
    for name in ("config.json", "log.txt"):
        assert fault in (out / name).read_text()
    assert fault in run_here_ok("evaluate", f"--run={out}", "--allow_unverified_data").stderr
    honest = run_here(*command[:-2], f"--out={out}")
    assert honest.returncode == 4 and "inject" in honest.stderr


def test_a_replica_that_is_out_of_step_stops_the_training(tmp_path):
    result = run_here(
        *SMALL, "--epochs=1", "--verify_every=0", "--inject=perturb_weight:replica=1,step=3",
        f"--out={tmp_path}/run",
    )  # fmt: skip
    assert result.returncode == 9
    last = result.stderr.splitlines()[-1]
    assert "logits/kernel on replica 1 differs from replica 0 by 0.001" in last


def test_a_verification_is_no_run_to_evaluate(clean):
    out, _ = clean
    result = run_here("evaluate", f"--run={out}")
    assert result.returncode == 5 and "has no weights" in result.stderr


def test_a_refused_verify_leaves_what_is_there(clean):
    """Not even --overwrite deletes anything before there is something to put in its place."""
    out, _ = clean
    before = sorted(path.name for path in out.rglob("*"))
    for flags in (["--data_dir=/nonexistent"], ["--inject=local_batch_norm"]):
        result = run_here("verify", *SMALL, "--steps=3", *flags, "--overwrite", f"--out={out}")
        assert result.returncode in (2, 3)
        assert sorted(path.name for path in out.rglob("*")) == before


def test_a_refused_fault_leaves_the_training_that_is_there(tmp_path):
    run_here_ok(*SMALL, "--epochs=1", f"--out={tmp_path}/run")
    result = run_here(
        *SMALL, "--epochs=1", "--inject=local_batch_norm", "--overwrite", f"--out={tmp_path}/run"
    )
    assert result.returncode == 2 and "needs a model with BatchNorm" in result.stderr
    assert load_summary(tmp_path / "run").status == "finished"


@pytest.mark.parametrize("fault", [None, "drop_gradient:replica=1"])
def test_a_figure_says_which_fault_was_injected(tmp_path, fault):
    write_verification(tmp_path, fault=fault)
    record = load(tmp_path)
    measured = record["strategies"]["manual"]["measurements"]
    measured["error"][-1], measured["absolute32"][-1] = 7.0, 1.0
    write_json(tmp_path / "verify.json", record)
    plot_verification(tmp_path)
    figure = (tmp_path / "verify.svg").read_text(encoding="utf-8")
    assert ("injected fault: drop_gradient:replica=1" in figure) == bool(fault)
    assert "GENERATED images" in figure
    assert "lenet on " in figure  # Text is found in the figure at all.
    assert count_pixels(tmp_path / "verify.png", RED) > 30
