"""Lets the workers of a cluster meet and compares their settings, before TensorFlow connects them.

Each worker connects to the chief and sends one line of JSON: secret, index, settings. When all have
come, the chief sends each one the same line: whether the training starts, or why not. TensorFlow's
own call waits for a missing worker without a message, and ignores SIGTERM.
"""

import asyncio
import contextlib
import hmac
import json
import re
import socket
import time
from collections.abc import Iterator, Mapping, Sequence

from app.devices.cluster import SECRET_VARIABLE, Cluster, host_and_port
from app.options import Config
from app.runtime import console, signals, watchdog
from app.runtime.errors import ConfigError, PeerLostError, reason_of
from app.runtime.versions import CPU_KERNELS, versions
from strategies.collective_cluster import ClusterWorkers
from strategies.multi_worker import default_all_reduce

_MAX_LINE_BYTES = 64 << 10
_HELLO_SEC = 3.0  # For a connection, and for a worker's line.
_MOST_STRANGERS = 64  # Connections that have not sent their line yet; the oldest is dropped.
_MOST_WARNINGS = 10
_POLL_SEC = 0.1
_SEC_BETWEEN_LINES = 10.0
_BAD_LINE = (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError)
# Names of TensorFlow's exceptions in a worker that has lost another one.
_LOST = ("UnavailableError", "AbortedError", "DeadlineExceededError", "CancelledError")
# Options that may differ between workers: paths and display.
_OWN = (
    *("out", "overwrite", "data_dir", "verbosity", "start_timeout_sec", "stall_timeout_sec"),
    *("num_workers", "max_restarts"),
)


def join(cluster: Cluster, local_devices: Sequence[str], config: Config) -> ClusterWorkers:
    """Connects this worker with the others; call it before TensorFlow runs any operation.

    Raises:
        ConfigError: the port is in use, or workers have different settings or secrets.
        PeerLostError: a worker did not come within `--start_timeout_sec`, or was lost.
    """
    if cluster.is_chief:
        count = console.count(len(cluster.addresses), "worker")
        console.say(f"cluster of {count} from {cluster.source}: {', '.join(cluster.addresses)}")
    meet(cluster, _settings(config, local_devices), config.cluster.start_timeout_sec)
    auto = config.distribution.all_reduce == "auto"
    all_reduce = default_all_reduce(local_devices) if auto else config.distribution.all_reduce

    lost = PeerLostError(  # TensorFlow's call would wait.
        f"--start_timeout_sec={config.cluster.start_timeout_sec}: a worker came and was lost; run"
        " the same command again"
    )
    with naming_lost_peers(cluster), watchdog.watch(config.cluster.start_timeout_sec, lost):
        workers = ClusterWorkers(cluster.addresses, cluster.index, local_devices, all_reduce)
    signals.reinstall()
    return workers


def meet(cluster: Cluster, settings: Mapping[str, object], timeout_sec: float) -> None:
    """Waits until all workers have come, with equal settings; see `join`."""
    address = cluster.addresses[cluster.index]
    port = host_and_port(address)[1]
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:  # Every worker: TensorFlow's server would share the port with another process.
        listener = socket.create_server(("", port), family=family, dualstack_ipv6=both)
    except OSError as error:
        raise ConfigError(
            f"port {port} of {address}: {reason_of(error)}; stop the process that uses the port,"
            " or give another port on every worker"
        ) from error
    kind = _Chief if cluster.is_chief else _Worker
    with listener, signals.deferred():  # Within a callback, an exception would only be logged.
        answer = asyncio.run(kind(cluster, settings, listener).meet(timeout_sec))
    if answer.get("error"):
        raise (ConfigError if answer.get("code") == 2 else PeerLostError)(str(answer["error"]))


class _Meeting:
    """What the chief and the other workers do while they wait."""

    def __init__(self, cluster: Cluster, settings: Mapping[str, object], listener: socket.socket):
        self._cluster, self._settings, self._listener = cluster, dict(settings), listener
        self._missing: set[int] = set()

    async def _wait(self, task: "asyncio.Task[dict] | None", timeout_sec: float) -> dict:
        """Waits for the task, or until no worker is missing; names the missing ones meanwhile."""
        start, num_lines = time.monotonic(), 0
        while not task.done() if task else self._missing:
            signals.check()
            names = self._cluster.names_of(sorted(self._missing))
            waited_sec = time.monotonic() - start
            # Worker 0 tells those that have come who is missing.
            if waited_sec >= timeout_sec + (0.0 if names else _HELLO_SEC):
                return {
                    "code": PeerLostError.exit_code,
                    "error": f"--start_timeout_sec={timeout_sec}: timed out waiting for"
                    f" {names or 'workers, which worker 0 names'}; check that it runs with the same"
                    " list of addresses, then run the same command again",
                }
            if waited_sec >= (num_lines + 1) * _SEC_BETWEEN_LINES:
                num_lines += 1
                if names:
                    console.say(f"waiting for {names}, {waited_sec:.0f} s of {timeout_sec} s")
            await asyncio.sleep(_POLL_SEC)
        return task.result() if task else {}


class _Worker(_Meeting):
    """A worker other than the chief."""

    async def meet(self, timeout_sec: float) -> dict:
        """Returns the chief's answer."""
        self._missing = {0}
        return await self._wait(asyncio.create_task(self._ask()), timeout_sec)

    async def _ask(self) -> dict:
        cluster = self._cluster
        hello = {"secret": cluster.secret, "index": cluster.index, "settings": self._settings}
        while True:  # The chief comes later, or the connection is lost.
            with contextlib.suppress(*_BAD_LINE):
                async with asyncio.timeout(_HELLO_SEC):
                    reader, writer = await asyncio.open_connection(
                        *host_and_port(cluster.addresses[0]), limit=_MAX_LINE_BYTES
                    )
                try:
                    writer.write(f"{json.dumps(hello)}\n".encode())
                    self._missing = set()
                    answer = json.loads(await reader.readline())
                    if isinstance(answer, dict):
                        return answer
                finally:
                    self._missing = {0}
                    writer.transport.abort()
            await asyncio.sleep(5 * _POLL_SEC)


class _Chief(_Meeting):
    """The chief, which admits the others."""

    def __init__(self, cluster: Cluster, settings: Mapping[str, object], listener: socket.socket):
        super().__init__(cluster, settings, listener)
        self._missing = set(range(1, len(cluster.addresses)))
        self._arrived: dict[int, tuple[dict, asyncio.StreamWriter]] = {}
        self._strangers: dict[asyncio.StreamWriter, None] = {}  # The oldest first.
        self._warned: set[str] = set()  # Hosts.

    async def meet(self, timeout_sec: float) -> dict:
        """Waits for the others, and returns the answer that they get."""
        server = await asyncio.start_server(self._admit, sock=self._listener, limit=_MAX_LINE_BYTES)
        answer = await self._wait(None, timeout_sec)
        server.close()
        if not answer and (error := self._difference()):
            answer = {"code": ConfigError.exit_code, "error": error}
        for _, writer in list(self._arrived.values()):
            await _send(writer, answer)
        return answer

    async def _admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Reads the line of a worker, or drops the connection."""
        self._strangers[writer] = None
        if len(self._strangers) > _MOST_STRANGERS:
            next(iter(self._strangers)).transport.abort()
        try:
            async with asyncio.timeout(_HELLO_SEC):
                hello = json.loads(await reader.readline())
            if not hmac.compare_digest(hello["secret"].encode(), self._cluster.secret.encode()):
                error = f"{SECRET_VARIABLE} is not that of worker 0; set the same for every worker"
                await _send(writer, {"code": ConfigError.exit_code, "error": error})
                raise ValueError("it does not know the secret of the cluster")
            index, settings = hello["index"], dict(hello["settings"])
            if index not in range(1, len(self._cluster.addresses)):
                raise ValueError("it is no worker of this cluster")
        except _BAD_LINE as error:
            self._warn(writer, error)
            writer.transport.abort()
            return
        finally:
            self._strangers.pop(writer, None)
        self._arrived[index] = settings, writer
        self._missing.discard(index)
        with contextlib.suppress(*_BAD_LINE):
            await reader.read(1)  # Returns when the worker has ended or has lost the connection.
        if self._arrived.get(index, (None, None))[1] is writer:
            del self._arrived[index]
            self._missing.add(index)

    def _warn(self, writer: asyncio.StreamWriter, error: BaseException) -> None:
        host = str((writer.get_extra_info("peername") or ["?"])[0]).removeprefix("::ffff:")
        if host not in self._warned and len(self._warned) < _MOST_WARNINGS:
            self._warned.add(host)
            console.warn(f"dropped a connection from {host}: {reason_of(error)}")

    def _difference(self) -> str:
        """Returns how workers' settings differ from the chief's, so that they cannot train."""
        differing = [
            f"{name}: worker 0 has {self._settings.get(name)}, worker {i} has {others.get(name)}"
            for i, (others, _) in sorted(self._arrived.items())
            for name in {**self._settings, **others}
            if self._settings.get(name) != others.get(name)
        ]
        more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
        advice = "start all of them with the same flags, devices and versions"
        return f"workers differ ({'; '.join(differing[:3])}{more}); {advice}" if differing else ""


async def _send(writer: asyncio.StreamWriter, answer: dict) -> None:
    """Sends the answer; the kernel repeats what the network loses."""
    with contextlib.suppress(OSError):
        writer.write(f"{json.dumps(answer)}\n".encode())
        writer.close()
        async with asyncio.timeout(_HELLO_SEC):
            await writer.wait_closed()


def _settings(config: Config, local_devices: Sequence[str]) -> dict:
    """Returns the settings that must be equal on all workers, as they come out of JSON.

    Kernels may differ, as processors may: the workers sum gradients that round differently, and all
    make the same update.
    """
    flags = {f"--{name}": value for name, value in config.values().items() if name not in _OWN}
    kind = "GPU" if "GPU" in local_devices[0] else "CPU"
    own = {f"version of {name}": v for name, v in versions().items() if name != CPU_KERNELS}
    return json.loads(json.dumps({**flags, "devices": f"{len(local_devices)} {kind}", **own}))


@contextlib.contextmanager
def naming_lost_peers(cluster: Cluster) -> Iterator[None]:
    """Turns what TensorFlow raises when a worker is gone into one line that names it.

    Raises:
        PeerLostError: it is.
    """
    try:
        yield
    except Exception as error:
        if type(error).__name__ not in _LOST:
            raise
        tasks = {int(task) for task in re.findall(r"/task:([0-9]+)", str(error))} - {cluster.index}
        known = sorted(task for task in tasks if task < len(cluster.addresses))
        lost = cluster.names_of(known) or "a worker"
        raise PeerLostError(
            f"worker {cluster.index} lost the connection to {lost}; start all workers again"
            " with the same command to resume from the last checkpoint"
        ) from error
