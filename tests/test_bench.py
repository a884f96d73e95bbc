"""Every published figure has a benchmark that reproduces it."""

from __future__ import annotations

from pathlib import Path

from bench.run import BY_HAND, WITH_DATA, WITHOUT_DATA

PROJECT = Path(__file__).parents[1]


def test_every_result_has_a_benchmark_and_every_benchmark_has_a_file() -> None:
    known = {*WITH_DATA, *WITHOUT_DATA, *BY_HAND}
    assert {folder.name for folder in (PROJECT / "results").iterdir() if folder.is_dir()} <= known
    assert all((PROJECT / "bench" / f"{name}.py").is_file() for name in known)


def test_every_result_that_the_readme_names_is_there() -> None:
    text = (PROJECT / "README.md").read_text(encoding="utf-8")
    named = [part.split(")", 1)[0] for part in text.split("](results/")[1:]]
    assert named
    assert [place for place in named if not (PROJECT / "results" / place).is_file()] == []
