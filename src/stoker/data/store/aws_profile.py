"""Keys, region and endpoint from the files of the AWS command line, which obstore does not read itself."""

from __future__ import annotations

import os
from collections.abc import Mapping
from configparser import ConfigParser, Error
from pathlib import Path

from stoker.errors import UserError

# Profiles whose keys only the AWS programs themselves can make.
_NEEDS_AWS_PROGRAM = ("sso_session", "sso_start_url", "role_arn", "credential_process", "login_session")


def profile_settings(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What the chosen profile adds to the environment, under obstore's names; empty where the environment
    already has keys, or where there is no profile."""
    anonymous = environment.get("AWS_SKIP_SIGNATURE", "").lower() in ("true", "1")
    keys_wanted = "AWS_ACCESS_KEY_ID" not in environment and not anonymous
    name = environment.get("AWS_PROFILE") or environment.get("AWS_DEFAULT_PROFILE") or "default"
    heading = name if name == "default" else f"profile {name}"
    values = _section(_file(environment, "AWS_CONFIG_FILE", "config"), heading)
    values |= _section(_file(environment, "AWS_SHARED_CREDENTIALS_FILE", "credentials"), name)
    settings: dict[str, str] = {}
    if keys_wanted and values.get("aws_access_key_id") and values.get("aws_secret_access_key"):
        settings["access_key_id"] = values["aws_access_key_id"]
        settings["secret_access_key"] = values["aws_secret_access_key"]
        if values.get("aws_session_token"):
            settings["token"] = values["aws_session_token"]
    elif keys_wanted and "AWS_PROFILE" in environment:
        _refuse(name, values)
    if "AWS_REGION" not in environment and "AWS_DEFAULT_REGION" not in environment and values.get("region"):
        settings["region"] = values["region"]
    endpoints = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    if not any(variable in environment for variable in endpoints) and values.get("endpoint_url"):
        settings["endpoint"] = values["endpoint_url"]
    return settings


def _refuse(name: str, values: Mapping[str, str]) -> None:
    made_elsewhere = next((key for key in _NEEDS_AWS_PROGRAM if key in values), None)
    if made_elsewhere:
        seen = f"the AWS profile '{name}' has no keys of its own; it uses {made_elsewhere}"
    else:
        seen = f"the AWS profile '{name}' (AWS_PROFILE) has no keys in ~/.aws"
    raise UserError(
        "no-credentials",
        seen,
        why="only keys that stand in a profile or in the environment are read here",
        hint=f'eval "$(aws configure export-credentials --profile {name} --format env)"',
    )


def _file(environment: Mapping[str, str], variable: str, usual: str) -> Path:
    named = environment.get(variable)
    return Path(named).expanduser() if named else Path(environment.get("HOME") or "~").expanduser() / ".aws" / usual


def _section(path: Path, name: str) -> dict[str, str]:
    # No interpolation: secrets may hold a percent sign.
    parser = ConfigParser(interpolation=None, strict=False)
    try:
        parser.read(path, encoding="utf-8")
    except (OSError, Error, UnicodeDecodeError) as error:
        # The parser's own text would show the line, which may be a secret.
        raise UserError(
            "credentials-unreadable", f"{path} cannot be read: {type(error).__name__}", hint=f"ls -l {path}"
        ) from None
    return dict(parser[name]) if parser.has_section(name) else {}
