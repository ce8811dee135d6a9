"""Lets layers compute a batch shard by shard, where others synchronise over all of it."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import tree

from lockstep.numeric.arrays import Named
from lockstep.oracles import Ask
from lockstep.recorders.common import Hooks
from lockstep.recorders.keras.private import layers_of, mask_of, set_mask
from lockstep.recorders.keras.values import to_numpy_dtype


@contextlib.contextmanager
def by_shard(
    model: keras.Model, variables: Mapping[str, keras.Variable], parts: Sequence[Ask]
) -> Iterator[list[Named]]:
    """Makes layers compute each shard of a batch on its own in a `with` block.

    A layer then sees the examples, the replica number, the seeds and the statistics of one shard
    at a time, as in a training. Layers that synchronise, or contain such layers, see the batch.

    Args:
        model: the model.
        variables: its variables, by name.
        parts: the steps of the shards that make up the batch.

    Yields:
        For each shard, the variables that its layers have changed so far.
    """
    names = {id(variable): name for name, variable in variables.items()}
    sizes = [len(part.data[0]) for part in parts]
    changed: list[Named] = [{} for _ in parts]

    def call(own: Named, inner: Callable, *args: Any, **kwargs: Any) -> Any:
        cuts = [_rows(leaf, sizes) for leaf in tree.flatten((args, kwargs))]
        if not any(cuts) or not tf.executing_eagerly():
            return inner(*args, **kwargs)
        outputs = []
        for shard, part in enumerate(parts):
            if not sizes[shard]:
                continue
            for name, variable in own.items():
                value = changed[shard].get(name, part.state[name])
                variable.assign(tf.cast(value, variable.dtype))
            pieces = iter(cuts)
            taken = partial(_take, pieces, shard)
            with as_replica(part.replica):
                own_args, own_kwargs = tree.map_structure(taken, (args, kwargs))
                outputs.append(inner(*own_args, **own_kwargs))
            for name, variable in own.items():
                changed[shard][name] = np.array(to_numpy_dtype(variable.value))
        return tree.map_structure(_joined, *outputs)

    with Hooks() as hooks:
        for layer in separate_layers(model):
            state = layer.non_trainable_variables
            own = {names[id(v)]: v for v in state if id(v) in names}
            hooks.hook(layer, "call", partial(call, own))
        yield changed


def separate_layers(layer: keras.layers.Layer) -> Iterator[keras.layers.Layer]:
    """Yields the outermost layers without any layer that synchronises."""
    for part in layers_of(layer, include_self=False, recursive=False):
        inner = layers_of(part)
        if any(getattr(each, "synchronized", False) for each in inner):
            yield from separate_layers(part)
        elif not isinstance(part, keras.layers.InputLayer):
            yield part


def _rows(leaf: Any, sizes: Sequence[int]) -> list[tf.Tensor]:
    """Returns the rows of each shard; empty for what has no row for each example.

    A tensor may have several rows for each example, such as one for each time step.
    """
    if not isinstance(leaf, tf.Tensor) or not leaf.shape.rank or len(leaf) % sum(sizes):
        return []
    times = len(leaf) // sum(sizes)
    rows, mask = tf.split(leaf, [times * size for size in sizes]), mask_of(leaf)
    if mask is not None:
        for each, own in zip(rows, _rows(mask, sizes), strict=True):
            set_mask(each, own)
    return rows


def _take(pieces: Iterator[list[tf.Tensor]], shard: int, leaf: Any) -> Any:
    """Returns a shard's rows of the next leaf."""
    rows = next(pieces)
    return rows[shard] if rows else leaf


def _joined(*parts: Any) -> Any:
    """Returns the results of all shards as one; of numbers, such as losses, the mean."""
    if not isinstance(parts[0], tf.Tensor):
        return parts[0]
    if not parts[0].shape.rank:
        return tf.reduce_mean(tf.stack(parts), 0)
    whole, masks = tf.concat(parts, 0), [mask_of(part) for part in parts]
    if all(mask is not None for mask in masks):
        set_mask(whole, tf.concat(masks, 0))
    return whole


@contextlib.contextmanager
def as_replica(number: int) -> Iterator[None]:
    """Runs a step on one device with the number of a replica, in a group of one."""
    with tf.distribute.ReplicaContext(tf.distribute.get_strategy(), number):
        yield
