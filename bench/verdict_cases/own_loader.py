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

from stoker.config import load_config
from stoker.doctor.diagnosing import diagnosis_of
from stoker.io.stores import LocalStore
from stoker.profile.clock_reading import NEWEST, observed_from
from stoker.profile.host import fit_to_machine, read_machine
from stoker.trial.process import together_trial


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
    job = {
        "cpus": machine.cpus, "seconds": faults["seconds"], "pace_s": faults["pace_s"], "keep": NEWEST, "whole": True,
    }  # fmt: skip
    lines = together_trial(config, job, lambda _seconds: None)["lines"]
    sys.stdout.write(json.dumps(diagnosis_of(observed_from(lines, "the case")).as_dict()) + "\n")


if __name__ == "__main__":
    main()
