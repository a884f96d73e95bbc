"""Our own loader with an injected fault, feeding a paced consumer; prints the doctor's diagnosis as JSON.

`python -m bench.verdict_cases.own_loader FAULTS KEY=VALUE...`, where FAULTS is JSON: pace_s, seconds, sleep_ms (per
read), bytes_per_second (shared by all reads), lock_ms (per read, one at a time).
"""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import Any

import torch

from stoker.clock.file import HEADER, interval_record
from stoker.clock.reading import observed_from
from stoker.config import load_config
from stoker.data.store.stores import LocalStore
from stoker.doctor.diagnosing import diagnosis_of
from stoker.doctor.trial_process import feed_at_pace
from stoker.machine.host import HostWatch, fit_to_machine, read_machine


def slow_down_reads(faults: dict[str, Any]) -> None:
    """Slows down every later read of a local file, in this process and its forks."""
    original, turn = LocalStore.read, threading.Lock()

    def read(self: LocalStore, *args: Any, **options: Any) -> Any:
        found = original(self, *args, **options)
        time.sleep(faults.get("sleep_ms", 0.0) / 1e3)
        if faults.get("bytes_per_second") or faults.get("lock_ms"):
            with turn:
                wait = faults.get("lock_ms", 0.0) / 1e3
                time.sleep(wait + (len(found) / faults["bytes_per_second"] if faults.get("bytes_per_second") else 0))
        return found

    LocalStore.read = read  # type: ignore[method-assign]


def main() -> None:
    faults = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    machine = read_machine()
    config, _ = fit_to_machine(load_config(None, sys.argv[2:]).config, machine)
    slow_down_reads(faults)
    watch = HostWatch()

    def look(seconds: float) -> None:
        if seconds == 0:
            watch.facts()
        watch.look()

    job = {
        "workers": config.num_workers, "cpus": machine.cpus, "seconds": faults["seconds"], "pace_s": faults["pace_s"],
    }  # fmt: skip
    interval, header, name_samples = feed_at_pace(config, job, look)
    host = {name: value for name, value in vars(watch.facts()).items() if value is not None}
    lines = [
        {"kind": "event", "event": HEADER, **header},
        {"kind": "step", **interval_record(interval, name_samples), "host": host},
    ]
    sys.stdout.write(json.dumps(diagnosis_of(observed_from(lines, "the case")).as_dict()) + "\n")


if __name__ == "__main__":
    main()
