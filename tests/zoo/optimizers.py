"""Trains right models with every optimizer of Keras, and says where the comparison finds a fault.

    python tests/zoo/optimizers.py [part of a name ...] [--kept=results.jsonl] [--seed=1]

A pair is a model, an optimizer and a dtype, `lenet/adam/float32`. Each is trained by `fit` under
`MirroredStrategy` on three logical CPU devices and compared with one device; as nothing is wrong
with any of them, whatever is found as a fault is a false alarm. Exits with 1 if there is one, or
if a pair raises. With `--kept`, results are added to a file, and pairs that it has are not run
again: a run that was interrupted is resumed by the same command.
"""

import argparse
import gc
import json
import os
import pathlib
import sys
import time
import warnings
from collections.abc import Callable, Sequence

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import keras
import numpy as np
import tensorflow as tf

import lockstep
from lockstep.record_keras import Recorder

layers, optimizers = keras.layers, keras.optimizers
NUM_REPLICAS, NUM_STEPS = 3, 5
GLOBAL_BATCH_SIZE = 15
NUM_CLASSES, NUM_TOKENS, LENGTH = 5, 20, 7
DTYPES = ("float32", "mixed_bfloat16")
CLEAN = "clean"


def lenet() -> keras.Model:
    """Returns LeNet for images of shape (28, 28, 1)."""
    return keras.Sequential([
        keras.Input((28, 28, 1)),
        layers.Conv2D(6, 5, padding="same", activation="sigmoid"), layers.AveragePooling2D(2),
        layers.Conv2D(16, 5, activation="sigmoid"), layers.AveragePooling2D(2),
        layers.Flatten(), layers.Dense(120, activation="sigmoid"),
        layers.Dense(84, activation="sigmoid"), layers.Dense(NUM_CLASSES),
    ])  # fmt: skip


def resnet() -> keras.Model:
    """Returns a network of one residual block with BatchNorm."""
    images = keras.Input((28, 28, 1))
    x = layers.Conv2D(8, 3, strides=2, padding="same")(images)
    x = layers.MaxPooling2D(2)(layers.ReLU()(layers.BatchNormalization()(x)))
    y = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(8, 3, padding="same")(x)))
    y = layers.BatchNormalization()(layers.Conv2D(8, 3, padding="same")(y))
    pooled = layers.GlobalAveragePooling2D()(layers.ReLU()(x + y))
    return keras.Model(images, layers.Dense(NUM_CLASSES)(pooled))


def lstm() -> keras.Model:
    """Returns an LSTM over sequences of tokens."""
    return keras.Sequential([
        keras.Input((LENGTH,), dtype="int32"), layers.Embedding(NUM_TOKENS, 8), layers.LSTM(6),
        layers.Dense(NUM_CLASSES),
    ])  # fmt: skip


def attention() -> keras.Model:
    """Returns self-attention over sequences of tokens, where a token of 0 is masked."""
    tokens = keras.Input((LENGTH,), dtype="int32")
    embedded = layers.Embedding(NUM_TOKENS, 8, mask_zero=True)(tokens)
    mixed = layers.MultiHeadAttention(2, 4)(embedded, embedded)
    x = layers.LayerNormalization()(embedded + mixed)
    return keras.Model(tokens, layers.Dense(NUM_CLASSES)(layers.GlobalAveragePooling1D()(x)))


MODELS: dict[str, Callable[[], keras.Model]] = {
    "lenet": lenet, "resnet": resnet, "lstm": lstm, "attention": attention,
}  # fmt: skip
OPTIMIZERS: dict[str, Callable[[], keras.optimizers.Optimizer]] = {
    "nesterov": lambda: optimizers.SGD(0.05, momentum=0.9, nesterov=True),
    "adam": lambda: optimizers.Adam(0.01),
    "adamw": lambda: optimizers.AdamW(0.01),
    "rmsprop": lambda: optimizers.RMSprop(0.01),
    "adagrad": lambda: optimizers.Adagrad(0.05),
    "adadelta": lambda: optimizers.Adadelta(0.1),
    "adamax": lambda: optimizers.Adamax(0.01),
    "nadam": lambda: optimizers.Nadam(0.01),
    "adafactor": lambda: optimizers.Adafactor(0.01),
    "lion": lambda: optimizers.Lion(0.001),
    "lamb": lambda: optimizers.Lamb(0.01),
    "ftrl": lambda: optimizers.Ftrl(0.05),
    "muon": lambda: optimizers.Muon(0.01),
    "schedule_free_adamw": lambda: optimizers.ScheduleFreeAdamW(0.01),
}


def data(model: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns images or tokens, and a class for each of them."""
    generator = np.random.default_rng(seed)
    num = NUM_STEPS * GLOBAL_BATCH_SIZE
    classes = generator.integers(0, NUM_CLASSES, num)
    if model in ("lenet", "resnet"):
        return generator.normal(size=(num, 28, 28, 1)).astype("float32"), classes
    tokens = generator.integers(1, NUM_TOKENS, (num, LENGTH))
    lengths = generator.integers(1, LENGTH + 1, num)
    return np.where(np.arange(LENGTH) < lengths[:, np.newaxis], tokens, 0), classes


def search(model: str, optimizer: str, dtype: str, seed: int) -> str:
    """Trains a pair and compares it; returns the verdict if it has a fault, else "clean"."""

    def build() -> keras.Model:
        built = MODELS[model]()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        built.compile(optimizer=OPTIMIZERS[optimizer](), loss=loss)
        return built

    keras.utils.set_random_seed(seed)
    keras.config.set_dtype_policy(dtype)
    try:
        strategy = tf.distribute.MirroredStrategy(
            [f"CPU:{i}" for i in range(NUM_REPLICAS)],
            cross_device_ops=tf.distribute.ReductionToOneDevice(),
        )
        assert strategy.num_replicas_in_sync == NUM_REPLICAS
        with strategy.scope():
            trained = build()
        batches = tf.data.Dataset.from_tensor_slices(data(model, seed)).batch(GLOBAL_BATCH_SIZE)
        with Recorder(trained, NUM_STEPS) as record:
            trained.fit(batches, verbose=0)
        verdict = lockstep.compare(record, model=build, batches=list(batches.as_numpy_iterator()))
        assert len(verdict.steps) == NUM_STEPS and "update" in verdict.checked
        return CLEAN if verdict.ok else str(verdict)
    finally:
        keras.config.set_dtype_policy("float32")
        keras.backend.clear_session()
        gc.collect()


def search_or_explain(pair: str, seed: int) -> str:
    """Searches a pair; where that raises, reports it and continues."""
    model, optimizer, dtype = pair.split("/")
    try:
        return search(model, optimizer, dtype, seed)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def print_table(results: dict[str, str]) -> None:
    """Prints optimizers against models and dtypes."""
    columns = [f"{model}/{dtype}" for dtype in DTYPES for model in MODELS]
    words = {"float32": "float32", "mixed_bfloat16": "bfloat16"}
    print(f"{'':<20}" + "".join(f"{words[c.split('/')[1]]:<11}" for c in columns))
    print(f"{'':<20}" + "".join(f"{c.split('/')[0]:<11}" for c in columns))
    for optimizer in OPTIMIZERS:
        row = f"{optimizer:<20}"
        for column in columns:
            model, dtype = column.split("/")
            result = results.get(f"{model}/{optimizer}/{dtype}")
            shown = "-" if result is None else CLEAN if result == CLEAN else "FALSE"
            row += f"{shown:<11}"
        print(row.rstrip())


def pairs_of(parts: Sequence[str]) -> list[str]:
    """Returns the pairs whose names have one of these parts; all for none."""
    names = [f"{m}/{o}/{d}" for d in DTYPES for m in MODELS for o in OPTIMIZERS]
    return [name for name in names if not parts or any(part in name for part in parts)]


def main() -> int:
    """Prints what is found in each pair, and a table; returns 1 if there is a false alarm."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", help="of the names of the pairs; all by default")
    parser.add_argument("--kept", type=pathlib.Path, help="a file to which results are added")
    parser.add_argument("--seed", type=int, default=1, help="of weights and examples")
    arguments = parser.parse_args()
    if not (pairs := pairs_of(arguments.parts)):
        parser.error(f"no pair has {', '.join(arguments.parts)} in its name")
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * NUM_REPLICAS,
    )
    tf.get_logger().setLevel("ERROR")  # Each pair traces another step, on purpose.
    warnings.filterwarnings("ignore", category=UserWarning, module="keras")
    kept: dict[str, str] = {}
    if arguments.kept and arguments.kept.exists():
        for line in arguments.kept.read_text(encoding="utf-8").splitlines():
            kept.update(json.loads(line))
    results = {}
    for pair in pairs:
        name = f"{pair}/seed {arguments.seed}"
        if name not in kept:
            begin = time.perf_counter()
            kept[name] = search_or_explain(pair, arguments.seed)
            print(f"{pair:<36} {time.perf_counter() - begin:5.1f} s  {kept[name]}", flush=True)
            if arguments.kept:
                with arguments.kept.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({name: kept[name]}) + "\n")
        results[pair] = kept[name]
    print_table(results)
    alarms = [pair for pair, result in results.items() if result != CLEAN]
    print(f"{len(alarms)} false alarms in {len(results)} pairs")
    return 1 if alarms else 0


if __name__ == "__main__":
    sys.exit(main())
