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
    said, normalised = talk(devices.workers), normalise(devices)
    # In the end, a training waits for all workers.
    return said, normalised, train(config, devices, run_dir if devices.workers.is_chief else None)


@pytest.fixture(scope="module")
def per_worker(tmp_path_factory):
    """What each of two workers returns from `work`."""
    run_dir = tmp_path_factory.mktemp("workers")
    return call_on_workers(CONFIG, work, CONFIG, run_dir, on_message=print)


def train(config, devices, run_dir):
    """Trains a dense layer; returns the epochs, without their times."""
    from app.training import loop
    from app.training.build import TrainingRun
    from models import MODELS
    from tests.conftest import generated

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MODELS, "lenet", "tests.dense_network:build_dense_network")
        patch.setattr(loop, "plot_accuracy", lambda *arguments: None)
        run = TrainingRun(config, devices, generated(50, 30))
        epochs = loop.TrainingLoop(run, run_dir).run()
    return [dataclasses.replace(each, epoch_sec=0.0, evaluation_sec=0.0) for each in epochs]


def test_workers_train_like_one_process(per_worker, tmp_path):
    from tests.conftest import CPUS

    devices = setup.Devices(CPUS[:2], simulated=True)
    expected = train(Config.of(strategy="manual", **OPTIONS), devices, tmp_path)
    assert [each.step for each in expected] == [3, 6]
    assert per_worker[0][2] == expected
    for own, each in zip(per_worker[1][2], expected, strict=True):
        assert own == dataclasses.replace(each, weights_sha256="")  # The chief writes.


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


def normalise(devices):
    """Trains with BatchNorm, and hands its statistics around."""
    import keras

    from app.errors import ReplicaDivergenceError
    from app.training.checks import check_copies
    from strategies import load_strategy_class
    from tests.small_models import deep_norm_network, momentum_sgd
    from tests.strategies.walks import NUM_STEPS, batches

    strategy = load_strategy_class("multi_worker")(devices.names, workers=devices.workers)
    keras.utils.set_random_seed(7 + devices.workers.index)
    strategy.build(deep_norm_network, momentum_sgd)
    strategy.train_steps(batches(strategy), NUM_STEPS)
    own, state = strategy.states.per_shard_statistics(), strategy.state()
    check_copies(strategy)
    strategy.load_state(state)
    averaged = strategy.states.per_shard_statistics()
    strategy.states.broadcast(own if devices.workers.is_chief else [])
    given_back = strategy.states.per_shard_statistics()
    if not devices.workers.is_chief:
        strategy.load_state({name: array + 1 for name, array in state.items()})
    with pytest.raises(ReplicaDivergenceError, match="differs from replica 0"):
        check_copies(strategy)
    strategy.states.broadcast()
    return own, state, averaged, given_back, strategy.state()


def test_batch_norm_is_that_of_one_machine(per_worker):
    # Not at the top: a worker imports TensorFlow in `set_up`.
    from tests.small_models import deep_norm_network, momentum_sgd
    from tests.strategies.walks import Training, assert_close, assert_same_bits, walk

    expected = walk(Training("manual", 2, deep_norm_network, momentum_sgd))
    for _, (own, state, averaged, given_back, shared), _ in per_worker:
        assert averaged == []
        np.testing.assert_equal(given_back, own)
        for arrays, others in zip(own, expected.statistics[-1], strict=True):
            for array, other in zip(arrays, others, strict=True):
                np.testing.assert_allclose(array, other, rtol=1e-6)
        assert_close(state, expected.states[-1], 1e-5)
        assert_same_bits(shared, per_worker[0][1][-1])
