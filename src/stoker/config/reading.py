"""Reads a config: file and overrides in, a valid config out, or all of its problems at once.

Precedence: defaults < base file < file < KEY=VALUE on the command line.
"""

from __future__ import annotations

import os
import re
import shlex
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from stoker.config.importing.names import NAMES, VALUES, ours_for
from stoker.config.importing.rules import Kind, Theirs
from stoker.config.pairs import RULES
from stoker.config.schema import ALIASES, SECTION_NAMES, Config, describe_type, key_names
from stoker.config.yaml_file import YamlFile, parse_value, read_yaml_file
from stoker.core.console import say_notes, say_warnings
from stoker.core.errors import ConfigError, UserError, config_problem, did_you_mean
from stoker.core.finding import Finding
from stoker.core.units import count


def say_validation_error(error: ValidationError) -> dict[str, str]:
    """One sentence for each invalid key, with the value and what would be valid."""
    by_key: dict[str, list[Any]] = {}
    for detail in error.errors():
        by_key.setdefault(str(detail["loc"][0]), []).append(detail)
    return {key: _say(key, details) for key, details in by_key.items()}


def _say(key: str, details: list[Any]) -> str:
    expected = describe_type(key).removesuffix(" | none")
    # A union reports one error per member; a violated bound says more than 'is not auto'.
    detail = next((d for d in details if d["type"] not in ("literal_error", "none_required")), details[0])
    given, context = detail["input"], detail.get("ctx", {})
    bound = {
        "greater_than_equal": ("ge", "at least"),
        "greater_than": ("gt", "above"),
        "less_than_equal": ("le", "at most"),
        "less_than": ("lt", "below"),
    }.get(detail["type"])
    if bound:
        return f"{key}: {_show(given)} must be {bound[1]} {context[bound[0]]}"
    if detail["type"] == "value_error":
        error, meant = str(context["error"]), None
        if key == "task" and isinstance(given, str):
            meant = did_you_mean(given, expected.split(" | "))
        return f"{key}: {error}" + (f"; {meant}" if meant else "")
    if detail["type"] == "finite_number":
        return f"{key}: {_show(given)} is not a finite number"
    if detail["type"] == "string_pattern_mismatch":
        allowed = "only letters, digits and . _ = + -, starting with a letter or digit"
        return f"{key}: {_show(given)} is not allowed; use {allowed}"
    if detail["type"] in ("string_too_short", "string_too_long"):
        return f"{key}: {_show(given)} must have 1 to {context.get('max_length', 'many')} characters"
    if detail["type"] in ("missing", "too_long", "too_short") or (
        len(detail["loc"]) > 1 and detail["type"] == "tuple_type"
    ):
        return f"{key}: the list must be {expected}"
    meant = did_you_mean(given, expected.split(" | ")) if isinstance(given, str) else None
    return f"{key}: {_show(given)} is not {_article(expected)}" + (f"; {meant}" if meant else "")


def _show(value: Any) -> str:
    text = repr(value) if not isinstance(value, bool) else str(value).lower()
    return text if len(text) <= 60 else text[:57] + "..."


def _article(expected: str) -> str:
    words = {"int": "a whole number", "float": "a number", "size": "a size like 62GB", "time": "a time like 18h"}
    if expected in words:
        return words[expected]
    if expected.startswith("["):
        return f"a list like {expected}"
    if " | " in expected:
        return "one of " + ", ".join(words.get(word, word) for word in expected.split(" | "))
    return expected


BASE = "base"
MAX_BASES = 8
COMMAND_LINE = "command line"
IMPORT = "stoker config import"
_OURS = frozenset(key_names()) | ALIASES.keys() | {BASE}
_KNOWN = _OURS | NAMES.keys()


@dataclass(frozen=True)
class Setting:
    """A value before validation, and where it was set."""

    value: Any
    spelled: str
    where: str
    meant: str = ""
    """Our key, if another program's name was translated."""

    @property
    def on_command_line(self) -> bool:
        return self.where.startswith(COMMAND_LINE)


@dataclass(frozen=True)
class Resolved:
    """A valid config, where each value came from, and warnings."""

    config: Config
    origins: dict[str, str]
    """For each key that was set: `configs/a.yaml:12` or `command line`; the others are defaults."""
    warnings: tuple[str, ...]
    notes: tuple[str, ...] = ()
    """What was adapted so that the settings fit together."""


def load_config(path: Path | str | None, overrides: Sequence[str] = ()) -> Resolved:
    """The config of a file with overrides applied; raises ConfigError with all problems."""
    problems: list[Finding] = []
    warnings: list[str] = []
    settings: dict[str, Setting] = {}
    others: dict[Path, list[str]] = {}
    if path is not None:
        for layer in _read_with_bases(Path(path)):
            problems += layer.problems
            given = [Setting(entry.value, entry.key, layer.where(entry.line)) for entry in layer.entries]
            settings |= _by_key(given, layer.path, problems, warnings)
            others[layer.path] = [entry.key for entry in layer.entries if entry.key in NAMES]
    settings |= _by_key(_read_overrides(overrides, problems), None, problems)
    _check_meaning_of_lr(settings, others, problems)
    notes = _shorten_warmup(settings)
    config = _validate(settings, problems, warnings)
    if problems:
        source = str(path) if path is not None else "the command line"
        problems.sort(key=_place)
        raise ConfigError(f"{count(len(problems), 'problem')} in {source}", problems, hint=_hint(problems, path))
    origins = {key: setting.where for key, setting in settings.items()}
    return Resolved(config, origins, tuple(warnings), notes)


def _place(problem: Finding) -> tuple[bool, str, int]:
    """For the order of the lines; problems of a file come before those of the command line."""
    found = re.match(r"(.*?):([0-9]+)", problem.where or "")
    return (True, "", 0) if found is None else (False, found[1], int(found[2]))


_last_loaded: Config | None = None


def load_for_command(path: Path | None, overrides: Sequence[str] | None) -> Resolved:
    """The config of file and overrides; warnings go to stderr; a crash log will include it."""
    resolved = load_config(path, overrides or ())
    remember_config(resolved.config)
    say_warnings(resolved.warnings)
    if os.environ.get("RANK", "0") == "0":  # the same on all ranks
        say_notes(resolved.notes)
    return resolved


def check_task(config: Config, what: str) -> None:
    """Refuses a task that is not built yet; `what` completes 'cannot be ...'."""
    if config.task != "classify":
        raise UserError("task-not-built", f"task: {config.task} cannot be {what} yet", hint="task=classify")


def remember_config(config: Config) -> None:
    """Keeps the config that the current command works with, for a crash log."""
    global _last_loaded
    _last_loaded = config


def config_in_use() -> Config | None:
    """The config that the current command works with, if it got that far."""
    return _last_loaded


def _read_with_bases(path: Path) -> list[YamlFile]:
    """The file and its base files, the deepest base first."""
    chain: list[YamlFile] = []
    seen: set[Path] = set()
    current: Path | None = path
    while current is not None:
        if current.resolve() in seen:
            raise ConfigError(
                f"{chain[-1].path} names {current} as its base, which is circular", name="config-base-circle"
            )
        if len(chain) > MAX_BASES:
            raise ConfigError(f"{path} has a chain of more than {MAX_BASES} base files", name="config-base-circle")
        seen.add(current.resolve())
        layer = read_yaml_file(current, _KNOWN, SECTION_NAMES)
        chain.append(layer)
        current = _base_of(layer)
    return chain[::-1]


def _base_of(layer: YamlFile) -> Path | None:
    bases = [entry for entry in layer.entries if entry.key == BASE]
    if not bases:
        return None
    if len(bases) > 1:
        layer.problems.append(config_problem((BASE,), "is set twice", layer.where(bases[1].line)))
    layer.entries[:] = [entry for entry in layer.entries if entry.key != BASE]
    value = bases[0].value
    if not isinstance(value, str) or not value:
        layer.problems.append(
            config_problem((BASE,), f"must be a file name, not {value!r}", layer.where(bases[0].line))
        )
        return None
    return layer.path.parent / value


def _read_overrides(overrides: Sequence[str], problems: list[Finding]) -> list[Setting]:
    given: list[Setting] = []
    for text in overrides:
        key, equals, value_text = text.partition("=")
        where = f"{COMMAND_LINE}: {text}"
        if not equals:
            problems.append(config_problem((text,), f"{text!r} is not KEY=VALUE", COMMAND_LINE))
            continue
        try:
            given.append(Setting(parse_value(value_text), key.strip(), where))
        except (yaml.YAMLError, ValueError, RecursionError):
            problems.append(config_problem((key,), f"the value {value_text!r} cannot be read", where))
    return given


def _by_key(
    given: Sequence[Setting], file: Path | None, problems: list[Finding], warnings: list[str] | None = None
) -> dict[str, Setting]:
    """The settings of one source under our keys, translated where they have another program's name."""
    settings: dict[str, Setting] = {}
    theirs = Theirs({setting.spelled: setting.value for setting in given})
    for setting in given:
        for translated in _from_others(setting, theirs, problems, file):
            _add(settings, translated, problems, warnings)
    return settings


def _from_others(setting: Setting, theirs: Theirs, problems: list[Finding], file: Path | None) -> list[Setting]:
    """The setting itself, or what another program's name or value for it stands for; or a problem, if it differs."""
    spelled, value = setting.spelled, setting.value
    rule = NAMES.get(spelled) or VALUES.get(spelled)
    try:
        became = rule(value, theirs) if rule is not None else None
    except (TypeError, ValueError):
        problems.append(config_problem((spelled,), f"{spelled}: {_show(value)} cannot be read", setting.where))
        return []
    if became is None:
        return [setting]
    if became.kind is not Kind.SAME:
        message = f"{spelled}: {_show(value)} is another program's: {became.why}"
        how = f"`{IMPORT}` translates it" if file else None
        problems.append(config_problem((spelled,), message, setting.where, how))
        return []
    return [Setting(item, spelled, setting.where, key) for key, item in became.settings.items()]


def _check_meaning_of_lr(settings: dict[str, Setting], others: dict[Path, list[str]], problems: list[Finding]) -> None:
    """Refuses an lr beside other programs' names, unless the config says whether to scale it.

    Those programs use it as it is. Scaled with the total batch, 0.005 on 8 GPUs with 256 samples each would be 0.04.
    """
    lr = settings.get("lr")
    if lr is None or lr.on_command_line or "scale_lr" in settings or "lr_reference_batch" in settings:
        return
    file = Path(lr.where.rpartition(":")[0])
    if others.get(file):
        names = ", ".join(others[file][:3])
        message = (
            f"lr: {_show(lr.value)} is beside names of other programs ({names}), which use lr as it is; stoker scales "
            "it with the total batch. Set scale_lr: false or true to say which is meant"
        )
        problems.append(config_problem(("lr",), message, lr.where, f"`{IMPORT}` does that"))


def _add(settings: dict[str, Setting], setting: Setting, problems: list[Finding], warnings: list[str] | None) -> None:
    """Adds a setting under its canonical key, or records why it cannot."""
    key = setting.meant or ALIASES.get(setting.spelled, setting.spelled)
    if key not in Config.model_fields:
        problems.append(_unknown_key(setting))
        return
    earlier = settings.get(key)
    if earlier is None:
        settings[key] = setting
    elif earlier.spelled != setting.spelled and earlier.value == setting.value and warnings is not None:
        # A file may serve two programs that have different names for the key; if the values agree,
        # there is nothing to decide.
        warnings.append(
            f"{setting.where}: {setting.spelled} is an alias of {key}, already set to the same value ({earlier.where})"
        )
    else:
        names = setting.spelled if earlier.spelled == setting.spelled else f"{earlier.spelled} and {setting.spelled}"
        message = f"{names}: set twice, to {earlier.value!r} ({earlier.where}) and {setting.value!r}"
        problems.append(config_problem((key,), message, setting.where))


def _shorten_warmup(settings: dict[str, Setting]) -> tuple[str, ...]:
    """Fits the file's warmup into fewer epochs, if these were given on the command line, and returns a note.

    `epochs=2` is how people try out a recipe, and it is not a mistake that the recipe's warmup is longer. A file that
    contradicts itself, or a command line that does, still is one.
    """
    warmup, epochs = settings.get("warmup_epochs"), settings.get("epochs")
    if warmup is None or epochs is None or warmup.on_command_line or not epochs.on_command_line:
        return ()
    if type(warmup.value) is not int or type(epochs.value) is not int or not 1 <= epochs.value <= warmup.value:
        return ()
    shorter = epochs.value // 2  # at least half of the run at the schedule itself
    where = f"shortened from {warmup.value} ({warmup.where}), because of {epochs.where}"
    settings["warmup_epochs"] = Setting(shorter, warmup.spelled, where)
    return (f"warmup_epochs: {warmup.value} does not fit into {epochs.spelled}={epochs.value}: using {shorter}",)


def _unknown_key(setting: Setting) -> Finding:
    spelled = setting.spelled
    message = f"{spelled!r} is not a key"
    odd = next((letter for letter in spelled if ord(letter) > 127), None)
    if odd is not None:
        message += f" (it contains {odd!r}, {unicodedata.name(odd, 'an unnamed character')})"
    last_part = unicodedata.normalize("NFKC", spelled).rpartition(".")[2]
    foreign = None if last_part in _OURS else ours_for(last_part, setting.value)
    meant = foreign or did_you_mean(last_part, _OURS) or did_you_mean(last_part, NAMES)
    return config_problem((spelled,), message, setting.where, meant)


def _validate(settings: dict[str, Setting], problems: list[Finding], warnings: list[str]) -> Config:
    """The validated config; defaults replace invalid values, so that the rules over several keys can still be
    checked for the other keys."""
    values = {key: setting.value for key, setting in settings.items()}
    wrong: set[str] = set()
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        for key, message in say_validation_error(error).items():
            wrong.add(key)
            problems.append(config_problem((key,), message, settings[key].where))
        config = Config.model_validate({key: value for key, value in values.items() if key not in wrong})
    for rule in RULES:
        message_or_none = None if wrong.intersection(rule.keys) else rule.check(config)
        if message_or_none is None:
            continue
        written = [settings[key].where for key in rule.keys if key in settings]
        if rule.forbids:
            problems.append(config_problem(rule.keys, message_or_none, " and ".join(written) or None))
        else:
            warnings.append(message_or_none)
    return config


def _hint(problems: Sequence[Finding], path: Path | str | None) -> str | None:
    if path is not None and any(one.fix and IMPORT in one.fix for one in problems):
        return f"{IMPORT} {shlex.quote(str(path))} -o ours.yaml"
    named = next((key for one in problems for key in one.keys if key in Config.model_fields), None)
    return f"stoker config keys {named}" if named else "stoker config keys    # every key with its meaning"
