"""Shows at its end what a process has imported since `show_imports`."""

from __future__ import annotations

import atexit
import sys


def show_imports() -> None:
    before = set(sys.modules)
    atexit.register(lambda: print("imported:", *(sys.modules.keys() - before), file=sys.stderr))
