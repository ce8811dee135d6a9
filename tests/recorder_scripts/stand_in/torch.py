"""Stands in for PyTorch: as much as `record_torch` and `torch_cases.py` use, with NumPy.

It has no automatic differentiation: the gradient of a weight is a pattern times the loss.
"""

import collections
import contextlib
import itertools
import multiprocessing as processes
import sys
import types

import numpy as np

__version__ = "2.13+stand.in"
strided, bfloat16, equal, argsort = "strided", np.float16, np.array_equal, np.argsort
int64 = np.int64
float16 = "torch.float16"  # Only of autocast, which changes nothing here.
set_num_threads = abs  # There is one thread.
compiler = types.SimpleNamespace(is_compiling=lambda: False)
cuda = types.SimpleNamespace(is_initialized=lambda: False, set_rng_state=None)
_random, _world, _pipe = [0, 0], [0, 1], []  # Seed and draws; rank and size; the other process.
_autocast = []  # Dtypes of the contexts that are entered.
_is_grad_enabled, _waiting = [True], []  # Weights whose gradients the next backward pass reduces.


class Tensor(np.ndarray):
    """An array that knows the weights that it is computed from."""

    grad, requires_grad, is_sparse, layout, rows = None, False, False, strided, None
    device = types.SimpleNamespace(type="cpu")
    __hash__ = object.__hash__

    def __array_finalize__(self, source):
        self.weights = getattr(source, "weights", ()) if _is_grad_enabled[0] else ()

    def square(self):
        return self * self

    def dim(self):
        return self.ndim

    def numel(self):
        return self.size

    def element_size(self):
        return self.itemsize

    def is_floating_point(self):
        return self.dtype.kind == "f"

    def register_hook(self, hook):
        """Without automatic differentiation, there is no gradient of an output."""

    def detach(self):
        found = self.view()
        found.weights = ()
        return found

    def cpu(self):
        return self

    def to_local(self):
        return self

    def clone(self):
        return self.copy()

    def float(self):
        return self.astype(np.float32)

    def to(self, dtype):
        return self.astype(dtype)

    def copy_(self, other):
        self[...] = other
        return self

    def register_post_accumulate_grad_hook(self, hook):
        return _Handle(self.hooks, hook)

    def backward(self):
        autograd.backward(self)


class _Sparse(Tensor):
    """The gradient of some rows; its own values are without meaning."""

    is_sparse, layout = True, "sparse_coo"

    def sparse_dim(self):
        return 1

    def _values(self):
        return tensor(np.full((len(self.rows), *self.shape[1:]), self.value, np.float32))

    def _indices(self):
        return tensor(self.rows[None])


class _Handle:
    def __init__(self, hooks, hook, prepend=False):
        self.hooks, others = hooks, dict(hooks)
        if prepend:
            hooks.clear()
        hooks[self] = hook
        hooks.update(others)
        self.id = self

    def hooks_dict_ref(self):
        return self.hooks

    def remove(self):
        self.hooks.pop(self, None)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.remove()


def _backward(loss):
    for weight in dict.fromkeys(loss.weights):
        if weight.rows is not None:
            new = zeros_like(weight).view(_Sparse)
            new.rows, new.value = weight.rows, loss.item()
        else:
            pattern = np.cos(1 + np.arange(weight.size, dtype=np.float32))
            new = tensor(loss.item() * pattern.reshape(weight.shape)).astype(weight.dtype)
        weight.grad = new if weight.grad is None else weight.grad + new
        for hook in list(weight.hooks.values()):
            hook(weight)
    while _waiting:
        for weight in _waiting.pop():
            both = [each for each in _exchanged(weight.grad) if each is not None]
            weight.grad = sum(tensor(each) for each in both) / np.float32(2) if both else None


autograd = types.ModuleType("torch.autograd")
autograd.backward = _backward


def _exchanged(value):
    """Returns the values of both processes in the order of their ranks."""
    _pipe[0].send(value)
    both = [value, _pipe[0].recv()]
    return both if _world[0] == 0 else both[::-1]


def tensor(data, device=None):
    return np.array(data).view(Tensor)


def cat(tensors):
    whole = tensor(np.concatenate(tensors))
    whole.weights = [weight for each in tensors for weight in each.weights]
    return whole


def zeros(size, dtype):
    return tensor(np.zeros(size, dtype))


def as_tensor(data):
    return data if isinstance(data, Tensor) else tensor(data)


def zeros_like(other):
    return tensor(np.zeros(other.shape, other.dtype))


def ones(*shape):
    return tensor(np.ones(shape, np.float32))


def manual_seed(seed):
    _random[:] = seed, 0


def _draw(shape):
    _random[1] += 1
    return tensor(np.random.default_rng(_random).normal(size=shape).astype(np.float32))


def get_rng_state():
    return tensor(np.array(_random, np.uint64).view(np.uint8))


def set_rng_state(state):
    _random[:] = state.view(np.uint64).tolist()


class Generator:
    def manual_seed(self, seed):
        self.numbers = np.random.default_rng(seed)
        return self


def randperm(size, generator):
    return tensor(generator.numbers.permutation(size))


def randn(*shape, generator):
    return tensor(generator.numbers.normal(size=shape).astype(np.float32))


def is_grad_enabled():
    return _is_grad_enabled[0]


@contextlib.contextmanager
def autocast(device, dtype):
    _autocast.append(dtype)
    yield
    _autocast.pop()


def is_autocast_enabled(device):
    return bool(_autocast)


def get_autocast_dtype(device):
    return _autocast[-1]


class no_grad(contextlib.ContextDecorator):
    def __enter__(self):
        self.before, _is_grad_enabled[0] = _is_grad_enabled[0], False

    def __exit__(self, *_):
        _is_grad_enabled[0] = self.before


# --- Modules -------------------------------------------------------------------------------------


class Module:
    """The output for an example is its mean times the sum of all weights."""

    def __init__(self):
        self.training, self._buffers = True, {}
        self._forward_pre_hooks, self._forward_hooks = {}, {}

    def __call__(self, *args):
        options = {}
        for hook, with_kwargs in list(self._forward_pre_hooks.values()):
            changed = hook(self, args, *[options] * with_kwargs)
            args, options = changed or (args, options)
        output = self.forward(*args, **options)
        for hook in list(self._forward_hooks.values()):
            changed = hook(self, args, output)
            output = output if changed is None else changed
        return output

    def forward(self, x):
        output = x.reshape(len(x), -1).mean(axis=1, keepdims=True, dtype=np.float32)
        for _, module in self.named_modules():
            output = output * np.float32(module.used(output))
        output = output * sum(p.sum(dtype=np.float32) for p in self.parameters())
        for p in self.parameters():
            p.rows = np.array(x).ravel() if x.dtype == int else None
        output.weights = [*x.weights, *(p for p in self.parameters() if p.requires_grad)]
        return output

    def used(self, x):
        return 1

    def register_forward_pre_hook(self, hook, *, prepend=False, with_kwargs=False):
        return _Handle(self._forward_pre_hooks, (hook, with_kwargs), prepend)

    def register_forward_hook(self, hook):
        return _Handle(self._forward_hooks, hook)

    def named_modules(self, prefix=""):
        yield prefix, self
        for name, module in vars(self).items():
            if isinstance(module, Module):
                yield from module.named_modules(f"{prefix}.{name}".lstrip("."))

    def _named(self, content, recurse):
        for prefix, module in self.named_modules() if recurse else [("", self)]:
            for name, value in content(module).items():
                if isinstance(value, Tensor):
                    yield f"{prefix}.{name}".lstrip("."), value

    def named_parameters(self, recurse=True, remove_duplicate=True):
        return self._named(vars, recurse)

    def named_buffers(self, recurse=True):
        return self._named(lambda module: module._buffers, recurse)

    def parameters(self):
        return [p for _, p in self.named_parameters()]

    def state_dict(self):
        return dict(self.named_parameters()) | dict(self.named_buffers())

    def requires_grad_(self, value):
        for p in self.parameters():
            p.requires_grad = value
        return self

    def bfloat16(self):
        self._add(**{name: p.shape for name, p in self.named_parameters()}, dtype=bfloat16)
        return self

    def train(self, mode=True):
        for _, module in self.named_modules():
            module.training = mode

    def eval(self):
        self.train(False)

    def _add(self, dtype=np.float32, **shapes):
        for name, shape in shapes.items():
            p = _draw(shape).astype(dtype)
            p.hooks, p.requires_grad = {}, True
            setattr(self, name, p)


class Linear(Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self._add(weight=(outputs, inputs), bias=(outputs,))


class Conv2d(Module):
    def __init__(self, inputs, outputs, size, stride):
        super().__init__()
        self.stride, self.padding, self.dilation, self.groups = (stride,) * 2, (0, 0), (1, 1), 1
        self._add(weight=(outputs, inputs, size, size), bias=(outputs,))


class BatchNorm2d(Module):
    def __init__(self, width):
        super().__init__()
        self.eps, self.momentum = 1e-5, 0.1
        self._add(weight=(width,), bias=(width,))
        self._buffers = {"running_mean": _draw(width), "running_var": _draw(width)}
        self._buffers["num_batches_tracked"] = tensor(0)

    def used(self, x):
        if self.training:
            self._buffers["running_mean"][...] += np.float32(x.mean())
            self._buffers["num_batches_tracked"][...] += 1
        return 1


class Embedding(Module):
    def __init__(self, rows, width, sparse):
        super().__init__()
        self._add(weight=(rows, width))


class Flatten(Module):
    """Has no weights."""


class Dropout(Module):
    def __init__(self, p):
        super().__init__()
        self.p = p

    def used(self, x):
        return _draw(()) if self.training and self.p else 1


class Sequential(Module):
    def __init__(self, *modules):
        super().__init__()
        vars(self).update({str(i): module for i, module in enumerate(modules)})

    def __getitem__(self, place):
        found = [m for m in vars(self).values() if isinstance(m, Module)][place]
        return Sequential(*found) if isinstance(place, slice) else found


class DistributedDataParallel(Module):
    """Averages the gradients of two processes at the end of a backward pass."""

    process_group = None

    def __init__(self, module):
        super().__init__()
        self.module, self.require_backward_grad_sync = module, True

    def forward(self, x):
        if self.require_backward_grad_sync:
            _waiting.append(self.parameters())
        return self.module(x)

    @contextlib.contextmanager
    def no_sync(self):
        self.require_backward_grad_sync = False
        yield
        self.require_backward_grad_sync = True


class DataParallel(DistributedDataParallel):
    """Is refused by the recorder."""


class DeviceMesh:
    """Both processes along one axis."""

    def __init__(self, kind="cpu", sizes=(2,), mesh_dim_names=None):
        self.mesh, self.mesh_dim_names = tensor(np.arange(2).reshape(sizes)), mesh_dim_names


class FSDPModule:
    def _get_fsdp_state(self):
        return self.state


def fully_shard(module, mesh=None):
    """Each process keeps the whole weights, which are DTensors nevertheless."""
    mesh = mesh or DeviceMesh()
    for p in module.parameters():
        p.full_tensor, p.device_mesh, p.placements = p.clone, mesh, ("Replicate",)
    module.__class__ = type("FSDP", (FSDPModule, type(module)), {})
    parameters = [types.SimpleNamespace(sharded_param=p) for p in module.parameters()]
    info = types.SimpleNamespace(mesh=mesh)
    group = types.SimpleNamespace(mesh_info=info, fsdp_params=parameters)
    module.state = types.SimpleNamespace(_fsdp_param_group=group)
    if isinstance(module, Sequential):
        module.register_forward_pre_hook(lambda *_: _waiting.append(module.parameters()))
    return module


def _clip(parameters, limit):
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = np.sqrt(sum(float((g.astype(float) ** 2).sum()) for g in gradients))
    _clipping._clip_grads_with_norm_(parameters, limit, norm)


def _clip_to(parameters, limit, norm):
    for p in parameters:
        if p.grad is not None:
            p.grad *= np.float32(min(1, limit / (norm + 1e-6)))


_clipping = types.SimpleNamespace(
    clip_grad_norm_=_clip, _clip_grads_with_norm_=_clip_to, clip_grad_value_=_clip_to
)


class GradScaler:
    def __init__(self, device, init_scale):
        self.factor = init_scale

    def is_enabled(self):
        return True

    def get_scale(self):
        return self.factor

    def scale(self, loss):
        return loss * np.float32(self.factor)

    def unscale_(self, optimizer):
        found = [p.grad for group in optimizer.param_groups for p in group["params"]]
        for gradient in found:
            gradient /= np.float32(self.factor)
        self.is_finite = all(np.isfinite(gradient).all() for gradient in found)

    def step(self, optimizer):
        if self.is_finite:
            optimizer.step()

    def update(self):
        self.factor *= 1 if self.is_finite else 0.5


amp = types.SimpleNamespace(GradScaler=GradScaler)


def _mse(x, y):
    return (x - y).square().mean(dtype=np.float32)


# --- Optimizers ----------------------------------------------------------------------------------


_before_all, _after_all = {}, {}  # Hooks of all optimizers.


class Optimizer:
    num_closure_calls = 1

    def __init__(self, params, lr, **defaults):
        self.defaults, self.state = {"lr": lr, **defaults}, collections.defaultdict(dict)
        groups = list(params)
        groups = groups if isinstance(groups[0], dict) else [{"params": groups}]
        self.param_groups = [{**self.defaults, **group} for group in groups]
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = {}, {}

    def register_step_pre_hook(self, hook):
        return _Handle(self._optimizer_step_pre_hooks, hook)

    def register_step_post_hook(self, hook):
        return _Handle(self._optimizer_step_post_hooks, hook)

    def zero_grad(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None

    def step(self, *args):
        for hook in itertools.chain(_before_all.values(), self._optimizer_step_pre_hooks.values()):
            changed = hook(self, (self, *args), {})
            args = changed[0][1:] if changed else args
        for closure in args * self.num_closure_calls:
            closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(group, p, p.grad, self.state[p])
        for hook in [*self._optimizer_step_post_hooks.values(), *_after_all.values()]:
            hook(self, (self, *args), {})


class SGD(Optimizer):
    def __init__(self, params, lr, momentum=0):
        super().__init__(params, lr, momentum=momentum)

    def update(self, group, p, gradient, state):
        if group["momentum"]:
            kept = state.setdefault("momentum_buffer", zeros_like(p))
            kept[...] = kept * kept.dtype.type(group["momentum"]) + gradient
            gradient = kept
        p -= p.dtype.type(group["lr"]) * gradient


class LBFGS(SGD):
    num_closure_calls = 2


class Adam(Optimizer):
    def __init__(self, params, lr, betas=(0.9, 0.999), weight_decay=0):
        rest = {"betas": betas, "eps": 1e-8, "weight_decay": weight_decay, "amsgrad": False}
        super().__init__(params, lr, **rest)

    def update(self, group, p, gradient, state):
        if not state:
            state |= {name: zeros_like(p) for name in ("exp_avg", "exp_avg_sq")}
            state["step"] = tensor(np.float32(0))
        state["step"][...] += 1
        corrected = []
        for slot, beta, power in zip(
            ("exp_avg", "exp_avg_sq"), group["betas"], (1, 2), strict=True
        ):
            new = np.float32(beta) * state[slot] + np.float32(1 - beta) * gradient**power
            state[slot][...] = new
            corrected.append(new / np.float32(1 - beta ** state["step"].item()))
        p *= np.float32(1 - group["lr"] * group["weight_decay"])
        root = np.sqrt(corrected[1]) + np.float32(group["eps"])
        p -= np.float32(group["lr"]) * corrected[0] / root


class AdamW(Adam):
    """Adam decays here as AdamW does."""


# --- Submodules ----------------------------------------------------------------------------------


def _leaves(tree):
    tree = tree.values() if isinstance(tree, dict) else tree
    return [x for each in tree for x in _leaves(each)] if not isinstance(tree, Tensor) else [tree]


def _map_only(kind, function, tree):
    if isinstance(tree, dict):
        return {key: _map_only(kind, function, value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_map_only(kind, function, value) for value in tree)
    return function(tree)


def _spawn(run, args, nprocs):
    ends, context = processes.Pipe(), processes.get_context("fork")

    def start(rank):
        _world[:], _pipe[:] = (rank, nprocs), [ends[rank]]
        run(rank, *args)

    children = [context.Process(target=start, args=(r,), daemon=True) for r in range(nprocs)]
    for child in children:
        child.start()
    for child in children:
        child.join(20)
    assert [child.exitcode for child in children] == [0] * nprocs


def _module(name, **content):
    module = types.ModuleType(f"torch.{name}")
    vars(module).update(content)
    sys.modules[f"torch.{name}"] = module
    return module


_layers = (Module, Linear, Conv2d, BatchNorm2d, Embedding, Flatten, Dropout, Sequential)
_parallel = _module("nn.parallel", DistributedDataParallel=DistributedDataParallel)
nn = _module(
    "nn", **{layer.__name__: layer for layer in _layers}, DataParallel=DataParallel,
    ConvTranspose2d=type("ConvTranspose2d", (Module,), {}), parallel=_parallel,
    utils=types.SimpleNamespace(**vars(_clipping), clip_grad=_clipping),
    init=types.SimpleNamespace(ones_=lambda p: p.copy_(ones(1))),
)  # fmt: skip
_module("nn.functional", mse_loss=_mse)
optim = _module("optim", SGD=SGD, LBFGS=LBFGS, Adam=Adam, AdamW=AdamW, Optimizer=Optimizer)
_module(
    "optim.optimizer",
    register_optimizer_step_pre_hook=lambda hook: _Handle(_before_all, hook),
    register_optimizer_step_post_hook=lambda hook: _Handle(_after_all, hook),
)
distributed = _module(
    "distributed", is_available=lambda: True, is_initialized=lambda: _world[1] > 1,
    get_rank=lambda group=None: _world[0], get_world_size=lambda group=None: _world[1],
    get_process_group_ranks=lambda group: [*range(_world[1])],
    init_process_group=lambda *args, **options: None, barrier=lambda: _exchanged(None),
    tensor=types.SimpleNamespace(distribute_tensor=lambda value, *args, **options: value),
)  # fmt: skip
_module("distributed.fsdp", fully_shard=fully_shard)
_module("distributed.device_mesh", init_device_mesh=DeviceMesh)
_iterator = type("_BaseDataLoaderIter", (), {})
_module("utils.data", dataloader=types.SimpleNamespace(_BaseDataLoaderIter=_iterator))
_module("utils", _pytree=types.SimpleNamespace(tree_leaves=_leaves, tree_map_only=_map_only))
multiprocessing = _module("multiprocessing", spawn=_spawn)
