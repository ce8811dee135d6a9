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


class CaseFile:
    """Runs the functions of a case file and reports their errors in one line with file and line.

    The file's imports are resolved in the folder of the file first. Modules of this program with
    the same names are removed from `sys.modules` while code of the case runs.

    Args:
        path: the file. `data(global_batch_size)` in it returns the dataset, and the optional
            `distribute(strategy, global_batch_size)` the argument of `fit` under a strategy.
        model_fn: name of the function that returns the compiled model.

    Raises:
        ConfigError: the file cannot be imported, or a function is missing.
    """

    def __init__(self, path: pathlib.Path, model_fn: str = "model"):
        self._path = path.resolve()
        self._own_modules: dict[str, types.ModuleType] = {}
        with self._running("while it was imported"):
            self._module = self._import()
        self._model_fn = self._function(model_fn)
        self._data_fn = self._function("data")
        self._distribute_fn = getattr(self._module, "distribute", None)

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
                raise ConfigError(_describe_error(error, self._path, what)) from error
            except SystemExit as error:
                raise ConfigError(
                    f"{self._path.name} {what}: the file ends the process; move the code of the"
                    ' script below `if __name__ == "__main__":`'
                ) from error

    @contextlib.contextmanager
    def _own_imports(self) -> Iterator[None]:
        """Hides modules that have the name of a file or folder next to the case."""
        folder = self._path.parent
        names = {entry.stem for entry in folder.glob("*.py")}
        names |= {entry.name for entry in folder.iterdir() if entry.is_dir()}
        aside = {
            name: module for name, module in sys.modules.items()
            if name.partition(".")[0] in names and not _is_from(module, folder)
        }  # fmt: skip
        for name in aside:
            del sys.modules[name]
        sys.modules.update(self._own_modules)
        sys.path.insert(0, str(folder))
        try:
            yield
        finally:
            sys.path.remove(str(folder))
            self._own_modules = {
                name: module for name, module in sys.modules.items() if _is_from(module, folder)
            }
            for name in self._own_modules:
                if name in aside:
                    del sys.modules[name]
            sys.modules.update(aside)


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
    # Without getattr: a module's __getattr__ may return or import anything.
    own = vars(module) if isinstance(module, types.ModuleType) else {}
    locations = getattr(own.get("__spec__"), "submodule_search_locations", None) or []
    places = [own.get("__file__"), *locations]  # A package without __init__.py has no file.
    file = next((place for place in places if isinstance(place, str)), None)
    if file is None or _is_installed(file):
        return False
    return pathlib.Path(file).resolve().is_relative_to(folder)


def _describe_error(error: BaseException, path: pathlib.Path, what: str) -> str:
    """Returns file and line of a case, the moment of the error, and its reason.

    Args:
        error: raised by code that a case defines, calls or passes to Keras.
        path: resolved path of the case.
        what: moment of the error, for example "in model()".
    """
    return f"{_place(error, path)} {what}: {type(error).__name__}: {_reason(error)}"


def _is_installed(file: str) -> bool:
    """Returns whether a file belongs to an installed package."""
    return bool({"site-packages", "dist-packages"} & set(pathlib.Path(file).parts))


def _place(error: BaseException, path: pathlib.Path) -> str:
    """Returns file and line of the innermost stack frame in the folder of the case."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{pathlib.Path(error.filename).name}:{error.lineno}:"
    own = _own_lines(error, path)
    return f"{pathlib.Path(own[-1][0]).name}:{own[-1][1]}:" if own else path.name


def _own_lines(error: BaseException, path: pathlib.Path) -> list[tuple[str, int]]:
    """Returns the lines of the case's folder in the traceback or in the message of an error."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [(frame.filename, frame.lineno or 0) for frame in frames]
    lines += [(file, int(number)) for file, number in _IN_TEXT.findall(str(error))]
    return [
        (file, number) for file, number in lines
        if pathlib.Path(file).resolve().is_relative_to(path.parent) and not _is_installed(file)
    ]  # fmt: skip


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
