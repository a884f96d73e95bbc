"""Commands into which no clock can be hung, refused before they cost hours."""

from __future__ import annotations

import re
from pathlib import Path

from stoker.errors import UsageError, UserError

PYTHON = re.compile(r"(python|pypy)[0-9.]*(\.exe)?$")
# -I: isolated, -E: ignore the environment, -S: no site module. Each keeps Python from looking at our PYTHONPATH.
REASONS = {
    "I": "isolated mode ignores PYTHONPATH, through which the clock is hung in",
    "E": "-E ignores PYTHONPATH, through which the clock is hung in",
    "S": "-S leaves out the site module, which hangs the clock in",
}
TAKE_A_VALUE = "WXQ"
"""Options of Python that are followed by a value; -c and -m end its options."""


def refuse_what_cannot_work(command: list[str]) -> None:
    """Raises where there is no command, or where its Python would not look at PYTHONPATH."""
    if not command:
        raise UsageError(
            "no-command", "there is no command after `--`", hint="stoker doctor -- python train.py --your arguments"
        )
    option = isolating_option(command)
    if option is not None:
        raise UserError(
            "cannot-attach",
            f"`{command[0]} -{option}` shuts the clock out",
            why=REASONS[option],
            hint=f"leave -{option} away, or put one line into the script:  import stoker; stoker.watch()",
        )


def isolating_option(command: list[str]) -> str | None:
    """I, E or S where the command is a Python with that option, alone or among others (-sE)."""
    if not PYTHON.fullmatch(Path(command[0]).name):
        return None
    words = iter(command[1:])
    for word in words:
        if not word.startswith("-") or word.startswith("--") or word == "-":
            return None
        for place, letter in enumerate(word[1:], 1):
            if letter in REASONS:
                return letter
            if letter in "cm":
                return None
            if letter in TAKE_A_VALUE:
                if place == len(word) - 1:
                    next(words, None)
                break
    return None
