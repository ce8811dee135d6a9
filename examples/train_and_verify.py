"""Trains LeNet on two devices, then compares the first three steps with one device.

    PYTHONPATH=. .venv/bin/python examples/train_and_verify.py

Run it in the directory of main.py.
"""

from app import Config, run

summary = run(Config.of("train", recipe="fast", epochs=1, num_train_examples=6000, device="cpu"))
print(f"test accuracy {summary['test_accuracy']:.4f}")

verified = run(Config.of("verify", strategies=("single", "manual"), steps=3, device="cpu"))
print(f"verdict: {verified['manual'].verdict.status}")
