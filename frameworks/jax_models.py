"""LeNet and ResNet-18 in JAX, equal to `models/lenet.py` and `models/resnet.py`.

Weights and moving statistics are two dictionaries with Keras' names and layouts. A network is a
function of both; it returns logits and the statistics after the batch.
"""

import jax
import numpy as np

Arrays = dict[str, jax.Array]
Result = tuple[jax.Array, Arrays]

LENET = {
    **{"conv1": (3, 3, 1, 20), "conv2": (5, 5, 20, 50)},
    **{"hidden": (800, 128), "logits": (128, 10)},
}


def resnet18_layers() -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the kernels by layer, and the widths of normalisations, as `(n,)`."""
    layers = {"stem_conv": (3, 3, 1, 64), "stem_norm": (64,), "logits": (512, 10)}
    inputs = 64
    for stage, width in enumerate((64, 128, 256, 512)):
        for name in (f"stage{stage}_block0", f"stage{stage}_block1"):
            layers |= {f"{name}_conv1": (3, 3, inputs, width), f"{name}_norm1": (width,)}
            layers |= {f"{name}_conv2": (3, 3, width, width), f"{name}_norm2": (width,)}
            if inputs != width:
                layers[f"{name}_shortcut"] = (1, 1, inputs, width)
            inputs = width
    return layers


def create_variables(name: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Creates weights and statistics of "lenet" or "resnet18"; kernels are N(0, 0.01²)."""
    generator = np.random.default_rng(0)
    params, state = {}, {}
    for layer, shape in (LENET if name == "lenet" else resnet18_layers()).items():
        zeros, ones = np.zeros(shape[-1], np.float32), np.ones(shape[-1], np.float32)
        if len(shape) == 1:
            params |= {f"{layer}/gamma": ones, f"{layer}/beta": zeros}
            state |= {f"{layer}/moving_mean": zeros, f"{layer}/moving_variance": ones}
        else:
            kernel = generator.normal(size=shape, scale=0.01).astype(np.float32)
            params |= {f"{layer}/kernel": kernel, f"{layer}/bias": zeros}
    return params, state


def lenet(params: Arrays, state: Arrays, images: jax.Array, training: bool) -> Result:
    """Returns logits of images `(n, 28, 28, 1)`; LeNet has no statistics."""
    x = _average_pool(jax.nn.relu(_conv(params, "conv1", images, padding="VALID")))
    x = _average_pool(jax.nn.relu(_conv(params, "conv2", x, padding="VALID")))
    x = jax.nn.relu(_dense(params, "hidden", x.reshape(len(x), -1)))
    return _dense(params, "logits", x), state


def resnet18(params: Arrays, state: Arrays, images: jax.Array, training: bool) -> Result:
    """Returns logits of images `(n, 28, 28, 1)`, and the statistics, updated if `training`."""
    state = dict(state)

    def norm(layer: str, x: jax.Array) -> jax.Array:
        mean, variance = state[f"{layer}/moving_mean"], state[f"{layer}/moving_variance"]
        if training:
            moving_mean, moving_variance = mean, variance
            mean, variance = x.mean((0, 1, 2)), x.var((0, 1, 2))  # Biased: divided by n.
            state[f"{layer}/moving_mean"] = 0.9 * moving_mean + 0.1 * mean
            state[f"{layer}/moving_variance"] = 0.9 * moving_variance + 0.1 * variance
        x = (x - mean) * jax.lax.rsqrt(variance + 1e-5)
        return x * params[f"{layer}/gamma"] + params[f"{layer}/beta"]

    x = jax.nn.relu(norm("stem_norm", _conv(params, "stem_conv", images)))
    for block in [f"stage{stage}_block{block}" for stage in range(4) for block in (0, 1)]:
        halves = f"{block}_shortcut/kernel" in params
        stride = 2 if halves else 1
        y = jax.nn.relu(norm(f"{block}_norm1", _conv(params, f"{block}_conv1", x, stride)))
        y = norm(f"{block}_norm2", _conv(params, f"{block}_conv2", y))
        x = _conv(params, f"{block}_shortcut", x, stride) if halves else x
        x = jax.nn.relu(y + x)
    return _dense(params, "logits", x.mean((1, 2))), state


NETWORKS = {"lenet": lenet, "resnet18": resnet18}


def _conv(
    params: Arrays, layer: str, x: jax.Array, stride: int = 1, padding: str = "SAME"
) -> jax.Array:
    # "SAME" pads as in TensorFlow: with stride 2, often more at the end than at the beginning.
    kernel, axes = params[f"{layer}/kernel"], ("NHWC", "HWIO", "NHWC")
    strides = (stride, stride)
    x = jax.lax.conv_general_dilated(x, kernel, strides, padding, dimension_numbers=axes)
    return x + params[f"{layer}/bias"]


def _dense(params: Arrays, layer: str, x: jax.Array) -> jax.Array:
    return x @ params[f"{layer}/kernel"] + params[f"{layer}/bias"]


def _average_pool(x: jax.Array) -> jax.Array:
    window = (1, 2, 2, 1)
    return jax.lax.reduce_window(x, 0.0, jax.lax.add, window, window, "VALID") / 4
