"""Errors: suggestions are close to what was meant, and errors survive the trip between processes."""

from __future__ import annotations

import ast
import pickle
import re
from pathlib import Path

import pytest

import stoker
from stoker.core.errors import ConfigError, Preempted, StokerError, UserError, config_problem, did_you_mean, nearest

SOURCE = Path(stoker.__file__).parent


@pytest.mark.parametrize(
    "error",
    [
        UserError("a-name", "seen", why="why", hint="hint"),
        ConfigError("2 problems", [config_problem(("lr",), "wrong", "f:1")]),
        Preempted("preempted", "at step 3"),
    ],
)
def test_they_survive_a_pickle(error: StokerError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert again.as_dict() == error.as_dict()
    assert str(again) == str(error)


def test_the_nearest_word_is_found() -> None:
    words = ["batch_size", "patch_size", "num_workers", "lr"]
    assert nearest("num_worker", words) == "num_workers"
    assert nearest("rl", words) == "lr"
    assert nearest("something else", words) is None
    assert nearest("x", []) is None
    assert did_you_mean("atch_size", words) == "did you mean batch_size or patch_size?"


ADVICE = re.compile(r"\b(?:delete|remove|erase|wipe|discard|rm)\b(?! -)", re.IGNORECASE)
NOT_ADVICE = {
    # What an option does, and the pack was made from data that is still there.
    "Delete the pack in DST first, and nothing else.",
}


def texts_for_people(path: Path) -> list[tuple[int, str]]:
    """Every text of a module that is not a docstring, with its line."""
    tree = ast.parse(path.read_text())
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return [
        (node.lineno, node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation
        if " " in node.value.strip()
    ]


def test_nobody_is_told_to_delete_what_they_made() -> None:
    assert ADVICE.search("delete the file; the same command then resumes")
    advice = [
        f"{path.relative_to(SOURCE)}:{line}: {text}"
        for path in sorted(SOURCE.rglob("*.py"))
        for line, text in texts_for_people(path)
        if ADVICE.search(text) and text not in NOT_ADVICE
    ]
    assert advice == []
