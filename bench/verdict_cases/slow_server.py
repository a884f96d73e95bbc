"""An HTTP server for one object, with added latency or a bandwidth limit that all clients share."""

from __future__ import annotations

import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

CHUNK = 4096


class SlowServer(ThreadingHTTPServer):
    """Answers after `latency_s`, at `bytes_per_second` for all clients together; 0 means no limit."""

    def __init__(self, size: int, latency_s: float, bytes_per_second: float) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.body = bytes(size)
        self.latency_s = latency_s
        self.bytes_per_second = bytes_per_second
        self.turn = threading.Lock()

    def send_slowly(self, write: object) -> None:
        assert callable(write)
        for start in range(0, len(self.body), CHUNK):
            part = self.body[start : start + CHUNK]
            if self.bytes_per_second:
                with self.turn:  # all clients share one pipe
                    time.sleep(len(part) / self.bytes_per_second)
            write(part)


class _Answer(BaseHTTPRequestHandler):
    server: SlowServer

    def do_GET(self) -> None:
        time.sleep(self.server.latency_s)
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.server.body)))
        self.end_headers()
        self.server.send_slowly(self.wfile.write)

    def log_message(self, *_: object) -> None:
        """Logs nothing."""


if __name__ == "__main__":
    server = SlowServer(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]))
    sys.stdout.write(f"{server.server_address[1]}\n")
    sys.stdout.flush()
    server.serve_forever()
