"""Writes an imported config: our keys with the reasons, and what was left out as comments."""

from __future__ import annotations

import json
import math
import textwrap
from pathlib import Path
from typing import Any

from stoker.config.importing.rules import Kind
from stoker.config.importing.translate import PROGRAMS, Imported, Translated
from stoker.config.reference import config_values, write_scalar
from stoker.config.schema import Config
from stoker.core.errors import UsageError, UserError, nearest
from stoker.core.files import write_text
from stoker.core.redact import redact

COMMENT_COLUMN = 34
MAX_LINE = 110
MAX_COMMENT = 200


def check_program(name: str | None) -> None:
    names = [program.name for program in PROGRAMS]
    if name is not None and name not in names:
        similar = nearest(name, names)
        raise UsageError(
            "unknown-program",
            f"--from {name}: not a program whose configs are known",
            why=f"known are {', '.join(names)}",
            hint=f"--from {similar}" if similar else "--from names    # reads the keys by their usual names",
        )


def check_output(output: Path | None, source: Path, *, force: bool) -> None:
    """Refuses to overwrite a file, and always the one that is imported."""
    if output is None:
        return
    if output.is_dir():
        raise UserError("not-a-file", f"{output} is a folder", hint=f"-o {output / 'ours.yaml'}")
    if output.exists() and source.exists() and output.samefile(source):
        raise UserError("file-exists", f"{output} is the config to import", hint="-o another.yaml")
    if output.exists() and not force:
        raise UserError("file-exists", f"{output} exists", hint="--force overwrites it")


def write_import(output: Path, text: str) -> None:
    """Writes the file at once, or not at all."""
    try:
        write_text(output, text)
    except OSError as error:
        raise UserError("cannot-write", f"{output} cannot be written: {error.strerror}") from None


def imported_as_yaml(imported: Imported) -> str:
    """Our config, with a comment for each of their keys: what it became, and why."""
    lines = [
        f"# Imported from {_comment(imported.source.name)} by `stoker config import`, read as a config of",
        f"# {imported.program.title} (--from {imported.program.name}).",
    ]
    if imported.base is not None:
        lines.append(f"# Keys that it lacks are from {_comment(imported.base.name)}.")
    lines += ["#", f"# {_count(imported)}", ""]
    for entry in imported.keys:
        for place, (key, value) in enumerate(entry.became.settings.items()):
            lines += _line(f"{key}: {_written(key, value)}", _reason(entry, key, first=place == 0))
    if imported.facts:
        lines += ["", "# What the program does without a key for it"]
        for fact in imported.facts:
            for key, value in fact.settings.items():
                lines += _line(f"{key}: {_written(key, value)}", fact.reasons.get(key, fact.why))
    for title, kinds in _LEFT_OUT:
        left_out = [entry for entry in imported.keys if entry.became.kind in kinds and not entry.became.settings]
        if left_out:
            lines += ["", f"# {title}"]
            for entry in left_out:
                lines += _line(f"# {_theirs(entry)}", _comment(entry.became.why) or "the same")
    return "\n".join(lines) + "\n"


_LEFT_OUT = (
    ("Nothing to set: what stoker does anyway", (Kind.SAME, Kind.NOT_NEEDED)),
    ("Changed, without a key of ours", (Kind.CHANGED,)),
    ("Had no effect there, and is left out", (Kind.NO_EFFECT,)),
    ("Not translated", (Kind.NOT_TRANSLATED,)),
    ("Unknown keys", (Kind.UNKNOWN,)),
)


def _count(imported: Imported) -> str:
    kept = len([key for key in imported.keys if key.became.settings])
    missing = len(imported.named(Kind.NOT_TRANSLATED, Kind.UNKNOWN))
    without = len(imported.named(Kind.NO_EFFECT))
    return f"{len(imported.keys)} keys: {kept} kept, {without} without effect there, {missing} not translated."


def _written(key: str, value: Any) -> str:
    checked = Config.model_validate({key: value})
    return write_scalar(config_values(checked)[key])


def _line(setting: str, reason: str) -> list[str]:
    """The setting with its reason behind it, or above it if that is too long."""
    line = f"{setting:<{COMMENT_COLUMN}}  # {reason}"
    if len(line) <= MAX_LINE:
        return [line]
    return [*textwrap.wrap(reason, MAX_LINE, initial_indent="# ", subsequent_indent="# "), setting]


def _reason(entry: Translated, key: str, *, first: bool) -> str:
    """What this key of ours was there, and why."""
    if key in entry.became.reasons:
        return entry.became.reasons[key]
    if not first:
        return f"belongs to {next(iter(entry.became.settings))}"
    was = "" if entry.name == key else f"was {_comment(entry.name)}"
    if was and _written(key, entry.became.settings[key]) != shown(entry):
        was = f"was {_theirs(entry)}"
    return "; ".join(part for part in (was, _comment(entry.became.why)) if part) or "the same"


def _theirs(entry: Translated) -> str:
    return f"{_comment(entry.name)}: {shown(entry)}"


def shown(entry: Translated) -> str:
    """Their value in one line, without secrets."""
    value = _safe(entry)
    return _comment(json.dumps(value) if isinstance(value, (dict, list)) else write_scalar(value))


def _safe(entry: Translated) -> Any:
    return redact(_cut(entry.value), entry.name.rpartition(".")[2])


def _cut(value: Any, depth: int = 4) -> Any:
    """The beginning of a value as plain data: anchors can make a small file grow without end."""
    if isinstance(value, dict):
        return {str(key): _cut(item, depth - 1) for key, item in list(value.items())[:8]} if depth else "..."
    if isinstance(value, list):
        return [_cut(item, depth - 1) for item in value[:8]] if depth else "..."
    finite = not isinstance(value, float) or math.isfinite(value)  # JSON has no NaN
    return value if finite and isinstance(value, (str, int, float, type(None))) else str(value)


def _comment(text: str) -> str:
    """Text that stays inside its comment: it comes from a file that somebody else wrote."""
    plain = "".join(letter if letter.isprintable() else "?" for letter in text)
    return plain if len(plain) <= MAX_COMMENT else plain[: MAX_COMMENT - 3] + "..."


def summary(imported: Imported) -> dict[str, Any]:
    """The import as `--json` prints it."""
    return {
        "source": str(imported.source),
        "program": imported.program.name,
        "base": str(imported.base) if imported.base else None,
        "config": {
            key: config_values(Config.model_validate({key: value}))[key] for key, value in imported.settings.items()
        },
        "keys": {
            entry.name: {
                "value": _safe(entry),
                "kind": str(entry.became.kind),
                "became": dict(entry.became.settings),
                "why": entry.became.why,
                "where": entry.origin,
            }
            for entry in imported.keys
        },
        "added": [{"settings": dict(fact.settings), "why": fact.why} for fact in imported.facts],
        "no_effect": imported.named(Kind.NO_EFFECT),
        "not_translated": imported.named(Kind.NOT_TRANSLATED),
        "unknown": imported.named(Kind.UNKNOWN),
    }


def import_notes(imported: Imported, output: Path | None) -> list[str]:
    """What somebody who imports a config should know at once."""
    notes = [f"read as a config of {imported.program.title} (--from {imported.program.name})"]
    beside = imported.source.parent / "base.yaml"
    if imported.base is not None:
        notes.append(f"keys that it lacks are from {imported.base}")
    elif beside.is_file() and beside.resolve() != imported.source.resolve():
        notes.append(f"{beside} was not read; if its keys count too: --base {beside}")
    for what, kinds in (
        ("had no effect there, and are left out", (Kind.NO_EFFECT,)),
        ("not translated", (Kind.NOT_TRANSLATED,)),
        ("unknown", (Kind.UNKNOWN,)),
    ):
        names = imported.named(*kinds)
        if names:
            notes.append(f"{what}: {', '.join(_comment(name) for name in names)}")
    if output is not None:
        notes.append(f"{output} has the reason for each key; next: stoker config show {output}")
    return notes
