"""Attacks stoker as disks, kernels, schedulers and clumsy people do, and prints what survived; `make attack` runs it.

    python tools/attack.py                       all parts
    python tools/attack.py --kills 500 --seed 7  more kill points; a seed repeats a run
    python tools/attack.py --only files          one part

Exit code 1 if anything was lost. To add an attack: a function below, and a line in PARTS.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

PROJECT = Path(__file__).parents[1]
sys.path.insert(0, str(PROJECT))

from tests.support.damaged_runs import (  # noqa: E402 - the project's folder is not a package of the environment
    DOCUMENTS,
    LINES,
    damaged_folders,
    odd_kinds,
    peak_bytes,
    quick_predictions,
    read_everything,
    replace_by,
    whole_run,
)
from tests.support.kill_points import VARIABLE, a_point  # noqa: E402
from tests.support.proxy import Proxy  # noqa: E402
from tests.support.ready_process import ReadyProcess, Started, ready_process  # noqa: E402
from tests.support.s3_server import S3Server, running_s3_server  # noqa: E402
from tests.support.staging import files_of, kill_at_random_moments, start_staging, write_tree  # noqa: E402
from tests.support.tiny_training import assert_same_end, steps_done, write_config, write_images  # noqa: E402

MOST_BYTES = 300_000_000
"""Memory that reading any file may take beside what Python and the libraries take."""
HANG_S = 60
OUTAGES = ("refuse", "reset", "stall", "kill")
INSTALL = "tests.support.kill_points:install"
KEYS = {"epochs": 2, "batch_size": 8, "checkpoint_every_steps": 2, "ema_decay": 0.9, "drop_path": 0.2, "save_top_k": 1}


@dataclass
class Outcome:
    """What one part tried, and what it lost."""

    tried: int = 0
    lost: list[str] = field(default_factory=list)
    note: str = ""


@dataclass(frozen=True)
class Attack:
    """What the parts share."""

    folder: Path
    ready: ReadyProcess
    images: Path
    rng: random.Random

    def config(self, name: str, **keys: object) -> Path:
        place = self.folder / name
        place.mkdir()
        return write_config(place, self.images, **(KEYS | keys))


def attack_kills(attack: Attack, count: int, **keys: object) -> Outcome:
    """SIGKILL at named points of saves, epochs, validation and steps, several in one run; the end has the same bits."""
    outcome, number = Outcome(), 0
    whole = attack.config(f"whole-{len(keys)}", **keys)
    assert attack.ready.run("train", whole, cwd=whole.parent).code == 0
    while outcome.tried < count:
        number += 1
        config = attack.config(f"killed-{len(keys)}-{number}", **keys)
        points: list[str] = []
        for _ in range(12):
            if len(points) == 6 or outcome.tried + len(points) >= count:
                break
            point = a_point(attack.rng)
            run = attack.ready.start("train", config, cwd=config.parent, before=INSTALL, **{VARIABLE: point})
            if run.wait() == -signal.SIGKILL:
                points.append(point)
            elif run.code == 0:
                break  # finished before it got there
        last = attack.ready.run("train", config, cwd=config.parent)
        outcome.tried += len(points)
        _judge(outcome, last, config, whole, ", ".join(points))
        shutil.rmtree(config.parent)
    return outcome


def attack_process_loader(attack: Attack, count: int) -> Outcome:
    """The same with batches made by worker processes."""
    return attack_kills(attack, count, loader="process", num_workers=2)


def attack_ranks(attack: Attack, count: int) -> Outcome:
    """SIGKILL of one of two ranks at a named point; the other ends, and the same command resumes."""
    outcome = Outcome()
    keys = {"batch_size": 4, "devices": 2}
    whole = attack.config("whole-ranks", **keys)
    codes = [rank.wait() for rank in _start_ranks(attack, whole)]
    assert codes == [0, 0], codes
    for number in range(count):
        config = attack.config(f"ranks-{number}", **keys)
        point = f"{a_point(attack.rng)}@{attack.rng.randrange(2)}"
        killed = [rank.wait() for rank in _start_ranks(attack, config, **{VARIABLE: point})]
        outcome.tried += -signal.SIGKILL in killed
        last = _start_ranks(attack, config)
        codes = [rank.wait() for rank in last]
        if codes != [0, 0]:
            outcome.lost.append(f"{point}: {codes}: {last[0].err[-300:]}")
        else:
            _judge(outcome, last[0], config, whole, point)
        shutil.rmtree(config.parent)
    return outcome


def attack_workers(attack: Attack, count: int) -> Outcome:
    """SIGKILL and SIGBUS of a loader process: an error that names it, and the same command resumes."""
    outcome = Outcome()
    keys = {"loader": "process", "num_workers": 2, "epochs": 12}
    for number in range(count):
        config = attack.config(f"workers-{number}", **keys)
        run = attack.ready.start("train", config, cwd=config.parent)
        run.wait_for(lambda place=config.parent: steps_done(place / "runs" / "tiny") >= 2)  # type: ignore[misc]
        victims = _loader_processes(run.pid)
        for pid in attack.rng.sample(victims, min(1, len(victims))):
            os.kill(pid, attack.rng.choice([signal.SIGKILL, signal.SIGBUS, signal.SIGSEGV]))
        outcome.tried += 1
        if run.wait() != 1 or "error: worker-died" not in run.err:
            outcome.lost.append(f"worker: exit code {run.code}: {run.err[-300:]}")
        again = attack.ready.run("train", config, cwd=config.parent)
        if again.code != 0:
            outcome.lost.append(f"resume after a dead worker: exit code {again.code}: {again.err[-300:]}")
        shutil.rmtree(config.parent)
    return outcome


def attack_notices(attack: Attack, count: int) -> Outcome:
    """SIGTERM, SIGUSR1 and SIGUSR2 at any moment from the first line on: exit code 143 and a line of text."""
    outcome = Outcome()
    for number in range(count):
        config = attack.config(f"notices-{number}", epochs=500, **({"devices": 2} if number % 3 == 2 else {}))
        sent = attack.rng.choice([signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
        process = subprocess.Popen(
            [sys.executable, "-m", "stoker", "train", str(config)], cwd=config.parent, stderr=subprocess.PIPE, text=True
        )
        # From here on somebody listens: the interpreter itself needs a tenth of a second.
        time.sleep(0.4 + attack.rng.random() * 8)
        process.send_signal(sent)
        _, said = process.communicate(timeout=HANG_S * 4)
        outcome.tried += 1
        if process.returncode != 143 or sent.name not in said:
            outcome.lost.append(f"{sent.name}: exit code {process.returncode}: {said[-300:]}")
        shutil.rmtree(config.parent)
    return outcome


def attack_outages(attack: Attack, count: int) -> Outcome:
    """A store that refuses, resets, stalls, or is killed and started again, during steps and validation; every other
    time with a notice in the middle: exit code 143 or 130, a save, and in the end the same bits."""
    outcome, slowest_s = Outcome(), 0.0
    images = write_images(attack.folder / "large", side=256)  # more than is read ahead
    keys: dict[str, object] = {"num_workers": 2, "lookahead": "1MB", "prefetch_factor": 1}
    whole = attack.config("whole-outages", **keys, data_root=str(images))
    assert attack.ready.run("train", whole, cwd=whole.parent).code == 0
    with running_s3_server() as server:
        url, proxy = server.put_folder(images, "tiny"), Proxy(server.port, latency=0.1).start()
        variables = server.environment(proxy.endpoint)
        for number in range(count):
            # The kinds, moments and engines in turn, so that no seed leaves one out.
            kind = OUTAGES[number % len(OUTAGES)]
            loader, step = ("thread", "process")[number // 2 % 2], (2, 6)[number // 3 % 2]
            sent = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)[number // 2 % 3] if number % 2 else None
            config = attack.config(f"outage-{number}", **keys, data_root=url, loader=loader)
            run = attack.ready.start("train", config, cwd=config.parent, **variables)
            run.wait_for(lambda place=config.parent, step=step: steps_done(place / "runs" / "tiny") >= step)  # type: ignore[misc]
            with broken_down(kind, proxy, server):
                time.sleep(1.5 + attack.rng.random() * 5)
                if sent is not None:
                    run.send(sent)
                    began_s = time.monotonic()
                    run.wait()
                    slowest_s = max(slowest_s, time.monotonic() - began_s)
            outcome.tried += 1
            what = f"{kind}, {loader}, step {step}, {sent.name if sent else 'no notice'}"
            if run.wait() != (0 if sent is None else 130 if sent == signal.SIGINT else 143):
                outcome.lost.append(f"{what}: exit code {run.code}: {run.err[-300:]}")
            last = run if sent is None else attack.ready.run("train", config, cwd=config.parent, **variables)
            _judge(outcome, last, config, whole, what)
            shutil.rmtree(config.parent)
        proxy.stop()
    outcome.note = f"left after {slowest_s:.1f} s at most" if slowest_s else ""
    return outcome


def attack_staging(attack: Attack, count: int) -> Outcome:
    """SIGKILL of `stage` at random moments: whatever its manifest lists is whole, and it can be completed."""
    contents = write_tree(attack.folder / "source", files=400)
    source, target = str(attack.folder / "source"), attack.folder / "target"
    outcome = Outcome()
    try:
        outcome.tried = kill_at_random_moments(source, target, contents, count, seed=attack.rng.randrange(1 << 30))
        assert start_staging(source, target).wait() == 0, "the last one could not be completed"
        assert files_of(target) == contents, "files differ"
    except AssertionError as error:
        outcome.lost.append(f"stage: {str(error)[:300]}")
    return outcome


def attack_files(attack: Attack, count: int) -> Outcome:
    """Damaged, odd and hostile files of a run, read by everything that reads them: no bug, no hang, little memory."""
    outcome = Outcome()
    quick_predictions()
    signal.signal(signal.SIGALRM, _hang)
    whole = whole_run(attack.folder / "files")
    before = peak_bytes()

    def read(what: str, folder: Path) -> None:
        outcome.tried += 1
        signal.alarm(HANG_S)
        try:
            read_everything(folder)
        except Exception as error:
            outcome.lost.append(f"{what}: {type(error).__name__}: {str(error)[:200]}")
        finally:
            signal.alarm(0)

    (attack.folder / "scratch").mkdir()
    for what, folder in damaged_folders(whole, attack.folder / "scratch", count, attack.rng.randrange(1 << 30)):
        read(what, folder)
    for name in (*LINES, *DOCUMENTS):
        file, content = whole / name, (whole / name).read_bytes()
        for kind, make in odd_kinds(file, large=name in LINES[:2]):
            replace_by(file, make)
            read(f"{name} as {kind}", whole)
        replace_by(file, lambda file=file, content=content: file.write_bytes(content))  # type: ignore[misc]
    outcome.note = f"{(peak_bytes() - before) / 1e6:,.0f} MB of memory at most"
    if peak_bytes() - before > MOST_BYTES:
        outcome.lost.append(f"memory: {outcome.note}")
    return outcome


@dataclass(frozen=True)
class Part:
    """One line of the table."""

    run: Callable[[Attack, int], Outcome]
    count: int
    """How often, if nobody says."""


PARTS = {
    "kills": Part(attack_kills, 200),
    "ranks": Part(attack_ranks, 12),
    "processes": Part(attack_process_loader, 12),
    "workers": Part(attack_workers, 4),
    "notices": Part(attack_notices, 9),
    "outages": Part(attack_outages, 12),
    "staging": Part(attack_staging, 6),
    "files": Part(attack_files, 1000),
}


def run(
    counts: dict[str, int], seed: int, tell: Callable[[str, Outcome], None] = lambda _name, _outcome: None
) -> dict[str, Outcome]:
    """The outcome of each part that has a count; `tell` gets each when it is known."""
    found = {}
    with tempfile.TemporaryDirectory(prefix="stoker-attack-") as name:
        folder = Path(name)
        images = write_images(folder / "images")
        (folder / "ready").mkdir()
        with ready_process(folder / "ready") as ready:
            for part, count in counts.items():
                (folder / part).mkdir()
                found[part] = PARTS[part].run(Attack(folder / part, ready, images, random.Random(seed)), count)
                tell(part, found[part])
    return found


HEAD = f"{'attack':<12}{'tried':>8}{'survived':>10}{'lost':>6}"


def row(name: str, outcome: Outcome) -> str:
    """A line of the table."""
    lost = len(outcome.lost)
    return f"{name:<12}{outcome.tried:>8,}{outcome.tried - lost:>10,}{lost:>6,}   {outcome.note}".rstrip()


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, part in PARTS.items():
        parser.add_argument(f"--{name}", type=int, default=part.count, metavar="N", help=part.run.__doc__)
    parser.add_argument("--only", choices=PARTS, action="append", help="only this part; may be repeated")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000)
    given = parser.parse_args(arguments)
    counts = {name: getattr(given, name) for name in given.only or PARTS}
    print(f"seed {given.seed}\n{HEAD}", flush=True)
    wanted = {name: count for name, count in counts.items() if count}
    found = run(wanted, given.seed, lambda name, outcome: print(row(name, outcome), flush=True))
    lost = [f"lost: {name}: {what}" for name, outcome in found.items() for what in outcome.lost]
    print("\n".join(lost or ["nothing was lost"]))
    return 1 if lost else 0


def _judge(outcome: Outcome, last: Started, config: Path, whole: Path, points: str) -> None:
    if last.code != 0:
        outcome.lost.append(f"{points}: the resumed run exits with {last.code}: {last.err[-300:]}")
        return
    try:
        assert_same_end(config.parent / "runs" / "tiny", whole.parent / "runs" / "tiny")
    except Exception as error:
        outcome.lost.append(f"{points}: {str(error)[:300]}")


def _start_ranks(attack: Attack, config: Path, **variables: str) -> list[Started]:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_WORLD_SIZE": "2"} | variables
    return [
        attack.ready.start(
            "train", config, "devices=1", cwd=config.parent, before=INSTALL, RANK=rank, LOCAL_RANK=rank, **shared
        )
        for rank in ("0", "1")
    ]


def _loader_processes(pid: int) -> list[int]:
    """The workers of a run: children of its fork server."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                grandparent = int(Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, ValueError):
                continue
            if grandparent == pid:
                found.append(int(entry.name))
    return found


@contextmanager
def broken_down(kind: str, proxy: Proxy, server: S3Server) -> Iterator[None]:
    """An outage inside the block."""
    if kind in ("reset", "stall"):
        proxy.outage = "reset" if kind == "reset" else "stall"
    elif kind == "refuse":
        proxy.stop()
    else:
        server.stop()
    yield
    if kind == "refuse":
        proxy.start()
    elif kind == "kill":
        server._start()
        proxy.upstream_port = server.port
    proxy.outage = None


def _hang(*_: object) -> None:
    raise TimeoutError("it hangs")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
