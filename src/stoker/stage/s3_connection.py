"""A connection to S3 with its buffer, the requests that it works on, and what it means if one is refused."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from typing import Any

from stoker.data.store.local_copy import PartialFile
from stoker.data.store.stores import ReadFailure, StoreDown
from stoker.stage.records import SourceFile
from stoker.stage.s3_requests import Head

BUFFER_BYTES = 256 << 10
ERROR_BYTES = 4096
"""As much of a refusal as is looked at."""
TOO_FAST = (429, 503)
"""Answers that ask for fewer requests."""
_FOR_NOW = (408, 500, 502, 504)
_REASONS = {404: "missing", 403: "permission", 401: "permission", 412: "changed", 416: "changed"}
_STORE_CODES = {
    "NoSuchBucket": ("bucket-missing", "check its name, and the endpoint in AWS_ENDPOINT_URL"),
    "PermanentRedirect": ("wrong-region", "set AWS_REGION to the bucket's region"),
    "AuthorizationHeaderMalformed": ("wrong-region", "set AWS_REGION to the bucket's region"),
    **dict.fromkeys(
        ("InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken", "RequestTimeTooSkewed"),
        ("credentials-refused", "renew the keys, then run the same command again: it continues"),
    ),
}


@dataclass(eq=False)
class Large:
    """An object that is written in parts."""

    file: SourceFile
    partial: PartialFile
    left: int
    """Requests that have not ended."""
    headers: dict[str, str] = field(default_factory=dict)
    failed: bool = False


@dataclass(eq=False)
class Task:
    """One request."""

    file: SourceFile
    method: str = "GET"
    start: int = 0
    end: int | None = None
    """None: the whole object."""
    large: Large | None = None
    tries: int = 0
    first_fault: float | None = None

    @property
    def size(self) -> int:
        return 0 if self.method == "HEAD" else (self.file.size if self.end is None else self.end) - self.start


class Fault(Exception):
    """This request failed and can be made again."""


class Connection:
    """A socket with its buffer and the request it works on."""

    def __init__(self, opened: Any, tls: bool) -> None:
        self.socket, self.tls = opened, tls
        self.buffer = bytearray(BUFFER_BYTES)
        self.view = memoryview(self.buffer)
        self.connected = False
        self.shaken = not tls
        self.used = False
        """Whether it has answered a request: one that a server closed while it was idle is no fault."""
        self.task: Task | None = None
        self.head: Head | None = None
        self.begin(None)

    def begin(self, task: Task | None) -> None:
        """Starts with a request, or is idle."""
        self.task, self.head, self.have, self.body_at, self.written = task, None, 0, 0, 0
        self.heard = time.monotonic()

    def room_for(self, size: int) -> None:
        """Makes the buffer large enough for a whole response."""
        if len(self.buffer) < size:
            grown = bytearray(size)
            grown[: self.have] = self.view[: self.have]
            self.buffer, self.view = grown, memoryview(grown)


def judge_refusal(path: str, status: int, body: bytes) -> Fault | ReadFailure:
    """A Fault if the request can be made again; else why this object cannot be read. Raises StoreDown if none can."""
    found = re.search(rb"<Code>(\w+)</Code>", body)
    code = found[1].decode() if found else ""
    if code in _STORE_CODES:
        name, hint = _STORE_CODES[code]
        raise StoreDown(name, f"the store refuses to be read: {code}", why="no other object can be read", hint=hint)
    said = f"status {status} {code}".strip()
    if status in TOO_FAST or status in _FOR_NOW:
        return Fault(said)
    detail = "it was replaced after it was listed" if status in (412, 416) else said
    return ReadFailure(path, _REASONS.get(status, "unreadable"), detail)


def unreachable(host: str, reason: str) -> StoreDown:
    """The error of a store that does not respond."""
    return StoreDown(
        "store-unreachable",
        f"{host} does not respond ({reason})",
        why="nothing can be copied until it does; what was copied stays",
        hint="check the network, then run the same command again: it continues",
    )
