"""Stands in for JAX: as much as `lockstep_jax.py` and `jax_cases.py` use, with NumPy.

There are four devices; what `shard_map` and `pmap` run on them runs in a thread for each.
"""

import contextlib
import functools
import sys
import threading
import types
from types import SimpleNamespace

import numpy as np

__version__ = "1.0.0+stand.in"
_place = threading.local()  # Of a thread of a device: `index` and `exchange`.


class Device:
    process_index = 0


_DEVICES = [Device(), Device(), Device(), Device()]


class PartitionSpec:
    def __init__(self, *axes):
        self.axes = axes

    def __iter__(self):
        return iter(self.axes)


class Mesh:
    def __init__(self, devices, axis_names):
        self.devices, self.axis_names = np.array(devices), axis_names
        self.shape = dict(zip(axis_names, self.devices.shape, strict=True))

    def places(self):
        """Returns device → axis → its position."""
        positions = np.ndindex(self.devices.shape)
        return {self.devices[at]: dict(zip(self.axis_names, at, strict=True)) for at in positions}


class Sharding:
    """Splits each dimension over the axis of the mesh that the specification has for it."""

    def __init__(self, mesh, spec):
        self.mesh, self.spec = mesh, spec
        self.devices, self.is_split = [*mesh.devices.flat], any(spec)
        self.device_set = set(self.devices)
        self.is_fully_replicated = not self.is_split

    def devices_indices_map(self, shape):
        found = {}
        for device, at in self.mesh.places().items():
            index = [slice(None)] * len(shape)
            for dimension, axis in enumerate(self.spec if shape else ()):
                if axis:
                    size = shape[dimension] // self.mesh.shape[axis]
                    index[dimension] = slice(at[axis] * size, at[axis] * size + size)
            found[device] = tuple(index)
        return found


ONE_DEVICE = Sharding(Mesh(_DEVICES[:1], ("x",)), PartitionSpec())


class Array(np.ndarray):
    is_fully_addressable = True

    def __array_finalize__(self, source):
        self.sharding = ONE_DEVICE

    @property
    def is_fully_replicated(self):
        return len(self.sharding.devices) == 1 or not self.sharding.is_split

    @property
    def addressable_shards(self):
        parts = self.sharding.devices_indices_map(self.shape)
        return [SimpleNamespace(device=device, data=self[part]) for device, part in parts.items()]

    def copy(self):
        return device_put(np.array(self), self.sharding, type(self))


class Key(Array):
    """Two numbers for each key; their axis is not one of the array's."""

    dtype = "key"


def device_put(tree, sharding, kind=None):
    def put(leaf):
        array = np.array(leaf).view(kind or (type(leaf) if isinstance(leaf, Key) else Array))
        array.sharding = sharding
        return array

    return tree_map(put, tree)


def make_array_from_callback(shape, sharding, part_of):
    whole = None
    for part in sharding.devices_indices_map(shape).values():
        values = np.asarray(part_of(part))
        whole = np.empty(shape, values.dtype) if whole is None else whole
        whole[part] = values
    return device_put(whole, sharding, Array)


# --- Trees ---------------------------------------------------------------------------------------


def _children(tree):
    """Returns keys and values of a node, and what makes a node of values; None for a leaf."""
    if isinstance(tree, dict):
        keys = sorted(tree)
        return keys, [tree[key] for key in keys], lambda v: dict(zip(keys, v, strict=True))
    if hasattr(tree, "_fields"):
        return tree._fields, list(tree), lambda values: type(tree)(*values)
    if isinstance(tree, list | tuple):
        return range(len(tree)), list(tree), type(tree)
    return None


def tree_flatten_with_path(tree, path=()):
    if (node := _children(tree)) is None:
        return [(path, tree)], tree
    pairs = zip(node[0], node[1], strict=True)
    return [x for key, v in pairs for x in tree_flatten_with_path(v, (*path, key))[0]], tree


def leaves_of(tree):
    return [leaf for _, leaf in tree_flatten_with_path(tree)[0]]


def unflatten(structure, leaves):
    leaves = iter(leaves)

    def built(tree):
        node = _children(tree)
        return next(leaves) if node is None else node[2]([built(value) for value in node[1]])

    return built(structure)


def tree_map(function, first, *others):
    """The leaves of `first` may be trees in the others."""
    if (node := _children(first)) is None:
        return function(first, *others)
    rows = zip(node[1], *(_children(other)[1] for other in others), strict=True)
    return node[2]([tree_map(function, *row) for row in rows])


def keystr(path, simple, separator):
    return separator.join(map(str, path))


# --- Functions on devices ------------------------------------------------------------------------


def _on_devices(function, arguments, mesh):
    """Runs a function in one thread for each of its lists of arguments; returns the results."""
    places = [*mesh.places().values()]
    count = len(arguments)
    barrier, sent, results = threading.Barrier(count, timeout=60), [None] * count, [None] * count

    def exchange(index, value):
        sent[index] = value
        barrier.wait()
        found = list(sent)
        barrier.wait()
        return found

    def run(index):
        _place.index, _place.exchange = index, functools.partial(exchange, index)
        _place.mesh, _place.places = mesh, places
        try:
            results[index] = function(*arguments[index])
        except BaseException as error:
            results[index] = error
            barrier.abort()

    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def shard_map(function, *, mesh, in_specs, out_specs, check_vma=True):
    def called(*args):
        def of_device(device):
            def part(spec, tree):
                return _part(tree, Sharding(mesh, spec), device)

            return tree_map(part, in_specs, args)

        results = _on_devices(function, [of_device(d) for d in mesh.devices.flat], mesh)
        return tree_map(functools.partial(_whole, mesh), out_specs, *results)

    def shardings(args):
        def of_tree(spec, tree):
            return [Sharding(mesh, spec) for _ in leaves_of(tree)]

        return leaves_of(tree_map(of_tree, in_specs, args))

    called.shardings = shardings
    return called


def _part(tree, sharding, device):
    def of_leaf(leaf):
        part = sharding.devices_indices_map(np.shape(leaf))[device]
        return np.asarray(leaf)[part].view(type(leaf) if isinstance(leaf, Key) else Array)

    return tree_map(of_leaf, tree) if sharding.is_split else tree


def _whole(mesh, spec, *trees):
    """Returns the arrays of which each device has a part."""
    sharding = Sharding(mesh, spec)

    def of_leaves(*parts):
        sizes = [1] * np.ndim(parts[0])
        for dimension, axis in enumerate(spec):
            sizes[dimension] = mesh.shape[axis] if axis else 1
        whole = np.empty(np.multiply(np.shape(parts[0]), sizes).astype(int), parts[0].dtype)
        for part, index in zip(
            parts, sharding.devices_indices_map(whole.shape).values(), strict=True
        ):
            whole[index] = part
        return device_put(whole, sharding, Array)

    return tree_map(of_leaves, *trees)


class _Compiled:
    """A function whose donated arguments are lost after each call."""

    def __init__(self, function, donate_argnums, shardings):
        self.function, self.shardings = function, shardings
        self.donated = donate_argnums if isinstance(donate_argnums, tuple) else (donate_argnums,)

    def __call__(self, *args, **options):
        result = self.function(*args, **options)
        result = tree_map(
            lambda a: a if isinstance(a, Array) else np.asarray(a).view(Array), result
        )
        for leaf in leaves_of([args[i] for i in self.donated]):
            if isinstance(leaf, Array):
                leaf.view(np.ndarray)[...] = 99
        return result

    def lower(self, *args, **options):
        shardings = self.shardings(args, options)
        compiled = SimpleNamespace(input_shardings=shardings, in_tree=SimpleNamespace())
        compiled.in_tree.flatten_up_to = list
        return SimpleNamespace(compile=lambda: compiled, as_text=str)


def jit(function, donate_argnums=(), static_argnums=()):
    def of_arrays(args, options):
        leaves = [a for a in leaves_of((args, options)) if not isinstance(a, str)]
        return [getattr(leaf, "sharding", None) for leaf in leaves]

    of_map = getattr(function, "shardings", None)
    found = of_arrays if of_map is None else lambda args, options: of_map(args)
    return _Compiled(function, donate_argnums, found)


def pmap(function, axis_name, donate_argnums=(), in_axes=0):
    def called(*args):
        axes = in_axes or [0] * len(args)
        mapped = [arg for arg, axis in zip(args, axes, strict=True) if axis == 0]
        count = len(leaves_of(mapped)[0])
        at = [
            [
                arg if axis is None else tree_map(lambda a, i=i: a[i], arg)
                for arg, axis in zip(args, axes, strict=True)
            ]
            for i in range(count)
        ]
        mesh = Mesh(_DEVICES[:count], ("d",))
        results = _on_devices(function, at, mesh)
        stacked = tree_map(lambda *parts: np.stack(parts), *results)
        return device_put(stacked, Sharding(mesh, PartitionSpec("d")))

    def shardings(args, options):
        axes = in_axes or [0] * len(args)
        found = []
        for arg, axis in zip(args, axes, strict=True):
            for leaf in leaves_of(arg):
                devices = _DEVICES[: 1 if axis is None else len(leaf)]
                found.append(Sharding(Mesh(devices, ("d",)), PartitionSpec("d")))
        return found

    return _Compiled(called, donate_argnums, shardings)


def _reduced(tree, axis, function):
    own = _place.places[_place.index]
    group = [
        sent
        for at, sent in zip(_place.places, _place.exchange(tree), strict=True)
        if all(at[other] == own[other] for other in own if other != axis)
    ]
    return tree_map(lambda *parts: function(np.stack(parts)).view(Array), *group)


def pmean(tree, axis):
    return _reduced(tree, axis, lambda parts: parts.mean(axis=0, dtype=parts.dtype))


def psum(tree, axis):
    return _reduced(tree, axis, lambda parts: parts.sum(axis=0, dtype=parts.dtype))


def _axes():
    mesh = getattr(_place, "mesh", None)
    return SimpleNamespace(manual_axes=mesh.axis_names if mesh else ())


class make_user_context:
    def __init__(self, value):
        self.value = value

    @contextlib.contextmanager
    def __call__(self, value):
        before, self.value = self.value, value
        yield
        self.value = before


# --- Random numbers ------------------------------------------------------------------------------


def key(*numbers):
    return np.array([0, *numbers][-2:], np.uint32).view(Key)


def fold_in(own, number):
    return key(int(own[1]) + 1000, number)


def split(own, count):
    return np.array([fold_in(own, i) for i in range(count)], np.uint32).view(Key)


def normal(own, shape):
    seed = np.array(own).ravel().tolist()
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def _module(name, **content):
    module = types.ModuleType(f"jax.{name}")
    vars(module).update(content)
    sys.modules[f"jax.{name}"] = module
    return module


devices = local_devices = _DEVICES.copy
process_index, process_count = int, functools.partial(int, 1)
block_until_ready, effects_barrier = leaves_of, int
tree = SimpleNamespace(map=tree_map, leaves=leaves_of, unflatten=unflatten)
tree_util = SimpleNamespace(tree_flatten_with_path=tree_flatten_with_path, keystr=keystr)
lax = SimpleNamespace(axis_index=lambda axes: _place.index, pmean=pmean, psum=psum)
debug = SimpleNamespace(callback=lambda function, *args: function(*args))
dtypes = SimpleNamespace(issubdtype=lambda dtype, kind: dtype == kind, prng_key="key")
random = SimpleNamespace(
    key=key, fold_in=fold_in, split=split, normal=normal, key_impl=lambda own: "own",
    key_data=lambda own: device_put(np.array(own), own.sharding, Array),
    wrap_key_data=lambda data, impl: device_put(np.array(data), data.sharding, Key),
)  # fmt: skip
numpy = _module("numpy", asarray=lambda value: np.asarray(value).view(Array))
sharding = _module(
    "sharding", PartitionSpec=PartitionSpec, NamedSharding=Sharding, get_abstract_mesh=_axes,
    Mesh=Mesh,
)  # fmt: skip
_module("experimental", multihost_utils=None)
