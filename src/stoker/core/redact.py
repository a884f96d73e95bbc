"""Removes secrets from text and records before they reach a log or a run folder."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "[removed]"

# A name that suggests a secret: AWS_SECRET_ACCESS_KEY, wandb_api_key, HF_TOKEN, password ...
_SECRET_NAME = re.compile(
    r"(?i)(secret|token|passw(or)?d|passphrase|api[_-]?key|access[_-]?key|credential|private[_-]?key|"
    r"authorization|(^|[_-])auth($|[_-])|sas([_-]|$)|signature)"
)
_RULES = [
    # scheme://user:password@host
    (re.compile(r"(?P<keep>\b[a-zA-Z][a-zA-Z0-9+.-]*://)[^/\s:@]+:[^/\s@]+@"), r"\g<keep>" + HIDDEN + "@"),
    # query strings of signed URLs
    (
        re.compile(r"(?i)(?P<keep>[?&](?:x-amz-[a-z-]+|sig|signature|token|key|awsaccesskeyid)=)[^&\s'\"]+"),
        r"\g<keep>" + HIDDEN,
    ),
    # NAME=value, --name value and "name": "value", where the name suggests a secret
    (
        re.compile(
            r"(?i)(?P<keep>\b[\w-]*(?:secret|token|passw(?:or)?d|api[_-]?key|access[_-]?key|credential)[\w-]*"
            r"[\"']?\s*(?:=|:|\s)\s*[\"']?)(?P<value>[^\s\"',;}]{4,})"
        ),
        r"\g<keep>" + HIDDEN,
    ),
    # keys with a well-known format, anywhere
    (re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"), HIDDEN),
    (re.compile(r"\b(?:hf_|ghp_|gho_|github_pat_|sk-|wandb_v1_)[A-Za-z0-9_-]{16,}"), HIDDEN),
]


def is_secret_name(name: str) -> bool:
    """Whether a variable or key of this name probably holds a secret."""
    return bool(_SECRET_NAME.search(name))


def redact_text(text: str) -> str:
    """The text with everything that looks like a secret replaced."""
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    return text


def redact(value: Any, name: str = "") -> Any:
    """The same structure with secrets replaced, recognised by their name or their format."""
    if name and is_secret_name(name) and value not in (None, "", False, True):
        return HIDDEN
    if isinstance(value, str):
        return redact_text(value)
    if isinstance(value, Mapping):
        return {key: redact(item, str(key)) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(redact(item) for item in value)
    return value
