"""Lets layers compute a batch shard by shard; those that synchronise add over all shards."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import tree

from lockstep.numeric.arrays import Named, same_bits
from lockstep.oracles import Ask
from lockstep.recorders.common import Hooks
from lockstep.recorders.keras.private import layers_of, mask_of, set_mask
from lockstep.recorders.keras.values import to_numpy_dtype

_MOST_PASSES = 8  # Of a layer whose sums over all shards depend on each other.


@contextlib.contextmanager
def by_shard(
    model: keras.Model,
    variables: Mapping[str, keras.Variable],
    parts: Sequence[Ask],
    *,
    at_once: bool = False,
) -> Iterator[list[Named]]:
    """Makes layers compute each shard of a batch on its own in a `with` block.

    A layer then sees the examples, the replica number, the seeds and the statistics of one shard
    at a time, as in a training, and adds over all shards in their order where it synchronises.
    Layers that contain one that synchronises see the batch.

    Args:
        model: the model.
        variables: its variables, by name.
        parts: the steps of the shards that make up the batch.
        at_once: whether layers that synchronise see the batch, too.

    Yields:
        For each shard, the variables that its layers have changed so far.
    """
    names = {id(variable): name for name, variable in variables.items()}
    sizes = [len(part.data[0]) for part in parts]
    changed: list[Named] = [{} for _ in parts]

    def compute(
        own: Named, sums: Sequence[tf.Tensor], inner: Callable, cuts: Sequence, nest: Any
    ) -> tuple[Any, list[list[tf.Tensor]]]:
        """Returns the results of a layer, and what each shard adds to the sums over all."""
        outputs, added = [], []
        for shard, part in enumerate(parts):
            if not sizes[shard]:
                continue
            for name, variable in own.items():
                value = changed[shard].get(name, part.state[name])
                variable.assign(tf.cast(value, variable.dtype))
            pieces = iter(cuts)
            replica = _Replica(part.replica, sum(map(bool, sizes)), sums)
            with replica:
                args, kwargs = tree.map_structure(partial(_take, pieces, shard), nest)
                outputs.append(inner(*args, **kwargs))
            added.append(replica.added)
            for name, variable in own.items():
                changed[shard][name] = np.array(to_numpy_dtype(variable.value))
        return tree.map_structure(_joined, *outputs), added

    def call(own: Named, inner: Callable, *args: Any, **kwargs: Any) -> Any:
        cuts = [_rows(leaf, sizes) for leaf in tree.flatten((args, kwargs))]
        if not any(cuts) or not tf.executing_eagerly():
            return inner(*args, **kwargs)
        before, last = [dict(each) for each in changed], list[list[tf.Tensor]]()
        for _ in range(_MOST_PASSES):
            changed[:] = [dict(each) for each in before]
            sums = [tf.add_n(each) for each in zip(*last, strict=True)]
            outputs, added = compute(own, sums, inner, cuts, (args, kwargs))
            if _have_same_bits(added, last):
                break
            last = added
        return outputs

    with Hooks() as hooks:
        for layer in separate_layers(model, synchronises=not at_once):
            state = layer.non_trainable_variables
            own = {names[id(v)]: v for v in state if id(v) in names}
            hooks.hook(layer, "call", partial(call, own))
        yield changed


def separate_layers(
    layer: keras.layers.Layer, *, synchronises: bool = False
) -> Iterator[keras.layers.Layer]:
    """Yields the outermost layers without any layer that synchronises.

    Args:
        layer: the layer or model that contains them.
        synchronises: whether to yield those that synchronise themselves, too.
    """
    for part in layers_of(layer, include_self=False, recursive=False):
        inner = [each for each in layers_of(part) if getattr(each, "synchronized", False)]
        if inner and not (synchronises and inner == [part]):
            yield from separate_layers(part, synchronises=synchronises)
        elif not isinstance(part, keras.layers.InputLayer):
            yield part


class _Replica(tf.distribute.ReplicaContext):
    """The number of a replica; sums over all replicas are those of an earlier pass.

    Args:
        number: the number of the replica.
        num_replicas: the number of replicas that add.
        sums: what all replicas have added in the earlier pass, in the order of the calls.

    Attributes:
        added: what this replica adds, in the order of the calls.
    """

    def __init__(self, number: int, num_replicas: int, sums: Sequence[tf.Tensor]):
        super().__init__(tf.distribute.get_strategy(), number)
        self._num_replicas, self._sums, self.added = num_replicas, sums, list[tf.Tensor]()

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas that add."""
        return self._num_replicas

    def all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        """Returns the sum or mean over all replicas; without an earlier pass that of this one."""
        times = 1 / self._num_replicas if "MEAN" in str(reduce_op).upper() else 1

        def reduced(own: Any) -> tf.Tensor:
            own = tf.convert_to_tensor(own)
            self.added.append(own)
            number = len(self.added) - 1
            total = self._sums[number] if number < len(self._sums) else own
            return total if times == 1 else total * tf.cast(times, total.dtype)

        return tree.map_structure(reduced, value)


def _have_same_bits(added: Sequence[list[tf.Tensor]], last: Sequence[list[tf.Tensor]]) -> bool:
    """Returns whether all shards have added what they added in the last pass."""
    if not any(added):
        return True
    own, old = ([[array.numpy() for array in part] for part in each] for each in (added, last))
    return [*map(len, own)] == [*map(len, old)] and all(
        same_bits(a, b) for pair in zip(own, old, strict=True) for a, b in zip(*pair, strict=True)
    )


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
