"""The run folder: its contents, atomic writes, and one process at a time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stoker.config import load_config
from stoker.core.errors import ConfigError
from stoker.core.files import write_text
from stoker.run.folder import open_run, run_folder_for, run_name_for
from stoker.run.lease import Lease, LeaseHeld

HOLDER = """
import sys
from pathlib import Path
from stoker.config import load_config
from stoker.run.folder import open_run
run = open_run(load_config(None, [f"runs_dir={sys.argv[1]}", "run_name=one"]).config, None)
print("held", flush=True)
sys.stdin.read()
"""
FORKING_HOLDER = HOLDER.replace(
    "print(", "import os\nif os.fork() == 0:\n    sys.stdin.read()\n    sys.exit()\nprint(", 1
)


def start_holder(runs: Path, program: str = HOLDER) -> subprocess.Popen[str]:
    holder = start_racer(runs, program)
    assert holder.stdout.readline() == "held\n"
    return holder


def start_racer(runs: Path, program: str = HOLDER) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program, str(runs)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def open_one(runs: Path):
    return open_run(load_config(None, [f"runs_dir={runs}", "run_name=one"]).config, None)


def test_it_holds_config_and_environment(tmp_path: Path) -> None:
    config = load_config(None, [f"runs_dir={tmp_path}", "run_name=first", "lr=0.3"]).config
    with open_run(config, None) as folder:
        assert load_config(folder.config_file).config == config
        environment = json.loads(folder.environment_file.read_text())
        assert environment["packages"]["torch"]
        assert environment["host"]["cpus"] == os.cpu_count()
        assert "git" in environment
    assert folder.root == tmp_path / "first"


def test_the_name_is_the_key_or_the_files_name() -> None:
    plain = load_config(None).config
    assert run_name_for(plain, Path("configs/rsb a2.yaml")) == "rsb-a2"
    assert run_name_for(plain, None) == "run"
    named = load_config(None, ["run_name=x1"]).config
    assert run_folder_for(named, Path("configs/a.yaml")).root == Path("runs/x1")


def test_secrets_do_not_reach_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "do-not-write-this")
    monkeypatch.setattr(sys, "argv", ["stoker", "train", "--token=do-not-write-this"])
    overrides = [f"runs_dir={tmp_path}", "data_root=https://user:do-not-write-this@host/x"]
    with open_run(load_config(None, overrides).config, None) as folder:
        for file in folder.root.iterdir():
            assert "do-not-write-this" not in file.read_text()


@pytest.mark.parametrize("program", [HOLDER, FORKING_HOLDER], ids=["alone", "with a child that lives on"])
def test_a_second_process_is_refused_until_the_first_one_crashes(tmp_path: Path, program: str) -> None:
    holder = start_holder(tmp_path, program)
    with pytest.raises(LeaseHeld) as caught:
        open_one(tmp_path)
    assert f"process {holder.pid} on" in caught.value.seen
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    for _ in range(2):
        with open_one(tmp_path) as folder:
            assert folder.config_file.exists()
            with pytest.raises(LeaseHeld):  # also for the same process
                open_one(tmp_path)


def test_one_of_many_concurrent_processes_wins(tmp_path: Path) -> None:
    racers = [start_racer(tmp_path) for _ in range(6)]
    # Whoever holds it does so until its input ends: after all have tried.
    answers = [racer.stdout.readline() for racer in racers if racer.stdout is not None]
    for racer in racers:
        racer.communicate()
    assert sorted(answers) == [""] * 5 + ["held\n"]


def test_a_lease_that_another_host_renews_is_respected(tmp_path: Path) -> None:
    lease = tmp_path / "lease.json"
    record = {"host": "another-host", "pid": 1, "renewed": time.time() - 5}
    lease.write_text(json.dumps(record))
    with pytest.raises(LeaseHeld, match="another-host"):
        Lease(lease).acquire()
    lease.write_text(json.dumps(record | {"renewed": time.time() - 3600}))
    Lease(lease).acquire().release()


def test_a_kill_in_the_middle_of_a_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_text(path, "old")
    program = (
        "import os, signal, sys; from pathlib import Path; from stoker.core.files import atomic_file\n"
        "with atomic_file(Path(sys.argv[1])) as s:\n"
        "    s.write('x' * 100000); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", program, str(path)])
    assert path.read_text() == "old"


def test_a_path_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    with pytest.raises(ConfigError, match="cannot be written") as caught:
        open_run(load_config(None, [f"runs_dir={blocker}/runs"]).config, None)
    assert caught.value.exit_code == 2


def test_a_folder_without_permission_is_refused_and_left_alone(open_folder: Path) -> None:
    program = (
        "import os, sys\nfrom stoker.config import load_config\nfrom stoker.run.folder import open_run\n"
        "from stoker.core.errors import ConfigError\n"
        "if os.getuid() == 0:\n    os.setgid(65534); os.setuid(65534)\n"
        "try:\n    open_run(load_config(None, ['runs_dir=' + sys.argv[1]]).config, None)\n"
        "except ConfigError as error:\n    print(error.seen)\n"
    )
    open_folder.chmod(0o555)  # closed to its owner too, who may be running the tests
    done = subprocess.run([sys.executable, "-c", program, str(open_folder)], capture_output=True, text=True)
    assert "cannot be written: Permission denied" in done.stdout
    assert list(open_folder.iterdir()) == []
