"""A resolved config and the reference of its keys, as text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from stoker.config.loading import Resolved
from stoker.config.reference import KeyReference
from stoker.config.schema import GROUPS
from stoker.config.writing import config_values, write_scalar


def config_with_origins(resolved: Resolved) -> str:
    """Every key with its value and where it came from; the text is itself a valid config."""
    values = config_values(resolved.config)
    lines: list[str] = []
    for group in GROUPS:
        lines += ["", f"# {(group.__doc__ or '').strip()}"]
        for name in group.model_fields:
            line = f"{name}: {write_scalar(values[name])}"
            lines.append(f"{line:<42} # {resolved.origins.get(name, 'default')}")
    return "\n".join(lines).lstrip("\n")


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
            lines.append(f"    Also written {', '.join(reference.aliases)}.")
        lines.append(textwrap.indent(textwrap.fill(reference.meaning, 100), "    "))
    return "\n".join(lines).lstrip("\n")
