"""Trains LeNet on two devices, then verifies the first steps against one device.

From the directory of main.py:

    PYTHONPATH=. .venv/bin/python examples/train_and_verify.py
"""

from app import Config, run


def main() -> None:
    """Prints the test accuracy and the verdict."""
    summary = run(
        Config.of("train", recipe="fast", epochs=1, num_train_examples=6000, num_devices=2)
    )
    print(f"test accuracy {summary.test_accuracy:.4f}")
    (pair,) = run(Config.of("verify", strategies=("single", "manual"), steps=3, num_devices=2))
    print(f"{' and '.join(pair.strategies)}: {pair.outcome}")


if __name__ == "__main__":  # Commands run in processes of their own, which import this file.
    main()
