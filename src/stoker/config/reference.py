"""A config as YAML, with or without origins; the key reference and the JSON schema for editors."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from stoker.config.importing.names import NAMES
from stoker.config.schema import ALIASES, GROUPS, SECTION_NAMES, Config, describe_type
from stoker.config.yaml_file import parse_value
from stoker.core.errors import UsageError, nearest

_PLAIN = re.compile(r"[A-Za-z0-9_./][A-Za-z0-9_./:+=-]*")


def config_values(config: Config) -> dict[str, Any]:
    """Every key with its value as YAML and JSON write it: sizes and times with their unit."""
    values = config.model_dump(mode="json")
    return {name: values[name] for group in GROUPS for name in group.model_fields}


def config_as_yaml(config: Config, header: str = "", origins: Mapping[str, str] | None = None) -> str:
    """The whole config as YAML, grouped by comments; loads back to the same config. With `origins`, each line says
    where its value is from."""
    values = config_values(config)
    lines = [f"# {line}" for line in header.splitlines()]
    for group in GROUPS:
        lines += ["", f"# {(group.__doc__ or '').strip()}"]
        for name in group.model_fields:
            line = f"{name}: {write_scalar(values[name])}"
            lines.append(line if origins is None else f"{line:<42} # {origins.get(name, 'default')}")
    return "\n".join(lines).lstrip("\n") + "\n"


def write_scalar(value: Any) -> str:
    """One value as single-line YAML."""
    if isinstance(value, list):
        return f"[{', '.join(write_scalar(item) for item in value)}]"
    if isinstance(value, str):
        plain = _PLAIN.fullmatch(value) and parse_value(value) == value
        # Quoted, so that text is never read as a number, a comment or the end of the document.
        quoted = yaml.safe_dump(value, default_style='"', allow_unicode=True, width=1_000_000)
        return value if plain else quoted.rstrip("\n")
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return repr(value)  # of a float, the shortest text that reads back as the same number


@dataclass(frozen=True)
class KeyReference:
    name: str
    group: str
    type: str
    default: Any
    unit: str | None
    aliases: tuple[str, ...]
    meaning: str


def key_references(names: list[str] | None = None) -> list[KeyReference]:
    """The reference of all keys, or of the named ones."""
    defaults = config_values(Config())
    found = []
    for group in GROUPS:
        for name, field in group.model_fields.items():
            extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
            found.append(
                KeyReference(
                    name=name,
                    group=(group.__doc__ or "").strip(),
                    type=describe_type(name),
                    default=defaults[name],
                    unit=str(extra["unit"]) if "unit" in extra else None,
                    aliases=tuple(alias for alias, key in ALIASES.items() if key == name),
                    meaning=" ".join((field.description or "").split()),
                )
            )
    if not names:
        return found
    by_name = {reference.name: reference for reference in found}
    by_name |= {alias: by_name[key] for alias, key in ALIASES.items()}
    unknown = next((name for name in names if name not in by_name), None)
    if unknown is not None:
        similar = nearest(unknown, by_name)
        hint = f"stoker config keys {similar}" if similar else "stoker config keys"
        raise UsageError("unknown-key", f"{unknown!r} is not a key", hint=hint)
    return [by_name[name] for name in names]


def editor_schema() -> dict[str, Any]:
    """A JSON schema that lets an editor complete and check config files, sections and aliases included."""
    section = {"$ref": "#/$defs/section"}
    defaults = config_values(Config())
    properties = Config.model_json_schema()["properties"]
    for name, schema in properties.items():
        schema.pop("title", None)
        schema["default"] = defaults[name]
        if "enum" in schema and "32" in schema["enum"]:  # YAML reads `precision: 32` as a number
            schema.pop("type")
            schema["enum"].append(32)
    properties |= {name: {"description": "Another program's name; see `stoker config import`."} for name in NAMES}
    properties |= {alias: {"description": f"Alias of {name}."} | properties[name] for alias, name in ALIASES.items()}
    for name in SECTION_NAMES & properties.keys():
        properties[name] = {"anyOf": [properties[name], section], "description": properties[name]["description"]}
    # Any other name must be a section, with the same rules for its keys; null is an empty section.
    keys = {"type": "object", "properties": properties, "additionalProperties": {"anyOf": [section, {"type": "null"}]}}
    base = {"type": "string", "description": "Config file to start from."}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "stoker config",
        **keys,
        "properties": {"base": base} | properties,
        "$defs": {"section": keys},
    }


def key_reference(references: Iterable[KeyReference]) -> str:
    """Name, type, default and meaning of each key, by group."""
    lines: list[str] = []
    group = None
    for reference in references:
        if reference.group != group:
            group = reference.group
            lines += ["", f"# {group}", ""]
        unit = f", {reference.unit}" if reference.unit else ""
        lines.append(f"{reference.name} ({reference.type}{unit}; default {write_scalar(reference.default)})")
        if reference.aliases:
            lines.append(f"    Alias: {', '.join(reference.aliases)}.")
        lines.append(textwrap.indent(textwrap.fill(reference.meaning, 100), "    "))
    return "\n".join(lines).lstrip("\n")
