"""tuned.yaml: only the tuned lines change, and it loads to exactly the settings that were confirmed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stoker.config import config_values, load_config
from stoker.core.errors import UsageError, UserError
from stoker.profile.host import fit_to_machine, read_machine
from stoker.tune.records import Outcome, Settings, Step
from stoker.tune.result import check_target, journal_path, write_tuned
from stoker.tune.space import settings_of

TEXT = """\
# My recipe.
model: test_convnext
loader:
  num_workers: 1   # as on the laptop
  prefetch_factor: 4
lr: 0.1
"""


def tuned(path: Path, change: Settings, *overrides: str) -> tuple[Path, Settings]:
    """Writes the result of a search that kept this change; returns the file and the settings."""
    resolved, machine = load_config(path, overrides), read_machine()
    original = settings_of(fit_to_machine(resolved.config, machine)[0])
    best = original | change
    kept = Step(3, best, change, "the loop waits", "kept", "+38 % ± 4 %")
    outcome = Outcome(original, best, 100.0, 138.0, "nothing left to try", trials=9, steps=(kept,))
    target = path.with_name("tuned.yaml")
    write_tuned(target, path, resolved, overrides, outcome, machine)
    return target, best


def loaded(path: Path) -> Settings:
    return settings_of(fit_to_machine(load_config(path).config, read_machine())[0])


def test_only_the_changed_lines_change_and_each_says_why(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(TEXT)
    target, best = tuned(path, {"num_workers": 4, "channels_last": False})
    lines = target.read_text().splitlines()
    first = (
        "# Written by `stoker tune` from mine.yaml: 100 -> 138 samples/s (+38 %), 9 trials; tune.jsonl has them all."
    )
    assert lines[0] == first
    assert lines[1:] == [
        "# My recipe.",
        "model: test_convnext",
        "loader:",
        "  num_workers: 4  # was 1: +38 % ± 4 % (tune, step 3); as on the laptop",
        "  prefetch_factor: 4",
        "lr: 0.1",
        "",
        "channels_last: false  # was true: +38 % ± 4 % (tune, step 3)",
    ]
    assert loaded(target) == best
    assert path.read_text() == TEXT
    before, after = (config_values(load_config(file).config) for file in (path, target))
    assert {key for key in before if before[key] != after[key]} == {"num_workers", "channels_last"}


def test_an_engine_that_auto_would_not_choose_is_written_out(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("num_workers: 2\n")
    target, best = tuned(path, {"num_workers": 8})
    assert best["loader"] == "thread"
    assert "loader: thread" in target.read_text()
    assert loaded(target) == best


@pytest.mark.parametrize(
    "text",
    ["{num_workers: 1, lr: 0.1}\n", "workers: 1\n", "num_workers:\n  1\n", "base: base.yaml\n", "'num_workers' : 1\n",
     "", "num_workers: auto\nprefetch_factor: null"],
    ids=["braces", "alias", "two lines", "base", "quoted", "empty", "no newline at the end"],
)  # fmt: skip
def test_any_file_loads_to_exactly_the_settings(tmp_path: Path, text: str) -> None:
    (tmp_path / "base.yaml").write_text("num_workers: 1\nlr: 0.3\n")
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    target, best = tuned(path, {"num_workers": 3, "prefetch_factor": 8}, "batch_size=64")
    assert loaded(target) == best
    assert load_config(target).config.batch_size == 64
    assert load_config(target).config.lr == load_config(path).config.lr
    assert "from the command line" in target.read_text()


def test_no_workers_need_no_prefetching(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("num_workers: 2\nprefetch_factor: 4\n")
    target, _ = tuned(path, {"num_workers": 0})
    config = load_config(target).config
    assert (config.num_workers, config.prefetch_factor) == (0, None)


def test_nothing_of_the_user_is_overwritten(tmp_path: Path) -> None:
    path, other = tmp_path / "mine.yaml", tmp_path / "tuned.yaml"
    path.write_text(TEXT)
    refused: list[tuple[Path, Any]] = [
        (path, UsageError),
        (tmp_path / "tuned.txt", UsageError),
        (tmp_path / "nowhere" / "tuned.yaml", UsageError),
    ]
    for target, kind in refused:
        with pytest.raises(kind):
            check_target(target, path, force=True)
    check_target(other, path, force=False)
    tuned(path, {"num_workers": 4})
    check_target(other, path, force=False)
    with pytest.raises(UserError, match="did not write it"):
        check_target(other, tmp_path / "another.yaml", force=False)
    other.write_text("lr: 0.1\n")
    with pytest.raises(UserError, match="did not write it"):
        check_target(other, path, force=False)
    check_target(other, path, force=True)
    assert journal_path(other).name == "tune.jsonl"
    assert journal_path(tmp_path / "fast.yaml").name == "fast.tune.jsonl"
