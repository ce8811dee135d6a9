"""Generates images of garments in ten classes from seeded shapes, for use without the real data.

Sizes and types are those of Fashion-MNIST. Images vary in size, position, slant, brightness,
texture and noise, and similar classes (shirt, t-shirt, pullover, coat) overlap, so that a network
learns but does not reach 100 % accuracy.
"""

from collections.abc import Callable

import numpy as np

from app.data.dataset import CLASS_NAMES, IMAGE_SHAPE, ImageDataset

Length = float | np.ndarray  # For all images, or per image: `(n, 1, 1)` or `(n, 28, 28)`.

_CHUNK = 500  # Images drawn at a time; fits in the processor's cache.


def generate_synthetic(
    *, seed: int = 0, num_train: int = 60_000, num_test: int = 10_000
) -> ImageDataset:
    """Generates the dataset, a pure function of the arguments; under 5 s for the full size."""
    train_seed, test_seed = np.random.SeedSequence(seed).spawn(2)
    return ImageDataset("synthetic", *_draw(train_seed, num_train), *_draw(test_seed, num_test))


def _draw(seed: np.random.SeedSequence, num_images: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns uint8 images `(num_images, 28, 28, 1)` and labels, with balanced classes."""
    generator = np.random.default_rng(seed)
    labels = generator.permutation(np.arange(num_images) % len(CLASS_NAMES)).astype(np.uint8)
    images = np.empty((num_images, *IMAGE_SHAPE), np.uint8)
    for label, draw_garment in enumerate(_GARMENTS):
        members = np.flatnonzero(labels == label)
        for start in range(0, len(members), _CHUNK):
            chunk = members[start : start + _CHUNK]
            images[chunk, :, :, 0] = _render(draw_garment, len(chunk), generator)
    return images, labels


class _Canvas:
    """Holds coordinates of n images, each with its own size, position and slant, and draws shapes.

    Coordinates run from −1 to 1, y downwards; masks are float32 `(n, 28, 28)` in [0, 1].
    """

    def __init__(self, num_images: int, generator: np.random.Generator):
        self._num_images, self._generator = num_images, generator
        line = np.linspace(-1.15, 1.15, 28, dtype=np.float32)
        y, x = line[None, :, None], line[None, None, :]
        self.y = (y - self.vary(0, 0.08)) / self.vary(0.9, 0.07)
        self.x = (x - self.vary(0, 0.08)) / self.vary(0.9, 0.09) + self.vary(0, 0.08) * y

    def vary(self, mean: float, standard_deviation: float) -> np.ndarray:
        """Returns normally distributed numbers, one per image, `(n, 1, 1)`."""
        numbers = self._generator.standard_normal((self._num_images, 1, 1), dtype=np.float32)
        return mean + np.float32(standard_deviation) * numbers

    def box(self, left: Length, right: Length, top: Length, bottom: Length) -> np.ndarray:
        """Draws a rectangle; bounds may be arrays for slanted sides."""
        horizontal = np.minimum(self.x - left, right - self.x)
        return _soften(np.minimum(horizontal, np.minimum(self.y - top, bottom - self.y)))

    def ellipse(self, x: Length, y: Length, width: Length, height: Length) -> np.ndarray:
        """Draws a filled ellipse around (x, y)."""
        distance = np.hypot((self.x - x) / width, (self.y - y) / height)
        return _soften((1 - distance) * 0.5)

    def body(
        self, top_width: Length, bottom_width: Length, top: Length, bottom: Length
    ) -> np.ndarray:
        """Draws a trunk whose width changes linearly from top to bottom."""
        half = top_width + (bottom_width - top_width) * (self.y - top) / (bottom - top)
        return self.box(-half, half, top, bottom)

    def sleeves(self, length: Length, spread: Length) -> np.ndarray:
        """Draws sleeves from the shoulders at ±0.45 down to `length`, leaning out by `spread`."""
        lean = 0.42 + spread * (self.y + 0.75)
        x = np.abs(self.x)
        inside = np.minimum(np.minimum(x - lean + 0.14, lean + 0.16 - x), length - self.y)
        return _soften(np.minimum(inside, self.y + 0.8))


def _soften(distance: np.ndarray) -> np.ndarray:
    """Converts a signed distance to a mask with an edge of about one pixel."""
    return np.clip(distance * 12 + 0.5, 0, 1)


def _t_shirt(c: _Canvas) -> np.ndarray:
    trunk = c.body(c.vary(0.45, 0.05), c.vary(0.45, 0.05), -0.8, c.vary(0.75, 0.1))
    return np.maximum(trunk, c.sleeves(c.vary(-0.2, 0.17), c.vary(0.45, 0.1)))


def _trouser(c: _Canvas) -> np.ndarray:
    gap = c.vary(0.06, 0.03) * (c.y + 0.7)
    leg = np.abs(c.x) - gap
    legs = c.box(-0.42, 0.42, -0.9, 0.95) * _soften(leg)
    return np.maximum(legs, c.body(c.vary(0.32, 0.04), 0.4, -0.95, -0.5))


def _pullover(c: _Canvas) -> np.ndarray:
    trunk = c.body(c.vary(0.46, 0.05), c.vary(0.46, 0.05), -0.8, c.vary(0.75, 0.1))
    return np.maximum(trunk, c.sleeves(c.vary(0.62, 0.17), c.vary(0.25, 0.08)))


def _dress(c: _Canvas) -> np.ndarray:
    skirt = c.body(c.vary(0.2, 0.04), c.vary(0.46, 0.1), -0.3, 0.98)
    top = c.body(c.vary(0.32, 0.06), 0.22, -0.95, -0.25)
    sleeves = c.sleeves(c.vary(-0.75, 0.25), 0.3)
    return np.maximum(np.maximum(skirt, top), sleeves)


def _coat(c: _Canvas) -> np.ndarray:
    trunk = c.body(c.vary(0.46, 0.05), c.vary(0.52, 0.06), -0.8, c.vary(0.88, 0.08))
    coat = np.maximum(trunk, c.sleeves(c.vary(0.7, 0.15), c.vary(0.24, 0.07)))
    opening = c.box(-0.05, 0.03, -0.5, 1.0) * np.clip(c.vary(0.5, 0.3), 0, 1)
    return coat * (1 - opening)


def _sandal(c: _Canvas) -> np.ndarray:
    sole = c.box(-0.95, 0.95, 0.28 - c.vary(0.2, 0.12) * c.x, 0.55 + 0 * c.x)
    stripes = np.sin(c.vary(9, 2) * c.x + c.vary(0, 3)) > 0.2
    straps = c.ellipse(c.vary(-0.1, 0.2), 0.3, c.vary(0.75, 0.1), c.vary(0.5, 0.12)) * stripes
    return np.maximum(sole, straps * (c.y < 0.4))


def _shirt(c: _Canvas) -> np.ndarray:
    trunk = c.body(c.vary(0.45, 0.05), c.vary(0.46, 0.05), -0.8, c.vary(0.78, 0.1))
    shirt = np.maximum(trunk, c.sleeves(c.vary(0.3, 0.4), c.vary(0.3, 0.1)))
    collar = _soften(0.16 - np.abs(c.x) - 0.5 * (c.y + 0.8)) * np.clip(c.vary(0.5, 0.35), 0, 1)
    buttons = c.box(-0.02, 0.04, -0.6, 0.7) * (np.sin(c.y * 16) > 0) * c.vary(0.3, 0.15)
    return shirt * (1 - np.clip(collar + buttons, 0, 1))


def _sneaker(c: _Canvas) -> np.ndarray:
    sole = c.box(-0.95, 0.95, 0.35, 0.58)
    upper = c.body(0.2, 0.85, c.vary(-0.2, 0.1), 0.45)
    toe = c.ellipse(c.vary(-0.45, 0.07), 0.35, 0.5, c.vary(0.3, 0.05))
    return np.maximum(sole * 0.8, np.maximum(upper * (c.x > -0.55), toe * (c.y < 0.45)))


def _bag(c: _Canvas) -> np.ndarray:
    top = c.vary(-0.2, 0.12)
    bag = c.body(c.vary(0.7, 0.1), c.vary(0.75, 0.1), top, c.vary(0.7, 0.1))
    width, height = c.vary(0.45, 0.1), c.vary(0.5, 0.15)
    handle = c.ellipse(0, top, width, height) - c.ellipse(0, top, width - 0.13, height - 0.13)
    return np.maximum(bag, np.clip(handle, 0, 1) * (c.y < top + 0.1))


def _ankle_boot(c: _Canvas) -> np.ndarray:
    sole = c.box(-0.9, 0.8, 0.62, 0.85 - 0.1 * (c.x > 0.2))
    shaft = c.box(c.vary(0.0, 0.06), c.vary(0.72, 0.06), c.vary(-0.75, 0.15), 0.7)
    foot = c.ellipse(c.vary(-0.25, 0.06), 0.62, 0.65, c.vary(0.45, 0.08)) * (c.y < 0.7)
    return np.maximum(sole, np.maximum(shaft, foot))


_GARMENTS = (
    _t_shirt, _trouser, _pullover, _dress, _coat,
    _sandal, _shirt, _sneaker, _bag, _ankle_boot,
)  # fmt: skip


def _render(
    draw_garment: Callable[[_Canvas], np.ndarray], num_images: int, generator: np.random.Generator
) -> np.ndarray:
    """Draws one chunk of a class with texture, brightness and noise; uint8 `(n, 28, 28)`."""
    canvas = _Canvas(num_images, generator)
    mask = draw_garment(canvas)
    along = np.where(canvas.vary(0, 1) > 0, canvas.x, canvas.y)
    stripes = 1 + canvas.vary(0, 0.22) * np.sin(canvas.vary(12, 5) * along + canvas.vary(0, 3))
    brightness = np.clip(canvas.vary(150, 50), 50, 250)
    noise = generator.standard_normal(mask.shape, dtype=np.float32)
    pixels = mask * (brightness * stripes + 28 * noise) + 9 * np.maximum(noise, 0)
    return np.clip(pixels, 0, 255).astype(np.uint8)
