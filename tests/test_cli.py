"""The program from outside: help, JSON, errors, exit codes, completion."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml

from stoker import __version__
from stoker.cli import COMMANDS, NOW_KEYS, build_parser, main
from stoker.config import load_config
from tests.conftest import PROJECT, Run
from tests.support.waiting import DEADLINE_S

HEAVY = ("torch", "numpy", "pydantic", "yaml", "typer", "rich")


def test_help_imports_nothing_heavy() -> None:
    program = (
        "import sys; from stoker.cli import main; main(['--help']);"
        f"sys.exit(str([m for m in {HEAVY} if m in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stderr.strip() == "[]"
    assert all(f"\n  {name} " in done.stdout for name in COMMANDS)


def test_the_table_of_commands_agrees_with_the_parser_and_the_folder() -> None:
    parser = build_parser(list(COMMANDS))
    assert {name: command.get_short_help_str(200) for name, command in parser.commands.items()} == COMMANDS
    files = {path.stem for path in (PROJECT / "src/stoker/commands").glob("*.py")} - {"__init__", "options"}
    assert {name.replace("-", "_") for name in COMMANDS} == files


ALL_HELPS = """
import sys
from stoker.cli import main
for name in sys.argv[1:]:
    main([name, "--help"])
    print(chr(0), end="")
    if {"torch", "numpy"} & set(sys.modules):
        sys.exit(name)
"""


def test_every_commands_help_is_light_and_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    done = subprocess.run([sys.executable, "-c", ALL_HELPS, *COMMANDS], capture_output=True, text=True)
    assert done.stderr == ""
    helps = dict(zip(COMMANDS, done.stdout.split("\0"), strict=False))
    for name, text in list(helps.items()):
        if "COMMAND [ARGS]" in text:
            listed = [line for line in text.split("Commands:")[1].splitlines() if line.startswith("  ")]
            del helps[name]
            for sub in [line.split()[0] for line in listed if line[2] != " "]:
                main([name, sub, "--help"])
                helps[f"{name} {sub}"] = capsys.readouterr().out
    assert len(helps) >= len(COMMANDS)
    assert [name for name, text in helps.items() if "Example: stoker " not in text or "--json" not in text] == []


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"], ["help"]])
def test_help_is_the_first_thing(new_stoker: Run, arguments: list[str]) -> None:
    ended = new_stoker(*arguments)
    assert ended.code == 0
    assert ended.out.startswith("Usage: stoker COMMAND")


def test_version(new_stoker: Run) -> None:
    assert new_stoker("--version").out == f"stoker {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["confg"], "stoker config --help"),
        (["--jsn"], "is not an option of stoker"),
        (["config"], "a command is missing"),
        (["config", "sow"], "No such command"),
        (["config", "show"], "Missing argument 'CONFIG'"),
        (["config", "show", "--nope"], "No such option"),
        (["config", "keys", "learning_rat"], "'learning_rat' is not a key"),
    ],
)
def test_wrong_usage_exits_2_without_a_traceback(stoker: Run, arguments: list[str], expected: str) -> None:
    ended = stoker(*arguments)
    assert ended.code == 2
    assert expected in ended.err
    assert "hint:" in ended.err
    assert "Traceback" not in ended.err


def test_an_option_that_became_a_key_is_refused_with_what_to_type(stoker: Run) -> None:
    for option, setting in NOW_KEYS.items():
        assert f"hint: {setting}" in stoker("predict", "run", "volume", option, "1").err
    load_config(None, ["task=segment3d", *(text for text in NOW_KEYS.values() if text != "KEY=VALUE")])


def test_show_is_itself_a_valid_config(stoker: Run, tmp_path: Path) -> None:
    shown = stoker("config", "show", PROJECT / "configs/rsb_a2.yaml", "epochs=7", "lr=0.25")
    assert shown.code == 0
    assert "rsb_a1.yaml:" in shown.out
    assert "# command line: epochs=7" in shown.out
    assert "# default" in shown.out
    again = tmp_path / "again.yaml"
    again.write_text(shown.out)
    ours = stoker("config", "show", again, "--json").json["config"]
    assert (
        ours
        == stoker("config", "show", PROJECT / "configs/rsb_a2.yaml", "epochs=7", "lr=0.25", "--json").json["config"]
    )
    assert ours["lr"] == 0.25


def test_json_is_one_document_even_for_an_error(stoker: Run, tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("lr: 1\nbatch_sie: 3\n")
    ended = stoker("config", "show", path, "--json")
    assert ended.code == 2
    error = ended.json["error"]
    assert error["exit_code"] == 2
    assert error["problems"][0]["where"] == f"{path}:2"
    assert error["problems"][0]["hint"] == "did you mean batch_size?"


def test_only_the_first_rank_prints_an_error_in_full() -> None:
    command = [sys.executable, "-m", "stoker", "config", "show", "absent.yaml"]
    told = {}
    for rank in ("0", "3"):
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"RANK": rank})
        assert done.returncode == 2
        told[rank] = done.stderr.strip().splitlines()
    assert len(told["0"]) > 1
    assert len(told["3"]) == 1
    assert told["3"][0].startswith("rank 3: ")


def test_keys_are_a_complete_reference(stoker: Run) -> None:
    reference = stoker("config", "keys", "--json").json
    assert len(reference) > 90
    for name, about in reference.items():
        assert about["meaning"].endswith("."), name
        assert about["type"], name
    assert reference["epochs"]["aliases"] == ["max_epochs"]
    text = stoker("config", "keys").out
    assert all(f"\n{name} (" in text for name in reference)


def test_the_schema_accepts_our_configs_and_rejects_mistakes(stoker: Run) -> None:
    schema = stoker("config", "schema").json
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    for path in (PROJECT / "configs").glob("*.yaml"):
        assert list(validator.iter_errors(yaml.safe_load(path.read_text()))) == [], path
    for wrong in (
        {"lrr": 1},
        {"training": {"wokers": 1}},
        {"batch_size": "many"},
        {"optimizer": "sdg"},
        {"lr": -1},
    ):
        assert list(validator.iter_errors(wrong)), wrong


def test_a_16_bit_config_is_not_an_error_without_a_gpu(stoker: Run) -> None:
    ended = stoker("config", "show", PROJECT / "configs/single_gpu_full.yaml", CUDA_VISIBLE_DEVICES="")
    assert ended.code == 0
    assert "note: precision: 16-mixed needs a GPU; using 32 on this machine" in ended.err


def test_a_closed_pipe_is_not_an_error() -> None:
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {sys.executable} -m stoker config keys | head -n 1"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0
    assert done.stderr == ""


CRASH = """
import sys, types
import stoker.cli as cli
module = types.ModuleType("crash")
def register(app):
    @app.command()
    def crash(json: bool = False):
        {body}
module.register = register
sys.modules["stoker.commands.crash"] = module
cli.COMMANDS["crash"] = ""
sys.exit(cli.main(["crash"]))
"""


def run_crash(body: str, home: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"XDG_STATE_HOME": str(home)} | variables
    return subprocess.run(
        [sys.executable, "-c", CRASH.format(body=body), "--api-key=abcd1234efgh"],
        capture_output=True, text=True, env=environment,
    )  # fmt: skip


def test_our_bug_exits_3_and_writes_a_log_without_secrets(tmp_path: Path) -> None:
    body = (
        "from stoker.config.reading import load_for_command; "
        "load_for_command(None, ['data_root=s3://user:hunter22@host/b', 'lr=0.125']); "
        "raise ZeroDivisionError('AKIAABCDEFGHIJKLMNOP')"
    )
    done = run_crash(body, tmp_path, WANDB_API_KEY="wandb-secret-value")
    assert done.returncode == 3
    assert "Traceback" not in done.stderr
    (log,) = (tmp_path / "stoker").glob("crash-*.log")
    assert str(log) in done.stderr
    text = log.read_text()
    assert "ZeroDivisionError" in text
    assert "lr: 0.125" in text
    assert '"torch"' in text
    for secret in ("hunter22", "AKIAABCDEFGHIJKLMNOP", "wandb-secret-value", "abcd1234efgh"):
        assert secret not in text


def test_a_bug_where_nothing_can_be_written_still_shows_the_details(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    done = run_crash("raise ZeroDivisionError('x')", blocker, TMPDIR=str(blocker), TEMP="", TMP="")
    assert done.returncode == 3
    assert "ZeroDivisionError" in done.stderr


def test_ctrl_c_exits_130() -> None:
    body = "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(5)"
    done = run_crash(body, Path("/tmp"))
    assert done.returncode == 130
    assert "stopped by Ctrl-C" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP])
def test_a_notice_is_heard_from_the_first_line_on(tmp_path: Path, number: signal.Signals) -> None:
    # Where a library tries an import, it takes any exception for a part that is not installed.
    body = (
        "with __import__('contextlib').suppress(Exception):"
        f" import os, time; os.kill(os.getpid(), {int(number)}); time.sleep(60)"
    )
    done = run_crash(body, tmp_path)
    assert done.returncode == 143
    assert f"error: preempted\n  stopped by {number.name}\n\nhint: the same command" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_notice_is_heard_in_c_code_and_if_it_came_before_anybody_listened() -> None:
    # A lock that its own thread holds: nothing but the end of the process leaves that call.
    stuck = (
        "import ctypes, os, threading; lock = ctypes.create_string_buffer(64); libc = ctypes.CDLL(None);"
        " libc.pthread_mutex_lock(lock); threading.Timer(0.2, os.kill, (os.getpid(), 10)).start();"
        " libc.pthread_mutex_lock(lock)"
    )
    early = "import os, signal; signal.pthread_sigmask(signal.SIG_BLOCK, [10]); os.kill(os.getpid(), 10)"
    for program in (
        f"import stoker.core.signals as n; n.PATIENCE_S = 0.2\n{CRASH.format(body=stuck)}",
        f"{early}\n{CRASH.format(body='raise SystemExit(9)')}",
    ):
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=DEADLINE_S)
        assert done.returncode == 143, done.stderr
        assert "stopped by SIGUSR1" in done.stderr


def test_an_end_of_file_that_nobody_expected_is_a_bug_and_no_interruption(tmp_path: Path) -> None:
    done = run_crash("raise EOFError('a pipe broke')", tmp_path)
    assert done.returncode == 3
    assert "EOFError: a pipe broke" in done.stderr
    assert "Ctrl-C" not in done.stderr


def test_preempted_exits_143() -> None:
    body = "from stoker.core.errors import Preempted; raise Preempted('preempted', 'SIGTERM at step 3')"
    assert run_crash(body, Path("/tmp")).returncode == 143
    assert signal.SIGTERM + 128 == 143


def complete(words: str, **variables: str) -> list[str]:
    environment = os.environ | {
        "_STOKER_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split(" ")) - 1),
    }  # fmt: skip
    done = subprocess.run([sys.executable, "-m", "stoker"], capture_output=True, text=True, env=environment)
    return done.stdout.split()


def test_the_shell_completes_commands_and_options() -> None:
    assert complete("stoker conf") == ["config"]
    assert set(complete("stoker config ")) == {"show", "keys", "schema", "import"}
    assert "--json" in complete("stoker config show --")


def test_the_completion_script_is_shown() -> None:
    # Which shell is asked of the parent processes: the tests themselves may have been started without any.
    command = ["bash", "-c", '"$0" -m stoker --show-completion; exit $?', sys.executable]
    done = subprocess.run(command, capture_output=True, text=True)
    assert "_STOKER_COMPLETE" in done.stdout, done.stderr


def test_json_documents_contain_no_nan(capsys: pytest.CaptureFixture[str]) -> None:
    from stoker.core.console import print_json

    with pytest.raises(ValueError):
        print_json({"x": float("nan")})
    print_json({"ä": 1})
    assert json.loads(capsys.readouterr().out) == {"ä": 1}
