"""Runs the test suite: everything else first, on all cores, then tests marked `real_time`, one at a time.

A test that needs real time can fail on a machine that pauses, so one that fails is repeated once, alone. With
--repeat-failed (CI), that goes for every test. What passes then is printed as unstable, and has to be fixed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).parents[1]
sys.path.insert(0, str(PROJECT))

from tests.support.isolation import isolate  # noqa: E402 - the project's folder is not a package of the environment
from tests.support.warm_start import start_warm  # noqa: E402

FAILED = Path(".pytest_cache/v/cache/lastfailed")
NO_TESTS = 5
MOST_REPEATED = 20  # more than that is a broken program, not an unstable test


def pytest(*options: str) -> int:
    return subprocess.run([sys.executable, "-m", "pytest", *options]).returncode


def failed() -> list[str]:
    """Names of the tests that have failed and not passed since."""
    return sorted(json.loads(FAILED.read_text())) if FAILED.exists() else []


def run_phase(options: list[str], *, repeat: bool) -> tuple[int, list[str]]:
    """Runs one pytest command; returns its exit code and the tests that passed only when repeated."""
    FAILED.unlink(missing_ok=True)
    code = pytest(*options)
    names = failed()
    if code != 1 or not repeat or not 0 < len(names) <= MOST_REPEATED:
        return (0 if code == NO_TESTS else code), []
    print(f"\nrepeating {len(names)} failed test(s), alone", flush=True)
    code = pytest("--last-failed", "-m", "", "-p", "no:xdist")
    return code, sorted(set(names) - set(failed()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", default="2", help="test processes for tests that do not need real time")
    parser.add_argument("--repeat-failed", action="store_true", help="repeat any failed test, not only real_time ones")
    options, words = parser.parse_known_args()
    # All test processes are forks of one that has imported torch and the rest: seconds each.
    isolate()
    start_warm()
    if words:  # a part of the suite: as the caller wants it, nothing repeated
        return pytest("-n", options.jobs, "--dist", "worksteal", *words)
    first, unstable = run_phase(
        ["-n", options.jobs, "--dist", "worksteal", "-m", "not release and not real_time"], repeat=options.repeat_failed
    )
    still_failed = failed()
    # Only their files: collecting all takes as long as running these.
    files = [str(path) for path in sorted(Path("tests").rglob("test_*.py")) if "mark.real_time" in path.read_text()]
    second, more = run_phase(["-m", "real_time and not release", "-p", "no:xdist", *files], repeat=True)
    still_failed += failed()
    unstable += more
    print(f"\n{len(unstable)} unstable (failed, then passed when repeated alone)")
    print("".join(f"  {name}\n" for name in unstable), end="")
    print("".join(f"  failed: {name}\n" for name in still_failed), end="", flush=True)
    return first or second


if __name__ == "__main__":
    sys.exit(main())
