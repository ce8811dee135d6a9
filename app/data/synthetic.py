"""Generates images of garments in ten classes, for use without the real data.

Seeded silhouettes vary in size, position, slant, brightness and noise, and every image contains a
share of another one, so that a network learns but does not reach 100 % accuracy.
"""

import numpy as np

# The silhouette of each class, in the order of `CLASS_NAMES`: seven rows of seven squares.
_SHAPES = (
    ".##.##. ####### #.###.# ..###.. ..###.. ..###.. ..###..",
    "..###.. ..###.. ..#.#.. ..#.#.. ..#.#.. ..#.#.. ..#.#..",
    "..###.. .#####. ####### #.###.# #.###.# #.###.# ..###..",
    "..#.#.. ..###.. ..###.. ...#... ..###.. .#####. .#####.",
    "..#.#.. .##.##. ###.### #.#.#.# #.#.#.# #.#.#.# ..#.#..",
    "....... ....... .....## ...#.#. .#.#.## ####### .......",
    "..#.#.. .#####. ####### #.###.# #.###.# ..###.. ..###..",
    "....... ....... ....##. ..##### ####### ####### .......",
    "....... ..###.. .#...#. ####### ####### ####### .......",
    "....### ....### ....### ..##### ####### ####### .......",
)
_CHUNK = 500  # Images drawn at a time; fits in the processor's cache.


def generate_synthetic(
    *, seed: int = 0, num_train: int = 60_000, num_test: int = 10_000
) -> tuple[np.ndarray, ...]:
    """Returns images and labels to train on, and those to test on, uint8; takes about 2 s."""
    train_seed, test_seed = np.random.SeedSequence(seed).spawn(2)
    return (*_draw(train_seed, num_train), *_draw(test_seed, num_test))


def _draw(seed: np.random.SeedSequence, num_images: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns images `(N, 28, 28, 1)` and labels `(N,)`, with balanced classes."""
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.arange(num_images) % len(_SHAPES)).astype(np.uint8)
    squares = [[[c == "#" for c in row] for row in shape.split()] for shape in _SHAPES]
    shapes = np.kron(squares, np.ones((1, 8, 8), np.float32))
    shapes = np.pad(shapes, ((0, 0), (28, 28), (28, 28)))
    images = np.empty((num_images, 28, 28, 1), np.uint8)
    for start in range(0, num_images, _CHUNK):
        chunk = labels[start : start + _CHUNK]
        share = np.clip(np.abs(rng.normal(0, 0.25, (len(chunk), 1, 1))), 0, 0.7)
        other = rng.integers(0, len(_SHAPES), len(chunk))
        mask = (1 - share) * _place(shapes, chunk, rng) + share * _place(shapes, other, rng)
        noise = rng.standard_normal(mask.shape, np.float32)
        pixels = mask * rng.uniform(70, 250, (len(chunk), 1, 1)) + 25 * noise * (mask + 0.2)
        images[start : start + len(chunk), ..., 0] = np.clip(pixels, 0, 255)
    return images, labels


def _place(shapes: np.ndarray, labels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Returns silhouettes of a random size, position and slant, `(n, 28, 28)` from 0 to 1."""
    size, up, left, slant = rng.standard_normal((4, len(labels), 1, 1))
    x = np.linspace(-31, 31, 28) * (1.1 + 0.1 * size)
    y = x.transpose(0, 2, 1)
    rows, columns = (
        np.clip(shapes.shape[1] / 2 + place, 0, shapes.shape[1] - 1).astype(np.int32)
        for place in (y + 2 * up, x + 2 * left + 0.1 * slant * y)
    )
    return shapes[labels[:, None, None], rows, columns]
