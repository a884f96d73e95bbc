"""The reference of every key, read off the schema: text for people, a JSON schema for editors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stoker.config.schema import ALIASES, GROUPS, SECTION_NAMES, Config, describe_type
from stoker.config.writing import config_values
from stoker.errors import UsageError, nearest


@dataclass(frozen=True)
class KeyReference:
    """What there is to say about one key."""

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
    properties |= {
        alias: {"description": f"Another name of {name}."} | properties[name] for alias, name in ALIASES.items()
    }
    for name in SECTION_NAMES & properties.keys():
        properties[name] = {
            "anyOf": [properties[name], section],
            "description": properties[name]["description"],
        }
    # Any other name may only be a section, whose keys are held to the same rules; null is an empty one.
    keys = {
        "type": "object",
        "properties": properties,
        "additionalProperties": {"anyOf": [section, {"type": "null"}]},
    }
    base = {"type": "string", "description": "Another config, whose values this one starts from."}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "stoker config",
        **keys,
        "properties": {"base": base} | properties,
        "$defs": {"section": keys},
    }
