"""LeNet and ResNet-18 as cases: what `--case=lenet` stands for."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from app.data.synthetic import generate_synthetic
from app.options import Config
from app.runtime.errors import ConfigError
from app.training import builtin_case
from app.training.case_file import CaseFile
from models import MODELS
from strategies.loss import shard_loss


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    dataset = generate_synthetic(num_train=40, num_test=20)
    monkeypatch.setattr(builtin_case, "load_dataset", lambda *_, **__: dataset)
    for name in ("lenet", "resnet18"):
        monkeypatch.setitem(MODELS, name, "dense_network:build_conv_norm_network")


def load(name: str) -> CaseFile:
    config: Config = Config.of("verify", case=name)
    return CaseFile(config.verification.case_path, config.verification.case_function)


@pytest.mark.parametrize("name", ["lenet", "resnet18", "lenet:d2l", "resnet18:d2l"])
def test_loss_is_that_of_our_strategies(name):
    case = load(name)
    keras.utils.set_random_seed(3)
    model = case.build_model()
    smoothing = 0.1 if name == "resnet18" else 0.0
    images, labels = next(iter(case.create_data(12)))
    logits = model(images)
    ours, _ = shard_loss(logits, labels, tf.size(labels), label_smoothing=smoothing)
    keras_loss = model.compute_loss(x=images, y=labels, y_pred=logits)
    np.testing.assert_allclose(keras_loss, ours, rtol=1e-6)


def test_weights_follow_from_the_seed():
    def first_weights(seed):
        keras.utils.set_random_seed(seed)
        return load("lenet").build_model().trainable_variables[0].numpy()

    assert np.array_equal(first_weights(1), first_weights(1))
    assert not np.array_equal(first_weights(1), first_weights(2))


def test_an_epoch_has_each_example_once():
    sizes = [len(labels) for _, labels in load("lenet").create_data(16)]
    assert sizes == [16, 16, 8]


def test_file_of_the_same_name_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert Config.of("verify", case="lenet").verification.case_path.parent.name == "builtin_cases"
    with pytest.raises(ConfigError, match=r"there is no file vgg; name a Python file, or lenet"):
        Config.of("verify", case="vgg")
    (tmp_path / "lenet").touch()
    with pytest.raises(ConfigError, match=r"must be a Python file"):
        Config.of("verify", case="lenet")
