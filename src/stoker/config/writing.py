"""A config as a file again: every key, grouped, and identical when it is loaded."""

from __future__ import annotations

import re
from typing import Any

import yaml

from stoker.config.schema import GROUPS, Config
from stoker.config.yaml_file import parse_value

_PLAIN = re.compile(r"[A-Za-z0-9_./][A-Za-z0-9_./:+=-]*")


def config_values(config: Config) -> dict[str, Any]:
    """Every key with its value as YAML and JSON write it: sizes and times with their unit."""
    values = config.model_dump(mode="json")
    return {name: values[name] for group in GROUPS for name in group.model_fields}


def config_as_yaml(config: Config, header: str = "") -> str:
    """The whole config as YAML, the groups set apart by comments."""
    values = config_values(config)
    lines = [f"# {line}" for line in header.splitlines()]
    for group in GROUPS:
        lines += ["", f"# {(group.__doc__ or '').strip()}"]
        lines += [f"{name}: {write_scalar(values[name])}" for name in group.model_fields]
    return "\n".join(lines).lstrip("\n") + "\n"


def write_scalar(value: Any) -> str:
    """One value as YAML writes it on one line."""
    if isinstance(value, list):
        return f"[{', '.join(write_scalar(item) for item in value)}]"
    if isinstance(value, str):
        plain = _PLAIN.fullmatch(value) and parse_value(value) == value
        # Quoted, so that no text is taken for a number, a comment or the end of the document.
        quoted = yaml.safe_dump(value, default_style='"', allow_unicode=True, width=1_000_000)
        return value if plain else quoted.rstrip("\n")
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return repr(value)  # of a float, the shortest text that reads back as the same number
