"""The connection to an object store: made on first use, kept through outages, and what is wrong if it cannot be."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError
from obstore.store import from_url

from stoker.core.errors import UserError
from stoker.core.redact import redact_text
from stoker.io import outage
from stoker.io.aws_settings import ENDPOINTS, profile_settings
from stoker.io.stores import ReadFailure, StoreDown

_ENDPOINTS = (*ENDPOINTS, "AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT")
_CREDENTIAL_CODES = {"InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken",
                     "TokenRefreshRequired", "RequestTimeTooSkewed", "AuthenticationFailed"}  # fmt: skip
_BUCKET_CODES = {"NoSuchBucket", "InvalidBucketName", "ContainerNotFound"}
_REGION_CODES = {"PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException"}


@dataclass(frozen=True)
class Patience:
    """The time limits of a request, and how often it is retried."""

    connect_s: float = 5
    """Time to open a connection: enough to resend a lost SYN packet three times."""
    stall_s: float = 10
    """Longest time without a single byte; the rest is then requested again from where it stopped."""
    request_s: float = 60
    """Time for one complete response; at 4 MB/s the largest sample (256 MB) arrives in time."""
    retry_s: float = 120
    """How long to wait for a store that does not respond: survives a gateway's restart and 'slow down' responses."""
    object_s: float = 30
    """The same for one object that fails while the rest of its store responds: a part of the store may restart."""
    max_retries: int = 3
    """Retries of a request by the client itself, within `quick_s`. Then we wait, and say so: the client's waits grow so
    slowly that 20 retries of refused connections are over after some 5 s, without a message."""
    quick_s: float = 5

    def options(self, allow_http: bool, *, alone: bool = False) -> dict[str, Any]:
        """The same as obstore's options; `alone` for a client that waits by itself, and retries for as long."""
        return {
            # With client options obstore ignores AWS_ALLOW_HTTP, so it is passed on here.
            "client_options": {
                "allow_http": allow_http,
                "connect_timeout": timedelta(seconds=self.connect_s),
                "read_timeout": timedelta(seconds=self.stall_s),
                "timeout": timedelta(seconds=self.request_s),
            },
            "retry_config": {
                "max_retries": MANY_RETRIES if alone else self.max_retries,
                "retry_timeout": timedelta(seconds=self.retry_s if alone else self.quick_s),
                "backoff": {
                    "init_backoff": timedelta(seconds=0.1),
                    "max_backoff": timedelta(seconds=10),
                    "base": 2,
                },
            },
        }


# For the first contact, and to find out after a failure whether the object or the store is at fault.
BRIEF = Patience(connect_s=5, stall_s=5, request_s=10, retry_s=10, max_retries=2, quick_s=10)
# So many retries that only the time limits them.
MANY_RETRIES = 100_000
# Delays between two attempts while a store does not respond.
FIRST_DELAY_S, LONGEST_DELAY_S = 0.25, 3.0
UNREACHABLE = "store-unreachable"
_Result = TypeVar("_Result")


class Connection:
    """A client for the objects below a URL, for all threads; belongs to the process that first uses it."""

    def __init__(self, url: str, patience: Patience) -> None:
        self.url, self.patience = url, patience
        self.fault: StoreDown | None = None
        """Why the store could not be reached, or did not respond in time; every further use fails the same way."""
        self.allowed = False
        """Whether something could be read or listed, so that a refusal is about one object."""
        self._client: Any = None
        self._reached = False
        self._contact = threading.Lock()
        self._back_s = 0.0
        """When it was last found to respond again."""

    @contextmanager
    def listing(self) -> Iterator[Any]:
        """A client that retries by itself; its errors become ours."""
        self.client(None)
        try:
            yield self._connect(self.patience, alone=True)
        except (BaseError, OSError) as error:
            raise self._down(error) from None

    def check(self) -> None:
        """Raises StoreDown if the store as a whole cannot be read; called after a failure that may be one object's."""
        _refuse_after_fork()
        if (fault := self._fault_of_store(None)) is not None:
            raise fault

    def client(self, path: str | None) -> Any:
        """The client for an object, or for listing; raises StoreDown if the store cannot be used."""
        _refuse_after_fork()
        if not self._reached:
            with self._contact:
                # Dozens of threads get here at once: one connects, and its result applies to all.
                if not self._reached and self.fault is None:
                    since_s = time.monotonic()
                    self._client = self._connect(self.patience)
                    fault = self._fault_of_store(path)
                    # A wrong endpoint should fail in seconds. For one that the run has reached before, we wait: the
                    # first contact may be that of a new worker, or of the first validation.
                    if fault is not None and fault.name == UNREACHABLE and outage.was_reached(self._endpoint()):
                        fault = self._fault_after_waiting(since_s)
                    self.fault = fault
                    self._reached = fault is None
                    if self._reached:
                        outage.note_reached(self._endpoint())
            if self.fault is not None:
                raise self.fault
        return self._client

    def patiently(self, path: str, attempt: Callable[[], _Result]) -> _Result:
        """The result of a request. If the store stops responding, waits for it and then retries."""
        began_s, delay_s = time.monotonic(), FIRST_DELAY_S
        while True:
            asked_s = time.monotonic()
            try:
                return attempt()
            except StoreDown as down:
                if down.name != UNREACHABLE or not self._reached:
                    raise
                self._await_return(asked_s)
                began_s = time.monotonic()  # the object's time limit starts again
            except ReadFailure as failure:
                # The store responds, and this object does not.
                if failure.reason != "unreadable" or time.monotonic() - began_s > self.patience.object_s:
                    raise
                with outage.waiting(f"{self.url}/{path}", began_s):
                    if not outage.pause(delay_s):
                        raise
                delay_s = min(2 * delay_s, LONGEST_DELAY_S)

    def failure(self, path: str, error: Exception) -> Exception:
        """The error of a failed read: ReadFailure if only this object is affected, StoreDown if the store is."""
        if isinstance(error, ValueError):
            return ReadFailure(path, "bad name", _summary(error))
        if _is_key_service(error) or _code(error) in _BUCKET_CODES | _CREDENTIAL_CODES | _REGION_CODES:
            return self._down(error)
        if isinstance(error, FileNotFoundError):
            return ReadFailure(path, "missing")
        if isinstance(error, PermissionDeniedError | UnauthenticatedError):
            return ReadFailure(path, "permission", _summary(error)) if self.allowed else self._down(error)
        if _status(error) == 416:
            return ReadFailure(path, "short", "it ends before the requested range")
        return self._fault_of_store(path) or ReadFailure(path, "unreadable", _summary(error))

    def _down(self, error: Exception) -> StoreDown:
        code, status, summary = _code(error), _status(error), _summary(error)
        if _is_key_service(error):
            name, seen = "no-credentials", f"no credentials found for {self.url} ({summary})"
            hint = (
                "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE; "
                "for a public bucket AWS_SKIP_SIGNATURE=true"
            )
        elif code in _REGION_CODES or status == 301:
            name, seen = "wrong-region", f"{self.url} is in another region ({summary})"
            hint = "set AWS_REGION to the bucket's region"
        elif code in _BUCKET_CODES or status == 404:
            name, seen = "bucket-missing", f"the bucket of {self.url} does not exist ({summary})"
            hint = "check its name, and the endpoint in AWS_ENDPOINT_URL"
        elif status in (401, 403):
            name, seen = "credentials-refused", f"{self.url} refused the credentials ({summary})"
            hint = (
                "check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN; temporary keys may have expired"
            )
        else:
            name, seen = UNREACHABLE, f"{self.url} does not respond ({summary})"
            hint = "check the network, and the endpoint in AWS_ENDPOINT_URL"
        return StoreDown(name, seen, why="no sample can be read until this is fixed", hint=hint)

    def _await_return(self, since_s: float) -> None:
        """Returns when the store responds again; raises StoreDown, in all threads alike, if it does not in time."""
        with self._contact:
            # One thread asks; its result since then applies to all.
            if self.fault is None and self._back_s < since_s:
                self.fault = self._fault_after_waiting(since_s)
            if self.fault is not None:
                raise self.fault

    def _fault_after_waiting(self, since_s: float) -> StoreDown | None:
        delay_s = FIRST_DELAY_S
        with outage.waiting(self.url, since_s):
            while True:
                if not outage.pause(delay_s):
                    return StoreDown(UNREACHABLE, f"{self.url} does not respond; the process is about to end")
                fault = self._fault_of_store(None)
                if fault is None:
                    self._back_s = time.monotonic()
                    return None
                waited_s = time.monotonic() - since_s
                if fault.name != UNREACHABLE or waited_s > self.patience.retry_s:
                    return StoreDown(
                        fault.name, f"{fault.seen}; waited for {waited_s:.0f} s", why=fault.why, hint=fault.hint
                    )
                delay_s = min(2 * delay_s, LONGEST_DELAY_S)

    def _fault_of_store(self, path: str | None) -> StoreDown | None:
        """What is wrong with the store as a whole, or None; lists one name to find out."""
        brief = self._connect(BRIEF if self.patience.retry_s > BRIEF.retry_s else self.patience)
        try:
            if urlsplit(self.url).scheme.startswith("http"):
                # A plain web server cannot list.
                obstore.head(brief, path or "")
            else:
                next(iter(obstore.list(brief, chunk_size=1)), None)
            self.allowed = True
        except (FileNotFoundError, ValueError):
            return None
        except (BaseError, OSError) as error:
            # Credentials that may read but not list are common: the first read will show.
            refused = _status(error) in (401, 403) and not _is_key_service(error)
            return None if refused and _code(error) not in _CREDENTIAL_CODES else self._down(error)
        return None

    def _endpoint(self) -> str:
        """The endpoint that an outage is attributed to: the server, or the bucket of a provider without a named one."""
        parts = urlsplit(self.url)
        named: str = profile_settings().get("endpoint", "") if parts.scheme.startswith("s3") else ""
        named = named or next((os.environ[name] for name in _ENDPOINTS if name in os.environ), "")
        return named or f"{parts.scheme}://{parts.netloc}"

    def _connect(self, patience: Patience, *, alone: bool = False) -> Any:
        scheme = urlsplit(self.url).scheme
        settings: dict[str, Any] = profile_settings() if scheme.startswith("s3") else {}
        allowed = os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("true", "1")
        allow_http = allowed or self._endpoint().startswith("http://") or scheme == "http"
        try:
            return from_url(self.url, **settings, **patience.options(allow_http, alone=alone))
        except (BaseError, ValueError) as error:
            raise StoreDown(
                "store-not-opened",
                f"{self.url} cannot be opened: {_summary(error)}",
                hint="check the URL, and the provider's environment variables (AWS_…, GOOGLE_…, AZURE_…)",
            ) from None


# obstore has one runtime for each process. A forked child inherits it without its threads: its first request never
# ends, and can break the parent's connections.
_process_of_first_request: int | None = None


def _refuse_after_fork() -> None:
    global _process_of_first_request
    process = os.getpid()
    if _process_of_first_request is None:
        _process_of_first_request = process
    elif _process_of_first_request != process:
        raise UserError(
            "object-store-after-fork",
            f"process {process} was forked from {_process_of_first_request}, which had already used an object store",
            why="the client's network threads do not survive a fork, so a request would hang forever",
            hint="set worker_start=forkserver",
        )


def _code(error: Exception) -> str | None:
    found = re.search(r"<Code>(\w+)</Code>", str(error))
    return found[1] if found else None


def _status(error: Exception) -> int | None:
    found = re.search(r"status code: (\d{3})", str(error))
    return int(found[1]) if found else None


def _is_key_service(error: Exception) -> bool:
    """Whether the failed request went to the host's metadata service, which is asked if no credentials are set."""
    return bool(re.search(r"/latest/(api/token|meta-data)|metadata\.google|metadata/identity", str(error)))


def _summary(error: Exception) -> str:
    """The useful line of obstore's page-long message."""
    text = str(error)
    cause = re.search(r'message: "([^"]+)"|error: "([^"]+)"|kind: (Timeout)', text)
    line = text.split("\n", 1)[0].split(" - ")[-1].strip()
    parts = [line, _code(error), next((group for group in cause.groups() if group), None) if cause else None]
    return redact_text("; ".join(part for part in parts if part))[:300]
