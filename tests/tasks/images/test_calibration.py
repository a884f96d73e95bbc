"""Choosing a decoder by measurement."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stoker.core.child import Parent
from stoker.tasks.images.decode import calibration
from stoker.tasks.images.decode.calibration import CalibrationResult, choose_decoder, choose_fastest, measure
from stoker.tasks.images.decode.crops import Decoding
from stoker.tasks.images.decode.decoders import available_decoders
from tests.conftest import PROJECT
from tests.support import decoder_trials as trials
from tests.support import images

CAP = 10_000_000
NAMES = ["simplejpeg", "pillow"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def files() -> list[bytes]:
    return [images.jpeg(images.noise(400, 300, seed), "420") for seed in range(6)]


@pytest.fixture
def cache_file(own_cache: Path) -> Path:
    return own_cache / "stoker" / "decoder.json"


Trial = Callable[[dict[str, Any], Parent], Any]
Replace = Callable[[Trial], None]


@pytest.fixture
def replace_trial(monkeypatch: pytest.MonkeyPatch) -> Replace:
    monkeypatch.setenv("PYTHONPATH", str(PROJECT))
    return lambda trial: monkeypatch.setattr(calibration, "decode_in_turn", trial)


def test_the_fastest_on_the_users_own_files_is_chosen(files: list[bytes]) -> None:
    decoding, result = choose_decoder("auto", lambda: files, 64, max_pixels=CAP)
    assert result is not None
    assert set(result.microseconds) == set(available_decoders())
    assert result.microseconds[result.choice] == min(result.microseconds.values())
    assert all(5 < time < 1e6 for time in result.microseconds.values())
    assert decoding == Decoding(result.choice, CAP)
    assert not result.remembered


def test_a_choice_is_remembered_and_not_measured_again(
    files: list[bytes], cache_file: Path, replace_trial: Replace
) -> None:
    first = choose_fastest(NAMES, files, 64, CAP)
    replace_trial(trials.raises)
    again = choose_fastest(NAMES, files, 64, CAP)
    assert again == CalibrationResult(first.choice, first.microseconds, remembered=True)
    assert cache_file.is_file()


def test_a_change_in_what_the_choice_depends_on_is_measured_again(files: list[bytes], replace_trial: Replace) -> None:
    replace_trial(trials.by_length)
    assert not choose_fastest(NAMES, files, 64, CAP).remembered
    assert choose_fastest(NAMES, files, 64, CAP).remembered
    assert not choose_fastest(NAMES, files, 128, CAP).remembered
    assert not choose_fastest(NAMES, files, 64, CAP, "draft").remembered
    assert not choose_fastest([*NAMES, "opencv"], files, 64, CAP).remembered
    assert not choose_fastest(NAMES, [data * 4 for data in files], 64, CAP).remembered
    assert choose_fastest(NAMES, [data + bytes(9) for data in files], 64, CAP).remembered


@pytest.mark.parametrize("trial", [trials.is_killed, trials.exits])
def test_a_decoder_that_crashes_is_left_out(files: list[bytes], trial: Trial, replace_trial: Replace) -> None:
    replace_trial(trial)
    assert set(measure(["good", "bad", "fine"], files, 64, CAP)) == {"good", "fine"}


def test_a_decoder_that_hangs_is_left_out(
    files: list[bytes], monkeypatch: pytest.MonkeyPatch, replace_trial: Replace
) -> None:
    monkeypatch.setattr(calibration, "TRIAL_TIMEOUT_S", 1.0)
    replace_trial(trials.hangs)
    assert set(measure(["good", "bad"], files, 64, CAP)) == {"good"}


@pytest.mark.parametrize("trial", [trials.fails, trials.raises, trials.says_nonsense, trials.finds_nothing])
def test_the_first_decoder_is_used_if_nothing_can_be_measured(
    files: list[bytes], trial: Trial, replace_trial: Replace, cache_file: Path
) -> None:
    replace_trial(trial)
    assert choose_fastest(NAMES, files, 64, CAP) == CalibrationResult("simplejpeg", {}, remembered=False)
    assert not cache_file.exists()


def test_no_files_or_one_decoder_need_no_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(calibration, "call")
    assert choose_fastest(NAMES, [], 64, CAP).choice == "simplejpeg"
    assert choose_fastest(["pillow"], [b"x"], 64, CAP).choice == "pillow"


def test_bad_files_in_the_data_do_not_disturb(files: list[bytes]) -> None:
    bad = [images.bad_images()[name] for name in ("empty", "jpeg-420 cut at 50 %", "png bomb")]
    assert set(measure(NAMES, [*bad, *files], 64, CAP)) == set(NAMES)
    assert measure(NAMES, bad, 64, CAP) == {}


def test_a_missing_decoder_is_left_out(files: list[bytes]) -> None:
    assert set(measure(["nothing-of-this-name", "pillow"], files, 64, CAP)) == {"pillow"}


def test_a_damaged_entry_is_measured_again(files: list[bytes], cache_file: Path, replace_trial: Replace) -> None:
    replace_trial(trials.by_length)
    choose_fastest(NAMES, files, 64, CAP)
    for damage in (7, {"simplejpeg": "fast"}, {"unknown": 1.0}, {}):
        known = json.loads(cache_file.read_text())
        cache_file.write_text(json.dumps(dict.fromkeys(known, damage)))
        assert not choose_fastest(NAMES, files, 64, CAP).remembered
