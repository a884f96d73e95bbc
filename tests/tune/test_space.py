"""What is proposed for a config, on machines whose loader is simulated: CPU-, storage- and consumer-bound."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import pytest

from stoker.config import Config
from stoker.doctor.simulation import Setup, ThreadWork, simulate
from stoker.profile.host import HostConfig, Machine, fit_to_machine
from stoker.profile.observed import BatchTime, HostFacts, LoaderShape, Observed, StageTime
from stoker.trial.ledger import HARMLESS
from stoker.tune.records import Measured, Outcome, Settings, State, Step, key_of
from stoker.tune.space import (
    KNOBS,
    Surroundings,
    config_with,
    other_training,
    proposer,
    settings_of,
)
from tests.tune.made_up import search_with

BATCH = 32


@dataclass
class Simulated:
    """A machine: what a batch costs, how many cores there are, how fast the consumer is."""

    cpu_s: float
    blocked_s: float
    pace_s: float
    cores: float = 4.0
    locked: float = 0.0
    """Share of a batch's CPU time for which a thread holds Python's lock, of which the prediction knows nothing."""
    crowding: float = 0.0
    """What each worker beyond the cores costs all others, of which it knows nothing either."""
    huge_every: int = 0
    """Batches of which one takes eight times as long as the others."""
    ran: list[Settings] = field(default_factory=list)

    def rate(self, settings: Settings) -> float:
        workers, prefetch = int(settings["num_workers"] or 0), int(settings["prefetch_factor"] or 2)
        cpu_s = self.cpu_s * (1 + self.crowding * max(0.0, workers - self.cores))
        processes = settings["loader"] == "process" and workers > 0
        setup = Setup(workers, prefetch, processes, self.cores)
        works = [ThreadWork(self._cpu_s(i, cpu_s), self.blocked_s * (1 + 0.3 * math.cos(i))) for i in range(240)]
        found = simulate(setup, works, [ThreadWork(0.0, self.pace_s)] * 240)
        if not processes and workers > 0 and self.locked:
            found = min(found, 1 / (self.locked * cpu_s))
        return found * BATCH

    def _cpu_s(self, number: int, cpu_s: float) -> float:
        huge = bool(self.huge_every) and number % self.huge_every == 0
        return cpu_s * (8 if huge else 1 + 0.3 * math.sin(number))

    def run(self, settings: Settings, seconds: float) -> Measured:
        self.ran.append(dict(settings))
        rate = self.rate(settings)
        workers, prefetch = int(settings["num_workers"] or 0), int(settings["prefetch_factor"] or 2)
        step_s = BATCH / rate
        wait_s = max(0.0, step_s - self.pace_s)
        batches = tuple(
            BatchTime(
                wall_s=self.cpu_s + self.blocked_s, cpu_s=self._cpu_s(i, self.cpu_s), runq_s=0.0,
                blocked_s=self.blocked_s * (1 + 0.3 * math.cos(i)), samples=BATCH,
            )
            for i in range(100)
        )  # fmt: skip
        engine: Any = "main" if workers == 0 else settings["loader"]
        observed = Observed(
            source="trial", steps=100, samples=100 * BATCH, elapsed_s=100 * step_s, wait_s=100 * wait_s,
            compute_s=100 * self.pace_s, waits_s=(wait_s,) * 100, steps_s=(self.pace_s,) * 100, consumer_cpu_s=0.0,
            loader=LoaderShape(workers, prefetch if workers else None, engine, batch_size=BATCH), batches=batches,
            host=HostFacts(round(self.cores)), pace_images_per_second=BATCH / self.pace_s,
            stages={"decode": StageTime(self.cpu_s), "fetch": StageTime(self.blocked_s, blocked_s=self.blocked_s)},
        )  # fmt: skip
        wiggle = 1 + 0.004 * math.sin(7 * len(self.ran))
        return Measured(
            "measured", tuple(rate * wiggle * part for part in (0.995, 1.0, 1.005)), wait_share=wait_s / step_s,
            took_s=seconds, ledger="same", observed=observed,
        )  # fmt: skip


def fitted(**keys: Any) -> HostConfig:
    return fit_to_machine(Config(batch_size=BATCH, **keys), Machine(cpus=4, accelerators=0))[0]


def tuned(machine: Simulated, **start: Any) -> Outcome:
    config = fitted(**{"num_workers": 2} | start)
    around = Surroundings(config, cpus=round(machine.cores), paced=True)
    return search_with(machine, settings_of(config), propose=proposer(around), ceiling=BATCH / machine.pace_s)


MACHINES: dict[str, tuple[Callable[[], Simulated], dict[str, Any]]] = {
    "cpu-bound": (lambda: Simulated(0.1, 0.0, 0.01), {"num_workers": 0}),
    "storage-bound": (lambda: Simulated(0.005, 0.2, 0.02), {"num_workers": 1}),
    "storage-bound, too many to begin with": (lambda: Simulated(0.01, 0.05, 0.03), {"num_workers": 16}),
    "threads share a lock": (lambda: Simulated(0.1, 0.0, 0.01, locked=0.5), {"num_workers": 4}),
    "workers hinder each other": (lambda: Simulated(0.1, 0.0, 0.01, crowding=0.05), {"num_workers": 12}),
    "processes to begin with": (lambda: Simulated(0.05, 0.05, 0.02), {"num_workers": 1, "loader": "process"}),
    "one core": (lambda: Simulated(0.02, 0.02, 0.03, cores=1.0), {"num_workers": 0}),
    # One batch each is too few, and more workers make up for it, but hinder each other.
    "a huge batch now and then": (
        lambda: Simulated(0.02, 0.0, 0.018, cores=2.0, crowding=0.1, huge_every=9),
        {"num_workers": 1, "prefetch_factor": 1},
    ),
}


@pytest.mark.parametrize("name", MACHINES)
def test_the_search_comes_within_five_percent_of_the_whole_grid(name: str) -> None:
    build, start = MACHINES[name]
    machine = build()
    outcome = tuned(machine, **start)
    most = max(
        machine.rate(outcome.original | {"num_workers": workers, "loader": loader, "prefetch_factor": prefetch})
        for workers, loader, prefetch in product((0, 1, 2, 3, 4, 6, 8, 12, 16), ("thread", "process"), (1, 2, 4, 8))
    )
    found = machine.rate(outcome.best)
    assert found >= 0.95 * most, (found / most, outcome.best, outcome.stopped)
    assert outcome.trials <= 25
    assert key_of(outcome.best) in [key_of(settings) for settings in machine.ran]


def test_a_loop_that_waits_for_its_consumer_is_left_alone() -> None:
    machine = Simulated(0.01, 0.0, 0.1)
    outcome = tuned(machine)
    assert (outcome.stopped, outcome.trials) == ("compute-bound", 2)
    assert outcome.best == outcome.original


def test_every_tuned_key_has_a_knob_and_cannot_change_the_training() -> None:
    known = {key for knob in KNOBS for key in knob.keys}
    for config in (fitted(), fitted(task="segment3d", patch_size=[32, 32, 32])):
        keys = set(settings_of(config))
        assert keys <= known, config.task
        assert keys <= HARMLESS
    config = fitted(num_workers=0)
    assert config_with(config, settings_of(config)).prefetch_factor is None


def state(config: HostConfig, **measured: Any) -> State:
    start = settings_of(config)
    run = Measured("measured", (100.0,), **{"wait_share": 0.0} | measured)
    return State(start, start, {key_of(start): [run, run]})


def proposed(config: HostConfig, at: State, **keys: Any) -> list[Settings]:
    """Everything that would be proposed if nothing helped."""
    propose = proposer(Surroundings(config, cpus=4, **keys))
    runs, found = dict(at.runs), []
    while (candidate := propose(State(at.original, at.best, runs))) is not None:
        found.append(candidate.change)
        runs[key_of(at.best | candidate.change)] = [Measured("crashed")]
    return found


def test_a_compute_bound_model_gets_only_what_concerns_its_step() -> None:
    config = fitted(gradient_accumulation=4)
    split = {"batch_size": 2 * BATCH, "gradient_accumulation": 2}
    changes = proposed(config, state(config), splits_change_training=False)
    assert changes == [split, {"channels_last": False}, {"compile_model": True}]
    assert split not in proposed(config, state(config), splits_change_training=True)
    assert proposed(config, state(config), paced=True) == []


def test_a_pack_is_tried_first_where_the_loop_waits() -> None:
    config = fitted()
    at = state(config, wait_share=0.6)
    start = at.original | {"data_root": "images"}
    at = State(start, start, {key_of(start): at.runs[key_of(at.original)]})
    assert proposed(config, at, packed=("shards",))[0] == {"data_root": "shards"}
    assert {"data_root": "shards"} not in proposed(config, at, packed=("images",))


def test_what_does_not_run_gets_fewer_workers_and_batches() -> None:
    config = fitted(num_workers=8, prefetch_factor=4)
    start = settings_of(config)
    failed = State(start, start, {key_of(start): [Measured("out-of-memory")]})
    changes = proposed(config, failed)
    assert changes[0] == {"num_workers": 6}
    assert {"prefetch_factor": 1} in changes
    assert all(change.get("num_workers", 0) < 8 for change in changes)  # type: ignore[operator]


def test_fewer_workers_keep_as_many_batches_in_flight() -> None:
    config = fitted(num_workers=16, prefetch_factor=1)
    changes = proposed(config, state(config, wait_share=0.6), paced=True)
    assert changes[0] == {"num_workers": 4, "prefetch_factor": 4}
    assert {"num_workers": 12, "prefetch_factor": 2} in changes
    config = fitted(num_workers=16, prefetch_factor=4)
    changes = proposed(config, state(config, wait_share=0.6), paced=True)
    assert changes[0] == {"num_workers": 4, "prefetch_factor": 8}, "more than eight have to prove themselves"


def test_where_workers_wait_for_a_store_it_is_read_further_ahead_first() -> None:
    config = fitted(num_workers=2, lookahead="1MB")

    def first(blocked_s: float, **keys: Any) -> list[Settings]:
        stages = {"fetch": StageTime(1.0, blocked_s=blocked_s)}
        observed = Observed(source="trial", steps=1, samples=1, elapsed_s=1.0, wait_s=0.6, stages=stages)
        return proposed(config, state(config, wait_share=0.6, observed=observed), paced=True, **keys)[:2]

    assert first(0.9, remote=True) == [{"lookahead": 256_000_000}, {"lookahead": 4_000_000}], (
        "less, if that is too much"
    )
    assert not any("lookahead" in change for change in first(0.01, remote=True))
    assert not any("lookahead" in change for change in first(0.9, remote=False))


def test_chunks_are_kept_before_anything_else_is_tried_where_none_are() -> None:
    config = fitted(task="segment3d", num_workers=2, volume_cache=0)
    assert proposed(config, state(config, wait_share=0.6), paced=True)[:2] == [
        {"volume_cache": 1_000_000_000},
        {"volume_cache": 256_000_000},
    ]


@pytest.mark.parametrize(("engine", "larger"), [("thread", False), ("process", True)])
def test_a_cache_that_holds_all_volumes_is_not_enlarged(engine: str, larger: bool) -> None:
    config = fitted(task="segment3d", num_workers=2, volume_cache="1GB", loader=engine)
    changes = proposed(config, state(config, wait_share=0.6), paced=True, decoded_bytes=600_000_000)
    assert any("volume_cache" in change for change in changes) is larger, "each process keeps chunks of its own"


def test_what_has_just_helped_is_taken_further_before_anything_else() -> None:
    config = fitted(task="segment3d", num_workers=2, volume_cache="1GB")
    at = state(config, wait_share=0.6)
    assert "num_workers" in proposed(config, at, paced=True)[0]
    best = at.original | {"volume_cache": 4_000_000_000}
    kept = Step(1, best, {"volume_cache": 4_000_000_000}, "", "kept", "")
    again = State(at.original, best, {**at.runs, key_of(best): at.runs[key_of(at.original)]}, (kept,))
    candidate = proposer(Surroundings(config, cpus=4, paced=True))(again)
    assert candidate is not None
    assert candidate.change == {"volume_cache": 16_000_000_000}


def test_another_training_is_proposed_only_by_name() -> None:
    config = fitted(mixup_alpha=0.2)
    names = ("precision", "img_size", "batch_size", "mixing")
    changes = [candidate.change for candidate in other_training(names, Surroundings(config, cpus=4))]
    assert changes == [
        {"precision": "bf16-mixed"},
        {"img_size": 160},
        {"batch_size": 2 * BATCH},
        {"mixup_alpha": 0.0, "cutmix_alpha": 0.0},
    ]
    assert other_training((), Surroundings(config, cpus=4)) == []
