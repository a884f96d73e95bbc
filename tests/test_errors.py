"""Errors: suggestions are close to what was meant, and errors survive the trip between processes."""

from __future__ import annotations

import pickle

import pytest

from stoker.errors import ConfigError, Preempted, Problem, StokerError, UserError, did_you_mean, nearest


@pytest.mark.parametrize(
    "error",
    [
        UserError("a-name", "seen", why="why", hint="hint"),
        ConfigError("2 problems", [Problem(("lr",), "wrong", "f:1")]),
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
