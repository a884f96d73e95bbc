"""The choice of a decoder by measurement."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from stoker.data.images import calibration
from stoker.data.images.calibration import CalibrationResult, cache_file, choose_fastest, measure
from stoker.data.images.decoders import available_decoders
from stoker.data.images.decoding import Decoding, choose_decoder
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


def trial(text: str) -> list[str]:
    """A real process in the place of the measuring one."""
    return [
        sys.executable,
        "-c",
        "import os, signal, sys, json\norder = json.loads(sys.stdin.buffer.readline())\n" + text,
    ]


# The longer a name, the slower.
SAYS = "print(json.dumps({name: float(len(name)) for name in order['decoders']}))"


def test_the_fastest_on_the_users_own_files_is_chosen(files: list[bytes]) -> None:
    decoding, result = choose_decoder("auto", lambda: files, 64, max_pixels=CAP)
    assert result is not None
    assert set(result.microseconds) == set(available_decoders())
    assert result.microseconds[result.choice] == min(result.microseconds.values())
    assert all(5 < time < 1e6 for time in result.microseconds.values())
    assert decoding == Decoding(result.choice, CAP)
    assert not result.remembered


def test_a_choice_is_remembered_and_not_measured_again(files: list[bytes], own_cache: Path) -> None:
    first = choose_fastest(NAMES, files, 64, CAP)
    again = choose_fastest(NAMES, files, 64, CAP, trial("sys.exit('measured again')"))
    assert again == CalibrationResult(first.choice, first.microseconds, remembered=True)
    assert cache_file() == own_cache / "stoker" / "decoder.json"


def test_what_a_choice_depends_on_is_measured_anew(files: list[bytes]) -> None:
    command = trial(SAYS)
    assert not choose_fastest(NAMES, files, 64, CAP, command).remembered
    assert choose_fastest(NAMES, files, 64, CAP, command).remembered
    assert not choose_fastest(NAMES, files, 128, CAP, command).remembered
    assert not choose_fastest([*NAMES, "opencv"], files, 64, CAP, command).remembered
    assert not choose_fastest(NAMES, [data * 4 for data in files], 64, CAP, command).remembered
    assert choose_fastest(NAMES, [data + bytes(9) for data in files], 64, CAP, command).remembered


@pytest.mark.parametrize("ending", ["os.kill(os.getpid(), signal.SIGSEGV)", "os.abort()", "sys.exit(3)"])
def test_a_decoder_that_crashes_is_left_out(files: list[bytes], ending: str) -> None:
    text = f"for name in order['decoders']:\n    print(name, flush=True)\n    if name == 'bad': {ending}\n" + SAYS
    assert set(measure(["good", "bad", "fine"], files, 64, CAP, trial(text))) == {"good", "fine"}


def test_a_decoder_that_hangs_is_left_out(files: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "TRIAL_TIMEOUT_S", 2.0)
    text = "import time\nif 'bad' in order['decoders']: print('bad', flush=True); time.sleep(60)\n" + SAYS
    assert set(measure(["good", "bad"], files, 64, CAP, trial(text))) == {"good"}


@pytest.mark.parametrize("text", ["sys.exit(1)", "print('nonsense')", "print('{}')"])
def test_where_nothing_can_be_measured_the_first_is_taken(files: list[bytes], text: str) -> None:
    assert choose_fastest(NAMES, files, 64, CAP, trial(text)) == CalibrationResult("simplejpeg", {}, remembered=False)


def test_no_files_or_one_decoder_need_no_measuring() -> None:
    never = trial("sys.exit('measured')")
    assert choose_fastest(NAMES, [], 64, CAP, never).choice == "simplejpeg"
    assert choose_fastest(["pillow"], [b"x"], 64, CAP, never).choice == "pillow"


def test_bad_files_among_the_users_do_not_disturb(files: list[bytes]) -> None:
    bad = [images.bad_images()[name] for name in ("empty", "jpeg-420 cut at 50 %", "png bomb")]
    assert set(measure(NAMES, [*bad, *files], 64, CAP)) == set(NAMES)
    assert measure(NAMES, bad, 64, CAP) == {}


def test_a_decoder_that_is_not_there_is_left_out(files: list[bytes]) -> None:
    assert set(measure(["nothing-of-this-name", "pillow"], files, 64, CAP)) == {"pillow"}


@pytest.mark.parametrize("content", ["", "[]", "not json", '{"a": 1}'])
def test_a_damaged_cache_is_as_good_as_none(files: list[bytes], content: str) -> None:
    cache_file().parent.mkdir(parents=True)
    cache_file().write_text(content)
    assert not choose_fastest(NAMES, files, 64, CAP, trial(SAYS)).remembered
    assert choose_fastest(NAMES, files, 64, CAP, trial(SAYS)).remembered


def test_a_damaged_entry_is_measured_again(files: list[bytes]) -> None:
    choose_fastest(NAMES, files, 64, CAP, trial(SAYS))
    for damage in (7, {"simplejpeg": "fast"}, {"unknown": 1.0}, {}):
        known = json.loads(cache_file().read_text())
        cache_file().write_text(json.dumps(dict.fromkeys(known, damage)))
        assert not choose_fastest(NAMES, files, 64, CAP, trial(SAYS)).remembered


def test_a_cache_that_cannot_be_written_is_no_error(
    files: list[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert choose_fastest(NAMES, files, 64, CAP, trial(SAYS)).choice == "pillow"
