"""Reads the commands in Markdown pages, checks them without running them, and compares output with what a page shows.

A fenced block `console` has commands after `$ `, each followed by what it prints; the tests run these. In a block
`console no_run` they are only checked, because they need a GPU, real data or a key press. A block with `file=NAME` is a
file for the commands after it. In shown output, a line `...` skips lines and `...` within a line skips text; numbers
with their units, bars and spaces may differ.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stoker.cli import COMMANDS, build_parser
from stoker.config import load_config

PROJECT = Path(__file__).parents[2]
SKIPPED = "..."
_FENCE = re.compile(r"^```([^\n`]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"(?<!`)`((?:stoker|make|python train\.py) [^`\n]+)`(?!`)")
_UNIT = r"(?: ?(?:%|x|us|µs|ms|s|min|h|days|[kMGT]?B|[kMG]?B/s)(?!\w))?"
_VARIES = re.compile(rf"(?P<text>\.\.\.)|(?P<bar>#[# ]*)|(?P<number>\d[\d,.]*(?<!,){_UNIT})|(?P<space>\s+)")
_ANY = {"text": ".*", "bar": "[# ]*", "number": rf"\d[\d,.]*{_UNIT}", "space": r"\s*"}


class BadPage(AssertionError):
    """A page that cannot be followed: a wrong command, option, key or block."""


@dataclass(frozen=True)
class Step:
    """One command of a page, or one file that it asks the reader to write."""

    line: int
    command: str = ""
    runs: bool = True
    shown: list[str] = field(default_factory=list)
    file: str = ""
    content: str = ""


def read_steps(text: str) -> list[Step]:
    """The commands and files of a page, in order."""
    steps: list[Step] = []
    for block in _FENCE.finditer(text):
        kind, *options = block[1].split() or [""]
        line = text.count("\n", 0, block.start()) + 2
        if kind == "console":
            if options not in ([], ["no_run"]):
                raise BadPage(f"line {line - 1}: a console block is plain or `no_run`, not {' '.join(options)}")
            steps += _commands(block[2], line, runs=not options)
        elif options and options[0].startswith("file="):
            steps.append(Step(line, file=options[0].removeprefix("file="), content=block[2]))
    return steps


def inline_commands(text: str) -> list[str]:
    """Commands quoted in running text or in a table."""
    return [match[1] for match in _INLINE.finditer(_FENCE.sub("", text))]


def _commands(block: str, line: int, *, runs: bool) -> list[Step]:
    found: list[Step] = []
    for number, text in enumerate(block.splitlines(), start=line):
        if text.startswith("$ "):
            found.append(Step(number, text.removeprefix("$ "), runs))
        elif found:
            found[-1].shown.append(text)
        else:
            raise BadPage(f"line {number}: a console block begins with a command after '$ ', not with {text!r}")
    return found


def check_command(command: str, written: set[str]) -> None:
    """Raises BadPage unless the command, its options, config file and KEY=VALUE are right; does not run it.

    `written` are the files that the page asked the reader to write before.
    """
    program, *words = shlex.split(command, comments=True)
    words = words[: words.index(">")] if ">" in words else words
    if program == "make":
        targets = re.findall(r"^([a-z]+):", (PROJECT / "Makefile").read_text(), re.MULTILINE)
        wrong = [word for word in words if "=" not in word and word not in targets]
        if wrong:
            raise BadPage(f"{command}: no such target: {wrong[0]}")
    elif program == "python" and words and words[0] == "train.py":
        import train

        check_command(shlex.join(["stoker", *train.arguments_for_stoker(words[1:])]), written)
    elif program == "stoker":
        _check_stoker(command, words, written)
    else:
        raise BadPage(f"{command}: cannot be checked; use stoker, make or python train.py")


def _check_stoker(command: str, words: list[str], written: set[str]) -> None:
    import typer

    if words[0].startswith("--") or words[0].isupper():  # `stoker --version`, `stoker COMMAND --help`
        return
    if words[0] not in COMMANDS:
        raise BadPage(f"{command}: no such command: {words[0]}")
    parser: Any = build_parser([words[0]])
    while hasattr(parser, "commands"):
        if not words or words[0] not in parser.commands:
            raise BadPage(f"{command}: no such command: {' '.join(words[:1])}")
        parser, words = parser.commands[words[0]], words[1:]
    if not words or words == ["--help"]:
        return  # a mention of the command
    try:
        context = parser.make_context(parser.name, words)
    except typer.TyperException as error:
        raise BadPage(f"{command}: {error.format_message()}") from None
    _check_keys(command, context.params, written)
    for word in context.obj or ():
        if word.endswith(".py") and not word.startswith("their_") and word not in written | {"train.py"}:
            raise BadPage(f"{command}: the page does not say what {word} is")


def _check_keys(command: str, given: dict[str, Any], written: set[str]) -> None:
    named = str(given.get("config") or given.get("target") or given.get("source") or "")
    config = PROJECT / named if named.startswith("configs/") else None
    if named.endswith(".yaml") and config is None and named not in written:
        raise BadPage(f"{command}: the page does not say what {named} is")
    # Files named by keys belong to the reader's machine; loading a config does not open them.
    words = (given.get(name) or () for name in ("overrides", "words", "data"))
    settings = [text for some in words for text in some if re.match(r"[a-z_]+=", text)]
    if config is None and any(text.startswith(("predict_", "patch_size=")) for text in settings):
        # The data, or the checkpoint, says that these are volumes.
        known = {"task": "segment3d", "patch_size": "[8,8,8]"}
        settings += [f"{key}={value}" for key, value in known.items() if f"{key}=" not in " ".join(settings)]
    try:
        load_config(config, settings)
    except Exception as error:
        raise BadPage(f"{command}: {error}") from None


_PROGRESS = re.compile(r".+: [\d,]+ of [\d,]+ \(\d+%\) .*/s(, [\d:]+ left)?")
"""A line of progress, which only a slow machine prints."""


def missing_line(shown: list[str], printed: str) -> str | None:
    """The first shown line that the output lacks, in order; None if all are there."""
    lines = [line.rstrip() for line in printed.splitlines() if not _PROGRESS.fullmatch(line.rstrip())]
    place, may_skip = 0, False
    for text in shown:
        if text.strip() == SKIPPED:
            may_skip = True
            continue
        pattern = _pattern(text)
        matching = (at for at in range(place, len(lines)) if pattern.fullmatch(lines[at]))
        found = next(matching, None)
        if found is None or (found > place and not may_skip):
            return text
        place, may_skip = found + 1, False
    return None


def _pattern(shown: str) -> re.Pattern[str]:
    patterns, end = [], 0
    for piece in _VARIES.finditer(shown.strip()):
        same = shown.strip()[end : piece.start()]
        patterns += [re.escape(same), _ANY[piece.lastgroup or ""]]
        end = piece.end()
    return re.compile(r"\s*" + "".join(patterns) + re.escape(shown.strip()[end:]) + r"\s*")
