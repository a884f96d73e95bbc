"""What S3 means by refusing a request: make it again, give this object up, or stop altogether."""

from __future__ import annotations

import re

from stoker.data.store.stores import ReadFailure, StoreDown
from stoker.stage.s3_connection import Fault

ERROR_BYTES = 4096
"""As much of the answer as is looked at."""
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
