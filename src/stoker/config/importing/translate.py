"""Translates a config of another program: their file in; ours out, with a comment for each of their keys."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from stoker.config.importing.names import VALUES
from stoker.config.importing.programs import Program, program_of
from stoker.config.importing.rules import Became, Kind, Rule, Theirs, changed, lost, same
from stoker.config.pairs import RULES
from stoker.config.reading import say_validation_error
from stoker.config.reference import config_values
from stoker.config.schema import ALIASES, FOREIGN_ALIASES, Config
from stoker.config.yaml_file import Entry, read_yaml_file
from stoker.errors import UserError

BASE_FILE = "base.yaml"
BASE_NAME = "_base_"
DOTTED = (("trainer",), ("experiment",))
"""Sections of programs whose keys only mean something with their sections."""
# PyYAML, which most programs use, reads these words as booleans; YAML 1.2, and stoker, as text.
_NEED_SECTION = ("name", "type", "root", "path", "dir", "class_path")
UNREADABLE = "(not plain data)"
_OLD_BOOLEANS = {"yes": True, "on": True, "no": False, "off": False}


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
    entries, dotted = _read_with_bases(source)
    program = program_of(frozenset(entries), program_name)
    sibling = source.parent / BASE_FILE
    if base is None and program.reads_base and sibling.is_file() and sibling.resolve() != source.resolve():
        base = sibling
    if program_name is None and program.name == "names":
        _refuse_ours(source, entries)
    if base is not None:
        entries = _read(base)[0] | entries
    values = {name: _normal(entry.value) for name, (entry, _) in entries.items()}
    theirs = Theirs({**values, **given})
    imported = Imported(source, program, base)
    taken: dict[str, str] = {}
    if given:
        imported.facts.append(same("given with the import", **given))
        taken |= dict.fromkeys(given, "the command line")
    for name, (_, origin) in entries.items():
        became = _without_conflicts(_valid(_became(name, values[name], theirs, program, dotted)), taken)
        taken |= dict.fromkeys(became.settings, name)
        imported.keys.append(Translated(name, values[name], became, origin))
    for fact in program.facts(theirs):
        missing = {key: value for key, value in fact.settings.items() if key not in taken}
        if missing:
            imported.facts.append(replace(fact, settings=missing))
            taken |= dict.fromkeys(missing, program.title)
    _make_consistent(imported, given)
    return imported


def _read_with_bases(path: Path) -> tuple[dict[str, tuple[Entry, str]], bool]:
    """The keys of a file and of those that it names with `_base_`; the file's own win."""
    entries, dotted = _read(path)
    seen, current = {path.resolve()}, path
    while (named := entries.get(BASE_NAME)) is not None and isinstance(named[0].value, str):
        current = current.parent / named[0].value
        if current.resolve() in seen:
            raise UserError("config-base-circle", f"{path} names {current} as its base, which is circular")
        seen.add(current.resolve())
        base, base_dotted = _read(current)
        # Only the base's own base is followed next.
        entries = base | {key: value for key, value in entries.items() if key != BASE_NAME}
        dotted = dotted or base_dotted
    return entries, dotted


def _read(path: Path) -> tuple[dict[str, tuple[Entry, str]], bool]:
    """Their keys with where they come from; under Lightning's sections with the section's name."""
    file = read_yaml_file(path, frozenset(), frozenset())
    dotted = any(entry.sections[:1] in DOTTED or entry.key == BASE_NAME for entry in file.entries)
    found: dict[str, tuple[Entry, str]] = {}
    for entry in file.entries:
        key, sections = entry.key.replace("-", "_"), [name for name in entry.sections if name != "init_args"]
        # Sections are headings, unless a key makes sense only with them, or is in two of them.
        if not dotted and key not in _NEED_SECTION and (key not in found or found[key][0].sections == entry.sections):
            sections = []
        # The last one wins, as in PyYAML.
        found[".".join([*sections, key])] = (entry, f"{path.name}:{entry.line}")
    for problem in file.problems:
        name = problem.keys[0]
        found.setdefault(name, (Entry(name, UNREADABLE, 0), problem.where or path.name))
    return found, dotted


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


def _became(name: str, value: Any, theirs: Theirs, program: Program, dotted: bool) -> Became:
    section, _, leaf = name.rpartition(".")
    if value is UNREADABLE:
        return lost("only plain data can be read")
    rule: Rule | None = program.table.get(name)
    if rule is None and dotted and section.partition(".")[0] != "trainer":
        rule = program.table.get(leaf)  # the user's own classes, by the usual names
    if rule is not None:
        try:
            return rule(value, theirs)
        except (TypeError, ValueError, ZeroDivisionError):
            return lost(f"unexpected value for {leaf or name}")
    key = ALIASES.get(leaf, leaf)
    if key not in Config.model_fields or section.partition(".")[0] == "trainer":
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


def _without_conflicts(became: Became, taken: dict[str, str]) -> Became:
    again = [key for key in became.settings if key in taken]
    if not again:
        return became
    rest = {key: value for key, value in became.settings.items() if key not in taken}
    return changed(f"{again[0]} is set by {taken[again[0]]}", **rest)


def _make_consistent(imported: Imported, given: Mapping[str, Any]) -> None:
    """Leaves out what is valid alone but not with the rest, until the whole config is valid."""
    while True:
        config = Config.model_validate(imported.settings)
        broken = next(((rule, text) for rule in RULES if rule.forbids and (text := rule.check(config))), None)
        if broken is None:
            return
        rule, text = broken
        key = next(key for key in rule.keys if key in imported.settings and key not in given)
        imported.facts = [fact for fact in imported.facts if key not in fact.settings]
        imported.keys = [
            replace(entry, became=lost(text)) if key in entry.became.settings else entry for entry in imported.keys
        ]
