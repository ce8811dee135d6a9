"""Checks the data of a training: its source, and its content if it is available."""

import os
import urllib.parse
from collections.abc import Callable, Mapping

from app.config import DoctorConfig
from app.data.data_sources import (
    DOWNLOAD_URL,
    FILES,
    HOW_TO_GET,
    PREPARED,
    TO_PREPARE,
    DataMissingError,
    DataSource,
    check_connection,
    find_data_source,
    is_prepared,
    manual_dir,
    tfds_folder,
)
from app.data.fashion_mnist import load_fashion_mnist, load_files
from app.doctor.check import NOTE, WARNING, Check
from app.runtime.errors import DataError, LockstepError
from app.runtime.processes import call_in_child_process

Connect = Callable[[str, float], None]  # See `check_connection`.

_CONNECT_TIMEOUT_SEC = 1.0  # A thread waits at most one second more.
_LOAD_TIMEOUT_SEC = 180  # 30 s on a busy machine.
_GENERATED = "GENERATED images take its place"
_WHAT = "Fashion-MNIST"


def check_data(
    config: DoctorConfig,
    environ: Mapping[str, str] = os.environ,
    connect: Connect = check_connection,
) -> list[Check]:
    """Finds the images of `--dataset` and verifies them as a training does.

    Nothing is downloaded or prepared.

    Args:
        config: options of `doctor`.
        environ: environment variables.
        connect: raises `OSError` unless a server answers in time.
    """
    if config.dataset == "synthetic":
        return [Check(_WHAT, "not needed: --dataset=synthetic generates images", NOTE)]
    try:
        source = find_data_source(config.data_dir, environ)
    except DataMissingError as error:
        if config.data_dir or config.dataset == "fashion_mnist":
            return [Check.of_error(_WHAT, error)]
        return [Check(_WHAT, f"{error.problem}: {_GENERATED}", WARNING, error.advice)]
    except DataError as error:
        return [Check.of_error(_WHAT, error)]
    unusable = [
        Check("FASHION_MNIST_DIR", f"{environ['FASHION_MNIST_DIR']}: not all files are there", NOTE)
        for looked in source.looked
        if looked.startswith("FASHION_MNIST_DIR=")
    ]
    found = _check_source(config, source, connect)
    return [*unusable, found, *([] if config.data_dir else [check_tfds(environ)])]


def check_tfds(environ: Mapping[str, str] = os.environ) -> Check:
    """Reports what TensorFlow Datasets has in its directory."""
    try:
        folder = tfds_folder(environ)
    except DataMissingError as error:
        return Check("TFDS", error.problem, NOTE)
    if is_prepared(folder):
        return Check("TFDS", f"{folder}: prepared", NOTE)
    files = "with files" if any(manual_dir(folder).glob("*")) else "without files"
    return Check("TFDS", f"{folder}: not prepared, {files} in downloads/manual", NOTE)


def _check_source(config: DoctorConfig, source: DataSource, connect: Connect) -> Check:
    try:
        if source.kind in (FILES, TO_PREPARE):
            return _check_files(config, source)
        if source.kind == PREPARED:
            return _check_prepared(config, source)
    except TimeoutError:
        error = DataError(
            f"{source.folder}: not read within {_LOAD_TIMEOUT_SEC} s; choose another --data_dir"
        )
        return Check.of_error(_WHAT, error)
    except LockstepError as error:
        return Check.of_error(_WHAT, error)
    return _check_download(config, source, connect)


def _check_files(config: DoctorConfig, source: DataSource) -> Check:
    dataset = load_files(source.paths, allow_unverified=config.allow_unverified_data)
    if dataset.name == "unverified":
        return _unverified(source)
    folder = manual_dir(source.folder) if source.kind == TO_PREPARE else source.folder
    told = f"{source.named_by}: the four files in {folder}, SHA-256 verified"
    if source.kind == TO_PREPARE:
        told += "; the first training has TFDS prepare itself from them, without a network"
    return Check(_WHAT, told)


def _check_prepared(config: DoctorConfig, source: DataSource) -> Check:
    name = call_in_child_process(
        _name_of_prepared,
        str(source.folder),
        config.allow_unverified_data,
        timeout_sec=_LOAD_TIMEOUT_SEC,
    )
    if name == "unverified":
        return _unverified(source)
    return Check(_WHAT, f"{source.named_by}: prepared in {source.folder}, SHA-256 verified")


def _name_of_prepared(send: Callable[[object], None], folder: str, allow_unverified: bool) -> str:
    """Runs in a separate process, because TFDS reads with TensorFlow."""
    from app.devices.device_setup import import_tensorflow

    import_tensorflow(-1)
    return load_fashion_mnist(folder, allow_unverified=allow_unverified).name


def _unverified(source: DataSource) -> Check:
    told = (
        f"{source.named_by}: UNVERIFIED images in {source.folder}, as --allow_unverified_data asks"
    )
    return Check(_WHAT, told, WARNING, "accuracies are not those of Fashion-MNIST")


def _check_download(config: DoctorConfig, source: DataSource, connect: Connect) -> Check:
    host = urllib.parse.urlsplit(DOWNLOAD_URL).hostname
    try:
        connect(DOWNLOAD_URL, _CONNECT_TIMEOUT_SEC)
    except OSError as error:
        told = f"nowhere here, and {host} does not answer"
        missing = DataMissingError(f"{told} ({_reason(error)}); {HOW_TO_GET}")
        if config.dataset == "fashion_mnist":
            return Check.of_error(_WHAT, missing)
        value = f"{told}: {_GENERATED}, and accuracies are not comparable"
        return Check(_WHAT, value, WARNING, f"for the real images, {HOW_TO_GET}")
    told = f"not here yet: the first training downloads 30 MB from {host} into {source.folder}"
    return Check(_WHAT, told)


def _reason(error: OSError) -> str:
    return str(getattr(error, "reason", error))
