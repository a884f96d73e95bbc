"""Reads objects of S3 with one thread and hundreds of connections: the kernel says which of them have data.

A thread for each request would hand Python's lock around: when this was decided, the same requests took 1.3 to 1.4
times as long that way, and twice the CPU.
"""

from __future__ import annotations

import errno
import heapq
import itertools
import os
import selectors
import socket
import ssl
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from stoker.io import outage
from stoker.io.stores import ReadFailure
from stoker.stage.s3 import Attempts, Fault, S3Source
from stoker.stage.s3_requests import LONGEST_ERROR_BYTES, LONGEST_HEAD_BYTES, BadResponse, Response, parse_head
from stoker.stage.sources import Content, Retried, SourceFile

BUFFER_BYTES = 256 << 10
TICK_S = 0.25

Done = Callable[[Content | ReadFailure], None]
"""Takes what was read, which is overwritten afterwards, or why it cannot be."""


@dataclass(eq=False)
class _Job:
    """A range of an object that is to be read."""

    file: SourceFile
    start: int
    end: int
    done: Done
    attempts: Attempts
    until: float = 0.0


class _Connection:
    """A socket with its buffer and the job it works on."""

    def __init__(self, opened: socket.socket) -> None:
        self.socket = opened
        self.memory = bytearray(BUFFER_BYTES)
        self.connected = False
        self.used = False
        """Whether it has answered a request: one that a server closed while it was idle is no fault."""
        self.begin(None)

    def begin(self, job: _Job | None) -> None:
        self.job, self.head, self.body_at, self.length = job, None, 0, 0
        self.target, self.have = memoryview(self.memory), 0
        self.heard = time.monotonic()

    head: tuple[int, dict[str, str], bool] | None


class S3Loop:
    """The requests that are in flight. Its methods are called by one thread."""

    def __init__(self, source: S3Source, retried: Retried) -> None:
        self._source, self._place, self._patience, self._retried = source, source.place, source.patience, retried
        self._selector = selectors.DefaultSelector()
        self._idle: list[_Connection] = []
        self._busy: set[_Connection] = set()
        self._later: list[tuple[float, int, _Job]] = []
        self._numbers = itertools.count()
        self._addresses: itertools.cycle[tuple[socket.AddressFamily, socket.SocketKind, int, tuple[object, ...]]] | None
        self._addresses = None
        self._next_tick = 0.0
        self._waiting: ExitStack | None = None
        """Open while the whole store does not respond."""

    def begin(self, file: SourceFile, start: int, end: int, done: Done) -> None:
        self._start(_Job(file, start, end, done, Attempts(self._source, file.path)))

    def run(self, wait_s: float) -> None:
        """Goes on with what has data, waiting for it at most so long. Raises StoreDown if the whole store fails."""
        now = time.monotonic()
        while self._later and self._later[0][0] <= now:
            self._start(heapq.heappop(self._later)[2])
        if now >= self._next_tick:
            self._next_tick = now + TICK_S
            self._check_stalls(now)
            self._note_outage(ended=not self._later or now - self._source.last_success < outage.SAID_AFTER_S)
        if self._later:
            wait_s = min(wait_s, self._later[0][0] - now)
        for key, _ in self._selector.select(max(0.0, wait_s)):
            connection: _Connection = key.data
            try:
                self._advance(connection)
            except (Fault, ReadFailure, OSError, BadResponse) as error:
                self._failed(connection, error)

    def close(self) -> None:
        self._note_outage(ended=True)
        for connection in [*self._busy, *self._idle]:
            connection.socket.close()
        self._selector.close()

    def _start(self, job: _Job) -> None:
        job.until = time.monotonic() + self._source.longest_s(job.end - job.start)
        try:
            connection = self._idle.pop() if self._idle else self._connect()
        except OSError as error:
            self._again(job, error)
            return
        connection.begin(job)
        self._busy.add(connection)
        if connection.connected:
            try:
                self._send(connection)
            except (OSError, Fault) as error:
                self._failed(connection, error)

    def _connect(self) -> _Connection:
        if self._addresses is None:
            found = socket.getaddrinfo(self._place.host, self._place.port, type=socket.SOCK_STREAM)
            self._addresses = itertools.cycle([(one[0], one[1], one[2], one[4]) for one in found])
        family, kind, protocol, address = next(self._addresses)
        opened = socket.socket(family, kind, protocol)
        opened.setblocking(False)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._place.tls is not None:
            opened = self._place.tls.wrap_socket(
                opened, server_hostname=self._place.host, do_handshake_on_connect=False
            )
        code = opened.connect_ex(address)
        if code not in (0, errno.EINPROGRESS):
            opened.close()
            raise OSError(code, os.strerror(code))
        connection = _Connection(opened)
        self._selector.register(opened, selectors.EVENT_WRITE, connection)
        return connection

    def _send(self, connection: _Connection) -> None:
        job = connection.job
        assert job is not None
        request = self._source.request_for(job.file, job.start, job.end)
        # A request fits the empty buffer of a connection many times over.
        if connection.socket.send(request) != len(request):
            raise Fault("the connection does not take a request")

    def _advance(self, connection: _Connection) -> None:
        """Goes on with a connection that has something to read, or can be written to for the first time."""
        if not connection.connected:
            self._shake_hands(connection)
        elif connection.job is None:  # the server closed an idle connection, or speaks unasked
            self._drop(connection)
        else:
            while self._receive(connection) and self._place.tls is not None:
                pass

    def _shake_hands(self, connection: _Connection) -> None:
        opened = connection.socket
        if code := opened.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise OSError(code, os.strerror(code))
        if isinstance(opened, ssl.SSLSocket):
            try:
                opened.do_handshake()
            except ssl.SSLWantReadError:
                self._selector.modify(opened, selectors.EVENT_READ, connection)
                return
            except ssl.SSLWantWriteError:
                self._selector.modify(opened, selectors.EVENT_WRITE, connection)
                return
        connection.connected = True
        self._selector.modify(opened, selectors.EVENT_READ, connection)
        self._send(connection)

    def _receive(self, connection: _Connection) -> bool:
        """Takes what has arrived; False if nothing more can be read now or the response is complete."""
        try:
            count = connection.socket.recv_into(connection.target[connection.have :])
        except (BlockingIOError, ssl.SSLWantReadError):
            return False
        if not count:
            raise BadResponse("the connection ended early" if connection.have or not connection.used else "")
        connection.have += count
        connection.heard = time.monotonic()
        if connection.head is None and not self._parse(connection):
            return True
        assert connection.head is not None
        missing = connection.body_at + connection.length - connection.have
        if missing < 0:
            raise BadResponse("more bytes than the response has")
        if not missing:
            self._complete(connection, *connection.head)
        return bool(missing)

    def _parse(self, connection: _Connection) -> bool:
        """Reads the head of a response; False if it is not there yet."""
        end = connection.memory.find(b"\r\n\r\n", 0, min(connection.have, LONGEST_HEAD_BYTES))
        if end < 0:
            if connection.have >= LONGEST_HEAD_BYTES:
                raise BadResponse("headers without an end")
            return False
        status, headers, _ = connection.head = parse_head(bytes(connection.target[:end]))
        connection.body_at = end + 4
        told = headers.get("content-length", "")
        if status >= 300 and "transfer-encoding" in headers:
            # The reason of a refusal, in chunks: what came with the head is enough, and the connection is not kept.
            connection.head, connection.length = (status, headers, False), connection.have - connection.body_at
        elif not (told.isascii() and told.isdecimal()):
            raise BadResponse("a response without a length")
        elif status >= 300 and int(told) > LONGEST_ERROR_BYTES:
            raise BadResponse(f"status {status} with a page of {told} bytes")
        else:
            job = connection.job
            assert job is not None
            if status < 300:
                self._source.check_length(job.file, job.end - job.start, int(told))
            connection.length = int(told)
            if connection.body_at + connection.length > len(connection.target):
                grown = memoryview(bytearray(connection.body_at + connection.length))
                grown[: connection.have] = connection.target[: connection.have]
                connection.target = grown
        return True

    def _complete(self, connection: _Connection, status: int, headers: dict[str, str], keeps: bool) -> None:
        job, body = connection.job, connection.target[connection.body_at : connection.have]
        assert job is not None
        connection.used = True
        outcome: Content | ReadFailure
        try:
            outcome = self._source.content_of(job.file, job.start, job.end, Response(status, headers, body))
        except ReadFailure as failure:
            outcome = failure
        except Fault as fault:
            self._release(connection, keeps=keeps)
            self._again(job, fault)
            return
        self._source.succeeded()
        job.done(outcome)
        self._release(connection, keeps=keeps)

    def _release(self, connection: _Connection, *, keeps: bool) -> None:
        if not keeps:
            self._drop(connection)
            return
        self._busy.discard(connection)
        connection.begin(None)
        self._idle.append(connection)

    def _drop(self, connection: _Connection) -> None:
        self._busy.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)
        self._selector.unregister(connection.socket)
        connection.socket.close()

    def _failed(self, connection: _Connection, error: Exception) -> None:
        job, used = connection.job, connection.used
        self._drop(connection)
        if job is None:
            return
        if isinstance(error, ReadFailure):
            job.done(error)
        elif isinstance(error, BadResponse) and not str(error) and used:
            self._start(job)  # a kept connection that the server had closed
        else:
            self._again(job, error)

    def _again(self, job: _Job, error: Exception) -> None:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
        fault = error if isinstance(error, Fault) else Fault(reason)
        try:
            pause_s = job.attempts.failed(fault)
        except ReadFailure as failure:
            job.done(failure)
            return
        self._retried(str(fault), fault.too_fast)
        heapq.heappush(self._later, (time.monotonic() + pause_s, next(self._numbers), job))

    def _check_stalls(self, now: float) -> None:
        for connection in list(self._busy):
            limit_s = self._patience.stall_s if connection.connected else self._patience.connect_s
            if now - connection.heard > limit_s:
                self._failed(connection, Fault(f"nothing arrived for {limit_s:g} s", too_fast=True))
            elif connection.job is not None and now > connection.job.until:
                self._failed(connection, Fault("it takes too long", too_fast=True))

    def _note_outage(self, *, ended: bool) -> None:
        """Says that the store does not respond, or no longer."""
        if ended and self._waiting is not None:
            self._waiting.close()
            self._waiting = None
        elif not ended and self._waiting is None:
            self._waiting = ExitStack()
            self._waiting.enter_context(outage.waiting(self._place.host_header, self._source.last_success))
