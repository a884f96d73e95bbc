"""Downloads objects of S3: one thread, hundreds of connections, a buffer for each.

A thread for each request would hand Python's lock around; here the kernel says which connections have data, and an
object is checked and written where it arrives. Small objects are taken whole, large ones in ranges that go straight to
their place in the file.
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
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

from stoker.data.store import outage
from stoker.data.store.copy_manifest import CopiedFile
from stoker.data.store.local_copy import LocalCopy
from stoker.data.store.object_store import Patience
from stoker.data.store.stores import ReadFailure
from stoker.stage.concurrency import Concurrency, RateLimit
from stoker.stage.records import Events, SourceFile, Tick, jitter, writing
from stoker.stage.s3_connection import (
    BUFFER_BYTES,
    ERROR_BYTES,
    TOO_FAST,
    Connection,
    Fault,
    Large,
    Task,
    judge_refusal,
    unreachable,
)
from stoker.stage.s3_requests import LONGEST_HEAD_BYTES, BadResponse, Head, S3Place, Signer, agreed_checksum, parse_head

BUFFERED_BYTES = 1 << 20
"""Larger objects are not kept in memory until they are complete."""
SINGLE_BYTES = 16 << 20
"""Larger objects are fetched in parts, several at once."""
PART_BYTES = 8 << 20
CHECKSUM_TRIES = 4
"""How often a large object is fetched whose bytes do not agree with the store's checksum."""
_BAD_CHECKSUM = "the bytes do not agree with the store's checksum"
_TICK_S = 0.25


class S3Download:
    """Copies objects of one place into a local copy."""

    def __init__(
        self,
        place: S3Place,
        copy: LocalCopy,
        events: Events,
        concurrency: Concurrency,
        rate: RateLimit,
        patience: Patience = Patience(),  # noqa: B008
    ) -> None:
        self._place, self._copy, self._events = place, copy, events
        self._concurrency, self._rate, self._patience = concurrency, rate, patience
        self._signer = Signer(place)
        self._selector = selectors.DefaultSelector()
        self._idle: list[Connection] = []
        self._busy: set[Connection] = set()
        self._ready: deque[Task] = deque()
        self._later: list[tuple[float, int, Task]] = []
        self._numbers = itertools.count()
        self._addresses: Iterator[Any] = iter(())
        self._finisher = ThreadPoolExecutor(1, thread_name_prefix="stoker-checksum")
        self._finishing: deque[tuple[Large, Future[CopiedFile]]] = deque()
        self._bad_checksums: Counter[str] = Counter()
        self._last_success = self._back = time.monotonic()
        self._waiting: ExitStack | None = None
        """Open while the whole store does not respond."""

    def run(self, files: Iterator[SourceFile], tick: Tick) -> None:
        """Copies all files; those that fail are told to `events`. Raises StoreDown if the whole store fails."""
        try:
            self._addresses = itertools.cycle(
                socket.getaddrinfo(self._place.host, self._place.port, type=socket.SOCK_STREAM)
            )
            self._loop(files, tick)
        except OSError as error:
            if isinstance(error, socket.gaierror):
                raise unreachable(self._place.host_header, f"{self._place.host}: {error.strerror}") from None
            raise
        finally:
            self._note_outage(ended=True)
            for connection in [*self._busy, *self._idle]:
                connection.socket.close()
                if connection.task is not None and connection.task.large is not None:
                    connection.task.large.partial.abandon()
            for task in [*self._ready, *(task for _, _, task in self._later)]:
                if task.large is not None:
                    task.large.partial.abandon()
            self._finisher.shutdown(cancel_futures=True)
            self._selector.close()

    def _loop(self, files: Iterator[SourceFile], tick: Tick) -> None:
        more = True
        next_tick = 0.0
        while True:
            now = time.monotonic()
            while self._later and self._later[0][0] <= now:
                self._ready.append(heapq.heappop(self._later)[2])
            while len(self._busy) < self._concurrency.limit and self._rate.wait_s() == 0:
                if not self._ready and more:
                    more = self._take(files)
                if not self._ready:
                    break
                self._start(self._ready.popleft())
            self._collect()
            if not (more or self._ready or self._later or self._busy or self._finishing):
                return
            if now >= next_tick:
                next_tick = now + _TICK_S
                tick()
                self._check_stalls(now)
                self._note_outage(ended=not self._later or now - self._last_success < outage.SAID_AFTER_S)
            for key, _ in self._selector.select(self._patience_until_next(now, next_tick, more)):
                connection: Connection = key.data
                try:
                    self._advance(connection)
                except ReadFailure as failure:
                    task = connection.task
                    self._drop(connection)
                    if task is not None:
                        self._give_up(task, failure)
                except (Fault, OSError, BadResponse) as error:
                    self._fault(connection, error)

    def _patience_until_next(self, now: float, next_tick: float, more: bool) -> float:
        wait = next_tick - now
        if self._later:
            wait = min(wait, self._later[0][0] - now)
        if (more or self._ready) and len(self._busy) < self._concurrency.limit:
            wait = min(wait, self._rate.wait_s())
        if self._finishing:
            wait = min(wait, 0.02)
        return max(0.0, wait)

    def _take(self, files: Iterator[SourceFile]) -> bool:
        """Makes the tasks of the next file; False if there is none."""
        file = next(files, None)
        if file is None:
            return False
        try:
            if file.size <= BUFFERED_BYTES:
                self._copy.check(file.path)
                self._ready.append(Task(file))
                return True
            with writing(self._copy):
                partial = self._copy.create(file.path, file.size)
        except ReadFailure as failure:
            self._events.failed(file, str(failure))
            return True
        if file.size <= SINGLE_BYTES:
            self._ready.append(Task(file, large=Large(file, partial, 1)))
            return True
        starts = range(0, file.size, PART_BYTES)
        # The checksum of the whole object is not told with a range of it.
        large = Large(file, partial, len(starts) + 1)
        self._ready.append(Task(file, "HEAD", large=large))
        self._ready.extend(Task(file, "GET", at, min(at + PART_BYTES, file.size), large) for at in starts)
        return True

    def _start(self, task: Task) -> None:
        if task.large is not None and task.large.failed:
            self._part_ended(task.large)
            return
        self._rate.take(task.size)
        connection = self._idle.pop() if self._idle else None
        try:
            connection = connection or self._connect()
        except OSError as error:
            self._again(task, error)
            return
        connection.begin(task)
        self._busy.add(connection)
        if connection.shaken and connection.connected:
            try:
                self._send(connection)
            except (OSError, Fault) as error:
                self._fault(connection, error)

    def _connect(self) -> Connection:
        family, kind, protocol, _, address = next(self._addresses)
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
            raise OSError(code, f"cannot connect: {os.strerror(code)}")
        connection = Connection(opened, self._place.tls is not None)
        self._selector.register(opened, selectors.EVENT_WRITE, connection)
        return connection

    def _send(self, connection: Connection) -> None:
        task = connection.task
        assert task is not None
        headers = {}
        if task.end is None:
            headers["x-amz-checksum-mode"] = "ENABLED"
        else:
            headers["range"] = f"bytes={task.start}-{task.end - 1}"
        if task.file.version:
            headers["if-match"] = task.file.version
        request = self._signer.request(task.method, self._place.path_of(task.file.path), headers)
        # A request fits the empty buffer of a connection many times over.
        if connection.socket.send(request) != len(request):
            raise Fault("the connection does not take a request")

    def _advance(self, connection: Connection) -> None:
        """Goes on with a connection that has something to read, or can be written to for the first time."""
        if not connection.connected:
            code = connection.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                raise OSError(code, "cannot connect")
            connection.connected = True
            if connection.shaken:
                self._selector.modify(connection.socket, selectors.EVENT_READ, connection)
                self._send(connection)
                return
        if not connection.shaken:
            try:
                connection.socket.do_handshake()
            except ssl.SSLWantReadError:
                self._selector.modify(connection.socket, selectors.EVENT_READ, connection)
                return
            except ssl.SSLWantWriteError:
                self._selector.modify(connection.socket, selectors.EVENT_WRITE, connection)
                return
            connection.shaken = True
            self._selector.modify(connection.socket, selectors.EVENT_READ, connection)
            self._send(connection)
            return
        if connection.task is None:  # the server closed an idle connection, or speaks unasked
            self._drop(connection)
            return
        while self._receive(connection) and connection.tls:
            pass

    def _receive(self, connection: Connection) -> bool:
        """Takes what has arrived; False if nothing more can be read now or the response is complete."""
        try:
            count = connection.socket.recv_into(connection.view[connection.have :])
        except (BlockingIOError, ssl.SSLWantReadError):
            return False
        if not count:
            raise Fault("the connection ended early" if connection.have or not connection.used else "")
        connection.have += count
        connection.heard = time.monotonic()
        task, head = connection.task, connection.head
        assert task is not None
        if head is None:
            end = connection.buffer.find(b"\r\n\r\n", 0, connection.have)
            if end < 0:
                if connection.have > LONGEST_HEAD_BYTES:
                    raise BadResponse("headers without an end")
                return True
            head = connection.head = parse_head(bytes(connection.view[:end]), task.method)
            connection.body_at = end + 4
            self._check_length(task, head)
            if task.large is None or head.status >= 300:
                connection.room_for(connection.body_at + head.length)
        have = connection.have - connection.body_at
        if (
            task.large is not None
            and head.status < 300
            and (have >= BUFFER_BYTES // 2 or have + connection.written == head.length)
        ):
            with writing(self._copy):
                task.large.partial.write_at(
                    task.start + connection.written, connection.view[connection.body_at : connection.have]
                )
            connection.written += have
            connection.have = connection.body_at
            have = 0
        if have + connection.written < head.length:
            return True
        if have + connection.written > head.length:
            raise BadResponse("more bytes than the response has")
        self._complete(connection, task, head)
        return False

    def _check_length(self, task: Task, head: Head) -> None:
        if head.status >= 300:
            if head.length > LONGEST_HEAD_BYTES:
                raise BadResponse(f"status {head.status} with a page of {head.length} bytes")
        elif task.method == "GET":
            if head.status != (200 if task.end is None else 206):
                raise BadResponse(f"status {head.status}")
            if head.length != task.size:
                raise ReadFailure(task.file.path, "changed", f"{head.length} bytes; the listing says {task.size}")

    def _complete(self, connection: Connection, task: Task, head: Head) -> None:
        body = connection.view[connection.body_at : connection.have]
        connection.used = True
        if head.status >= 300:
            code, text = head.status, bytes(body[:ERROR_BYTES])
            self._release(connection, head)
            self._refused(task, code, text)
            return
        if task.file.version and head.e_tag and head.e_tag.strip('"') != task.file.version.strip('"'):
            raise ReadFailure(task.file.path, "changed", "it was replaced after it was listed")
        large = task.large
        if large is None:
            agreed = agreed_checksum(head.headers, body)
            if agreed is None:
                raise Fault(_BAD_CHECKSUM)
            with writing(self._copy):
                record = self._copy.put(task.file.path, body, task.file.version or head.e_tag, agreed)
            self._release(connection, head)
            self._succeeded(task)
            self._events.done(task.file, record)
            return
        if task.end is None:
            large.headers = head.headers
        self._release(connection, head)
        self._succeeded(task)
        self._part_ended(large)

    def _succeeded(self, task: Task) -> None:
        self._last_success = time.monotonic()
        self._concurrency.done(task.size)

    def _part_ended(self, large: Large) -> None:
        large.left -= 1
        if large.left:
            return
        if large.failed:
            large.partial.abandon()
        else:
            # Hashing a large file takes long: the connections go on meanwhile.
            self._finishing.append((large, self._finisher.submit(_finish, large)))

    def _collect(self) -> None:
        while self._finishing and self._finishing[0][1].done():
            large, future = self._finishing.popleft()
            try:
                with writing(self._copy):
                    record = future.result()
                self._events.done(large.file, record)
            except Fault as fault:
                self._bad_checksums[large.file.path] += 1
                if self._bad_checksums[large.file.path] >= CHECKSUM_TRIES:
                    self._events.failed(large.file, str(fault))
                else:
                    self._events.retried(str(fault))
                    self._take(iter([large.file]))
            except ReadFailure as failure:
                self._events.failed(large.file, str(failure))

    def _release(self, connection: Connection, head: Head) -> None:
        self._busy.discard(connection)
        connection.begin(None)
        if head.keeps_open and len(self._idle) + len(self._busy) < self._concurrency.limit:
            self._idle.append(connection)
        else:
            self._drop(connection)

    def _drop(self, connection: Connection) -> None:
        self._busy.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)
        self._selector.unregister(connection.socket)
        connection.socket.close()

    def _refused(self, task: Task, status: int, body: bytes) -> None:
        judged = judge_refusal(task.file.path, status, body)
        if status in TOO_FAST:
            self._concurrency.slow_down()
        if isinstance(judged, Fault):
            self._again(task, judged)
        else:
            self._give_up(task, judged)

    def _fault(self, connection: Connection, error: Exception) -> None:
        task, used = connection.task, connection.used
        self._drop(connection)
        if task is None:
            return
        if isinstance(error, Fault) and not str(error) and used:
            self._ready.appendleft(task)  # a kept connection that the server had closed
        else:
            self._again(task, error)

    def _again(self, task: Task, error: Exception) -> None:
        now = time.monotonic()
        task.tries += 1
        task.first_fault = task.first_fault or now
        reason = str(error) or type(error).__name__
        if now - self._last_success > self._patience.retry_s:
            raise unreachable(self._place.host_header, reason)
        # As long as nothing else arrives either, it is the store's fault; afterwards an object has all its time again.
        failing_s = now - max(task.first_fault, self._back)
        if self._last_success > task.first_fault and failing_s > min(self._patience.object_s, self._patience.retry_s):
            self._give_up(task, ReadFailure(task.file.path, "unreadable", reason))
            return
        self._events.retried(reason)
        wait = min(10.0, 0.1 * 2 ** (task.tries - 1)) * jitter(0.5, 1.0)
        heapq.heappush(self._later, (now + wait, next(self._numbers), task))

    def _note_outage(self, *, ended: bool) -> None:
        """Says that the store does not respond, or no longer."""
        if ended and self._waiting is not None:
            self._waiting.close()
            self._waiting, self._back = None, time.monotonic()
        elif not ended and self._waiting is None:
            self._waiting = ExitStack()
            self._waiting.enter_context(outage.waiting(self._place.host_header, self._last_success))

    def _give_up(self, task: Task, failure: ReadFailure) -> None:
        large = task.large
        if large is None or not large.failed:
            self._events.failed(task.file, str(failure))
        if large is not None:
            large.failed = True
            self._part_ended(large)

    def _check_stalls(self, now: float) -> None:
        for connection in list(self._busy):
            limit = self._patience.stall_s if connection.connected else self._patience.connect_s
            if now - connection.heard > limit:
                self._fault(connection, Fault(f"nothing arrived for {limit:.0f} s"))


def _finish(large: Large) -> CopiedFile:
    content = large.partial.mapped()
    agreed = agreed_checksum(large.headers, content) if large.headers else ""
    if agreed is None:
        large.partial.abandon()
        raise Fault(_BAD_CHECKSUM)
    return large.partial.finish(large.file.version or large.headers.get("etag", ""), agreed)
