"""An HTTP/1.1 proxy that adds latency, limits bandwidth and breaks responses on demand.

Requests are forwarded unmodified, so signatures stay valid. In tests it runs in a thread; for measurements it runs as
a separate process, which prints its port and exits when its stdin is closed:

    python -m tests.support.proxy UPSTREAM_PORT LATENCY_MS [MB_PER_SECOND]
"""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
import struct
import sys
import threading
import time
from asyncio import StreamReader, StreamWriter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

CHUNK = 1 << 17
INJECTED = b"<Error><Code>SlowDown</Code><Message>injected</Message></Error>"


@dataclass
class Fault:
    """A fault for requests whose 'METHOD /path range' matches."""

    pattern: re.Pattern[str]
    kind: Literal["reset", "short", "stall", "flip", "status", "call"]
    """reset, short: the connection breaks, or ends cleanly, after that many bytes of the body; stall: it hangs there;
    flip: a bit of that byte is wrong; status: an error response; call: a function runs before forwarding."""
    times: int = 1
    after: int = 0
    code: int = 503
    seconds: float = 1.0
    call: Callable[[], object] | None = None
    seen: int = 0


@dataclass
class Proxy:
    """A proxy between a client and a server on this machine."""

    upstream_port: int
    latency: float = 0.0
    bytes_per_second: float | None = None
    port: int = 0
    """Chosen at the first start; the same after a stop, so that a server can go away and come back."""
    requests: list[str] = field(default_factory=list)
    """The 'METHOD /path range' of every request received."""
    in_flight: int = 0
    most_in_flight: int = 0
    tls: ssl.SSLContext | None = None
    """Speaks TLS to the client."""
    outage: Literal["reset", "stall"] | None = None
    """While set, every request is reset, or not answered at all. For refused connections, stop the proxy."""
    _faults: list[Fault] = field(default_factory=list)
    _link_free_at: float = 0.0

    @property
    def endpoint(self) -> str:
        return f"{'http' if self.tls is None else 'https'}://127.0.0.1:{self.port}"

    def fault(self, pattern: str, kind: str, **details: object) -> Fault:
        """Injects a fault into the next matching request, or the next `times` of them."""
        fault = Fault(re.compile(pattern), kind, **details)  # type: ignore[arg-type]
        self._faults.append(fault)
        return fault

    def reset(self) -> None:
        """Forgets all faults and requests."""
        self._faults.clear()
        self.requests.clear()
        self.most_in_flight = 0

    def start(self) -> Proxy:
        ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(ready)), daemon=True, name="proxy")
        self._thread.start()
        assert ready.wait(120)
        return self

    def stop(self) -> None:
        if not self._thread.is_alive():
            return
        self._loop.call_soon_threadsafe(self._done.set)
        self._thread.join(120)

    async def _serve(self, ready: threading.Event) -> None:
        self._loop, self._done = asyncio.get_running_loop(), asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        server = await asyncio.start_server(
            self._connection, "127.0.0.1", self.port, backlog=1024, limit=1 << 18, ssl=self.tls
        )
        self.port = server.sockets[0].getsockname()[1]
        ready.set()
        await self._done.wait()
        server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connection(self, client: StreamReader, to_client: StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        writers = [to_client]
        with suppress(asyncio.IncompleteReadError, asyncio.CancelledError, OSError):
            server, to_server = await asyncio.open_connection("127.0.0.1", self.upstream_port, limit=1 << 18)
            writers.append(to_server)
            while await self._exchange(client, to_client, server, to_server):
                pass
        self._tasks.discard(task)
        for writer in writers:
            writer.close()

    async def _exchange(
        self, client: StreamReader, to_client: StreamWriter, server: StreamReader, to_server: StreamWriter
    ) -> bool:
        """Forwards one request and its response; returns whether the connection stays open."""
        head = await client.readuntil(b"\r\n\r\n")
        if self.outage is not None:
            return await self._no_answer(to_client)
        method, target, _ = head.split(b"\r\n", 1)[0].decode().split(" ")
        asked = _headers(head)
        line = f"{method} {target} {asked.get('range', '')}"
        self.requests.append(line)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            fault, due = self._pick(line), self._loop.time() + self.latency
            if fault is not None and fault.call is not None:
                await asyncio.to_thread(fault.call)
            if fault is not None and fault.kind == "status":
                await self._body(client, None, asked)
                await self._until(due)
                body = b"" if method == "HEAD" else INJECTED
                to_client.write(b"HTTP/1.1 %d Injected\r\nContent-Length: %d\r\n\r\n" % (fault.code, len(INJECTED)))
                to_client.write(body)
                await to_client.drain()
                return True
            to_server.write(head)
            await self._body(client, to_server, asked)
            answer = await server.readuntil(b"\r\n\r\n")
            while answer.startswith(b"HTTP/1.1 100"):
                answer = await server.readuntil(b"\r\n\r\n")
            await self._until(due)
            told = _headers(answer)
            to_client.write(answer)
            has_body = method != "HEAD" and answer[9:12] not in (b"204", b"304")
            if has_body and not await self._body(server, to_client, told, fault, limited=True):
                return False
            await to_client.drain()
            return "close" not in (told.get("connection", "") + asked.get("connection", "")).lower()
        finally:
            self.in_flight -= 1

    async def _no_answer(self, to_client: StreamWriter) -> bool:
        while self.outage == "stall":
            await asyncio.sleep(0.1)
        if self.outage == "reset":
            await self._break(to_client, Fault(re.compile(""), "reset"))
        return False

    async def _body(
        self,
        source: StreamReader,
        target: StreamWriter | None,
        headers: dict[str, str],
        fault: Fault | None = None,
        limited: bool = False,
    ) -> bool:
        """Forwards a body; returns False if a fault broke it."""
        if "chunked" in headers.get("transfer-encoding", ""):
            return await self._chunked_body(source, target)
        left, sent = int(headers.get("content-length", 0)), 0
        while left:
            data = await source.read(min(left, CHUNK))
            if not data:
                raise ConnectionError
            left -= len(data)
            breaks = fault is not None and fault.kind in ("reset", "short", "stall")
            if target and fault and breaks and sent + len(data) >= fault.after:
                target.write(data[: fault.after - sent])
                await target.drain()
                await self._break(target, fault)
                return False
            if fault is not None and fault.kind == "flip" and sent <= fault.after < sent + len(data):
                place = fault.after - sent
                data = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
            if limited and self.bytes_per_second:
                self._link_free_at = max(self._link_free_at, self._loop.time()) + len(data) / self.bytes_per_second
                await self._until(self._link_free_at)
            if target:
                target.write(data)
                if left:
                    await target.drain()
            sent += len(data)
        return True

    async def _chunked_body(self, source: StreamReader, target: StreamWriter | None) -> bool:
        while True:
            size = await source.readuntil(b"\r\n")
            data = await source.readexactly(int(size.split(b";")[0], 16) + 2)
            if target:
                target.write(size + data)
                await target.drain()
            if len(data) == 2:
                return True

    async def _break(self, target: StreamWriter, fault: Fault) -> None:
        if fault.kind == "stall":
            await asyncio.sleep(fault.seconds)
        elif fault.kind == "reset":
            await asyncio.sleep(0.01)  # so that the bytes are sent before the reset
            linger = struct.pack("ii", 1, 0)
            target.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            target.transport.abort()

    def _pick(self, line: str) -> Fault | None:
        for fault in self._faults:
            if fault.seen < fault.times and fault.pattern.search(line):
                fault.seen += 1
                return fault
        return None

    async def _until(self, moment: float) -> None:
        await asyncio.sleep(max(0.0, moment - self._loop.time()))


def _headers(head: bytes) -> dict[str, str]:
    lines = (line.partition(":") for line in head.decode("latin-1").split("\r\n")[1:])
    return {name.strip().lower(): value.strip() for name, colon, value in lines if colon}


if __name__ == "__main__":
    numbers = [float(argument) for argument in sys.argv[1:]]
    limit = numbers[2] * 1e6 if len(numbers) > 2 else None
    proxy = Proxy(int(numbers[0]), latency=numbers[1] / 1000, bytes_per_second=limit).start()
    print(proxy.port, flush=True)
    sys.stdin.read()
    proxy.stop()


AT_MOST_S = 60.0
"""Only a reader that never asks for so much at once takes so long."""


def hold_until_in_flight(proxy: Proxy, count: int, pattern: str, *, answered: int = 0) -> None:
    """Makes the proxy answer only the first few of the matching requests until `count` have been in flight at once: no
    latency has to be long enough."""
    proxy.most_in_flight = proxy.in_flight
    end = time.monotonic() + AT_MOST_S

    def hold() -> None:
        while proxy.most_in_flight < count and time.monotonic() < end:
            time.sleep(0.005)

    proxy.fault(pattern, "call", times=answered, call=lambda: None)
    proxy.fault(pattern, "call", times=1_000_000, call=hold)
