"""How S3 is reached, and with which keys, as the environment and the AWS profile files say.

obstore does not read the profile files. Keys in a profile are read here; for profiles whose keys only AWS's own code
can make (`_NEEDS_AWS_CODE`), obstore's provider on boto3 is used if boto3 is installed, and refreshes them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from configparser import ConfigParser, Error
from pathlib import Path
from typing import Any

from stoker.core.errors import UserError

ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_NEEDS_AWS_CODE = ("sso_session", "sso_start_url", "role_arn", "credential_process", "login_session")


def is_anonymous(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether requests are not signed: for public buckets."""
    return environment.get("AWS_SKIP_SIGNATURE", "").lower() in ("true", "1")


def profile_settings(environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Settings that the chosen profile adds to the environment, as obstore's options; empty if there is no profile."""
    keys_wanted = "AWS_ACCESS_KEY_ID" not in environment and not is_anonymous(environment)
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
    if not any(variable in environment for variable in ENDPOINTS) and values.get("endpoint_url"):
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
