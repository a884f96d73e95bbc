"""Objects behind a URL (S3, Google Cloud Storage, Azure, plain HTTP), read through obstore.

A body is never trusted: one of unexpected length is a failure, not a sample.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from configparser import ConfigParser, Error
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError
from obstore.store import from_url

from stoker.core.errors import UserError
from stoker.core.redact import redact_text
from stoker.io import outage
from stoker.io.stores import MAX_OBJECT_BYTES, Buffer, FileVersion, ReadFailure, StoreDown

_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT")
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


class ObjectStore:
    """A bucket or a part of one; connects on first use, in the process that uses it."""

    is_remote = True

    def __init__(self, url: str, *, max_object_bytes: int = MAX_OBJECT_BYTES, patience: Patience = Patience()) -> None:  # noqa: B008
        parts = urlsplit(url)
        if "@" in parts.netloc and not parts.scheme.startswith("abfs"):
            raise UserError(
                "secret-in-url",
                f"{redact_text(url)} contains a user name or a key",
                why="URLs end up in logs and run folders",
                hint="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment instead",
            )
        if not parts.netloc:
            raise UserError("bad-store-url", f"'{url}' does not name a bucket", hint="write s3://bucket/folder")
        self.url = url.rstrip("/")
        self.max_object_bytes = max_object_bytes
        self.patience = patience
        self.fetches = 0
        """Requests so far; approximate, because threads count without a lock."""
        self._client: Any = None
        self._reached = False
        self._fault: StoreDown | None = None
        self._contact = threading.Lock()
        self._back_s = 0.0
        """When it was last found to respond again."""
        self._allowed = False
        self._tags: dict[str, str] = {}

    def __reduce__(self) -> Any:
        # Only the URL: each process takes its credentials from its own environment.
        return partial(ObjectStore, max_object_bytes=self.max_object_bytes, patience=self.patience), (self.url,)

    def read(
        self, path: str, offset: int = 0, size: int | None = None, *, whole: bool = False, version: str | None = None
    ) -> Buffer:
        """The bytes, of this version if one is given; blocks the calling thread without holding the GIL."""
        return self._get(path, offset, size, whole, version)[0]

    def fetch(self, path: str, size: int | None = None) -> tuple[Buffer, str]:
        """A whole object, of this size if one is given, and its version (ETag); the version is empty if it has none."""
        return self._get(path, 0, size, True, None)

    def _get(self, path: str, offset: int, size: int | None, whole: bool, version: str | None) -> tuple[Buffer, str]:
        if size is not None and size > self.max_object_bytes:
            raise ReadFailure(path, "too large", f"{size} bytes; the limit is {self.max_object_bytes}")
        if size == 0 and not whole:
            return b"", ""
        return self._patiently(path, lambda: self._read(path, offset, size, whole, version))

    def _read(self, path: str, offset: int, size: int | None, whole: bool, version: str | None) -> tuple[Buffer, str]:
        client, meta = self._connected(path), None
        self.fetches += 1
        try:
            part = not whole and (offset > 0 or size is not None)
            if part:
                wanted_range: Any = {"offset": offset} if size is None else (offset, offset + size)
                answer = obstore.get(client, path, options={"range": wanted_range})
            else:
                answer = obstore.get(client, path)
            meta = answer.meta
            first, last = answer.range
            if last - first > self.max_object_bytes:
                raise ReadFailure(path, "too large", f"{last - first} bytes; the limit is {self.max_object_bytes}")
            self._check_unchanged(path, meta, size if whole else None, part, version)
            data = memoryview(answer.bytes())
        except (BaseError, OSError, ValueError) as error:
            raise self._failure(path, error, meta) from None
        wanted = last - first if size is None else size
        if len(data) != wanted:
            raise ReadFailure(path, "short", f"{len(data)} of {wanted} bytes")
        self._allowed = True
        return data, meta["e_tag"] or ""

    def list(self, prefix: str = "") -> Iterator[tuple[str, int]]:
        """Every object below the prefix, in the server's order: its path relative to the URL, and its size."""
        return ((path, size) for path, size, _ in self.versions(prefix))

    def versions(self, prefix: str = "", *, directly: bool = False) -> Iterator[tuple[str, int, str]]:
        """The same with each object's version (its ETag, or ""); with `directly`, without the folders below."""
        with self._listing() as client:
            if directly:
                chunks: Any = [obstore.list_with_delimiter(client, prefix or None)["objects"]]
            else:
                chunks = obstore.list(client, prefix or None, chunk_size=1000)
            for chunk in chunks:
                for entry in chunk:
                    yield str(entry["path"]), int(entry["size"]), entry["e_tag"] or ""

    def entries(self) -> tuple[Sequence[str], dict[str, Sequence[Any]]]:
        """What is directly below the URL: names of folders, and of objects with their size and version; both sorted and
        without hidden ones."""
        with self._listing() as client:
            found = obstore.list_with_delimiter(client)
        folders = sorted(str(prefix).strip("/").rpartition("/")[2] for prefix in found["common_prefixes"])
        objects = sorted((str(entry["path"]), (entry["size"], entry["e_tag"])) for entry in found["objects"])
        return (
            [name for name in folders if not name.startswith(".")],
            {name: facts for name, facts in objects if not name.startswith(".")},
        )

    @contextmanager
    def _listing(self) -> Iterator[Any]:
        """A client that retries by itself; its errors become ours."""
        self._connected(None)
        try:
            yield self._connect(self.patience, alone=True)
        except (BaseError, OSError) as error:
            raise self._down(error) from None

    def about(self, path: str) -> FileVersion:
        def ask() -> FileVersion:
            client = self._connected(path)
            try:
                found = obstore.head(client, path)
            except (BaseError, OSError, ValueError) as error:
                raise self._failure(path, error, None) from None
            return FileVersion(int(found["size"]), found["e_tag"] or "")

        return self._patiently(path, ask)

    @property
    def failed(self) -> bool:
        """Whether it could not be reached, or did not respond in time; every further use fails the same way."""
        return self._fault is not None

    def check(self) -> None:
        """Raises StoreDown if the store as a whole cannot be read; called after a failure that may be one object's."""
        _refuse_after_fork()
        if (fault := self._fault_of_store(None)) is not None:
            raise fault

    def _patiently(self, path: str, attempt: Callable[[], _Result]) -> _Result:
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

    def _await_return(self, since_s: float) -> None:
        """Returns when the store responds again; raises StoreDown, in all threads alike, if it does not in time."""
        with self._contact:
            # One thread asks; its result since then applies to all.
            if self._fault is None and self._back_s < since_s:
                self._fault = self._fault_after_waiting(since_s)
            if self._fault is not None:
                raise self._fault

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

    def _check_unchanged(self, path: str, meta: Any, size: int | None, part: bool, version: str | None) -> None:
        if size is not None and meta["size"] != size:
            raise ReadFailure(path, "changed", f"{meta['size']} bytes; the index says {size}")
        tag = meta["e_tag"]
        if version and tag is not None and tag != version:
            raise ReadFailure(path, "changed", "it was replaced after it was listed or opened")
        # A shard is read in many parts, which must all come from the same version.
        if part and tag is not None and self._tags.setdefault(path, tag) != tag:
            raise ReadFailure(path, "changed", "it was replaced after its first part was read")

    def _connected(self, path: str | None) -> Any:
        _refuse_after_fork()
        if not self._reached:
            with self._contact:
                # Dozens of threads get here at once: one connects, and its result applies to all.
                if not self._reached and self._fault is None:
                    since_s = time.monotonic()
                    self._client = self._connect(self.patience)
                    fault = self._fault_of_store(path)
                    # A wrong endpoint should fail in seconds. For one that the run has reached before, we wait: the
                    # first contact may be that of a new worker, or of the first validation.
                    if fault is not None and fault.name == UNREACHABLE and outage.was_reached(self._endpoint()):
                        fault = self._fault_after_waiting(since_s)
                    self._fault = fault
                    self._reached = fault is None
                    if self._reached:
                        outage.note_reached(self._endpoint())
            if self._fault is not None:
                raise self._fault
        return self._client

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

    def _fault_of_store(self, path: str | None) -> StoreDown | None:
        """What is wrong with the store as a whole, or None; lists one name to find out."""
        brief = self._connect(BRIEF if self.patience.retry_s > BRIEF.retry_s else self.patience)
        try:
            if urlsplit(self.url).scheme.startswith("http"):
                # A plain web server cannot list.
                obstore.head(brief, path or "")
            else:
                next(iter(obstore.list(brief, chunk_size=1)), None)
            self._allowed = True
        except (FileNotFoundError, ValueError):
            return None
        except (BaseError, OSError) as error:
            # Credentials that may read but not list are common: the first read will show.
            refused = _status(error) in (401, 403) and not _is_key_service(error)
            return None if refused and _code(error) not in _CREDENTIAL_CODES else self._down(error)
        return None

    def _failure(self, path: str, error: Exception, meta: Any) -> Exception:
        """The error of a failed read: ReadFailure if only this object is affected, StoreDown if the store is."""
        if isinstance(error, ValueError):
            return ReadFailure(path, "bad name", _summary(error))
        if _is_key_service(error) or _code(error) in _BUCKET_CODES | _CREDENTIAL_CODES | _REGION_CODES:
            return self._down(error)
        if isinstance(error, FileNotFoundError):
            return ReadFailure(path, "missing")
        if isinstance(error, PermissionDeniedError | UnauthenticatedError):
            return ReadFailure(path, "permission", _summary(error)) if self._allowed else self._down(error)
        if _status(error) == 416:
            return ReadFailure(path, "short", "it ends before the requested range")
        fault = self._fault_of_store(path)
        if fault is not None:
            return fault
        if meta is not None and self._was_replaced(path, meta):
            return ReadFailure(path, "changed", "it was replaced while it was being read")
        return ReadFailure(path, "unreadable", _summary(error))

    def _was_replaced(self, path: str, meta: Any) -> bool:
        try:
            now = obstore.head(self._client, path)
        except (BaseError, OSError):
            return False
        return (now["e_tag"], now["size"]) != (meta["e_tag"], meta["size"])

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


# obstore does not read the AWS profile files. Keys in a profile are read here; for profiles whose keys only AWS's own
# code can make (these settings), obstore's provider on boto3 is used if boto3 is installed, and refreshes them.
_NEEDS_AWS_CODE = ("sso_session", "sso_start_url", "role_arn", "credential_process", "login_session")


def profile_settings(environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Settings that the chosen profile adds to the environment, as obstore's options; empty if there is no profile."""
    anonymous = environment.get("AWS_SKIP_SIGNATURE", "").lower() in ("true", "1")
    keys_wanted = "AWS_ACCESS_KEY_ID" not in environment and not anonymous
    name = environment.get("AWS_PROFILE") or environment.get("AWS_DEFAULT_PROFILE") or "default"
    heading = name if name == "default" else f"profile {name}"
    values = _section(_file(environment, "AWS_CONFIG_FILE", "config"), heading)
    values |= _section(_file(environment, "AWS_SHARED_CREDENTIALS_FILE", "credentials"), name)
    settings: dict[str, Any] = {}
    if keys_wanted and values.get("aws_access_key_id") and values.get("aws_secret_access_key"):
        settings["access_key_id"] = values["aws_access_key_id"]
        settings["secret_access_key"] = values["aws_secret_access_key"]
        if values.get("aws_session_token"):
            settings["token"] = values["aws_session_token"]
    elif keys_wanted and "AWS_PROFILE" in environment:
        settings["credential_provider"] = _boto3_provider(name, values)
    if "AWS_REGION" not in environment and "AWS_DEFAULT_REGION" not in environment and values.get("region"):
        settings["region"] = values["region"]
    endpoints = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    if not any(variable in environment for variable in endpoints) and values.get("endpoint_url"):
        settings["endpoint"] = values["endpoint_url"]
    return settings


def _boto3_provider(name: str, values: Mapping[str, str]) -> Any:
    """A provider that gets a profile's keys from boto3, and refreshes them; raises UserError if it cannot."""
    setting = next((key for key in _NEEDS_AWS_CODE if key in values), None)
    hint = f'eval "$(aws configure export-credentials --profile {name} --format env)"'
    if setting is None:
        raise UserError(
            "no-credentials",
            f"the AWS profile '{name}' (AWS_PROFILE) has no keys in ~/.aws",
            why="the bucket cannot be read without credentials",
            hint=hint,
        )
    try:
        import boto3
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError:
        raise UserError(
            "no-credentials",
            f"the AWS profile '{name}' has no keys of its own; it uses {setting}",
            why="only boto3 can get keys for such a profile, and it is not installed",
            hint=f"pip install boto3, or {hint}",
        ) from None
    try:
        return Boto3CredentialProvider(boto3.Session(profile_name=name))
    except Exception as error:  # botocore has a class of errors for each way in which a profile can fail
        raise UserError(
            "no-credentials",
            f"boto3 found no keys for the AWS profile '{name}', which uses {setting}: {error}",
            hint=f"aws sso login --profile {name} if it uses SSO, or {hint}",
        ) from None


def _file(environment: Mapping[str, str], variable: str, usual: str) -> Path:
    named = environment.get(variable)
    return Path(named).expanduser() if named else Path(environment.get("HOME") or "~").expanduser() / ".aws" / usual


def _section(path: Path, name: str) -> dict[str, str]:
    # No interpolation: secrets may contain a percent sign.
    parser = ConfigParser(interpolation=None, strict=False)
    try:
        parser.read(path, encoding="utf-8")
    except (OSError, Error, UnicodeDecodeError) as error:
        # The parser's own message would show the line, which may be a secret.
        raise UserError(
            "credentials-unreadable", f"{path} cannot be read: {type(error).__name__}", hint=f"ls -l {path}"
        ) from None
    return dict(parser[name]) if parser.has_section(name) else {}
