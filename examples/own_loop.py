"""Trains with a strategy of the program in your own loop, on two logical CPU devices.

    PYTHONPATH=. .venv/bin/python examples/own_loop.py

Run it in the directory of main.py.
"""

from app import Config
from app.data.fashion_mnist import load_data
from app.devices.setup import set_up

config = Config.of(
    "train",
    strategy="manual",
    device="cpu",
    num_gpus=2,
    recipe="fast",
    num_train_examples=6000,
    epochs=1,
)
devices = set_up(config)  # Call it before TensorFlow is imported: it configures the devices.

from app.training.build import TrainingRun  # noqa: E402
from app.training.loop import evaluate  # noqa: E402

training = TrainingRun(config, devices, load_data(config))
strategy = training.strategy

iterator = strategy.distribute(training.batches())
for _ in range(3):
    totals = strategy.train_steps(iterator, num_steps=training.steps_per_epoch // 3)
    print(f"loss {totals.loss:.4f}, accuracy {totals.accuracy:.4f}")
print(f"test accuracy {evaluate(strategy, training.dataset).accuracy:.4f}")
