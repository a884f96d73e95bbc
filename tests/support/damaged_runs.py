"""Run folders with damaged, odd and hostile files, and everything that reads them: the files' part of `make attack`."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from stoker.core.errors import StokerError
from stoker.doctor import what_if
from stoker.doctor.diagnosing import diagnosis_of
from stoker.profile.clock_reading import read_observed
from stoker.profile.step_clock import BATCH_COLUMNS
from stoker.report.document import compare, read_document
from stoker.report.live_view import frame_lines, status_line
from stoker.run.lease import Lease, is_held
from stoker.run.metrics import MetricsFile, read_metrics, truncate_after
from tests.support.recorded_run import write_run

LINES = ("metrics.jsonl", "clock.jsonl", "predictions.jsonl", "quarantine.jsonl")
DOCUMENTS = ("environment.json", "lease.json", "config.yaml", "subset.json")
DEEP = 100_000
ODD: tuple[Any, ...] = (
    None, True, False, "", "x", "NaN", "\ud800", "\0", "9" * 4000, "\x1b[2J", [], {}, [[]], [None], {"": None}, 0, -1,
    1, 0.5, -0.5, 1e-320, 1e308, -1e308, 10**30, -(10**30), 10**400, 2**31, 2**63, float("nan"), float("inf"),
    float("-inf"), ["x"] * 50, {"a": {"b": {"c": []}}}, {"workers": "x"}, {"wall_s": -1.0},
)  # fmt: skip
"""Values that a field never has; each is put in the place of every kind of value."""


def damage_text(data: bytes, rng: random.Random) -> bytes:
    """The bytes of a file after what disks, editors and crashes do to them."""
    kind = rng.randrange(8)
    at, end = sorted((rng.randrange(len(data) + 1), rng.randrange(len(data) + 1)))
    if kind == 0:  # bits
        flipped = bytearray(data)
        for _ in range(rng.randrange(1, 20)):
            if flipped:
                flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
        return bytes(flipped)
    if kind == 1:
        return data[:at]
    if kind == 2:
        return data[:at] + data[end:]
    if kind == 3:
        return data[:at] + bytes(rng.randrange(1, 5000)) + data[end:]
    if kind == 4:
        return data[:at] + rng.randbytes(rng.randrange(1, 5000)) + data[at:]
    if kind == 5:
        return data[:at] + data[at:end] * rng.randrange(2, 5) + data[end:]
    if kind == 6:
        opening = rng.choice([b"[", b'{"a":', b"[{}, "]) * rng.choice([30, 300, DEEP])
        return data[:at] + b"\n" + opening + b"\n" + data[at:]
    lines = data.splitlines(keepends=True)
    rng.shuffle(lines)
    return b"".join(lines)


def damage_values(data: bytes, rng: random.Random) -> bytes:
    """The file with odd values in a few places, still JSON."""
    lines = data.splitlines()
    if not lines:
        return data
    whole = lines[0].strip() == b"{"  # an indented document
    texts = [data] if whole else lines
    for _ in range(rng.randrange(1, 6)):
        number = rng.randrange(len(texts)) if rng.random() < 0.7 else 0
        try:
            document = json.loads(texts[number])
        except ValueError:
            continue
        texts[number] = json.dumps(_with_odd_value(document, rng)).encode()
    return b"\n".join(texts) + b"\n"


def _with_odd_value(document: Any, rng: random.Random) -> Any:
    """The document with one value, at any depth, replaced, removed or added."""
    places = list(_places(document))
    if not places or rng.random() < 0.05:
        return rng.choice(ODD)
    holder, key = rng.choice(places)
    odd = rng.choice(ODD)
    if isinstance(holder, dict) and rng.random() < 0.15:
        del holder[key]
    elif isinstance(holder, dict) and rng.random() < 0.15:
        holder[rng.choice(["", "step", "kind", "x" * 5000, "\ud800"])] = odd
    elif isinstance(holder, list) and rng.random() < 0.3:
        holder.extend([odd] * rng.choice([1, 100, 10_000]))
    else:
        holder[key] = odd
    return document


def _places(document: Any) -> Iterator[tuple[Any, Any]]:
    numbered = enumerate(document) if isinstance(document, list) else ()
    for key, value in document.items() if isinstance(document, dict) else numbered:
        yield document, key
        yield from _places(value)


def odd_kinds(path: Path, *, large: bool) -> list[tuple[str, Callable[[], object]]]:
    """What may have a file's name besides a file of ours, and what makes it; large ones take seconds to read."""
    kinds: list[tuple[str, Callable[[], object]]] = [
        ("pipe", lambda: os.mkfifo(path)),
        ("device", lambda: path.symlink_to("/dev/zero")),
        ("folder", lambda: path.mkdir()),
        ("nowhere", lambda: path.symlink_to(path.parent / "absent")),
        ("itself", lambda: path.symlink_to(path)),
        ("deep", lambda: path.write_bytes(b"[" * DEEP + b"\n")),
        ("empty", lambda: path.write_bytes(b"")),
        ("zeros", lambda: path.write_bytes(bytes(100_000))),
    ]
    if large:
        line = b'{"kind": "step", "step": 1, "steps": 1, "wait_s": 1}\n'
        kinds += [
            ("endless line", lambda: path.write_bytes(b"x" * (50 << 20))),
            ("many small lines", lambda: path.write_bytes(line * 600_000)),
            ("wide lines", lambda: path.write_bytes((b"{" + b'"a":[],' * 100_000 + b'"b":1}\n') * 40)),
        ]
    return kinds


def replace_by(path: Path, make: Callable[[], object]) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    make()


def quick_predictions(change: Callable[[Any, str, Any], None] = setattr) -> None:
    """Makes the doctor's simulations short: what they predict does not matter here."""
    change(what_if, "DRAWN", 10)
    change(what_if, "BOOTSTRAPS", 2)


def whole_run(folder: Path) -> Path:
    """A run with everything in its files that training and the doctor write there."""
    write_run(folder, epochs=2, lines=3)
    lines = [json.loads(line) for line in (folder / "clock.jsonl").read_bytes().splitlines()]
    lines[0] |= {"storage": {"kind": "s3", "remote": True}, "accelerator": {"name": "GPU", "count": 1}}
    times = [0.1, 0.05, 0.01, 0.04, 64, 0, 0.02, 1_000_000]
    assert len(times) == len(BATCH_COLUMNS)
    for line in lines:
        if line["kind"] == "step":
            line |= {"waits_s": [0.03] * 10, "steps_s": [0.07] * 10, "batches": [times] * 10, "epoch_starts_s": [0.2]}
            line["host"] = {"cpus": 8, "ram_bytes": 10**10, "cpu_busy_share": 0.5, "shm_bytes": 10**9}
    (folder / "clock.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    speedup = {"low": 1.1, "expected": 1.2, "high": 1.3}
    for name, record in (
        ("quarantine.jsonl", {"name": "a.jpg", "reason": "truncated"}),
        ("predictions.jsonl", {"label": "num_workers 2 -> 4", "speedup": speedup}),
        ("lease.json", {"host": "elsewhere", "pid": 1, "renewed": 1.0}),
        ("subset.json", {"classes": ["a", "b"]}),
    ):
        (folder / name).write_text(json.dumps(record) + "\n")
    return folder


def read_everything(folder: Path) -> None:
    """Reads a run folder as report, watch, doctor and a resumed run do; only errors meant for users are accepted."""
    _, document = read_document(folder)
    json.dumps(document, allow_nan=False).encode()
    "\n".join(text for text, _ in frame_lines(document)).encode()
    status_line(document).encode()
    compare(document, document)
    is_held(folder / "lease.json")
    with _for_users():
        observed = read_observed(folder)
        if observed.steps:
            diagnosis_of(observed)
    with _for_users(OSError):
        for _ in read_metrics(folder / "metrics.jsonl"):
            pass
    with _for_users(OSError):
        Lease(folder / "lease.json").acquire().release()
    for name in ("metrics.jsonl", "clock.jsonl"):
        with _for_users(OSError):
            truncate_after(folder / name, 3, 1)
            MetricsFile(folder / name, say=lambda _text: None).close()


class _for_users:  # noqa: N801 - reads as a block
    """Accepts errors that a user can act on, and what the operating system says."""

    def __init__(self, *others: type[BaseException]) -> None:
        self._accepted = (StokerError, *others)

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, *_rest: object) -> bool:
        return kind is not None and issubclass(kind, self._accepted)


def damaged_folders(whole: Path, scratch: Path, count: int, seed: int) -> Iterator[tuple[str, Path]]:
    """Copies of a run folder, one after the other, each with damage; with what was done to it."""
    rng = random.Random(seed)
    present = [name for name in (*LINES, *DOCUMENTS) if (whole / name).exists()]
    for number in range(count):
        folder = scratch / "run"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(whole, folder, ignore=shutil.ignore_patterns("*.ckpt", "preview.jpg", "logs"))
        done = []
        for name in rng.sample(present, rng.choice([1, 1, 2, 4])):
            path = folder / name
            change = rng.choice([damage_text, damage_values, damage_values])
            path.write_bytes(change(path.read_bytes(), rng))
            done.append(f"{name} {change.__name__}")
        yield f"seed {seed}, number {number}: {', '.join(done)}", folder


def peak_bytes() -> int:
    """The most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
