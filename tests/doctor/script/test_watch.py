"""`stoker.watch()` in one line of a script, and reading back what it recorded."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

import pytest

from stoker.attach import ring
from stoker.cli import main
from stoker.core.errors import UserError
from stoker.doctor.script.recording import read_attached
from tests.doctor.script.conftest import SCRIPTS
from tests.support.waiting import DEADLINE_S


def test_one_line_in_the_script_leaves_a_record_and_prints_nothing(tmp_path: Path) -> None:
    report = tmp_path / "report"
    script = [sys.executable, str(SCRIPTS / "watched.py"), str(report), "spawn"]
    done = subprocess.run(script, capture_output=True, text=True, timeout=DEADLINE_S)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    seen = read_attached(report)
    assert (seen.steps, len(seen.batches)) == (9, 10)
    assert seen.loader is not None
    assert seen.loader.start_method == "spawn"
    assert seen.host is not None
    assert seen.host.cpus >= 1
    assert main(["report", str(report)]) == 0
    page = (report / "report.html").read_text()
    assert '"state":"watched"' in page
    _another_version(report)
    with pytest.raises(UserError) as refused:
        read_attached(report)
    assert refused.value.name == "record-of-another-version"


def _another_version(report: Path) -> None:
    path = next(report.glob("steps-*.ring"))
    data = bytearray(path.read_bytes())
    struct.pack_into("<I", data, 4, ring.VERSION + 1)
    path.write_bytes(data)


def test_a_folder_without_a_record_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError) as refused:
        read_attached(tmp_path)
    assert refused.value.name == "no-record"
    assert "stoker.watch" in str(refused.value.hint)


def test_importing_stoker_does_not_import_the_watch() -> None:
    program = "import stoker, sys; assert 'stoker.doctor' not in sys.modules; stoker.watch; stoker.nothing"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "AttributeError: module 'stoker' has no attribute 'nothing'" in done.stderr
