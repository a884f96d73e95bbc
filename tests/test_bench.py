"""Every published figure has a benchmark that reproduces it, and the README quotes figures without changing them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from bench.run import BY_HAND, WITH_DATA, WITHOUT_DATA

PROJECT = Path(__file__).parents[1]
README, RESULTS = PROJECT / "README.md", PROJECT / "docs" / "results.md"
HEADLINES = 8
MOST_WORDS = 30
"""In a cell; longer remarks go below the table."""


def _rows(page: Path) -> list[list[str]]:
    """The cells of each row with evidence."""
    lines = page.read_text(encoding="utf-8").splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "/result.json)" in line]


def _evidence(row: list[str]) -> str:
    return row[-1].split("](", 1)[1].rstrip(")")


def _numbers(text: str) -> set[str]:
    return set(re.findall(r"\d+(?:[.,]\d+)*", text))


def test_every_result_has_a_benchmark_and_every_benchmark_has_a_file() -> None:
    known = {*WITH_DATA, *WITHOUT_DATA, *BY_HAND}
    assert {folder.name for folder in (PROJECT / "results").iterdir() if folder.is_dir()} <= known
    assert all((PROJECT / "bench" / f"{name}.py").is_file() for name in known)


@pytest.mark.parametrize("page", [README, RESULTS], ids=lambda page: page.stem)
def test_every_figure_on_a_page_has_its_evidence(page: Path) -> None:
    rows = _rows(page)
    assert rows
    assert [row[0] for row in rows if not (page.parent / _evidence(row)).is_file()] == []
    # Every row of the table under 'Results' or '# Results' names a file, not only those that we found above.
    table = page.read_text(encoding="utf-8").split("# Results", 1)[1].split("\n## ", 1)[0]
    assert len([line for line in table.splitlines() if line.startswith("|")]) == len(rows) + 2


def test_the_readme_has_the_headlines_of_the_results_unchanged() -> None:
    headlines, rows = _rows(README), _rows(RESULTS)
    assert len(headlines) == HEADLINES
    for headline in headlines:
        name = Path(_evidence(headline)).parent.name
        published = [" ".join(row[:-1]) for row in rows if Path(_evidence(row)).parent.name == name]
        wanted = _numbers(" ".join(headline[:-1]))
        assert any(wanted <= _numbers(text) for text in published), f"{headline[0]}: other figures than in results.md"


@pytest.mark.parametrize("page", [README, RESULTS], ids=lambda page: page.stem)
def test_cells_are_short(page: Path) -> None:
    assert [cell for row in _rows(page) for cell in row if len(cell.split()) > MOST_WORDS] == []
