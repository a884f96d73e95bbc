"""Serves the report of a running run to browsers on this machine only.

There are two addresses, / and /data.json; no path is ever turned into a file name. The Host header must name this
machine: a web page whose own name resolves to our address (DNS rebinding) is refused and cannot read a run.
"""

from __future__ import annotations

import json
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from stoker.core.console import print_result, say
from stoker.core.errors import UserError
from stoker.report.document import Document
from stoker.report.page import report_document, report_page
from stoker.report.watch_screen import PAUSE_FACTOR, ReadDocument

ADDRESS = "127.0.0.1"
HOSTS = frozenset({"127.0.0.1", "localhost"})
REFRESH_S = 0.5
SLOWEST_CLIENT_S = 20.0


class WatchServer(ThreadingHTTPServer):
    """Serves one run; bound to the loopback address only."""

    daemon_threads = True

    def __init__(self, read: ReadDocument, port: int = 0) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._document: Document | None = None
        self._due_s = 0.0
        super().__init__((ADDRESS, port), _Handler)

    @property
    def url(self) -> str:
        return f"http://{ADDRESS}:{self.server_address[1]}/"

    def document(self) -> Document:
        """The data of the page now; read again at most every half second, however many tabs ask."""
        with self._lock:
            began_s = time.monotonic()
            if self._document is None or began_s >= self._due_s:
                self._document = report_document([self._read()])
                ended_s = time.monotonic()
                self._due_s = ended_s + max(REFRESH_S, PAUSE_FACTOR * (ended_s - began_s))
            return self._document


class _Handler(BaseHTTPRequestHandler):
    server: WatchServer
    timeout = SLOWEST_CLIENT_S
    server_version, sys_version = "stoker", ""

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, *, with_body: bool) -> None:
        host, _, port = self.headers.get("Host", "").rpartition(":")
        if host not in HOSTS or port != str(self.server.server_address[1]):
            self._send(HTTPStatus.FORBIDDEN, "text/plain", b"only available to browsers on this machine\n", with_body)
        elif self.path == "/":
            page = report_page(self.server.document(), live=True)
            self._send(HTTPStatus.OK, "text/html; charset=utf-8", page.encode(), with_body)
        elif self.path == "/data.json":
            data = json.dumps(self.server.document(), allow_nan=False, separators=(",", ":")).encode()
            self._send(HTTPStatus.OK, "application/json", data, with_body)
        else:
            self._send(HTTPStatus.NOT_FOUND, "text/plain", b"there is only / and /data.json\n", with_body)

    def _send(self, status: HTTPStatus, kind: str, body: bytes, with_body: bool) -> None:
        self.send_response(status)
        for name, value in {
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Connection": "close",
        }.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        """Silent: a line every second about a successful request helps nobody."""


def watch_in_browser(read: ReadDocument, port: int) -> None:
    """Prints the address, then serves until Ctrl-C."""
    try:
        server = WatchServer(read, port)
    except OSError as error:
        raise UserError(
            "port-taken",
            f"cannot listen on {ADDRESS}:{port}: {error.strerror or error}",
            hint="stoker watch RUN --web    # picks a free port",
        ) from None
    with server:
        print_result(server.url)
        say("open it in a browser on this machine (from another one: ssh -L); Ctrl-C stops the page, not the run")
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            say("stopped watching; the run is not affected")
