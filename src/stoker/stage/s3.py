"""Objects of S3 through awscrt, which signs, connects and receives; this module lists, checks and retries.

obstore reads everything else, but does not show the checksums that S3 keeps of objects. Each thread has one request in
flight, and awscrt's own retries are off: ours are counted, reported, and slow the copying down.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import threading
import time
import urllib.request
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote, unquote_plus, urlencode, urlsplit
from xml.etree import ElementTree

from awscrt import auth, checksums, http, io, s3
from awscrt.exceptions import AwsCrtError

from stoker.core.console import Advance
from stoker.io import outage
from stoker.io.aws_settings import ENDPOINTS, is_anonymous, profile_settings
from stoker.io.connection import Patience
from stoker.io.object_store import ObjectStore
from stoker.io.stores import Buffer, ReadFailure, StoreDown
from stoker.stage.sources import LISTING_THREADS, Content, Retried, Source, SourceFile, jitter, say_nothing

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


class _Response(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes


class S3Source(Source):
    """A bucket or a part of one."""

    most_at_once = 4096

    def __init__(self, store: ObjectStore, place: _Place) -> None:
        self.url, self._store, self._place, self._patience = store.url, store, place, store.connection.patience
        self._client = _client(place, self._patience)
        self._requests: set[Any] = set()
        self._stopped = threading.Event()
        self._last_success = self._back = time.monotonic()
        """When a request last succeeded, and when one did so after an outage."""
        try:
            self._request("GET", place.base or "/", "ListObjectsV2", query={"list-type": "2", "max-keys": "1"})
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
        whole = start == 0 and end == file.size

        def attempt() -> Content:
            # The response to a range lacks the checksum of the whole object.
            headers = {"x-amz-checksum-mode": "ENABLED"} if whole else {"range": f"bytes={start}-{end - 1}"}
            found = self._ask_about(file, "GET", "GetObject", headers, end - start)
            if not whole and found.status != 206:
                raise Fault(f"status {found.status}")
            if len(found.body) != end - start:
                detail = f"{len(found.body)} bytes; the listing says {end - start}"
                raise ReadFailure(file.path, "changed", detail)
            agreed = agreed_checksum(found.headers, found.body) if whole else ""
            if agreed is None:
                raise Fault("the bytes do not agree with the store's checksum")
            return Content(found.body, agreed)

        return self._patiently(file.path, attempt, retried)

    def agreed(self, file: SourceFile, content: Buffer) -> str | None:
        found = self._patiently(
            file.path,
            lambda: self._ask_about(file, "HEAD", "HeadObject", {"x-amz-checksum-mode": "ENABLED"}),
            say_nothing,
        )
        return agreed_checksum(found.headers, content)

    def stop(self) -> None:
        self._stopped.set()
        for request in list(self._requests):
            request.cancel()

    def _ask_about(
        self, file: SourceFile, method: str, operation: str, headers: dict[str, str], size: int = 0
    ) -> _Response:
        """The response about this version of an object; raises ReadFailure if it is another one by now."""
        if file.version:
            headers["if-match"] = file.version
        found = self._request(method, self._place.path_of(file.path), operation, headers, size=size)
        tag = found.headers.get("etag", "").strip('"')
        if file.version and tag and tag != file.version.strip('"'):
            raise ReadFailure(file.path, "changed", "it was replaced after it was listed")
        return found

    def _request(
        self,
        method: str,
        path: str,
        operation: str,
        headers: dict[str, str] | None = None,
        query: dict[str, str] | None = None,
        size: int = 0,
    ) -> _Response:
        """The response to one request; raises Fault, ReadFailure or StoreDown if it is not a good one."""
        target = f"{path}?{urlencode(query, quote_via=quote, safe='-_.~')}" if query else path
        listed = http.HttpHeaders([("host", self._place.host_header), *(headers or {}).items()])
        told: dict[str, Any] = {}
        body: list[bytes] = []
        ended = threading.Event()

        def on_done(**details: Any) -> None:
            told.update(details)
            ended.set()

        request = self._client.make_request(
            type=s3.S3RequestType.DEFAULT, operation_name=operation, request=http.HttpRequest(method, target, listed),
            on_headers=lambda headers, **_: told.update(headers=headers),
            on_body=lambda chunk, **_: body.append(chunk), on_done=on_done,
        )  # fmt: skip
        self._requests.add(request)
        try:
            limit_s = self._patience.connect_s + self._patience.stall_s + size / SLOWEST
            if not ended.wait(limit_s):
                request.cancel()
                raise Fault(f"no response in {limit_s:.0f} s", too_fast=True)
        finally:
            self._requests.discard(request)
        error = told["error"]
        if error is None:
            found = {name.lower(): value for name, value in told["headers"]}
            return _Response(told["status_code"], found, body[0] if len(body) == 1 else b"".join(body))
        if isinstance(error, s3.S3ResponseError):
            raise _refusal(path, error.status_code, error.body or b"")
        assert isinstance(error, AwsCrtError), error
        if error.name == "AWS_ERROR_S3_SLOW_DOWN":
            raise Fault("the store asks for fewer requests", too_fast=True)
        raise Fault(error.message.rstrip("."))

    def _patiently(self, path: str, attempt: Callable[[], _Result], retried: Retried) -> _Result:
        """The result of a request, which is retried while that may help."""
        tries, first_fault = 0, 0.0
        while True:
            heard = max(self._last_success, first_fault)
            silent = tries > 0 and time.monotonic() - heard > outage.SAID_AFTER_S
            with outage.waiting(self._place.host_header, heard) if silent else nullcontext():
                if tries:
                    pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** (tries - 1)) * jitter(0.5, 1.0)
                    self._stopped.wait(pause_s)
                try:
                    result = attempt()
                except Fault as caught:
                    fault, now = caught, time.monotonic()
                else:
                    now = time.monotonic()
                    if silent and now - self._last_success > outage.SAID_AFTER_S:
                        self._back = now
                    self._last_success = now
                    return result
            if self._stopped.is_set():
                raise ReadFailure(path, "unreadable", "stopped")
            tries += 1
            first_fault = first_fault or now
            if now - max(self._last_success, first_fault) > self._patience.retry_s:
                raise StoreDown(
                    "store-unreachable",
                    f"{self._place.host_header} does not respond ({fault})",
                    why="nothing can be copied until it does; what was copied stays",
                    hint="check the network, then run the same command again: it continues",
                )
            # While nothing else arrives either, the store is at fault; afterwards the object's time limit starts again.
            failing_s = now - max(first_fault, self._back)
            if self._last_success > first_fault and failing_s > min(self._patience.object_s, self._patience.retry_s):
                raise ReadFailure(path, "unreadable", str(fault))
            retried(str(fault), fault.too_fast)

    def _pages(self, folder: str, *, directly: bool = False) -> Iterator[list[SourceFile]]:
        """The objects below a folder, a page of up to a thousand at a time.

        Not through obstore, whose listing ends with an error at the first name that has an empty or a '..' part."""
        prefix = f"{self._place.prefix}/" if self._place.prefix else ""
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
        path = self._place.base or "/"
        try:
            return self._patiently(
                path, lambda: self._request("GET", path, "ListObjectsV2", query=query).body, say_nothing
            )
        except (ReadFailure, StoreDown) as failure:
            self._store.connection.check()  # it knows more about what can be wrong
            raise StoreDown(
                "listing-failed",
                f"{self._place.host_header} does not list the bucket ({failure})",
                why="what to copy is not known",
                hint="check that the credentials may list the bucket (s3:ListBucket)",
            ) from None


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


class _Place(NamedTuple):
    """A bucket and the part of it below a prefix, and how it is reached."""

    host_header: str
    tls: bool
    base: str
    """What every path begins with: `/bucket`, or nothing if the bucket is part of the host's name."""
    prefix: str
    """Without a slash at its end; "" for the whole bucket."""
    region: str
    keys: Any
    """awscrt's provider of credentials; None: anonymous."""

    def path_of(self, name: str) -> str:
        key = f"{self.prefix}/{name}" if self.prefix else name
        return f"{self.base}/{quote(key.encode('utf-8', 'surrogateescape'), safe='/-_.~')}"


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
    host, base = address.netloc, f"/{parts.netloc}"
    if os.environ.get("AWS_VIRTUAL_HOSTED_STYLE_REQUEST", "").lower() in ("true", "1"):
        # obstore expects the bucket in a given endpoint; without one it adds it.
        host, base = (host, "") if endpoint else (f"{parts.netloc}.{host}", "")
    unusual = address.scheme not in ("http", "https") or not host or address.path.strip("/")
    through_proxy = address.scheme in urllib.request.getproxies() and not urllib.request.proxy_bypass(
        address.hostname or ""
    )
    if (keys is None and not anonymous) or unusual or through_proxy:
        return None
    return S3Source(store, _Place(host, address.scheme == "https", base, parts.path.strip("/"), region, keys))


def _keys(settings: dict[str, Any]) -> Any:
    names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
    identity, secret, token = (os.environ.get(name) for name in names)
    if not identity or not secret:
        identity, secret, token = (settings.get(name) for name in ("access_key_id", "secret_access_key", "token"))
    return auth.AwsCredentialsProvider.new_static(identity, secret, token) if identity and secret else None


def _client(place: _Place, patience: Patience) -> Any:
    signing = None
    if place.keys is not None:
        signing = s3.create_default_s3_signing_config(region=place.region, credential_provider=place.keys)
    trusted = None
    if place.tls and (bundle := os.environ.get("AWS_CA_BUNDLE")):
        options = io.TlsContextOptions()
        options.override_default_trust_store_from_path(ca_filepath=bundle)
        trusted = io.ClientTlsContext(options).new_connection_options()
    return s3.S3Client(
        region=place.region,
        tls_mode=s3.S3RequestTlsMode.ENABLED if place.tls else s3.S3RequestTlsMode.DISABLED,
        signing_config=signing,
        tls_connection_options=trusted,
        # 0 would mean its default, five; with one token, only the client's first failure is retried unseen.
        retry_config=s3.S3RetryConfig(max_retries=1, initial_bucket_capacity=1, backoff_scale_factor_ms=1),
        connect_timeout_ms=int(1000 * patience.connect_s),
        max_active_connections_override=S3Source.most_at_once,
    )


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
