"""Records what stoker does from outside, and checks that it still does exactly that; `make oracle` runs the check.

    python tools/oracle.py check                     everything, in about five minutes
    python tools/oracle.py check --only runs help    some parts
    python tools/oracle.py record --only help        after a change that was meant; then look at `git diff`

The recordings are texts in tests/oracle/expected/. Exit code 1 if anything differs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

PROJECT = Path(__file__).parents[1]
sys.path.insert(0, str(PROJECT))

from tests.support.isolation import isolate  # noqa: E402 - the project's folder is not a package of the environment

isolate()

from tests.oracle.comparing import Comparison, record  # noqa: E402
from tests.oracle.parts import PARTS, Bench  # noqa: E402
from tests.support.ready_process import ready_process  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["record", "check"])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=", ".join(PARTS))
    options = parser.parse_args()
    comparison, began = Comparison(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="stoker-oracle-") as name, ready_process(Path(name)) as ready:
        (place := Path(name) / "work").mkdir()
        bench = Bench(place, ready, variants=options.what == "check")
        for part in options.only:
            if options.what == "record":
                record(part, bench)
            else:
                comparison.check(part, bench)
                print(f"{time.monotonic() - began:4.0f} s  {part}", file=sys.stderr)
    if options.what == "check":
        print(comparison.text())
    return 1 if comparison.differences else 0


if __name__ == "__main__":
    sys.exit(main())
