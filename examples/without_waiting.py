"""Times training steps with and without waiting for the device.

    python examples/without_waiting.py

JAX returns from a step before the device has computed it. The program times the same steps in three
ways: it does not wait, it waits for each step, or it waits for the step before, so that two steps
are in flight. It needs JAX and NumPy.
"""

import time

import jax
import numpy as np


@jax.jit
def step(weights, batch):
    """Returns the weights after a step that takes some 15 ms on a CPU."""
    for _ in range(8):
        weights = weights - 1e-4 * (batch.T @ jax.nn.tanh(batch @ weights))
    return weights


def run(batches, weights, max_in_flight):
    """Returns seconds until the last call returns and until its result is there, and the result."""
    results, start = [weights], time.perf_counter()
    for batch in batches:
        results.append(step(results[-1], batch))
        if len(results) > max_in_flight:
            results[-max_in_flight].block_until_ready()
    returned = time.perf_counter() - start
    results[-1].block_until_ready()
    return returned, time.perf_counter() - start, results[-1]


def main():
    """Runs 20 steps in each way, five times in turn, and prints medians."""
    random = np.random.default_rng(0)
    batches = [jax.device_put(random.random((256, 1024), np.float32)) for _ in range(20)]
    weights = jax.device_put(random.random((1024, 128), np.float32))
    ways = {"no wait": 100, "each step": 1, "two in flight": 2}
    times = {way: [] for way in ways}
    last = []
    for number in range(6):
        for way, max_in_flight in ways.items():
            *seconds, weights_after = run(batches, weights, max_in_flight)
            last.append(np.array(weights_after))
            if number:  # The first round compiles.
                times[way].append(seconds)
    for way, rounds in times.items():
        returned, done = np.median(rounds, axis=0) * 1000
        print(
            f"{way}: calls return after {returned:.1f} ms, the weights are there after {done:.1f}"
        )
    print("same weights:", all(np.array_equal(last[0], each) for each in last))


if __name__ == "__main__":
    main()
