"""Looking at a worker's stack names the line that takes the time, also where a C function keeps Python's lock."""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from scipy.ndimage import median_filter

from stoker.attach import fetching
from stoker.attach.fetching import FetchTotals
from stoker.attach.sampling import sampler
from stoker.doctor.script.loop_facts import preparation_of
from stoker.doctor.script.recording import read_fetches
from stoker.loader import buffers
from stoker.profile import batch_costs
from stoker.profile.observed import HotSpot
from tests.support.waiting import wait_until

VOLUME = np.random.default_rng(0).random((40, 40, 40), np.float32)


def keeps_the_lock(count: int) -> int:
    return sum(range(count))  # a loop in C, which never gives the lock away


def computes_in_a_library() -> None:
    median_filter(VOLUME, size=3)


def computes_in_python(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def spots_of(folder: Path, work: Callable[[], None], looks: int = 0) -> dict[str, HotSpot]:
    """By function, after batches that do this work: four, and more until there were so many looks."""
    totals = FetchTotals(str(folder / "fetch-1-0.ring"), -1, 1)
    sampler.start()
    try:
        for number in itertools.count():
            if number >= 4 and totals.spots.looks >= looks:
                break
            totals.batch_begins()
            began = totals.sample_begins()
            work()
            totals.sample_ends(began, number)
            totals.batch_ends()
            totals.batch_made(1, 1, None, None)
    finally:
        sampler.stop()
    totals.spots._write()
    totals._write_totals()
    found = preparation_of(read_fetches(folder))
    return {spot.function: spot for spot in found.spots}


@pytest.mark.real_time
def test_a_c_function_that_keeps_the_lock_gets_the_time_that_it_took(tmp_path: Path) -> None:
    took = time.thread_time()
    keeps_the_lock(3_000_000)
    took = time.thread_time() - took

    def work() -> None:
        for _ in range(10):
            keeps_the_lock(3_000_000)
            computes_in_python(took)

    spots = spots_of(tmp_path, work, looks=20)
    # Half each on an idle machine. Without the weights of late looks the first would be near zero.
    assert spots["keeps_the_lock"].share > 0.25
    assert spots["computes_in_python"].share > 0.05
    assert spots["keeps_the_lock"].line == keeps_the_lock.__code__.co_firstlineno + 1


@pytest.mark.real_time
def test_a_library_function_is_named_with_the_users_line_that_calls_it(tmp_path: Path) -> None:
    def work() -> None:
        for _ in range(4):
            computes_in_a_library()

    # A look that comes late leaves out others: how many there are in a time is not known.
    spot = spots_of(tmp_path, work, looks=20)["computes_in_a_library"]
    assert spot.calls == "scipy.ndimage.median_filter"
    assert Path(spot.file).name == Path(__file__).name
    assert spot.line == computes_in_a_library.__code__.co_firstlineno + 1
    assert spot.share > 0.8


@pytest.mark.parametrize(("module", "counts"), [(batch_costs, False), (fetching, False), (buffers, True)])
def test_what_measures_is_not_listed_among_what_takes_time(module: ModuleType, counts: bool) -> None:
    """Where no line of the user's is involved, as in a data set that belongs to a library."""
    namespace: dict[str, Any] = {"look": lambda: sampler._spot(sys._getframe(1), "")}
    name = module.__name__.replace(".", "_")
    exec(compile(f"def {name}():\n    return look()", str(module.__file__), "exec"), namespace)
    exec(compile(f"def fetch():\n    return {name}()", str(fetching.__file__), "exec"), namespace)
    assert (namespace["fetch"]() is not None) == counts


def test_what_happens_between_batches_does_not_count(tmp_path: Path) -> None:
    def work() -> None:
        sampler.thread = 0
        computes_in_python(0.1)
        sampler.thread = own

    own = threading.get_ident()
    assert spots_of(tmp_path, work) == {}


def test_the_looking_thread_is_not_one_of_the_scripts_and_ends_when_it_is_told_to() -> None:
    def looking() -> int:
        return sum(frame.f_code.co_name == "_look_again_and_again" for frame in sys._current_frames().values())

    before = threading.active_count()
    sampler.start()
    wait_until(lambda: looking() == 1)
    assert threading.active_count() == before
    sampler.stop()
    wait_until(lambda: looking() == 0)
