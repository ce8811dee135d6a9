"""Measures the machine's peak speed, as a program of the benchmark: products of square matrices."""

import argparse
import os
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from protocol import claim_stdout, serve

SIZE = 4096
PRODUCTS = 10  # Per block.


def main() -> None:
    """Multiplies matrices on request; an "image" is one floating-point operation here."""
    claim_stdout()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--data_dir", help="not needed")
    options = parser.parse_args()
    import tensorflow as tf

    a, b = (tf.cast(tf.random.normal((SIZE, SIZE)), options.precision) for _ in range(2))
    multiply = tf.function(lambda: tf.matmul(a, b))
    multiply()

    def steps(num_steps: int) -> dict:
        start = time.perf_counter()
        for _ in range(PRODUCTS):
            product = multiply()
        product[0, 0].numpy()
        return {"sec": time.perf_counter() - start, "images": PRODUCTS * 2 * SIZE**3, "loss": 0.0}

    serve({"versions": {"tensorflow": tf.__version__}}, {"steps": steps})


if __name__ == "__main__":
    main()
