"""What workers say to each other, and that they train like one process."""

import dataclasses

import numpy as np
import pytest

from app.devices import setup
from app.devices.local_workers import call_on_workers
from app.options import Config

OPTIONS = {"device": "cpu", "global_batch_size": 20, "epochs": 2}
CONFIG = Config.of(strategy="multi_worker", num_workers=2, **OPTIONS)

pytestmark = pytest.mark.parity  # The workers have TensorFlow's optimizer, too.


def work(channel, config, run_dir):
    """Runs in each worker: one start of TensorFlow for all that is asked of them."""
    devices = setup.set_up(config)
    workers = devices.workers
    said = talk(workers)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers, "leave", lambda: None)  # Not before all has been said.
        epochs, strategy = train(config, devices, run_dir if workers.is_chief else None)
    told = hand_around(strategy)
    workers.leave()
    return said, epochs, told


@pytest.fixture(scope="module")
def per_worker(tmp_path_factory):
    """What each of two workers returns from `work`."""
    run_dir = tmp_path_factory.mktemp("workers")
    return call_on_workers(CONFIG, work, CONFIG, run_dir, on_message=print)


def train(config, devices, run_dir):
    """Trains with BatchNorm; returns the epochs, without their times, and the strategy."""
    from app.training import loop
    from app.training.build import TrainingRun
    from models import MODELS
    from tests.conftest import generated

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MODELS, "lenet", "tests.dense_network:build_conv_norm_network")
        patch.setattr(loop, "plot_accuracy", lambda *arguments: None)
        run = TrainingRun(config, devices, generated(50, 30))
        epochs = loop.TrainingLoop(run, run_dir).run()
    epochs = [dataclasses.replace(each, epoch_sec=0.0, evaluation_sec=0.0) for each in epochs]
    return epochs, run.strategy


def talk(workers):
    """What is not noticed by a training: messages of other lengths, times, items of a worker."""
    index = workers.index
    return {
        "long": workers.gather(b"x" * 3000 * index),
        "largest": workers.all_reduce_max(index, -index, 0.1 + index),
        "items": workers.local_range(6),
    }


def test_workers_talk(per_worker):
    for (said, *_), items in zip(per_worker, (range(3), range(3, 6)), strict=True):
        long = [b"", b"x" * 3000]
        assert said == {"long": long, "largest": [1.0, 0.0, 1.1], "items": items}


def hand_around(strategy):
    """Hands the state around that a training has left."""
    from app.errors import ReplicaDivergenceError
    from app.training.checks import check_copies

    is_chief = strategy.workers.is_chief
    own, state = strategy.states.per_shard_statistics(), strategy.state()
    strategy.load_state(state)
    averaged = strategy.states.per_shard_statistics()
    strategy.states.broadcast(own if is_chief else [])
    given_back = strategy.states.per_shard_statistics()
    if not is_chief:
        strategy.load_state({name: array + 1 for name, array in state.items()})
    with pytest.raises(ReplicaDivergenceError, match="differs from replica 0"):
        check_copies(strategy)
    strategy.states.broadcast()
    return own, averaged, given_back, strategy.state()


def test_workers_train_like_one_process(per_worker, tmp_path):
    # Not at the top: a worker imports TensorFlow in `set_up`.
    from tests.conftest import CPUS
    from tests.strategies.walks import assert_same_bits

    devices = setup.Devices(CPUS[:2], simulated=True)
    expected, strategy = train(Config.of(strategy="manual", **OPTIONS), devices, tmp_path)
    assert [each.step for each in expected] == [3, 6]
    statistics = strategy.states.per_shard_statistics()
    assert len(statistics) == 2
    for *_, (own, averaged, given_back, state) in per_worker:
        np.testing.assert_equal(own, statistics)
        np.testing.assert_equal(given_back, statistics)
        assert averaged == []
        assert_same_bits(state, per_worker[0][2][-1])
    assert per_worker[0][1] == expected
    for own, each in zip(per_worker[1][1], expected, strict=True):
        assert own == dataclasses.replace(each, weights_sha256="")  # The chief writes.
