"""Serves the page of a training in progress to browsers on this machine."""

import errno
import http.server
import json
import re
import socketserver
import threading

from app.report.live_page import SECURITY_POLICY, LivePage
from app.runtime.errors import ConfigError, reason_of

DEFAULT_PORT = 8060
_ADDRESS = "127.0.0.1"
# With any port: a tunnel may have another one at its other end.
_HOST = re.compile(r"(127\.0\.0\.1|localhost)(:\d+)?", re.IGNORECASE)
_HEADERS = {
    "Content-Security-Policy": SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
_TEXT, _HTML, _JSON = "text/plain", "text/html", "application/json"


class LiveServer(socketserver.ThreadingTCPServer):
    """Serves a page on the loopback interface, with a thread per request.

    Browsers keep idle connections open, which would block a single thread.

    Args:
        port: the port, or 0 for any free one.
        page: the page to serve.

    Raises:
        OSError: the port cannot be used.
    """

    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False

    def __init__(self, port: int, page: LivePage) -> None:
        self._page, self._lock = page, threading.Lock()
        super().__init__((_ADDRESS, port), _Handler)

    @property
    def url(self) -> str:
        """The address of the page."""
        return f"http://{_ADDRESS}:{self.server_address[1]}/"

    def content(self, path: str) -> tuple[str, str] | None:
        """Returns media type and text for a path; None if there is nothing."""
        with self._lock:  # The page and matplotlib are not thread-safe.
            if path == "/":
                return _HTML, self._page.page()
            if path == "/live.json":
                return _JSON, json.dumps(self._page.update())
        return None


class _Handler(http.server.BaseHTTPRequestHandler):
    """Answers GET requests from browsers on this machine and rejects all others."""

    server: LiveServer
    timeout = 10
    server_version, sys_version = "Lockstep", ""

    def do_GET(self) -> None:
        """Sends the page or its parts."""
        if not self._is_for_this_machine():
            self._send(403, _TEXT, "Open this page as 127.0.0.1 or localhost.\n")
            return
        found = self.server.content(self.path)
        if found is None:
            self._send(404, _TEXT, "There is nothing at this path.\n")
            return
        self._send(200, *found)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Rejects a request; the base class calls it for bad requests and other methods."""
        if code == 501:
            self._send(405, _TEXT, "Only GET is allowed.\n")
        else:
            self._send(code, _TEXT, "The request is refused.\n")

    def log_message(self, format: str, *args: object) -> None:
        """Prints nothing: there is a request every two seconds."""

    def _is_for_this_machine(self) -> bool:
        """Returns whether the browser addressed this machine.

        A page of another site can point its host name to this machine (DNS rebinding) and could
        then read the answers.
        """
        hosts = self.headers.get_all("Host", [])
        return len(hosts) == 1 and _HOST.fullmatch(hosts[0]) is not None

    def _send(self, status: int, media_type: str, text: str) -> None:
        content = text.encode("utf-8", "replace")
        try:
            self.send_response(status)
            self.send_header("Content-Type", f"{media_type}; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            if status == 405:
                self.send_header("Allow", "GET")
            for name, value in _HEADERS.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)
        except (ConnectionError, TimeoutError):  # The browser has closed the connection.
            self.close_connection = True


def open_server(port: int | None, page: LivePage) -> LiveServer:
    """Opens the server of a page.

    Args:
        port: the port; None for `DEFAULT_PORT`, or any free port if that one is in use.
        page: the page to serve.

    Raises:
        ConfigError: the port cannot be used.
    """
    try:
        return LiveServer(DEFAULT_PORT if port is None else port, page)
    except OSError as error:
        if port is None:
            return LiveServer(0, page)
        reason = "is in use" if error.errno == errno.EADDRINUSE else f"fails: {reason_of(error)}"
        raise ConfigError(f"--port={port} {reason}; choose another port or leave it out") from error
