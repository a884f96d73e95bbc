"""Attaching timers to a command, or by one line of a script; and everything but the time stays as it was."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

import pytest

from stoker.attach import ring
from stoker.cli import main
from stoker.core.errors import UsageError, UserError
from stoker.doctor.script.recording import read_attached
from stoker.doctor.script.run_script import isolating_option, run_attached
from tests.doctor.script.conftest import SCRIPTS
from tests.support.waiting import DEADLINE_S


@pytest.mark.parametrize(
    ("command", "option"),
    [
        (["python", "-I", "train.py"], "I"),
        (["/usr/bin/python3.11", "-sE", "train.py"], "E"),
        (["python", "-W", "ignore", "-S", "-m", "train"], "S"),
        (["python", "-u", "train.py", "-I"], None),
        (["python", "-m", "train", "-E"], None),
        (["python", "-X", "dev", "train.py"], None),
        (["torchrun", "-I", "train.py"], None),
    ],
)
def test_options_that_prevent_attaching_are_found(command: list[str], option: str | None) -> None:
    assert isolating_option(command) == option


def test_an_isolated_python_is_refused_with_the_one_line_that_works() -> None:
    with pytest.raises(UserError) as refused:
        run_attached([sys.executable, "-I", "train.py"])
    assert refused.value.name == "cannot-attach"
    assert "import stoker; stoker.watch()" in str(refused.value.hint)


def test_a_python_that_a_shell_script_isolates_is_reported_afterwards(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"#!/bin/sh\nexec {sys.executable} -I -c 'print(1)'\n")
    script.chmod(0o755)
    result = run_attached([str(script)])
    assert capfd.readouterr().out == "1\n"
    assert result.observed is None
    assert "stoker.watch()" in result.notes[0]


def test_commands_that_do_not_exist_or_are_not_executable_are_refused_with_a_hint(tmp_path: Path) -> None:
    with pytest.raises(UserError) as missing:
        run_attached(["train_my_model.py", "--lr", "1"])
    assert missing.value.name == "command-not-found"
    assert missing.value.hint == "stoker doctor -- python train_my_model.py --lr 1"
    with pytest.raises(UsageError):
        run_attached([])
    script = tmp_path / "train.py"
    script.write_text("print(1)\n")
    with pytest.raises(UserError) as refused:
        run_attached([str(script)])
    assert refused.value.name == "command-cannot-run"
    assert "python" in str(refused.value.hint)


def test_the_users_own_sitecustomize_still_runs_and_the_path_is_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('mine')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    look = (
        "import sys; print([entry for entry in sys.path if 'on_path' in entry], sys.modules['sitecustomize'].__file__)"
    )
    run_attached([sys.executable, "-c", look])
    assert capfd.readouterr().out == f"mine\n[] {tmp_path}/sitecustomize.py\n"


def test_attaching_works_in_a_python_without_stoker_and_a_script_without_a_loader_says_so() -> None:
    bare = sys._base_executable  # type: ignore[attr-defined]
    code = "import importlib.util as u; assert u.find_spec('typer') is None; raise SystemExit(7)"
    result = run_attached([bare, "-c", code])
    assert result.exit_code == 7
    assert result.observed is None
    assert "no batch from a torch DataLoader" in result.notes[0]


def test_one_line_in_the_script_leaves_a_record_and_prints_nothing(tmp_path: Path) -> None:
    report = tmp_path / "report"
    script = [sys.executable, str(SCRIPTS / "watched.py"), str(report), "spawn"]
    done = subprocess.run(script, capture_output=True, text=True, timeout=DEADLINE_S)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    seen = read_attached(report)
    assert (seen.steps, len(seen.batches)) == (9, 10)
    assert seen.loader.start_method == "spawn"
    assert seen.host.cpus >= 1
    assert main(["report", str(report)]) == 0
    page = (report / "report.html").read_text()
    assert '"state":"watched"' in page
    path = next(report.glob("steps-*.ring"))
    data = bytearray(path.read_bytes())
    struct.pack_into("<I", data, 4, ring.VERSION + 1)
    path.write_bytes(data)
    with pytest.raises(UserError) as refused:
        read_attached(report)
    assert refused.value.name == "record-of-another-version"


def test_a_folder_without_a_record_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError) as refused:
        read_attached(tmp_path)
    assert refused.value.name == "no-record"
    assert "stoker.watch" in str(refused.value.hint)


def test_importing_stoker_does_not_import_the_watch() -> None:
    program = "import stoker, sys; assert 'stoker.doctor' not in sys.modules; stoker.watch; stoker.nothing"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "AttributeError: module 'stoker' has no attribute 'nothing'" in done.stderr


PROGRAM = """
import copy, io, pickle, sys
from stoker.attach.session import start
start(sys.argv[1])
import torch, torchvision, PIL.Image, numpy, cv2
from torchvision.io import decode_jpeg

def decode(data: torch.Tensor):
    return decode_jpeg(data)

torch.jit.script(decode)
assert pickle.loads(pickle.dumps(decode_jpeg)) is decode_jpeg
assert pickle.loads(pickle.dumps(numpy.load)) is numpy.load

class Files(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        with open(sys.argv[2], "rb") as stream:
            assert type(stream) is io.BufferedReader
            start = stream.read(3)
            assert stream.seek(0) == 0 and start + stream.read()[3:] == b"0123456789" * 1000
        with open(sys.argv[2]) as text:
            assert text.read(3) == "012"
        return torch.zeros(8)

model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
step = torch.compile(optimizer.step, backend="eager")
loader = torch.utils.data.DataLoader(Files(), batch_size=2)
copy.deepcopy(loader)
for inputs in loader:
    model(inputs).sum().backward()
    step()
assert pickle.loads(pickle.dumps(open)) is open
assert loader.dataset.__class__ is Files
"""


def test_scripting_compiling_pickling_and_reading(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_bytes(b"0123456789" * 1000)
    records = tmp_path / "records"
    records.mkdir()
    program = tmp_path / "program.py"  # TorchScript reads the source
    program.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, str(program), str(records), str(text)], capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.returncode == 0, done.stderr
    assert not any("note" in path.read_text() for path in records.glob("about-*.jsonl"))
