"""Translates a config of another program: their file in; ours out, with a comment for each of their keys."""

from __future__ import annotations

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
from stoker.config.reference import config_values
from stoker.config.schema import ALIASES, FOREIGN_ALIASES, Config
from stoker.config.yaml_file import Entry, read_yaml_file
from stoker.core.errors import UserError

BASE_NAME = "_base_"
UNREADABLE = "(not plain data)"
# PyYAML, which most programs use, reads these words as booleans; YAML 1.2, and stoker, as text.
_OLD_BOOLEANS = {"yes": True, "on": True, "no": False, "off": False}
ENOUGH_MARKS = 3


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
    for name, (_, origin) in entries.items():
        became = _without_conflicts(_valid(_became(name, values[name], theirs, program.table)), taken, imported)
        taken |= dict.fromkeys(became.settings, name)
        imported.keys.append(Translated(name, values[name], became, origin))
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
