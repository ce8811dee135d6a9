"""Trains with a strategy of the program in your own loop, on two logical CPU devices.

    PYTHONPATH=. .venv/bin/python examples/own_loop.py

Run it in the directory of main.py.
"""

from app import Config
from app.data.dataset_loader import load_data
from app.devices.device_setup import set_up
from app.training.evaluation import evaluate
from app.training.training_spec import TrainingSpec

config = Config.of(
    "train",
    strategy="manual",
    device="cpu",
    num_devices=2,
    recipe="fast",
    num_train_examples=6000,
    epochs=1,
)
devices = set_up(config)  # Call it first: it configures TensorFlow's devices.
spec = TrainingSpec(config, load_data(config))
strategy = spec.build_strategy(devices)

iterator = strategy.distribute(spec.batches())
for _ in range(3):
    totals = strategy.train_steps(iterator, num_steps=spec.steps_per_epoch // 3)
    print(f"loss {totals.loss:.4f}, accuracy {totals.accuracy:.4f}")
print(f"test accuracy {evaluate(strategy, spec.dataset).accuracy:.4f}")
logits = strategy.predict(spec.dataset.test_images[:5])
