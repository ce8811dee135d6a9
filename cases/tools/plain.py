"""What people look at today: the final weights and the losses that a training prints.

A run writes `out.npz`, or `out.rankN.npz` of each process, to the path in `CASES_OUT`: `weights/…`
and `state/…` (buffers, state of optimizers) after the last step, and `losses`, one for each update.
"""

import contextlib
import os
import pathlib
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

RESULTS = "truth.jsonl"
ROUNDING = 1e-4  # Relative difference; right programs in float32 have 1e-7 to 1e-5.
WRAPPERS = ("module.", "_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


def training(model: Any, optimizer: Any = None, **facts: Any) -> Any:
    """Returns a context manager that writes weights, state and losses at the end."""
    keras, torch = sys.modules.get("keras"), sys.modules.get("torch")
    several = model if isinstance(model, list | tuple) else [model]
    if torch and isinstance(several[0], torch.nn.Module):
        return _torch_training(several, optimizer, facts.get("others") or {})
    if keras and isinstance(several[0], keras.Model):
        return _keras_training(several)
    return _jax_training(model, facts["outputs"])


def _write(arrays: Mapping[str, Any], rank: int | None = None) -> None:
    path = pathlib.Path(os.environ["CASES_OUT"])
    path = path if rank is None else path.with_suffix(f".rank{rank}.npz")
    np.savez(path, **{name: np.asarray(array) for name, array in arrays.items()})


@contextlib.contextmanager
def _torch_training(models: list[Any], optimizer: Any, others: Mapping[str, Any]) -> Iterator[None]:
    import torch
    import torch.optim.optimizer as optimizers_of

    losses, backward = list[list[float]]([[]]), torch.autograd.backward
    given = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
    optimizers = {id(each): each for each in given if isinstance(each, torch.optim.Optimizer)}

    def observed(tensors: Any, *args: Any, **kwargs: Any) -> None:
        several = tensors if isinstance(tensors, list | tuple) else [tensors]
        losses[-1] += [float(each.detach()) for each in several if each.numel() == 1]
        backward(tensors, *args, **kwargs)

    def ends_step(stepped: Any, *_: Any) -> None:
        optimizers.setdefault(id(stepped), stepped)
        losses.extend([[]] if losses[-1] else [])

    hook = optimizers_of.register_optimizer_step_post_hook(ends_step)
    torch.autograd.backward = observed
    try:
        yield
    finally:
        torch.autograd.backward = backward
        hook.remove()
    arrays: dict[str, Any] = {"losses": [np.sum(each) for each in losses if each]}
    names: dict[Any, str] = {}
    for prefix, each in {**dict(enumerate(models)), **others}.items():
        if not isinstance(each, torch.nn.Module):
            tensors = each if isinstance(each, dict) else {"": each}
            arrays |= {f"state/{prefix}.{name}": _whole(value) for name, value in tensors.items()}
            continue
        for name, weight in each.named_parameters():
            names[weight] = f"{prefix}.{_without_wrappers(name)}"
            arrays[f"weights/{names[weight]}"] = _whole(weight)
        for name, buffer in each.named_buffers():
            arrays[f"state/{prefix}.{_without_wrappers(name)}"] = _whole(buffer)
    for each in optimizers.values():
        for weight, state in each.state.items():  # In an order that all ranks have.
            for key, value in state.items() if weight in names else ():
                if isinstance(value, torch.Tensor):
                    arrays[f"state/{names[weight]}.{key}"] = _whole(value)
    is_group = torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
    _write(arrays, torch.distributed.get_rank() if is_group else None)


def _without_wrappers(name: str) -> str:
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _whole(value: Any) -> np.ndarray:
    """Returns a tensor of PyTorch as an array; one that is split over ranks is put together."""
    if not hasattr(value, "detach"):
        return np.asarray(value, np.float64)
    tensor = value.detach()
    tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return (tensor if tensor.is_complex() else tensor.double()).cpu().numpy()


@contextlib.contextmanager
def _keras_training(models: list[Any]) -> Iterator[Any]:
    yield types.SimpleNamespace(wrap=lambda step: step)
    arrays: dict[str, Any] = {"losses": []}
    for number, model in enumerate(models):
        trained = {id(variable) for variable in model.trainable_variables}
        of_optimizer = getattr(getattr(model, "optimizer", None), "variables", [])
        for index, variable in enumerate([*model.variables, *of_optimizer]):
            kind = "weights" if id(variable) in trained else "state"
            if not str(variable.dtype).startswith(("string", "uint")):
                arrays[f"{kind}/{number}.{index}"] = np.asarray(variable, np.float64)
        if history := getattr(model, "history", None):
            arrays["losses"] = history.history.get("loss", [])
    _write(arrays)


@contextlib.contextmanager
def _jax_training(step: Any, outputs: Mapping[str, Any]) -> Iterator[Callable[..., Any]]:
    losses: list[float] = []
    last: list[Any] = []

    def observed(*args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        last[:] = [result]
        if "loss" in outputs:
            losses.append(float(np.mean(np.asarray(_at(result, outputs["loss"])))))
        return result

    yield observed
    import jax

    arrays: dict[str, Any] = {"losses": losses}
    for role, place in outputs.items():
        if role in ("loss", "key") or not last:
            continue
        leaves = jax.tree_util.tree_leaves_with_path(_at(last[0], place))
        for path, leaf in leaves:
            kind = "weights" if role == "params" else "state"
            if not jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                name = f"{kind}/{role}{jax.tree_util.keystr(path)}"
                arrays[name] = np.asarray(leaf, np.float64)
    _write(arrays)


def _at(result: Any, place: Any) -> Any:
    """Returns what a result has at a position, a path such as "1/loss", or a tuple of these."""
    if isinstance(place, tuple):
        return tuple(_at(result, each) for each in place)
    for part in str(place).split("/") if place != "" else ():
        if isinstance(result, Mapping):
            result = result[part] if part in result else result[int(part)]
        elif part.isdigit():
            result = result[int(part)] if isinstance(result, list | tuple) else result
        else:
            result = getattr(result, part)
    return result


def differs(was: Mapping[str, Any], line: Mapping[str, Any]) -> bool:
    """Returns whether a form has other weights where it had equal ones, or the reverse."""
    return is_shown(was) != is_shown(line) or was.get("finite") != line.get("finite")


def is_shown(line: Mapping[str, Any]) -> bool:
    """Returns whether weights or state differ by more than rounding; numbers vary by machine."""
    return max(line.get("weights") or 0.0, line.get("state") or 0.0) > ROUNDING


def judge(
    case: Any, names: Sequence[str], runner: Any, folder: pathlib.Path
) -> Iterator[dict[str, Any]]:
    """Yields how far the final weights, state and losses of each form are from the reference's.

    `weights` and `state` are the largest relative difference of an array, of any copy, and `loss`
    that of a step; null if none could be compared, and infinite differences are 1e300.
    """
    from cases.runner import CannotRunError, FailedRunError

    for name in names:
        line: dict[str, Any] = {"variant": f"{case.id}.{name}"}
        try:
            reference, *runs = runner.trainings_of(case, name)
            for number, run in enumerate([reference, *runs]):
                path = f"{folder}/{name}{number}.npz"
                runner.run(run, path, {"tool": "plain"}, _variables, runner.timeout_sec)
            one = _copies(folder, f"{name}0")
            for key, value in distances(one, _copies(folder, f"{name}{len(runs)}")).items():
                line[key] = float(f"{value:.5g}") if isinstance(value, float) else value
            if case.head["mode"] == "port":
                line["loss"] = None  # A port draws initial weights of its own.
            yield {**line, "text": ""}
        except CannotRunError:
            raise
        except (FailedRunError, ValueError) as error:
            yield {**line, "status": "refused", "text": str(error)}


def _variables(path: str) -> dict[str, str]:
    return {"CASES_TOOL": "plain", "CASES_OUT": path}


def _copies(folder: pathlib.Path, name: str) -> list[dict[str, np.ndarray]]:
    """Returns the arrays that each process has written."""
    paths = sorted([*folder.glob(f"{name}.npz"), *folder.glob(f"{name}.rank*.npz")])
    return [dict(np.load(path)) for path in paths]


def distances(
    one: Sequence[Mapping[str, np.ndarray]], two: Sequence[Mapping[str, np.ndarray]]
) -> dict[str, Any]:
    """Returns how far weights, state and losses of a run are from those of the reference."""
    found: dict[str, Any] = {}
    for kind in ("weights", "state"):
        all_pairs = [
            pair
            for name, right in one[0].items()
            if name.startswith(f"{kind}/")
            for pair in _pairs(right, [copy[name] for copy in two if name in copy])
        ]
        found[kind] = max((_distance(*pair) for pair in all_pairs), default=None)
    losses = [copy["losses"] for copy in two if copy["losses"].size]
    right = one[0]["losses"][-len(losses[0]) :] if losses else np.zeros(0)
    found["loss"] = None
    if losses and len(right) and all(len(each) == len(right) for each in losses):
        total = np.sum(losses, 0)  # A rank prints its loss, or its share of the whole.
        found["loss"] = min(
            max(map(_distance, right, given)) for given in (total, total / len(losses))
        )
    arrays = [array for copy in (*one, *two) for array in copy.values()]
    found["finite"] = all(bool(np.isfinite(array).all()) for array in arrays)
    return found


def _pairs(
    right: np.ndarray, copies: Sequence[np.ndarray]
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields the array of the reference with each copy, or with all parts put together."""
    whole = [each for each in copies if each.shape == right.shape]
    if len(whole) == len(copies):
        yield from ((right, each) for each in whole)
    elif len(copies) == 1 and right.shape == (1, *copies[0].shape[1:]):
        yield from ((right[0], each) for each in copies[0])  # Copies of `jax.pmap`.
    else:
        for axis in range(right.ndim):
            with contextlib.suppress(ValueError):
                joined = np.concatenate(copies, axis)
                if joined.shape == right.shape:
                    yield right, joined
                    return


def _distance(one: Any, two: Any) -> float:
    """Returns the norm of the difference, relative to the larger norm."""
    sizes = [float(np.linalg.norm(one)), float(np.linalg.norm(two))]
    if not np.isfinite(sizes).all():
        return 0.0 if np.array_equal(one, two, equal_nan=True) else 1e300
    return float(np.linalg.norm(np.subtract(one, two))) / max(sizes) if any(sizes) else 0.0
