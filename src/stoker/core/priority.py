"""Loader workers run at a lower priority than the thread that trains.

On a GPU that thread launches every kernel: whenever it is runnable and a decoding worker has its core, the GPU runs
out of work. Workers lose little by it: they get every core that nobody else wants.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress

# Five steps of nice are a third of the weight: the training thread gets three quarters of a contended core
# (results/priority).
STEPS_BACK = 5
LOWEST = 19
# The priority at the start: threads inherit a lowered one, and must not lower it once more.
_AT_START = os.getpriority(os.PRIO_PROCESS, 0)


def step_back() -> None:
    """Lowers the priority of the calling thread and of the threads and processes that it starts from now on.

    Never raises it, and does nothing the second time: a run that was started with `nice` keeps its value. If the
    system refuses, nothing changes.
    """
    # Linux keeps the priority per thread, and takes a thread's number here; elsewhere it belongs to the process, and
    # this call would slow down the training thread as well.
    if not os.path.exists("/proc/thread-self"):  # noqa: PTH110 - the cheapest way to ask
        return
    with suppress(OSError):
        thread = threading.get_native_id()
        wanted = min(LOWEST, _AT_START + STEPS_BACK)
        if os.getpriority(os.PRIO_PROCESS, thread) < wanted:
            os.setpriority(os.PRIO_PROCESS, thread, wanted)
