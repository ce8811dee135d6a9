"""What workers say to each other, and that their parts of a batch are disjoint and complete."""

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
    said, normalised = talk(devices), normalise(devices)
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


def talk(devices):
    """Every kind of message, and the shards of three batches."""
    import tensorflow as tf

    from strategies import load_strategy_class

    workers, index = devices.workers, devices.workers.index
    said = {
        "short": workers.gather(f"worker {index}".encode()),
        "long": [len(text) for text in workers.gather(b"x" * 3000 * index)],
        "chief": workers.broadcast(b"from the chief" if index == 0 else b"ignored"),
        "nothing": workers.broadcast(),
        "largest": workers.all_reduce_max(index, -index, 0.1 + index),
        "arrays": workers.gather_arrays([np.full((2, 3), index, np.float32), np.int64([index])]),
    }
    strategy = load_strategy_class("multi_worker")(devices.names, workers=workers)
    images = np.zeros((50, 28, 28, 1), np.uint8)
    images[:, 0, 0, 0] = np.arange(50)  # Each example shows its index.
    dataset = tf.data.Dataset.from_tensor_slices((images, np.zeros(50, np.int32)))
    iterator = strategy.distribute(dataset.batch(20).repeat())

    @tf.function
    def shards():
        kept = strategy.tf_strategy.run(lambda images, *_: images[:, 0, 0, 0], args=next(iterator))
        return strategy.tf_strategy.experimental_local_results(kept)

    seen = [[shard.numpy().tolist() for shard in shards()] for _ in range(3)]
    return said, list(strategy.local_shard_ids), seen


def test_workers_talk_and_split_every_batch(per_worker):
    (chief, ids, seen), (other, other_ids, other_seen) = (talked for talked, *_ in per_worker)
    assert (ids, other_ids) == ([0], [1])
    for said in (chief, other):
        for index, (floats, numbers) in enumerate(said.pop("arrays")):
            np.testing.assert_array_equal(floats, np.full((2, 3), index, np.float32), strict=True)
            np.testing.assert_array_equal(numbers, np.int64([index]), strict=True)
        assert said == {
            "short": [b"worker 0", b"worker 1"], "long": [0, 3000],
            "chief": b"from the chief", "nothing": b"", "largest": [1.0, 0.0, 1.1],
        }  # fmt: skip
    # In the order of one device: the shards of a batch, one replica after another, are the batch.
    for step, (first, second) in enumerate(zip(seen, other_seen, strict=True)):
        batch = [example for shard in (*first, *second) for example in shard]
        assert batch == list(range(20 * step, min(20 * step + 20, 50)))


def train_with_batch_norm(strategy):
    """Makes three steps of a model with BatchNorm; the same in a worker as on one machine."""
    import keras
    import tensorflow as tf

    def model_fn():
        keras.utils.set_random_seed(7)
        images = keras.Input((28, 28, 1), dtype="uint8")
        flat = keras.layers.Flatten()(keras.layers.Rescaling(1 / 255)(images))
        normalised = keras.layers.BatchNormalization(name="norm")(flat)
        return keras.Model(images, keras.layers.Dense(10, name="logits")(normalised))

    strategy.build(model_fn, lambda: keras.optimizers.SGD(0.1, momentum=0.9))
    pixels = np.random.default_rng(0).integers(0, 256, (60, 28, 28, 1), dtype=np.uint8)
    dataset = tf.data.Dataset.from_tensor_slices((pixels, np.arange(60, dtype=np.int32) % 10))
    totals = strategy.train_steps(strategy.distribute(dataset.batch(20).repeat()), 3)
    own = strategy.states.per_shard_statistics()
    state = strategy.state()
    evaluated = strategy.evaluate(dataset.batch(25))
    return tuple(totals), own, state, tuple(evaluated)


def normalise(devices):
    """Trains with BatchNorm, and hands its statistics around."""
    from app.errors import ReplicaDivergenceError
    from app.training.checks import check_copies
    from strategies import load_strategy_class

    strategy = load_strategy_class("multi_worker")(devices.names, workers=devices.workers)
    results = train_with_batch_norm(strategy)
    own, state = results[1], results[2]
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
    return *results, averaged, given_back, strategy.state()


def test_batch_norm_and_totals_are_those_of_one_machine(per_worker):
    # Not at the top: a worker imports TensorFlow in `set_up`.
    from strategies import load_strategy_class
    from tests.conftest import CPUS
    from tests.strategies.walks import assert_same_bits

    expected = train_with_batch_norm(load_strategy_class("manual")(CPUS[:2]))
    for _, results, _ in per_worker:
        totals, own, state, evaluated, averaged, given_back, shared = results
        assert len(own) == len(given_back) == 2 and averaged == []
        assert totals[1:] == expected[0][1:] and totals[2] == 60
        assert totals[0] == pytest.approx(expected[0][0], rel=1e-6)
        assert evaluated[2] == 60 and evaluated[1] == expected[3][1]
        assert_same_bits(shared, per_worker[0][1][-1])
        for replica, arrays in enumerate(own):
            copies = arrays, given_back[replica], expected[1][replica]
            for array, copy, other in zip(*copies, strict=True):
                np.testing.assert_array_equal(copy, array)
                np.testing.assert_allclose(array, other, rtol=1e-6)
        for array, other in zip(state.values(), expected[2].values(), strict=True):
            np.testing.assert_allclose(array, other, rtol=1e-5, atol=1e-6)


def test_a_worker_has_consecutive_items():
    from strategies.base import Workers

    workers = Workers()
    workers.index, workers.count = 1, 2
    assert workers.local_range(6) == range(3, 6)
