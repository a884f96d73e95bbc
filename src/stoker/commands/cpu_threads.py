"""How torch's own threads wait for each other, to be said before torch is loaded."""

from __future__ import annotations

import os


def let_threads_sleep() -> None:
    """Threads of OpenMP sleep while they wait, unless the user says otherwise.

    By default they spin, and take the cores from the loader: on two cores that others use too, the same training
    took 142 s so, and 20 s with sleeping threads.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
