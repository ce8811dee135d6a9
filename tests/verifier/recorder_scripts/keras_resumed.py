"""Trains in Keras with dropout, saves a checkpoint and resumes from it.

keras_resumed.py STEPS [save=FILE] [load=FILE] [without=PART]: PART is "optimizer" or "seeds".
"""

import pickle
import sys

import keras
import numpy as np

import lockstep

given, num_steps = dict(word.split("=") for word in sys.argv[2:]), int(sys.argv[1])
keras.utils.set_random_seed(0)
x = np.random.default_rng(0).normal(size=(64, 6)).astype(np.float32)
model = keras.Sequential(
    [keras.Input((6,)), keras.layers.Dense(8, "tanh"), keras.layers.Dropout(0.2, seed=1),
     keras.layers.Dense(2)]
)  # fmt: skip
model.compile(keras.optimizers.Adam(0.01), "mse")
model.optimizer.build(model.trainable_variables)
parts = {
    "model": model.weights,
    "optimizer": model.optimizer.variables,
    "seeds": [v for v in model.variables if "seed" in v.path],
}
first = 0
if "load" in given:
    with open(given["load"], "rb") as file:
        saved = pickle.load(file)
    first = saved.pop("first")
    for name, values in saved.items():
        for variable, value in zip(parts[name], values, strict=True):
            if name != given.get("without"):
                variable.assign(value)
with lockstep.record(model):
    rows = slice(16 * first, 16 * num_steps)
    model.fit(x[rows], x[rows, :2], batch_size=16, shuffle=False, verbose=0)
if "save" in given:
    saved = {name: [np.array(v) for v in own] for name, own in parts.items()}
    with open(given["save"], "wb") as file:
        pickle.dump(saved | {"first": num_steps}, file)
