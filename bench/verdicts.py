"""The doctor's accuracy: its verdicts on scripts with one known fault each, run for a few seconds.

Covers a plain torch script, Lightning, Hugging Face's Trainer and accelerate, and a script that trains on volumes, all
attached to unmodified, and our own loader. A case is repeated if other programs took the cores while it ran.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from bench.peers.environments import python_of
from bench.quiet import wait_for_quiet
from bench.rounds import RESULTS, keep
from bench.verdict_cases.cases import CASES, HABITS, LOOP, Case, Script
from stoker.tasks.demo import write_scrolls

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "bench" / "verdict_cases"
ENVIRONMENTS: dict[Script, str] = {"transformers": "huggingface", "accelerate": "huggingface"}
"""Environments of the scripts that do not have one of the same name."""
RIGHT = 0.95
TIMEOUT_S = 300.0
TRIES = 3
DISTURBED = "cores-are-taken"
NOTHING = "nothing in the loop"
PICTURES, SIDE, HUGE_SIDE = 1600, 700, 9000
VOLUMES, VOLUME_SIDE, VOLUME_STEPS, PATCH = 12, 96, 30, ("24", "40", "40")
CGROUP = Path("/sys/fs/cgroup/cpu")
PERIOD_US = 100_000


def write_pictures(folder: Path) -> None:
    """Two data sets of class folders with JPEGs: `plain`, and `huge`, with a few pictures far larger than the rest."""
    rng = np.random.default_rng(0)
    noise = Image.fromarray(rng.integers(0, 255, (SIDE // 4, SIDE // 4, 3), dtype=np.uint8)).resize((SIDE, SIDE))
    huge = noise.resize((HUGE_SIDE, HUGE_SIDE))
    for root in ("plain", "huge"):
        for number in range(PICTURES):
            place = folder / root / "train" / f"class{number % 2}"
            place.mkdir(parents=True, exist_ok=True)
            rare = root == "huge" and number % 200 == 199
            picture = huge if rare else noise if root == "plain" else noise.resize((100, 100))
            picture.save(place / f"{number}.jpg", quality=85)
    noise.save(folder / "large.jpg", quality=85)


@contextlib.contextmanager
def served(case: Case) -> Iterator[str | None]:
    """The URL of the case's server, or None if it has no server."""
    if case.server is None:
        yield None
        return
    command = [sys.executable, str(FOLDER / "slow_server.py"), *map(str, case.server)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{process.stdout.readline().strip()}/object"
        finally:
            process.terminate()


@contextlib.contextmanager
def limited(case: Case) -> Iterator[list[str]]:
    """The command prefix that applies the case's cores, quota and shared memory."""
    before = ["taskset", "-c", case.cpus]
    if case.shm_mb is not None:
        mount = f'mount -t tmpfs -o size={case.shm_mb}m tmpfs /dev/shm && exec "$@"'
        before = ["unshare", "-m", "sh", "-c", mount, "sh", *before]
    if case.quota is None:
        yield before
        return
    group = CGROUP / f"stoker_verdicts_{os.getpid()}"
    group.mkdir()
    try:
        (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (group / "cpu.cfs_quota_us").write_text(str(int(case.quota * PERIOD_US)))
        yield ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh", *before]
    finally:
        for _ in range(50):
            with contextlib.suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.1)


def run(case: Case, folder: Path, seconds: float, nice: int) -> dict[str, Any]:
    """The doctor's JSON document for a case."""
    with served(case) as url, limited(case) as before:
        if case.script == "own":
            root = folder / ("huge" if "data_root=HUGE" in case.settings else "plain")
            settings = [text for text in case.settings if text != "data_root=HUGE"]
            command = [
                sys.executable, "-m", "bench.verdict_cases.own_loader", json.dumps(case.faults | {"seconds": seconds}),
                f"data_root={root}", f"index_dir={folder / 'index'}", "pin_memory=false", "task=classify", *settings,
            ]  # fmt: skip
        elif case.script == "volumes":
            arguments = [str(folder / "volumes"), "--steps", str(VOLUME_STEPS), "--patch", *PATCH, *case.settings]
            script = [sys.executable, str(FOLDER.parent / "document_replica.py"), *arguments]
            command = [sys.executable, "-m", "stoker", "doctor", "--json", "--", *script]
        else:
            faults = case.faults | {"seconds": case.seconds or seconds} | ({"url": url} if url else {})
            if faults.get("jpeg"):
                faults["jpeg"] = str(folder / "large.jpg")
            python = python_of(ENVIRONMENTS.get(case.script, case.script))
            script = [str(python), str(FOLDER / f"{case.script}_script.py"), json.dumps(faults)]
            command = [sys.executable, "-m", "stoker", "doctor", "--json", "--", *script]
        try:
            done = subprocess.run(
                ["nice", "-n", str(nice), *before, *command], capture_output=True, text=True, timeout=TIMEOUT_S,
                cwd=ROOT, env=os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
            )  # fmt: skip
            document: dict[str, Any] = json.loads(done.stdout)
        except subprocess.TimeoutExpired:
            return {"verdict": f"nothing after {TIMEOUT_S:.0f} s", "wait_share": None, "findings": []}
        except ValueError:
            sys.stderr.write(done.stderr[-2000:])
            return {"verdict": f"exit {done.returncode}", "wait_share": None, "findings": []}
    return document


def is_right(case: Case, document: dict[str, Any]) -> bool:
    found = {finding["id"] for finding in document["findings"]}
    if case.loop is not None:
        return found & set(LOOP) == set(case.loop)
    as_listed = case.habits is None or found & set(HABITS) == set(case.habits)
    return document.get("verdict") in case.verdicts and (case.finding is None or case.finding in found) and as_listed


def truth_of(case: Case) -> str:
    """What must be said: the verdict, or what the loop does."""
    return case.verdicts[0] if case.loop is None else " + ".join(case.loop) or NOTHING


def said_in(case: Case, document: dict[str, Any]) -> str:
    """What was said, in the same words."""
    if case.loop is not None:
        found = {finding["id"] for finding in document["findings"]}
        return " + ".join(name for name in LOOP if name in found) or NOTHING
    verdict: str = document["verdict"]
    return "storage-bound" if verdict.startswith("storage-bound") else verdict


def confusion(rows: list[dict[str, Any]]) -> str:
    """The confusion matrix as text: truth by verdict."""
    pairs = Counter((row["truth"], row["verdict"]) for row in rows)
    truths, verdicts = (sorted({pair[place] for pair in pairs}) for place in (0, 1))
    width = max(map(len, truths))
    lines = [f"{'truth':<{width}}  " + "  ".join(verdicts)]
    for truth in truths:
        cells = [str(pairs[truth, verdict] or ".").rjust(len(verdict)) for verdict in verdicts]
        lines.append(f"{truth:<{width}}  " + "  ".join(cells))
    return "\n".join(lines)


def _right(rows: list[dict[str, Any]]) -> float:
    return sum(bool(row["right"]) for row in rows) / len(rows)


def row_of(case: Case, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """What the doctor said about a case; tried again if others took the cores."""
    tries = 1
    wait_for_quiet(arguments.patience)
    document = run(case, folder, arguments.seconds, arguments.nice)
    while document["verdict"] == DISTURBED and case.loop is None and tries < TRIES:
        tries += 1
        wait_for_quiet(arguments.patience)
        document = run(case, folder, arguments.seconds, arguments.nice)
    right, said = is_right(case, document), said_in(case, document)
    sys.stderr.write(f"{'right' if right else 'WRONG'}  {case.name}: {said}")
    sys.stderr.write("\n" if right else f"; {json.dumps(document)[:900]}\n")
    return {
        "case": case.name, "truth": truth_of(case), "verdict": said, "right": right, "tries": tries,
        "held_out": case.held_out, "wait_share": document["wait_share"],
        "findings": [finding["id"] for finding in document["findings"]],
    }  # fmt: skip


def earlier() -> list[dict[str, Any]]:
    """The rows of a run that was not finished."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        document = json.loads((RESULTS / "verdicts" / "result.json").read_text())["measured"]
        if not document["complete"]:
            rows: list[dict[str, Any]] = document["rows"]
            return rows
    return []


def summary_of(rows: list[dict[str, Any]], *, complete: bool) -> dict[str, Any]:
    held_out = [row for row in rows if row["held_out"]]
    by_kind = Counter(row["case"].split(":")[0] for row in rows)
    document = {"cases": len(rows), "complete": complete, "right": round(_right(rows), 4), "by_script": dict(by_kind)}
    if held_out:
        document |= {"held_out": len(held_out), "right_of_held_out": round(_right(held_out), 4)}
    return document | {"confusion": confusion(rows).splitlines(), "rows": rows}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="only cases whose name contains this")
    parser.add_argument("--skip", type=int, default=0, help="leave out so many cases at the beginning")
    parser.add_argument("--held-out", action="store_true", help="only the cases that no threshold was tuned on")
    parser.add_argument("--tuned", action="store_true", help="only the others")
    parser.add_argument("--resume", action="store_true", help="keep the rows of a run that was not finished")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no case after this; --resume continues")
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--patience", type=float, default=20.0, help="seconds to wait for idle cores before each run")
    parser.add_argument("--nice", type=int, default=0, help="nice level; negative on a busy machine (needs root)")
    parser.add_argument("--dry", action="store_true", help="do not write to results/")
    arguments = parser.parse_args()
    cases = [case for case in CASES if arguments.only is None or arguments.only in case.name]
    cases = [case for case in cases if case.held_out or not arguments.held_out]
    cases = [case for case in cases if not (case.held_out and arguments.tuned)]
    installed = {script for script in {case.script for case in cases} if python_of(ENVIRONMENTS.get(script, script))}
    cases = [case for case in cases if case.script in installed]
    rows = earlier() if arguments.resume else []
    done, began_s = {row["case"] for row in rows}, time.monotonic()
    with tempfile.TemporaryDirectory(prefix="stoker-verdicts-") as name:
        folder = Path(name)
        if any(case.script != "loop" for case in cases):
            write_pictures(folder)
        if any(case.script == "volumes" for case in cases):
            write_scrolls(folder / "volumes", volumes=VOLUMES, shape=(VOLUME_SIDE,) * 3, tests=0)
        for case in cases[arguments.skip :]:
            if case.name in done:
                continue
            if (time.monotonic() - began_s) / 60 > arguments.minutes:
                break
            rows.append(row_of(case, folder, arguments))
    held_out = [row for row in rows if row["held_out"]]
    print(confusion(rows))
    print(f"{_right(rows):.1%} of {len(rows)} right")
    if held_out:
        print(f"{_right(held_out):.1%} of {len(held_out)} held-out cases right")
    if not arguments.dry:
        complete = {row["case"] for row in rows} >= {case.name for case in CASES}
        print(f"wrote {keep('verdicts', summary_of(rows, complete=complete))}")
    return 0 if _right(rows) >= RIGHT else 1


if __name__ == "__main__":
    sys.exit(main())
