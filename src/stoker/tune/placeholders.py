"""A command line with places for the values that are tuned: `python train.py -j {num_workers} -b {batch_size=64}`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from stoker.core.errors import UsageError, nearest
from stoker.tune.records import Settings, Value

_NAME = r"[A-Za-z_][A-Za-z0-9_-]*"
_PLACE = re.compile(rf"\{{\{{({_NAME}(?:=[^{{}}]*)?)\}}\}}|\{{({_NAME})(?:=([^{{}}]*))?\}}")
"""A placeholder, or `{{name}}`, which is passed on as `{name}`. JSON does not match: its names are in quotes."""
_CUT_OFF = re.compile(rf"\{{({_NAME})=[^{{}}]*$")
_WORKER_FLAG = re.compile(r"-j|--(?:num[-_]|data[-_]|n[-_])?workers")

LEAST = {"num_workers": 0, "prefetch_factor": 1, "batch_size": 1}
"""The names whose values we choose ourselves, and their smallest value."""
DATALOADER_DEFAULTS = {"num_workers": 0, "prefetch_factor": 2}
CHANGES_TRAINING = frozenset({"batch_size"})
MOST_WORDS = "a name that stoker does not know needs its values, separated by |, the first being the one to start from"


@dataclass(frozen=True)
class Placeholder:
    """One value that is tuned."""

    name: str
    start: Value
    values: tuple[Value, ...] | None = None
    """What the user allows; None for a name whose values we choose."""
    assumed: bool = False
    """Whether the start is DataLoader's default, because the command names none."""


@dataclass(frozen=True)
class Template:
    """The user's command with its places."""

    words: tuple[str, ...]
    places: tuple[Placeholder, ...]

    @property
    def start(self) -> Settings:
        return {place.name: place.start for place in self.places}

    def __getitem__(self, name: str) -> Placeholder:
        return next(place for place in self.places if place.name == name)

    def __contains__(self, name: str) -> bool:
        return any(place.name == name for place in self.places)

    def filled(self, settings: Settings) -> list[str]:
        """The command with these values; a word that is nothing but an empty value is left out."""
        found = []
        for word in self.words:
            text = _PLACE.sub(lambda match: _value(match, settings), word)
            if text or not _PLACE.fullmatch(word):
                found.append(text)
        return found

    def line(self, settings: Settings) -> str:
        """The same as one would type it."""
        return shlex.join(self.filled(settings))

    def notes(self) -> list[str]:
        """What was assumed about the places, in words."""
        return [
            f"{{{place.name}}} has no start value; starting from {place.start}"
            + (", DataLoader's default" if place.start == DATALOADER_DEFAULTS.get(place.name) else "")
            + f". If the script usually runs with another, write {{{place.name}=4}}"
            for place in self.places
            if place.assumed
        ]


def _value(match: re.Match[str], settings: Settings) -> str:
    if match[1] is not None:
        return f"{{{match[1]}}}"
    return str(settings[_normal(match[2])])


def _normal(name: str) -> str:
    return name.replace("-", "_")


def read_template(words: Sequence[str]) -> Template:
    """The command with its places; raises UsageError if it has none, or one whose values are not known."""
    if not words:
        raise UsageError(
            "no-command", "no command given after `--`", hint="stoker tune -- python train.py -j {num_workers}"
        )
    given: dict[str, list[str]] = {}
    for word in words:
        for match in _PLACE.finditer(word):
            if match[1] is None:
                texts = given.setdefault(_normal(match[2]), [])
                if match[3] is not None:
                    texts.append(match[3])
        if _CUT_OFF.search(word):
            raise UsageError(
                "placeholder-not-closed", f"{word} has no closing brace",
                why="without quotes the shell takes | for a pipe",
                hint="quote it: stoker tune -- python train.py --decoder '{decoder=pil|cv2}'",
            )  # fmt: skip
    if not given:
        raise UsageError(
            "no-placeholder", f"nothing to tune in: {shlex.join(words)}",
            why="write each value that may be changed in braces, with the value to start from",
            hint=f"stoker tune -- {_example(words)}",
        )  # fmt: skip
    return Template(tuple(words), tuple(_placeholder(name, texts, given) for name, texts in given.items()))


def _example(words: Sequence[str]) -> str:
    """The user's own command with its number of workers as a place, or with one added."""
    shown = [shlex.quote(word) for word in words]
    for at, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if not _WORKER_FLAG.fullmatch(flag):
            continue
        if equals and value.isdigit():
            return " ".join([*shown[:at], f"{flag}={{num_workers={value}}}", *shown[at + 1 :]])
        if at + 1 < len(words) and words[at + 1].isdigit():
            return " ".join([*shown[: at + 1], f"{{num_workers={words[at + 1]}}}", *shown[at + 2 :]])
    return " ".join([*shown, "-j {num_workers=4}"])


def _placeholder(name: str, texts: list[str], given: dict[str, list[str]]) -> Placeholder:
    different = list(dict.fromkeys(texts))
    if len(different) > 1:
        raise UsageError(
            "placeholder-twice", f"{{{name}}} is given as {' and as '.join(different)}",
            hint=f"write its values once, and {{{name}}} in the other places",
        )  # fmt: skip
    text = different[0] if different else None
    if name not in LEAST:
        return _of_other_name(name, text)
    if text is not None:
        values = tuple(_number(name, part) for part in text.split("|"))
        return Placeholder(name, values[0], _distinct(name, values) if len(values) > 1 else None)
    if name not in DATALOADER_DEFAULTS:
        raise UsageError(
            "placeholder-without-start", f"{{{name}}} has no value to start from",
            why="the search compares with how the script is run now", hint=f"{{{name}=64}}",
        )  # fmt: skip
    # DataLoader refuses prefetch_factor without workers.
    start = max(DATALOADER_DEFAULTS[name], 1 if name == "num_workers" and "prefetch_factor" in given else 0)
    return Placeholder(name, start, assumed=True)


def _of_other_name(name: str, text: str | None) -> Placeholder:
    values = () if text is None else tuple(text.split("|"))
    if len(values) < 2:
        near = nearest(name, LEAST)
        raise UsageError(
            "placeholder-without-values", f"{{{name}}} has no values to choose from",
            why=f"{MOST_WORDS}; known are {', '.join(LEAST)}",
            hint=f"{{{near}}}" if near else f"'{{{name}={text or 'pil'}|cv2}}'    # with quotes",
        )  # fmt: skip
    return Placeholder(name, values[0], _distinct(name, values))


def _distinct(name: str, values: tuple[Value, ...]) -> tuple[Value, ...]:
    if len(set(values)) < len(values):
        raise UsageError("placeholder-value-twice", f"{{{name}={'|'.join(map(str, values))}}} names a value twice")
    return values


def _number(name: str, text: str) -> int:
    if not text.isdecimal() or int(text) < LEAST[name]:
        raise UsageError(
            "placeholder-not-a-number", f"{{{name}={text}}}: expected whole numbers from {LEAST[name]} on",
            hint=f"{{{name}={max(LEAST[name], 4)}}}",
        )  # fmt: skip
    return int(text)
