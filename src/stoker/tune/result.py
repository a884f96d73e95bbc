"""tuned.yaml: the original file with only the tuned lines changed, each with a comment that says what it gained."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.config import Config, config_as_yaml, config_values, load_config
from stoker.config.reading import Resolved
from stoker.config.reference import write_scalar
from stoker.config.schema import ALIASES, SECTION_NAMES
from stoker.config.yaml_file import read_yaml_file
from stoker.core.errors import ConfigError, UsageError, UserError
from stoker.core.files import write_text
from stoker.core.redact import redact_text
from stoker.profile.host import Machine, fit_to_machine
from stoker.tune.records import Outcome, Settings
from stoker.tune.space import config_with, settings_of

DEFAULT_NAME = "tuned.yaml"
MARK = "# Written by `stoker tune` from "


@dataclass(frozen=True)
class KeptChange:
    key: str
    value: Any
    comment: str


def journal_path(target: Path) -> Path:
    """The journal beside a result: tune.jsonl beside tuned.yaml, fast.tune.jsonl beside fast.yaml."""
    return target.with_name("tune.jsonl" if target.name == DEFAULT_NAME else f"{target.stem}.tune.jsonl")


def check_target(target: Path, config: Path, *, force: bool) -> None:
    """Refuses to overwrite the config itself, and any file that `stoker tune` did not write from it."""
    if target.suffix not in (".yaml", ".yml"):
        raise UsageError("usage", f"--write {target} is not a .yaml file", hint=f"--write {DEFAULT_NAME}")
    if not target.absolute().parent.is_dir():
        raise UsageError("usage", f"--write {target}: its folder does not exist", hint=f"mkdir -p {target.parent}")
    if target.exists() and config.exists() and target.samefile(config):
        raise UsageError(
            "usage", f"--write {target} is the config itself", why="the original is never changed",
            hint=f"--write {config.with_name(DEFAULT_NAME)}",
        )  # fmt: skip
    if force or not target.exists():
        return
    try:
        with target.open(encoding="utf-8", errors="replace") as stream:
            first = stream.readline(4096).rstrip("\n")
    except OSError as error:
        raise UserError("target-unreadable", f"{target} cannot be read: {error.strerror}") from None
    if not first.startswith(MARK + config.name + ":"):
        raise UserError(
            "target-exists",
            f"{target} exists, and `stoker tune {config}` did not write it",
            why="it would be overwritten",
            hint=f"--write {config.stem}.tuned.yaml, or --force",
        )


def write_tuned(
    target: Path, path: Path, resolved: Resolved, overrides: Sequence[str], outcome: Outcome, machine: Machine
) -> None:
    """Writes the result; it loads to exactly the settings that were confirmed."""
    changes = [*_from_command_line(resolved), *tuned_changes(outcome, fit_to_machine(resolved.config, machine)[0])]
    header = redact_text(_header(path, target, overrides, outcome))
    text = _edited(path, header, changes)
    if text is None or not _is_right(text, target, changes, resolved.config, outcome.best, machine):
        # Spread over several lines, in braces, or below a base that is elsewhere: all keys are written instead.
        text = _whole_config(header, resolved.config, changes)
    write_text(target, text)


def tuned_changes(outcome: Outcome, config: Any) -> list[KeptChange]:
    """The keys that the result changes, each with what it gained."""
    values = config_values(config_with(config, outcome.best))
    before = config_values(config_with(config, outcome.original))
    found = []
    for key, value in outcome.best.items():
        was = outcome.original.get(key)
        if value == was and not (key == "loader" and _engine_would_change(config, outcome)):
            continue
        step = outcome.step_that_set(key, value)
        gain = "" if step is None else f": {step.reason} (tune, step {step.number})"
        found.append(KeptChange(key, values[key], f"was {write_scalar(before[key])}{gain}"))
    if outcome.best.get("num_workers") == 0 and config.prefetch_factor is not None:
        found = [change for change in found if change.key != "prefetch_factor"]
        found.append(KeptChange("prefetch_factor", None, f"was {config.prefetch_factor}, which needs workers"))
    return found


def _engine_would_change(config: Any, outcome: Outcome) -> bool:
    """`loader: auto` chooses by the number of workers: another number would choose another engine."""
    workers = outcome.best.get("num_workers")
    changed = config.model_copy(update={"num_workers": workers})
    return bool(settings_of(changed)["loader"] != outcome.best.get("loader"))


def _from_command_line(resolved: Resolved) -> list[KeptChange]:
    values = config_values(resolved.config)
    return [
        KeptChange(key, values[key], "from the command line")
        for key, where in resolved.origins.items()
        if where.startswith("command line")
    ]


def _header(path: Path, target: Path, overrides: Sequence[str], outcome: Outcome) -> str:
    rates = ""
    if outcome.best == outcome.original:
        rates = "nothing faster was found, "
    elif outcome.before and outcome.after:
        unit = outcome.facts.get("unit", "samples")
        gain = outcome.after / outcome.before - 1
        rates = f"{outcome.before:,.0f} -> {outcome.after:,.0f} {unit}/s ({gain:+.0%}), ".replace("%", " %")
    added = f" with {' '.join(overrides)}" if overrides else ""
    return f"{MARK}{path.name}:{added} {rates}{outcome.trials} trials; {journal_path(target).name} has them all."


def _edited(path: Path, header: str, changes: Sequence[KeptChange]) -> str | None:
    """The file's text with these lines changed or added; None if one of them cannot be."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        known = frozenset(Config.model_fields) | ALIASES.keys()
        entries = read_yaml_file(path, known, SECTION_NAMES).entries
    except (OSError, UnicodeDecodeError, ConfigError):
        return None
    lines = text.splitlines()
    added = []
    by_key = {change.key: change for change in changes}  # tuned keys override the command line
    for change in by_key.values():
        place = [entry for entry in entries if ALIASES.get(entry.key, entry.key) == change.key]
        if not place:
            added.append(f"{change.key}: {write_scalar(change.value)}  # {change.comment}")
            continue
        entry = place[-1]
        new = _edited_line(lines[entry.line - 1], entry.key, change)
        if new is None:
            return None
        lines[entry.line - 1] = new
    return "\n".join([header, *lines, *(["", *added] if added else [])]) + "\n"


def _edited_line(line: str, spelled: str, change: KeptChange) -> str | None:
    found = re.fullmatch(
        rf"(\s*(?:{re.escape(spelled)}|\"{re.escape(spelled)}\"|'{re.escape(spelled)}')\s*:\s*)"
        r"((?:\"[^\"]*\"|'[^']*'|\[[^\]]*\]|[^\s#][^#]*?)?)(\s+#\s?(.*))?\s*",
        line,
    )
    if found is None:
        return None
    kept = f"; {found[4]}" if found[4] else ""
    head = found[1] if found[1].endswith((" ", "\t")) else found[1] + " "
    return f"{head}{write_scalar(change.value)}  # {change.comment}{kept}"


def _is_right(
    text: str, target: Path, changes: Sequence[KeptChange], config: Config, best: Settings, machine: Machine
) -> bool:
    """Whether the text, in the place where it will be, loads to the config with these changes and nothing else."""
    wanted = config_values(config) | {change.key: change.value for change in changes}
    descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".yaml", dir=target.absolute().parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)
        loaded = load_config(Path(name)).config
    except ConfigError:
        return False
    finally:
        with suppress(OSError):
            Path(name).unlink()
    fitted = settings_of(fit_to_machine(loaded, machine)[0])
    silent = ("prefetch_factor", "loader") if best.get("num_workers") == 0 else ()
    tuned = {key: value for key, value in best.items() if key in fitted and key not in silent}
    return config_values(loaded) == wanted and all(fitted[key] == value for key, value in tuned.items())


def _whole_config(header: str, config: Config, changes: Sequence[KeptChange]) -> str:
    by_key = {change.key: change for change in changes}
    changed = Config.model_validate(config_values(config) | {key: change.value for key, change in by_key.items()})
    lines = []
    for line in config_as_yaml(changed).splitlines():
        change = by_key.get(line.partition(":")[0])
        lines.append(line if change is None else f"{line}  # {change.comment}")
    return "\n".join([header, *lines]) + "\n"
