"""Images that a user hands in; `messages.txt` has what is refused."""

import numpy as np
import pytest
from PIL import Image

from app.data.image_files import load_image_files
from app.runtime.errors import DataError


@pytest.fixture
def pixels():
    return np.random.default_rng(0).integers(0, 256, (28, 28), dtype=np.uint8)


def save_png(path, pixels):
    Image.fromarray(pixels).save(path)
    return str(path)


def test_png_and_npy_come_in_order_with_names(tmp_path, pixels):
    png = save_png(tmp_path / "a b.PNG", pixels)
    np.save(tmp_path / "one.npy", pixels)
    np.save(tmp_path / "two.npy", np.stack([pixels, 255 - pixels])[..., None])
    names, images = load_image_files([png, f"{tmp_path}/one.npy", f"{tmp_path}/two.npy"])
    assert names == [png, f"{tmp_path}/one.npy", f"{tmp_path}/two.npy[0]", f"{tmp_path}/two.npy[1]"]
    assert images.shape == (4, 28, 28, 1) and images.dtype == np.uint8
    for loaded, expected in zip(images, [pixels, pixels, pixels, 255 - pixels], strict=True):
        np.testing.assert_array_equal(loaded[..., 0], expected)


def test_a_header_that_promises_too_much_is_not_believed(tmp_path):
    header = b"{'descr': '|u1', 'fortran_order': False, 'shape': (99999999999, 28, 28), }"
    header = header.ljust(117) + b"\n"
    content = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header
    (tmp_path / "huge.npy").write_bytes(content)
    with pytest.raises(DataError, match=r"huge\.npy"):
        load_image_files([f"{tmp_path}/huge.npy"])


def test_colour_becomes_luma(tmp_path):
    """ITU-R BT.601: 0.299 R' + 0.587 G' + 0.114 B'."""
    pixels = np.random.default_rng(1).integers(0, 256, (28, 28, 3), dtype=np.uint8)
    loaded = load_image_files([save_png(tmp_path / "rgb.png", pixels)])[1][0, ..., 0].astype(int)
    assert np.abs(loaded - pixels @ [0.299, 0.587, 0.114]).max() <= 1
    opaque = np.dstack([pixels, np.full((28, 28), 128, np.uint8)])
    with_alpha = load_image_files([save_png(tmp_path / "rgba.png", opaque)])[1][0, ..., 0]
    np.testing.assert_array_equal(with_alpha, loaded)
