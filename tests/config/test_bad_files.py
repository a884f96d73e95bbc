"""Files that are not a config: a clear error, exit code 2, nothing written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Run


def _write(path: Path, data: bytes | str) -> Path:
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


DEEP = "[" * 5000
LAUGHS = "a: &a [x, x]\n" + "".join(f"{c}: &{c} [*{p}, *{p}]\n" for p, c in zip("abcdefgh", "bcdefghi", strict=True))

BAD_FILES: dict[str, tuple[bytes | str, str]] = {
    "binary": (bytes(range(256)) * 4, "not text"),
    "nul": ("lr: 1\0\n", "NUL"),
    "tabs": ("training:\n\tlr: 1\n", "found a tab; YAML is indented with spaces"),
    "list": ("- lr: 1\n- epochs: 2\n", "contains a list"),
    "scalar": ("just words\n", "single value"),
    "python-object": ("model: !!python/object/apply:os.system ['touch owned']\n", "plain data, not objects"),
    "unknown-tag": ("lr: !mine 3\n", "plain data, not objects"),
    "unclosed": ("patch_size: [1, 2\n", "config-not-yaml"),
    "two-documents": ("lr: 1\n---\nlr: 2\n", "a single document"),
    "deep": (f"model: {DEEP}\n", "nested too deeply"),
    "laughs": (LAUGHS, "is not a key"),
    "own-ancestor": ("a: &a\n  b: *a\n", "nested too deeply"),
    "key-list": ("? [a, b]\n: 1\n", "single word"),
    "nan": ("lr: .nan\n", "not a finite number"),
    "look-alike": ("l\N{CYRILLIC SMALL LETTER GHE}: 1\n", "CYRILLIC SMALL LETTER GHE"),
    "digits": ("seed: " + "9" * 5000 + "\n", "cannot be parsed"),
    "control": ("model: 'a\x07b'\n", "unprintable"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD_FILES)
def test_it_is_refused_with_a_clear_error(kind: str, stoker: Run, tmp_path: Path) -> None:
    content, expected = BAD_FILES[kind]
    folder = tmp_path / "work"
    folder.mkdir()
    path = _write(folder / "bad.yaml", content)
    ended = stoker("config", "show", path, cwd=folder)
    assert ended.code == 2
    assert expected in ended.err
    assert "Traceback" not in ended.err
    assert ended.out == ""
    assert [entry.name for entry in folder.iterdir()] == ["bad.yaml"]


def test_what_was_probably_meant_is_said(stoker: Run, tmp_path: Path) -> None:
    (tmp_path / "data" / "train" / "cat").mkdir(parents=True)
    (tmp_path / "run").mkdir()
    for name in ("metrics.jsonl", "config.yaml"):
        (tmp_path / "run" / name).touch()
    (tmp_path / "last.ckpt").write_bytes(b"STOKER\0\xff")
    with (tmp_path / "large.pth").open("wb") as stream:
        stream.truncate(100_000_000)
    for path, hint in {
        "data": "CONFIG data_root=data, if that is your data",
        "run": "the command that began this run resumes it; `stoker report run` shows it",
        "last.ckpt": "CONFIG --resume last.ckpt continues its run; CONFIG --from last.ckpt begins another",
        "large.pth": "CONFIG --resume large.pth",
        "resnet50": "CONFIG model=resnet50, if that is a network",
    }.items():
        ended = stoker("train", path, cwd=tmp_path)
        assert ended.code == 2
        assert f"hint: {hint}" in ended.err


def test_a_path_without_a_config_is_refused_and_the_nearest_is_suggested(stoker: Run, tmp_path: Path) -> None:
    (tmp_path / "demo.yaml").write_text("lr: 1\n")
    huge = tmp_path / "huge.yaml"
    with huge.open("wb") as stream:
        stream.truncate(100_000_000)
    for path, expected in (
        (tmp_path / "dmo.yaml", f"did you mean {tmp_path / 'demo.yaml'}?"),
        (tmp_path / "no" / "where.yaml", "and neither does its folder"),
        (tmp_path, "is a folder"),
        (huge, "100 MB"),
        (Path("/dev/zero"), "error: "),
    ):
        ended = stoker("config", "show", path)
        assert (ended.code, expected in ended.err) == (2, True), ended.err


def test_a_file_without_permission_is_refused(open_folder: Path, as_nobody: Callable[..., tuple[int, str]]) -> None:
    path = _write(open_folder / "secret.yaml", "lr: 1\n")
    path.chmod(0)
    code, err = as_nobody("config", "show", str(path))
    assert code == 2
    assert "cannot be read: Permission denied" in err


def test_an_empty_file_is_all_defaults(stoker: Run, tmp_path: Path) -> None:
    assert stoker("config", "show", _write(tmp_path / "empty.yaml", "# nothing\n")).code == 0
