"""Which change of the loader is tried next, and whether it is kept, from made-up measurements."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stoker.loader.batch import LoaderSetup
from stoker.train.loader_changes import (
    MOST_PREFETCH,
    MOST_WORKERS,
    LoaderChange,
    Look,
    MemoryRoom,
    is_idle,
    is_kept,
    mean_of,
    needed_bytes,
    outcome_text,
    possible_changes,
)

GB = 1_000_000_000
SETUP = LoaderSetup(workers=3, prefetch=2, lookahead_bytes=256_000_000, requests=64)
ROOM = MemoryRoom(cores=4, spare_bytes=8 * GB, batch_bytes=10_000_000, worker_bytes=20_000_000, first_requests=64)
# Workers compute all the time, and the loop waits for them.
STARVED = Look(
    seconds=1.0, samples=1000, wait_share=0.3, ready_share=0.0, busy_share=1.0, cpu_share=0.98, fetch_share=0.05,
    crowded_share=0.0, loop_share=0.2,
)  # fmt: skip
BLOCKED = replace(STARVED, cpu_share=0.2, fetch_share=0.85)
FED = replace(STARVED, wait_share=0.0, ready_share=0.9, busy_share=0.4)


def tried(
    seen: Look, setup: LoaderSetup = SETUP, room: MemoryRoom = ROOM, *, idle_for_long: bool = False
) -> list[tuple[str, int]]:
    return [(one.knob, one.after) for one in possible_changes(seen, setup, room, idle_for_long=idle_for_long)]


def looks(seen: Look, *rates: int) -> list[Look]:
    return [replace(seen, samples=rate) for rate in rates]


def test_workers_that_compute_get_one_more_while_there_are_cores() -> None:
    assert tried(STARVED) == [("workers", 4)]
    assert tried(STARVED, replace(SETUP, workers=4)) == [], "the training thread needs a part of a core"
    assert tried(replace(STARVED, loop_share=1.0), room=replace(ROOM, cores=3)) == [], "that core is its own"
    assert tried(replace(STARVED, cpu_share=None), replace(SETUP, workers=4)) == [], "not measured: not assumed"


def test_workers_that_are_blocked_may_outnumber_the_cores() -> None:
    assert tried(BLOCKED, replace(SETUP, workers=8)) == [("workers", 16)]
    assert tried(BLOCKED, replace(SETUP, workers=16)) == [("workers", 21)], "what they compute has to fit the cores"
    busy = replace(BLOCKED, cpu_share=0.01)
    assert tried(busy, replace(SETUP, workers=MOST_WORKERS)) == []


@pytest.mark.parametrize(("knob", "after"), [("lookahead_bytes", 512_000_000), ("requests", 128)])
def test_workers_that_wait_for_storage_first_get_what_holds_the_reader_back(knob: str, after: int) -> None:
    held = replace(BLOCKED, held_back_by=knob)
    assert tried(held) == [(knob, after), ("workers", 6)]
    assert (knob, after) not in tried(replace(held, fetch_share=0.1)), "blocked, but not for bytes"
    assert (knob, after) not in tried(replace(held, cpu_share=0.9)), "bytes come from memory"


def test_a_loop_that_waits_for_idle_workers_needs_more_batches_in_flight() -> None:
    uneven = replace(STARVED, busy_share=0.6)
    assert tried(uneven) == [("prefetch", 4)]
    assert tried(uneven, replace(SETUP, prefetch=MOST_PREFETCH)) == []


def test_nothing_is_tried_that_memory_has_no_room_for() -> None:
    needed = 2 * ROOM.batch_bytes + ROOM.worker_bytes
    assert tried(STARVED, room=replace(ROOM, spare_bytes=needed)) == [("workers", 4)]
    assert tried(STARVED, room=replace(ROOM, spare_bytes=needed - 1)) == []
    assert tried(STARVED, room=replace(ROOM, spare_bytes=None)) == []
    assert tried(STARVED, room=replace(ROOM, is_limited=True)) == [], "the memory guard wins"
    held = replace(BLOCKED, held_back_by="lookahead_bytes")
    assert tried(held, room=replace(ROOM, spare_bytes=255_000_000)) == [("workers", 6)]
    assert needed_bytes(LoaderChange("prefetch", 2, 4, ""), SETUP, ROOM) == 2 * 3 * ROOM.batch_bytes
    assert needed_bytes(LoaderChange("workers", 3, 2, ""), SETUP, ROOM) < 0


def test_what_the_user_chose_stays() -> None:
    held = replace(BLOCKED, held_back_by="lookahead_bytes")
    assert tried(held, room=replace(ROOM, fixed=frozenset({"lookahead_bytes"}))) == [("workers", 6)]
    assert tried(replace(STARVED, busy_share=0.6), room=replace(ROOM, fixed=frozenset({"prefetch"}))) == []


def test_the_training_thread_gets_its_core_back() -> None:
    crowded = replace(FED, crowded_share=0.2, busy_share=0.9)
    (change,) = possible_changes(crowded, SETUP, replace(ROOM, is_limited=True), idle_for_long=False)
    assert (change.knob, change.after) == ("workers", 2)
    assert change.why == "the training thread waited for a core for 20% of the time"
    assert tried(crowded, replace(SETUP, workers=1)) == []
    assert tried(replace(crowded, wait_share=0.3)) == [("workers", 4)], "a loop that waits needs them more"


def test_workers_that_nobody_needs_leave_after_a_while() -> None:
    assert tried(FED, idle_for_long=True) == [("workers", 2)]
    assert tried(FED) == []
    assert tried(replace(FED, busy_share=0.6), idle_for_long=True) == [], "two could not do the work of three"
    assert tried(replace(FED, wait_share=0.03), idle_for_long=False) == [], "in between nothing happens"
    assert is_idle(FED)
    assert not is_idle(STARVED)
    assert not is_idle(replace(FED, ready_share=0.1))


def test_more_of_something_has_to_bring_a_gain_beyond_the_noise() -> None:
    more = LoaderChange("workers", 3, 4, "")
    before = looks(STARVED, 1000, 1010, 990, 1000, 1000)
    assert is_kept(more, before, looks(STARVED, 1100, 1110, 1090, 1100, 1100))
    assert not is_kept(more, before, looks(STARVED, 1010, 1015, 1005, 1010, 1010))
    assert not is_kept(more, looks(STARVED, 700, 1300, 900, 1100, 1000), looks(STARVED, 1500, 700, 1300, 900, 1100))
    assert not is_kept(more, before, looks(STARVED, 900, 900, 900, 900, 900))


def test_less_of_something_may_not_cost_anything() -> None:
    fewer = LoaderChange("workers", 3, 2, "")
    before = looks(FED, 1000, 1000, 1000, 1000, 1000)
    assert is_kept(fewer, before, looks(FED, 990, 1000, 995, 990, 1000))
    assert not is_kept(fewer, before, looks(FED, 950, 950, 950, 950, 950))
    assert not is_kept(fewer, before, looks(replace(FED, wait_share=0.1), 1000, 1000, 1000, 1000, 1000))


def test_several_looks_are_one_weighted_by_their_time() -> None:
    long = replace(FED, seconds=3.0, samples=3000, held_back_by="requests")
    mean = mean_of([STARVED, long, replace(long, crowded_share=None)])
    assert (mean.seconds, mean.samples, mean.crowded_share) == (7.0, 7000, None)
    assert mean.wait_share == pytest.approx(0.3 / 7)
    assert mean.held_back_by == "requests"


def test_the_outcome_of_a_trial_is_one_line() -> None:
    about = {"knob": "workers", "from": 1, "to": 2, "rate_before": 812.4, "why": "the loop waited 23% of the time"}
    assert outcome_text({"decision": "tried", **about}, "images") is None
    kept = outcome_text({"decision": "kept", **about, "rate_after": 1010.0}, "images")
    assert kept == "loader: 2 workers instead of 1, 812 -> 1,010 images/s: the loop waited 23% of the time"
    undone = outcome_text({"decision": "undone", **about, "rate_after": 8.05}, "patches")
    assert undone == "loader: back from 2 to 1 worker, 812 -> 8.05 patches/s"
    slightly = outcome_text({"decision": "undone", **about, "rate_after": 820.0}, "images")
    assert slightly == "loader: back from 2 to 1 worker, 812 -> 820 images/s, which is within the noise"
    ahead = {"knob": "lookahead_bytes", "from": 256_000_000, "to": 512_000_000, "why": "memory ran low"}
    assert outcome_text({"decision": "undone", **ahead}, "images") == (
        "loader: back from 512 MB to 256 MB of look-ahead: memory ran low"
    )
