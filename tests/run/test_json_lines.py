"""A run's .jsonl files are read while they are written: whole lines once each, damaged lines skipped."""

from __future__ import annotations

from pathlib import Path

from stoker.run.json_lines import JsonLines


def test_a_line_is_read_once_it_is_whole_and_a_replaced_file_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    lines: JsonLines[list[dict[str, object]]] = JsonLines(file, list)
    assert not lines.refresh()
    file.write_text('{"a": 1}\n{"a"')
    assert lines.refresh()
    assert lines.records == [{"a": 1}]
    with file.open("a") as stream:
        stream.write(": 2}\n")
    assert lines.refresh()
    assert lines.records == [{"a": 1}, {"a": 2}]
    assert not lines.refresh()
    (tmp_path / "other").write_text('{"b": 1}\n')
    (tmp_path / "other").replace(file)
    lines.refresh()
    assert lines.records == [{"b": 1}]


def test_a_line_without_an_end_does_not_fill_the_memory(tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    file.write_bytes(b"x" * (9 << 20) + b'\n{"a": 1}\n')
    lines: JsonLines[list[dict[str, object]]] = JsonLines(file, list)
    lines.refresh()
    assert lines.records == [{"a": 1}]
    assert lines.broken == 1
