"""Translates a config of another program: their file in; ours out, with a comment for each of their keys and why."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from stoker.config.importing.lightning import LIGHTNING
from stoker.config.importing.names import IMPORT_NAMES, VALUES
from stoker.config.importing.rules import Became, Kind, Rule, Table, Theirs, changed, lost, same
from stoker.config.importing.timm import TIMM, TIMM_MARKS, timm_facts
from stoker.config.importing.torchvision import TORCHVISION, TORCHVISION_MARKS, torchvision_facts
from stoker.config.pairs import RULES
from stoker.config.reading import say_validation_error
from stoker.config.reference import config_values, write_scalar
from stoker.config.schema import ALIASES, FOREIGN_ALIASES, Config
from stoker.config.yaml_file import Entry, read_yaml_file
from stoker.core.errors import UsageError, UserError, nearest
from stoker.core.files import write_text
from stoker.core.redact import redact
from stoker.core.units import count

BASE_NAME = "_base_"
UNREADABLE = "(not plain data)"
# PyYAML, which most programs use, reads these words as booleans; YAML 1.2, and stoker, as text.
_OLD_BOOLEANS = {"yes": True, "on": True, "no": False, "off": False}
DECIDING = ("optimizer.", "lr_scheduler.")
ENOUGH_MARKS = 3
MOST_LISTED = 40
COMMENT_COLUMN = 34
MAX_LINE = 110
MAX_COMMENT = 200


@dataclass(frozen=True)
class Program:
    """A program whose configs can be imported."""

    name: str
    """For `--from`."""
    title: str
    table: Table
    facts: Callable[[Theirs], list[Became]]
    """What it does without being told by a key; each becomes settings of ours, unless a key has set them."""
    recognises: Callable[[frozenset[str]], bool]


def _unscaled(_theirs: Theirs) -> list[Became]:
    return [same("lr is used as it is there; stoker would scale it with the total batch", scale_lr=False)]


def _has_marks(marks: Iterable[str]) -> Callable[[frozenset[str]], bool]:
    return lambda keys: len(keys.intersection(marks)) >= ENOUGH_MARKS


PROGRAMS = (
    Program(
        "lightning", "Lightning CLI", LIGHTNING, _unscaled, lambda keys: any(key.startswith("trainer.") for key in keys)
    ),
    Program("timm", "timm's train.py", TIMM, timm_facts, _has_marks(TIMM_MARKS)),
    Program(
        "torchvision", "torchvision's classification reference", TORCHVISION, torchvision_facts,
        _has_marks(TORCHVISION_MARKS),
    ),
    Program(
        "names", "a program that we do not know, by the names of its keys", IMPORT_NAMES, _unscaled, lambda _: True
    ),
)  # fmt: skip
"""In the order in which they are tried; `names` is for everything else."""


@dataclass(frozen=True)
class Translated:
    """One key of theirs, and what it became."""

    name: str
    value: Any
    became: Became
    origin: str


@dataclass
class Imported:
    """A whole config, translated."""

    source: Path
    program: Program
    base: Path | None
    keys: list[Translated] = field(default_factory=list)
    facts: list[Became] = field(default_factory=list)

    @property
    def settings(self) -> dict[str, Any]:
        """Our keys, in the order in which they are written."""
        merged: dict[str, Any] = {}
        for became in [*(key.became for key in self.keys), *self.facts]:
            merged |= became.settings
        return merged

    @property
    def lost(self) -> list[Translated]:
        """The keys that cannot be kept, or not wholly."""
        return [key for key in self.keys if key.became.kind in (Kind.NOT_TRANSLATED, Kind.UNKNOWN)]

    def named(self, *kinds: Kind) -> list[str]:
        return [key.name for key in self.keys if key.became.kind in kinds]


def import_config(
    source: Path, *, base: Path | None = None, program_name: str | None = None, given: Mapping[str, Any] | None = None
) -> Imported:
    """The translation of a config; the settings it returns are valid together.

    `given` are settings of ours that their config does not say, such as the number of GPUs.
    """
    given = given or {}
    entries = _read_with_bases(source)
    names = frozenset(end for name in entries for end in _ends(name))
    program = next(one for one in PROGRAMS if one.name == program_name or (not program_name and one.recognises(names)))
    if program_name is None and program.name == "names":
        _refuse_ours(source, (entry.key for entry, _ in entries.values()))
    if base is not None:
        entries = _read(base) | entries
    values = {name: _normal(entry.value) for name, (entry, _) in entries.items()}
    # A rule may ask for a key without its sections; the first one counts.
    theirs = Theirs({end: values[name] for name in reversed(values) for end in _ends(name)} | values | dict(given))
    imported = Imported(source, program, base)
    taken: dict[str, str] = {}
    if given:
        imported.facts.append(same("given with the import", **given))
        taken |= dict.fromkeys(given, "the command line")
    order = list(entries)
    # What a program gives the optimizer counts, not an argument of the user's own model that has the same name.
    for name in sorted(order, key=lambda name: not name.startswith(DECIDING)):
        became = _without_conflicts(_valid(_became(name, values[name], theirs, program.table)), taken, imported)
        taken |= dict.fromkeys(became.settings, name)
        imported.keys.append(Translated(name, values[name], became, entries[name][1]))
    imported.keys.sort(key=lambda key: order.index(key.name))
    for fact in program.facts(theirs):
        missing = {key: value for key, value in fact.settings.items() if key not in taken}
        if missing:
            imported.facts.append(replace(fact, settings=missing))
            taken |= dict.fromkeys(missing, program.title)
    _make_consistent(imported, given)
    return imported


def _ends(name: str) -> list[str]:
    """A key with all its sections, with fewer of them, and alone."""
    parts = name.split(".")
    return [".".join(parts[first:]) for first in range(len(parts))]


def _read_with_bases(path: Path) -> dict[str, tuple[Entry, str]]:
    """The keys of a file and of those that it names with `_base_`; the file's own win."""
    entries = _read(path)
    seen, current = {path.resolve()}, path
    while (named := entries.get(BASE_NAME)) is not None and isinstance(named[0].value, str):
        current = current.parent / named[0].value
        if current.resolve() in seen:
            raise UserError("config-base-circle", f"{path} names {current} as its base, which is circular")
        seen.add(current.resolve())
        # Only the base's own base is followed next.
        entries = _read(current) | {key: value for key, value in entries.items() if key != BASE_NAME}
    return entries


def _read(path: Path) -> dict[str, tuple[Entry, str]]:
    """Their keys with their sections, and where they come from; the last one wins, as in PyYAML."""
    file = read_yaml_file(path, frozenset(), frozenset())
    found: dict[str, tuple[Entry, str]] = {}
    for entry in file.entries:
        sections = [name for name in entry.sections if name != "init_args"]
        found[".".join([*sections, entry.key.replace("-", "_")])] = (entry, f"{path.name}:{entry.line}")
    for problem in file.problems:
        name = problem.keys[0]
        found.setdefault(name, (Entry(name, UNREADABLE, 0), problem.where or path.name))
    return found


def _normal(value: Any) -> Any:
    return _OLD_BOOLEANS.get(value.lower(), value) if isinstance(value, str) else value


def _refuse_ours(source: Path, entries: Iterable[str]) -> None:
    ours = Config.model_fields.keys() | (ALIASES.keys() - FOREIGN_ALIASES.keys()) | {"base"}
    if ours.issuperset(entries):
        raise UserError(
            "config-already-ours",
            f"{source} has only keys of stoker",
            why="it can be used as it is; reading it as another program's would change what lr means",
            hint=f"stoker config show {source}    # or import it with --from names",
        )


def _became(name: str, value: Any, theirs: Theirs, table: Table) -> Became:
    if value is UNREADABLE:
        return lost("only plain data can be read")
    *fewer, leaf = _ends(name)
    sections = f"{name.partition('.')[0]}.*"
    rule: Rule | None = next((table[key] for key in (name, sections, *fewer, leaf) if key in table), None)
    if rule is not None:
        try:
            return rule(value, theirs)
        except (TypeError, ValueError, KeyError, AttributeError, ZeroDivisionError):
            return lost(f"unexpected value for {leaf}")
    key = ALIASES.get(leaf, leaf)
    if key not in Config.model_fields:
        return Became(Kind.UNKNOWN, "unknown")
    foreign = VALUES[key](value, theirs) if key in VALUES else None
    if foreign is not None:
        return foreign
    return same(**{key: value})


def _valid(became: Became) -> Became:
    """The same without values that our keys do not accept, or that this version does not have."""
    settings = dict(became.settings)
    for key, value in became.settings.items():
        if key not in Config.model_fields:
            return lost(f"this version of stoker has no {key}")
        if value is None and config_values(Config())[key] is not None:
            return same("not set")
        try:
            Config.model_validate({key: value})
        except ValidationError as error:
            return lost(say_validation_error(error)[key])
        settings[key] = value
    return replace(became, settings=settings)


def _without_conflicts(became: Became, taken: dict[str, str], imported: Imported) -> Became:
    again = [key for key in became.settings if key in taken]
    if not again:
        return became
    rest = {key: value for key, value in became.settings.items() if key not in taken}
    known, why = imported.settings, f"{again[0]} is set by {taken[again[0]]}"
    if all(known[key] == became.settings[key] for key in again):
        return replace(became, settings=rest) if rest else same(f"as {taken[again[0]]} says")
    return changed(why, **rest) if rest else lost(why)


def _make_consistent(imported: Imported, given: Mapping[str, Any]) -> None:
    """Leaves out what is valid alone but not with the rest, until the whole config is valid."""
    while True:
        config = Config.model_validate(imported.settings)
        broken = next(((rule, text) for rule in RULES if rule.forbids and (text := rule.check(config))), None)
        if broken is None:
            return
        rule, text = broken
        # One that the reason names; not the task, with which everything would go that only this task has.
        candidates = sorted(rule.keys, key=lambda key: (key == "task", key not in text))
        key = next(key for key in candidates if key in imported.settings and key not in given)
        imported.facts = [fact for fact in imported.facts if key not in fact.settings]
        imported.keys = [
            replace(entry, became=lost(text)) if key in entry.became.settings else entry for entry in imported.keys
        ]


# As a file of ours.


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


def check_kept(imported: Imported) -> None:
    """Raises UserError with the list of what cannot be kept."""
    if imported.lost:
        lines = [f"  {_theirs(key)}    # {_comment(key.became.why)}" for key in imported.lost]
        listed = [*lines[:MOST_LISTED], *([f"  and {len(lines) - MOST_LISTED} more"] if lines[MOST_LISTED:] else [])]
        raise UserError(
            "not-all-kept",
            f"{count(len(imported.lost), 'key')} of {imported.source} cannot be kept\n" + "\n".join(listed),
            why="the training would differ from that of the other program; nothing was written",
            hint="the same command with --accept imports the rest",
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
    missing = len(imported.lost)
    kept = len([key for key in imported.keys if key.became.settings and key not in imported.lost])
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
