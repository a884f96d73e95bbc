"""Objects of S3, by requests of our own (`s3_requests`): lists, reads, checks and retries.

Each thread has one request in flight; retries are counted, reported, and slow the copying down. obstore reads
everything else, but does not show the checksums that S3 keeps of objects.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import ssl
import threading
import time
import urllib.request
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote_plus, urlsplit
from xml.etree import ElementTree

from awscrt import checksums

from stoker.core.console import Advance
from stoker.core.errors import UserError
from stoker.core.redact import redact_text
from stoker.io import outage
from stoker.io.aws_settings import ENDPOINTS, is_anonymous, profile_settings
from stoker.io.object_store import ObjectStore
from stoker.io.stores import Buffer, ReadFailure, StoreDown
from stoker.stage.s3_requests import BadResponse, Connections, Keys, Response, S3Place, Signer
from stoker.stage.sources import LISTING_THREADS, Content, Retried, Source, SourceFile, jitter, say_nothing

if TYPE_CHECKING:
    from stoker.stage.s3_loop import S3Loop

SLOWEST = 100_000
"""Lowest rate of one request, in bytes per second; if it is slower, too many requests share the network."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 10.0
_TOO_FAST = (429, 503)
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
_Result = TypeVar("_Result")


class Fault(Exception):
    """This request failed and can be made again."""

    def __init__(self, reason: str, *, too_fast: bool = False) -> None:
        super().__init__(reason)
        self.too_fast = too_fast
        """Whether fewer requests would help."""


class S3Source(Source):
    """A bucket or a part of one."""

    most_at_once = 512

    def __init__(self, store: ObjectStore, place: S3Place) -> None:
        self.url, self._store, self.place, self.patience = store.url, store, place, store.connection.patience
        self._signer = Signer(place)
        self._connections = Connections(place, self.patience.connect_s, self.patience.stall_s)
        self.stopped = threading.Event()
        self.last_success = self.back = time.monotonic()
        """When a request last succeeded, and when one did so after an outage."""
        try:
            self._request("GET", place.base or "/", query={"list-type": "2", "max-keys": "1"})
        except (Fault, ReadFailure, StoreDown):
            store.connection.check()  # says what is wrong

    def files(self, below: Sequence[str] = ("",), progress: Advance | None = None) -> Iterator[SourceFile]:
        """Every object, in the server's order; several folders at once."""
        found = 0
        with ThreadPoolExecutor(LISTING_THREADS) as pool:
            # The pages of a single folder as they come.
            lists: Any = map(self._pages, below)
            if len(below) > 1:
                lists = pool.map(lambda folder: list(self._pages(folder)), below)
            for pages in lists:
                for page in pages:
                    found += len(page)
                    if progress is not None:
                        progress(found, None)
                    yield from page

    def directly_in(self, folder: str) -> list[SourceFile]:
        return [file for page in self._pages(folder, directly=True) for file in page]

    def read(self, file: SourceFile, start: int, end: int, retried: Retried = say_nothing) -> Content:
        """The bytes of this version of an object; those of a whole object agree with the store's checksum."""

        def attempt() -> Content:
            found = self._exchange("GET", self.request_for(file, start, end), self.longest_s(end - start))
            return self.content_of(file, start, end, found)

        return self._patiently(file.path, attempt, retried)

    def request_for(self, file: SourceFile, start: int, end: int, method: str = "GET") -> bytes:
        """The request for a range of this version of an object, ready to be sent."""
        # The response to a range lacks the checksum of the whole object.
        whole = start == 0 and end == file.size
        headers = {"x-amz-checksum-mode": "ENABLED"} if whole else {"range": f"bytes={start}-{end - 1}"}
        if file.version and file.version.isprintable():
            headers["if-match"] = file.version
        return self._signer.request(method, self.place.path_of(file.path), headers)

    def content_of(self, file: SourceFile, start: int, end: int, found: Response) -> Content:
        """What a response brings, checked; raises Fault, ReadFailure or StoreDown if it is not a good one."""
        self._check(file, found)
        whole = start == 0 and end == file.size
        if found.status != (200 if whole else 206):
            raise Fault(f"status {found.status}")
        self.check_length(file, end - start, len(found.body))
        agreed = agreed_checksum(found.headers, found.body) if whole else ""
        if agreed is None:
            raise Fault("the bytes do not agree with the store's checksum")
        return Content(found.body, agreed)

    def check_length(self, file: SourceFile, expected: int, found: int) -> None:
        if found != expected:
            raise ReadFailure(file.path, "changed", f"{found} bytes; the listing says {expected}")

    def agreed(self, file: SourceFile, content: Buffer) -> str | None:
        def attempt() -> Response:
            found = self._exchange("HEAD", self.request_for(file, 0, file.size, "HEAD"), self.longest_s(0))
            self._check(file, found)
            return found

        return agreed_checksum(self._patiently(file.path, attempt, say_nothing).headers, content)

    def loop(self, retried: Retried) -> S3Loop:
        from stoker.stage.s3_loop import S3Loop

        return S3Loop(self, retried)

    def stop(self) -> None:
        self.stopped.set()
        self._connections.stop()

    def longest_s(self, size: int) -> float:
        """How long a request for so many bytes may take."""
        return self.patience.connect_s + self.patience.stall_s + size / SLOWEST

    def succeeded(self) -> None:
        now = time.monotonic()
        if now - self.last_success > outage.SAID_AFTER_S:
            self.back = now
        self.last_success = now

    def _check(self, file: SourceFile, found: Response) -> None:
        """Raises ReadFailure if a response is about another version of an object, and if it is a refusal."""
        if found.status >= 300:
            raise _refusal(file.path, found.status, bytes(found.body))
        tag = found.headers.get("etag", "").strip('"')
        if file.version and tag and tag != file.version.strip('"'):
            raise ReadFailure(file.path, "changed", "it was replaced after it was listed")

    def _request(self, method: str, path: str, query: dict[str, str]) -> Response:
        """The response to one request; raises Fault, ReadFailure or StoreDown if it is not a good one."""
        found = self._exchange(method, self._signer.request(method, path, {}, query), self.longest_s(0))
        if found.status >= 300:
            raise _refusal(path, found.status, bytes(found.body))
        return found

    def _exchange(self, method: str, request: bytes, limit_s: float) -> Response:
        try:
            return self._connections.exchange(method, request, limit_s)
        except TimeoutError as error:
            raise Fault(str(error), too_fast=True) from None
        except (OSError, BadResponse) as error:
            raise Fault((error.strerror if isinstance(error, OSError) else None) or str(error)) from None

    def _patiently(self, path: str, attempt: Callable[[], _Result], retried: Retried) -> _Result:
        """The result of a request, which is retried while that may help."""
        attempts, pause_s = Attempts(self, path), 0.0
        while True:
            heard = max(self.last_success, attempts.first_fault)
            silent = attempts.tries > 0 and time.monotonic() - heard > outage.SAID_AFTER_S
            with outage.waiting(self.place.host_header, heard) if silent else nullcontext():
                if pause_s:
                    self.stopped.wait(pause_s)
                try:
                    result = attempt()
                except Fault as caught:
                    fault = caught
                else:
                    self.succeeded()
                    return result
            if self.stopped.is_set():
                raise ReadFailure(path, "unreadable", "stopped")
            pause_s = attempts.failed(fault)
            retried(str(fault), fault.too_fast)

    def _pages(self, folder: str, *, directly: bool = False) -> Iterator[list[SourceFile]]:
        """The objects below a folder, a page of up to a thousand at a time.

        Not through obstore, whose listing ends with an error at the first name that has an empty or a '..' part."""
        prefix = f"{self.place.prefix}/" if self.place.prefix else ""
        query = {"encoding-type": "url", "list-type": "2", "prefix": prefix + (f"{folder}/" if folder else "")}
        if directly:
            query["delimiter"] = "/"
        while True:
            page = ElementTree.fromstring(self._page(query))  # noqa: S314 - entities are not expanded by expat's defaults
            name = page.tag.rpartition("}")[0] + "}" if page.tag.startswith("{") else ""
            encoded = page.findtext(f"{name}EncodingType") == "url"
            files = []
            for entry in page.iter(f"{name}Contents"):
                key = entry.findtext(f"{name}Key") or ""
                key = unquote_plus(key, errors="surrogateescape") if encoded else key
                size = int(entry.findtext(f"{name}Size") or 0)
                if key.endswith("/") and size == 0:
                    continue  # how consoles make an empty folder
                files.append(SourceFile(key[len(prefix) :], size, entry.findtext(f"{name}ETag") or ""))
            yield files
            token = page.findtext(f"{name}NextContinuationToken")
            if page.findtext(f"{name}IsTruncated") != "true" or not token:
                return
            query["continuation-token"] = token

    def _page(self, query: dict[str, str]) -> bytes:
        path = self.place.base or "/"
        try:
            return self._patiently(path, lambda: bytes(self._request("GET", path, query=query).body), say_nothing)
        except (ReadFailure, StoreDown) as failure:
            self._store.connection.check()  # it knows more about what can be wrong
            raise StoreDown(
                "listing-failed",
                f"{self.place.host_header} does not list the bucket ({failure})",
                why="what to copy is not known",
                hint="check that the credentials may list the bucket (s3:ListBucket)",
            ) from None


class Attempts:
    """How often a request for an object has failed, and whether it is tried again."""

    def __init__(self, source: S3Source, path: str) -> None:
        self._source, self._path = source, path
        self.tries, self.first_fault = 0, 0.0

    def failed(self, fault: Fault) -> float:
        """How long to wait before the next attempt. Raises ReadFailure if this object cannot be read, StoreDown if the
        whole store does not respond."""
        source, now = self._source, time.monotonic()
        self.tries += 1
        self.first_fault = self.first_fault or now
        if now - max(source.last_success, self.first_fault) > source.patience.retry_s:
            raise StoreDown(
                "store-unreachable",
                f"{source.place.host_header} does not respond ({fault})",
                why="nothing can be copied until it does; what was copied stays",
                hint="check the network, then run the same command again: it continues",
            )
        # While nothing else arrives either, the store is at fault; afterwards the object's time limit starts again.
        failing_s = now - max(self.first_fault, source.back)
        longest_s = min(source.patience.object_s, source.patience.retry_s)
        if source.last_success > self.first_fault and failing_s > longest_s:
            raise ReadFailure(self._path, "unreadable", str(fault))
        return jitter(0.5, 1.0) * min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** (self.tries - 1))


def _refusal(path: str, status: int, body: bytes) -> Exception:
    """What a refused request means: it can be made again, this object cannot be read, or none can."""
    found = re.search(rb"<Code>(\w+)</Code>", body)
    code = found[1].decode() if found else ""
    if code in _STORE_CODES:
        name, hint = _STORE_CODES[code]
        return StoreDown(name, f"the store refuses access: {code}", why="no other object can be read", hint=hint)
    said = f"status {status} {code}".strip()
    if status in _TOO_FAST or status in _FOR_NOW:
        return Fault(said, too_fast=status in _TOO_FAST)
    detail = "it was replaced after it was listed" if status in (412, 416) else said
    return ReadFailure(path, _REASONS.get(status, "unreadable"), detail)


def open_s3(store: ObjectStore) -> S3Source | None:
    """The source of an s3:// URL; None for others, and if it takes more than keys: a proxy, or a service that hands out
    credentials. obstore can do that."""
    parts = urlsplit(store.url)
    if parts.scheme not in ("s3", "s3a"):
        return None
    settings = profile_settings()
    anonymous = is_anonymous()
    keys = None if anonymous else _keys(settings)
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or settings.get("region", "us-east-1")
    endpoint = next((os.environ[name] for name in ENDPOINTS if os.environ.get(name)), settings.get("endpoint"))
    address = urlsplit(endpoint or f"https://s3.{region}.amazonaws.com")
    host, base = address.hostname or "", f"/{parts.netloc}"
    if os.environ.get("AWS_VIRTUAL_HOSTED_STYLE_REQUEST", "").lower() in ("true", "1"):
        # obstore expects the bucket in a given endpoint; without one it adds it.
        host, base = (host, "") if endpoint else (f"{parts.netloc}.{host}", "")
    unusual = address.scheme not in ("http", "https") or not host or address.path.strip("/")
    through_proxy = address.scheme in urllib.request.getproxies() and not urllib.request.proxy_bypass(host)
    if (keys is None and not anonymous) or unusual or through_proxy:
        return None
    bundle = os.environ.get("AWS_CA_BUNDLE")
    try:
        port = address.port or (443 if address.scheme == "https" else 80)
        tls = ssl.create_default_context(cafile=bundle) if address.scheme == "https" else None
    except ValueError as error:
        where = redact_text(str(endpoint))
        raise UserError("bad-endpoint", f"{where}: {error}", hint="set AWS_ENDPOINT_URL to http://HOST:PORT") from None
    except OSError as error:
        raise UserError(
            "bad-certificates", f"AWS_CA_BUNDLE={bundle}: {error.strerror or error}", hint="unset AWS_CA_BUNDLE"
        ) from None
    return S3Source(store, S3Place(host, port, tls, base, parts.path.strip("/"), region, keys))


def _keys(settings: dict[str, Any]) -> Keys | None:
    names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
    identity, secret, token = (os.environ.get(name) for name in names)
    if not identity or not secret:
        identity, secret, token = (settings.get(name) for name in ("access_key_id", "secret_access_key", "token"))
    return Keys(identity, secret, token) if identity and secret else None


def _crc(function: Callable[[Buffer], int], size: int) -> Callable[[Buffer], bytes]:
    return lambda data: function(data).to_bytes(size, "big")


_CHECKSUMS: dict[str, Callable[[Buffer], bytes]] = {
    "crc64nvme": _crc(checksums.crc64nvme, 8),
    "crc32c": _crc(checksums.crc32c, 4),
    "crc32": _crc(zlib.crc32, 4),
    "sha256": lambda data: hashlib.sha256(data).digest(),
    "sha1": lambda data: hashlib.sha1(data).digest(),  # noqa: S324 - what the store has, not what we trust
}
"""Checksums that are computed, the fastest first. S3 has stored a CRC64NVME of every object since 2025."""
_PLAIN_MD5 = re.compile(r'"?([0-9a-f]{32})"?')


def agreed_checksum(headers: dict[str, str], data: Buffer) -> str | None:
    """The kind of checksum in the response that the data agrees with; "" if it has none that can be computed,
    None if one disagrees.

    An ETag with a '-' is not a checksum of the content, nor is one of an object that is encrypted with a key of KMS."""
    for name, compute in _CHECKSUMS.items():
        told = headers.get(f"x-amz-checksum-{name}")
        # A checksum of the parts' checksums has their number behind a '-'.
        if told is not None and "-" not in told and headers.get("x-amz-checksum-type", "FULL_OBJECT") == "FULL_OBJECT":
            return name if base64.b64encode(compute(data)).decode() == told else None
    tag = _PLAIN_MD5.fullmatch(headers.get("etag", ""))
    is_md5 = headers.get("x-amz-server-side-encryption", "AES256") == "AES256" and not any(
        name.startswith("x-amz-server-side-encryption-customer") for name in headers
    )
    if tag is not None and is_md5:
        return "md5" if hashlib.md5(data).hexdigest() == tag[1] else None  # noqa: S324
    return ""
