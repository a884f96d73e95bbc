"""Startup time of `stoker --help` relative to `python -c pass`, which no Python program can beat."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

from bench.rounds import interleave, keep, ratio

LARGEST_RATIO = 10.0


def time_of(*command: str, env: dict[str, str] | None = None) -> float:
    """Seconds of the fastest of three runs, the one least disturbed by other programs."""
    times = []
    for _ in range(3):
        start = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=env)
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    python = sys.executable
    times = interleave(
        {
            "python -c pass": lambda: time_of(python, "-c", "pass"),
            "stoker --help": lambda: time_of(python, "-m", "stoker", "--help"),
            "stoker config show": lambda: time_of(python, "-m", "stoker", "config", "show", "configs/demo.yaml"),
        },
        rounds,
    )
    ratios = {name: ratio(spread, times["python -c pass"]) for name, spread in times.items()}
    path = keep(
        "startup",
        {
            "seconds": {n: s.as_dict() for n, s in times.items()},
            "ratios": {n: s.as_dict() for n, s in ratios.items()},
        },
    )
    for name, spread in ratios.items():
        print(f"{name:<20} {spread.median:5.2f}x  ({min(spread.values):.2f}-{max(spread.values):.2f})")
    print(f"wrote {path}")
    return 0 if ratios["stoker --help"].median < LARGEST_RATIO else 1


if __name__ == "__main__":
    sys.exit(main())
