"""Loads a case, a Python file that defines a Keras model and a dataset."""

import contextlib
import importlib.util
import pathlib
import re
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from app.runtime.errors import ConfigError, DeviceError, LockstepError, reason_of

_IN_TEXT = re.compile(r'File "([^"]+)", line (\d+)')
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")  # Keras prints in bold.
# Lines that TensorFlow and Keras add around the reason of an error in traced code or a graph.
_AROUND = re.compile(
    r'in user code:|Graph execution error:|Detected at node|<stack traces|File "'
    r"|(\w+: )?Exception encountered when calling"
)
_SOURCE_INDENT = " " * 8  # Indentation of the quoted source lines.
_OF_TENSORFLOW = re.compile(
    r"^\{\{function_node \S+\}\} |^assertion failed: \[|\] \[Condition .*$|\s*\[Op:\S+\].*$"
)
_FIT_ARGUMENTS = ("class_weight", "callbacks", "validation_data")


class CaseFile:
    """Runs the functions of a case file and reports their errors in one line with file and line.

    The file's imports are resolved in the folder of the file first. Loaded modules with the name
    of a file or folder beside the case are removed from `sys.modules` while its code runs.

    Args:
        path: the file. `data(global_batch_size)` in it returns the dataset, the optional
            `distribute(strategy, global_batch_size)` the argument of `fit` under a strategy, and
            the optional `fit_arguments()` a dict of other arguments of `fit`.
        model_fn: name of the function that returns the compiled model.

    Raises:
        ConfigError: the file cannot be imported, or a function is missing.
    """

    def __init__(self, path: pathlib.Path, model_fn: str = "model"):
        self._path = path.resolve()
        self._own_modules: dict[str, types.ModuleType] = {}
        folder = self._path.parent
        self._own_names = {
            name
            for name in (entry.name.removesuffix(".py") for entry in folder.iterdir())
            if name in sys.modules and not _is_from(sys.modules[name], folder)
        }
        with self._running("while it was imported"):
            self._module = self._import()
        self._model_fn = self._function(model_fn)
        self._data_fn = self._function("data")
        self._distribute_fn = getattr(self._module, "distribute", None)
        self._fit_arguments_fn = getattr(self._module, "fit_arguments", dict)

    def build_model(self) -> keras.Model:
        """Builds the model.

        Raises:
            ConfigError: the function fails, or does not return a compiled model.
        """
        model = self._call(self._model_fn)
        where = self._where(self._model_fn)
        if not isinstance(model, keras.Model):
            raise ConfigError(
                f"{where} must return a compiled keras.Model, got {type(model).__name__}"
            )
        if getattr(model, "optimizer", None) is None:
            raise ConfigError(f"{where} returns a model that is not compiled; call model.compile")
        return model

    def create_data(self, global_batch_size: int) -> tf.data.Dataset:
        """Creates the dataset.

        Raises:
            ConfigError: the function fails, or does not return a `tf.data.Dataset`.
        """
        dataset = self._call(self._data_fn, global_batch_size)
        if not isinstance(dataset, tf.data.Dataset):
            raise ConfigError(
                f"{self._where(self._data_fn)} must return a tf.data.Dataset, got"
                f" {type(dataset).__name__}"
            )
        _check_dense(dataset, self._where(self._data_fn))
        return dataset

    def distribute(self, strategy: tf.distribute.Strategy, global_batch_size: int) -> Any:
        """Returns the argument of `fit` under a strategy; None if the case does not define it."""
        if self._distribute_fn is None:
            return None
        return self._call(self._distribute_fn, strategy, global_batch_size)

    def fit_arguments(self) -> dict[str, Any]:
        """Returns newly created arguments of `fit`, such as class weights and callbacks.

        Raises:
            ConfigError: the function fails, or returns other arguments.
        """
        arguments = self._call(self._fit_arguments_fn)
        where, allowed = self._where(self._fit_arguments_fn), ", ".join(_FIT_ARGUMENTS)
        if not isinstance(arguments, dict):
            raise ConfigError(f"{where} must return a dict, got {type(arguments).__name__}")
        if others := arguments.keys() - set(_FIT_ARGUMENTS):
            raise ConfigError(
                f"{where} returns {', '.join(sorted(others))}, which the verification sets itself;"
                f" return only {allowed}"
            )
        return arguments

    def run(self, function: Callable[[], Any], what: str) -> Any:
        """Calls a function that runs code of the case, such as layers and losses."""
        with self._running(what):
            return function()

    def _call(self, function: Callable, *arguments: Any) -> Any:
        with self._running(f"in {function.__name__}()"):
            return function(*arguments)

    def _function(self, name: str) -> Callable:
        function = getattr(self._module, name, None)
        if not callable(function):
            names = [n for n, v in vars(self._module).items() if isinstance(v, types.FunctionType)]
            raise ConfigError(
                f"{self._path.name} has no function {name}, it has"
                f" {', '.join(names) or 'none'}; define {name}"
            )
        return function

    def _where(self, function: Callable) -> str:
        code = getattr(function, "__code__", None)
        line = f":{code.co_firstlineno}" if code else ""
        return f"{self._path.name}{line}: {getattr(function, '__name__', function)}()"

    def _import(self) -> types.ModuleType:
        name = self._path.stem
        spec = importlib.util.spec_from_file_location(name, self._path)
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        return module

    @contextlib.contextmanager
    def _running(self, what: str) -> Iterator[None]:
        """Makes the case's modules importable and turns errors of the case into one line."""
        with self._own_imports():
            try:
                yield
            except LockstepError:
                raise
            except (MemoryError, tf.errors.ResourceExhaustedError) as error:
                raise DeviceError(
                    f"{self._path.name}: out of memory {what}; use a smaller --global_batch_size or"
                    " fewer --steps"
                ) from error
            except Exception as error:
                place, name = _place(error, self._path), type(error).__name__
                raise ConfigError(f"{place} {what}: {name}: {_reason(error)}") from error
            except SystemExit as error:
                raise ConfigError(
                    f"{self._path.name} {what}: the file ends the process; move the code of the"
                    ' script below `if __name__ == "__main__":`'
                ) from error

    @contextlib.contextmanager
    def _own_imports(self) -> Iterator[None]:
        """Replaces loaded modules that have the name of a file or folder beside the case."""
        folder = str(self._path.parent)
        others = self._replace_modules(self._own_modules)
        sys.path.insert(0, folder)
        try:
            yield
        finally:
            sys.path.remove(folder)
            self._own_modules = self._replace_modules(others)

    def _replace_modules(self, modules: dict[str, types.ModuleType]) -> dict[str, types.ModuleType]:
        """Replaces the loaded modules with names of the case; returns those that were loaded."""
        loaded = {n: m for n, m in sys.modules.items() if n.partition(".")[0] in self._own_names}
        for name in loaded:
            del sys.modules[name]
        sys.modules.update(modules)
        return loaded


def is_none(spec: tf.TypeSpec) -> bool:
    """Returns whether a spec stands for None; TensorFlow has no public name for its type."""
    return type(spec).__name__ == "NoneTensorSpec"


def _check_dense(dataset: tf.data.Dataset, where: str) -> None:
    """Checks that a dataset consists of dense tensors.

    Raises:
        ConfigError: it does not.
    """
    for spec in tf.nest.flatten(dataset.element_spec):
        if is_none(spec):
            continue
        if not isinstance(spec, tf.TensorSpec):
            kind = spec.value_type.__name__
            raise ConfigError(
                f"{where} returns a {kind} in its batches; return dense tensors, and let the model"
                " build others from them"
            )


def _is_from(module: types.ModuleType, folder: pathlib.Path) -> bool:
    """Returns whether a module is a file or a package in a folder."""
    # Not as attributes: the __getattr__ of a module may return or import anything.
    values = getattr(module, "__dict__", {})
    spec = values.get("__spec__")
    packages = getattr(spec, "submodule_search_locations", None) or []
    file = values.get("__file__")
    parents = [pathlib.Path(place).resolve().parent for place in packages or [file or "/"]]
    return folder in parents


def _place(error: BaseException, path: pathlib.Path) -> str:
    """Returns file and line of the innermost stack frame in the folder of the case.

    Args:
        error: raised by code that the case defines, calls or passes to Keras; its message may
            contain a stack, too.
        path: resolved path of the case.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{pathlib.Path(error.filename).name}:{error.lineno}:"
    frames = traceback.extract_tb(error.__traceback__)
    lines = [(frame.filename, str(frame.lineno or 0)) for frame in frames]
    for file, number in reversed([*lines, *_IN_TEXT.findall(str(error))]):
        is_installed = {"site-packages", "dist-packages"} & set(pathlib.Path(file).parts)
        if pathlib.Path(file).resolve().is_relative_to(path.parent) and not is_installed:
            return f"{pathlib.Path(file).name}:{number}:"
    return path.name


def _reason(error: BaseException) -> str:
    """Returns the line of an error message with the reason."""
    if isinstance(error, OSError | KeyError):
        return reason_of(error)
    told = [
        line.strip() for line in _ESCAPES.sub("", str(error)).splitlines()
        if line.strip() and not line.startswith(_SOURCE_INDENT) and not _AROUND.match(line.strip())
    ]  # fmt: skip
    line = _OF_TENSORFLOW.sub("", told[0]) if told else ""
    return reason_of(Exception(line.removeprefix(f"{type(error).__name__}: "))) if line else ""
