"""Values that are measured once and remembered in the user's cache folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stoker.core.files import cache_folder, remember, remember_all


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def is_number(value: Any) -> bool:
    return isinstance(value, int)


def not_again() -> int:
    raise AssertionError("measured again")


def test_the_cache_folder_is_where_the_user_wants_it(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_folder() == home / ".cache" / "stoker"
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "elsewhere"))
    assert cache_folder() == home / "elsewhere" / "stoker"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert cache_folder() == home / ".cache" / "stoker"


def test_each_key_is_measured_once() -> None:
    assert remember("speed.json", "cpu a", lambda: 1, is_number) == 1
    assert remember("speed.json", "cpu b", lambda: 2, is_number) == 2
    assert remember("speed.json", "cpu a", not_again, is_number) == 1
    assert remember("speed.json", "cpu b", not_again, is_number) == 2


def test_an_unusable_value_is_neither_stored_nor_returned() -> None:
    assert remember("speed.json", "cpu", lambda: None, is_number) is None
    assert not cache_folder().exists()
    remember("speed.json", "cpu", lambda: "fast", lambda _value: True)
    assert remember("speed.json", "cpu", lambda: 3, is_number) == 3
    assert remember("speed.json", "cpu", not_again, is_number) == 3


def test_a_damaged_or_changed_file_is_replaced(home: Path) -> None:
    file = cache_folder() / "speed.json"
    file.parent.mkdir(parents=True)
    for content in (b"", b"[]", b"{", b"\xff\xfe"):
        file.write_bytes(content)
        assert remember("speed.json", "cpu", lambda: 4, is_number) == 4
        assert remember("speed.json", "cpu", not_again, is_number) == 4
    file.write_text(file.read_text().replace("4", "5", 1))
    assert remember("speed.json", "cpu", lambda: 6, is_number) == 6
    file.unlink()
    file.parent.rmdir()
    file.parent.write_text("in the way")
    assert remember("speed.json", "cpu", lambda: 5, is_number) == 5


def test_many_keys_are_measured_together_and_only_those_that_are_not_known() -> None:
    assert remember_all("speed.json", ["a", "c"], lambda missing: [10 + place for place in missing], is_number) == [
        10,
        11,
    ]
    asked: list[list[int]] = []

    def measure(missing: list[int]) -> list[Any]:
        asked.append(missing)
        return ["no number", 21]

    assert remember_all("speed.json", ["a", "b", "c", "d"], measure, is_number) == [10, "no number", 11, 21]
    assert asked == [[1, 3]]
    assert remember("speed.json", "d", not_again, is_number) == 21
    assert remember_all("speed.json", [], lambda _missing: [], is_number) == []
