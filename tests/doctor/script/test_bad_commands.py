"""Commands that timers cannot be attached to, and scripts that have nothing to time."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from stoker.core.errors import UsageError, UserError
from stoker.doctor.script.run_script import isolating_option, run_attached


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
