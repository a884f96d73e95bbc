"""What can be tuned of a config, one declaration per key: which loss it addresses, and which values are worth a run.

Everything here leaves the training as it is: the same samples, crops, labels and total batch. What would change it is
in `other_training`, and is measured only when asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from stoker.core.finding import Estimate
from stoker.doctor.what_if import (
    MOST_WORKERS,
    WORKERS_PER_CORE,
    Change,
    LoaderModel,
    model_of,
    rate_of,
    speed_up,
    with_loader,
)
from stoker.loader.loader import DEFAULT_PREFETCH, choose_engine
from stoker.profile.host import HostConfig
from stoker.profile.observed import Observed
from stoker.tasks.base import task_for
from stoker.trial.ledger import LOADER_KEYS, STEP_KEYS
from stoker.tune.records import EXPECTED, Candidate, Goal, Settings, State, Value

Loss = Literal["data", "compute", "start"]
"""Waiting for data, computing, starting."""

COMPUTES = 0.1
"""Share of the time that the loop computes, below which the step has nothing to gain."""
MOSTLY_COMPUTES = 0.1
"""Share of the time that the loop waits, below which the step comes first: above it, the loader has a sure gain."""
MOST_LOOKAHEAD = 4_000_000_000
LEAST_CACHE = 256_000_000
MOST_CACHE = 64_000_000_000
TIME_TO_COMPILE_S = 720.0
"""A compiled model is tried if at least this much of the budget is left: it is compiled again for the confirmation. An
allowance, since the time to compile is not known beforehand."""


@dataclass(frozen=True)
class Surroundings:
    """What candidates depend on besides the state of the search."""

    config: HostConfig
    cpus: int
    """Cores that one rank may use."""
    cuda: bool = False
    paced: bool = False
    """A paced consumer replaces the model: nothing about the step can be measured."""
    remote: bool = False
    splits_change_training: bool = True
    """Whether dividing an update into other batches changes the training: batch norm sees other batches, and mixing
    finds other partners."""
    goal: Goal = "throughput"
    decoded_bytes: int | None = None
    """Decoded size of all volumes: a larger cache has nothing more to keep."""
    mapped: frozenset[str] = frozenset()
    """The places in `packed` where volumes are read without decoding: a cache would keep nothing."""
    packed: tuple[str, ...] = ()
    """The same data elsewhere, in the order in which it is tried: in shards, in blocks of some size, or a copy."""


Values = Callable[[State, Surroundings], Iterator[Candidate]]


@dataclass(frozen=True)
class Knob:
    """One key, or keys that only make sense together."""

    keys: tuple[str, ...]
    loss: Loss
    candidates: Values


def settings_of(config: HostConfig) -> Settings:
    """The tuned keys of a config, with what `auto` stands for here."""
    task = task_for(config)
    found: Settings = {name: getattr(config, name) for name in (*LOADER_KEYS, *task.tuned_keys, *STEP_KEYS)}
    found["prefetch_factor"] = config.prefetch_factor or DEFAULT_PREFETCH
    found["loader"] = choose_engine(config.loader, config.num_workers, volumes=task.releases_gil)
    return found


def config_with(config: HostConfig, settings: Settings) -> HostConfig:
    update: dict[str, Any] = dict(settings)
    if settings.get("num_workers") == 0:
        update["prefetch_factor"] = None  # which needs workers
    return config.model_copy(update=update)


def proposer(around: Surroundings) -> Callable[[State], Candidate | None]:
    """The next change that is worth a run: the largest bottleneck comes first."""

    def propose(state: State) -> Candidate | None:
        kept = next((step.change for step in reversed(state.steps) if step.decision == "kept"), {})
        for loss in _losses(state, around):
            # The key that has just helped comes first: the next four steps of look-ahead often help, too.
            for knob in sorted(KNOBS, key=lambda knob: not set(knob.keys) & set(kept)):
                if knob.loss != loss:
                    continue
                for candidate in knob.candidates(state, around):
                    if not state.is_done(state.best | candidate.change):
                        return candidate
        return None

    return propose


def _losses(state: State, around: Surroundings) -> list[Loss]:
    """The bottlenecks, the largest loss first."""
    measured = state.measured
    found: list[Loss] = []
    waits = None if measured is None else measured.wait_share
    if not state.is_at_ceiling and (waits is None or waits >= WAITS):
        found.append("data")
    if not around.paced and measured is not None and (waits is None or 1 - waits >= COMPUTES):
        found.append("compute")
    if len(found) == 2 and waits is not None and waits < MOSTLY_COMPUTES:
        found.reverse()
    if around.goal != "throughput":
        found.append("start")
    return found


# The knobs.


def _workers(state: State, around: Surroundings) -> Iterator[Candidate]:
    now = _whole(state.best, "num_workers")
    counts = worker_counts(around.cpus, now)
    model = loader_model(state)
    if state.measured is None:  # it does not run at all
        yield from (
            Candidate({"num_workers": count}, "the original does not run; fewer workers need less memory")
            for count in reversed(counts)
            if 0 < count < now
        )
        return
    yield from worker_candidates(
        now, counts, around.cpus, model, _waiting(state), changed=_workers_were_changed(state),
        prefetch=_whole(state.best, "prefetch_factor"),
    )  # fmt: skip


def _engine(state: State, around: Surroundings) -> Iterator[Candidate]:  # noqa: ARG001
    if _whole(state.best, "num_workers") == 0 or state.measured is None:
        return
    if state.best["loader"] == "thread":
        yield Candidate({"loader": "process"}, _waiting(state) + "; threads share Python's lock, processes do not")
    else:
        yield Candidate({"loader": "thread"}, _waiting(state) + "; threads hand over batches without a copy")


def _prefetch(state: State, around: Surroundings) -> Iterator[Candidate]:  # noqa: ARG001
    now, workers = _whole(state.best, "prefetch_factor"), _whole(state.best, "num_workers")
    if workers == 0:
        return
    if state.measured is None:
        if now > 1:
            yield Candidate({"prefetch_factor": 1}, "the original does not run; fewer batches need less memory")
        return
    yield from prefetch_candidates(now, workers, loader_model(state))


def _lookahead(state: State, around: Surroundings) -> Iterator[Candidate]:
    now = _whole(state.best, "lookahead")
    observed = state.observed
    if not around.remote or observed is None or _blocked_share(observed) < COMPUTES:
        return
    why = "workers wait for the object store; fetch further ahead"
    for more in _further(around.config, "lookahead", now):
        if more <= MOST_LOOKAHEAD:
            yield Candidate({"lookahead": more}, why)


def _packed(state: State, around: Surroundings) -> Iterator[Candidate]:
    for place in around.packed:
        if state.best["data_root"] != place:
            yield Candidate({"data_root": place}, _waiting(state) + "; the same data from another place")


def _decoder(state: State, around: Surroundings) -> Iterator[Candidate]:
    # In draft mode decoders give different pixels.
    if state.best.get("decoder") not in ("auto", None) and around.config.decode_mode != "draft":
        yield Candidate({"decoder": "auto"}, "the decoder that is fastest on these files, with the same pixels")


def _small_cache(state: State, around: Surroundings) -> Iterator[Candidate]:
    now = state.best.get("volume_cache")
    if isinstance(now, int) and now < _default(around.config, "volume_cache"):
        yield from _cache(state, around)


def _cache(state: State, around: Surroundings) -> Iterator[Candidate]:
    now = state.best.get("volume_cache")
    if not isinstance(now, int) or state.measured is None:
        return
    if state.best.get("data_root") in around.mapped:
        return
    if around.decoded_bytes is not None:
        # It is divided among processes, each of which keeps its own chunks.
        copies = max(1, _whole(state.best, "num_workers")) if state.best["loader"] == "process" else 1
        if now >= copies * around.decoded_bytes:
            return
    for more in _further(around.config, "volume_cache", max(now, LEAST_CACHE // 4)):
        if more <= MOST_CACHE:
            yield Candidate({"volume_cache": more}, _waiting(state) + "; decoded chunks are kept for other patches")


def _pinned(state: State, around: Surroundings) -> Iterator[Candidate]:
    if around.cuda and state.best["pin_memory"] is False:
        yield Candidate({"pin_memory": True}, "copies from page-locked memory run beside the step")


def _kept_workers(state: State, around: Surroundings) -> Iterator[Candidate]:  # noqa: ARG001
    if state.best["persistent_workers"] is False and state.best["loader"] == "process":
        yield Candidate({"persistent_workers": True}, "workers that are kept need not start with every epoch")


def _compiled(state: State, around: Surroundings) -> Iterator[Candidate]:
    if state.best["compile_model"] is False:
        if state.left_s >= TIME_TO_COMPILE_S:
            yield Candidate({"compile_model": True}, "the step limits; compiled kernels read and write less memory")
        return
    if around.cuda and state.left_s >= TIME_TO_COMPILE_S:
        for mode in ("reduce-overhead", "max-autotune"):
            if state.best["compile_mode"] == "default":
                yield Candidate({"compile_mode": mode}, "the step limits; fewer launches, or better kernels")


def _uncompiled(state: State, around: Surroundings) -> Iterator[Candidate]:
    if state.best["compile_model"] is True and around.goal == "cost":
        yield Candidate({"compile_model": False}, "compiling takes longer than a short run gets back")


def _layout(state: State, around: Surroundings) -> Iterator[Candidate]:  # noqa: ARG001
    other = not state.best["channels_last"]
    yield Candidate({"channels_last": other}, "the step limits; the other memory layout suits some networks better")


def _split(state: State, around: Surroundings) -> Iterator[Candidate]:
    if around.splits_change_training:
        return
    batch, parts = _whole(state.best, "batch_size"), _whole(state.best, "gradient_accumulation")
    if parts % 2 == 0:
        change: Settings = {"batch_size": 2 * batch, "gradient_accumulation": parts // 2}
        yield Candidate(change, "the step limits; larger batches use the device better, with the same total batch")


KNOBS = (
    Knob(("data_root",), "data", _packed),
    # Before the workers: while they wait for the store, more of them only wait, too (results/tune).
    Knob(("lookahead",), "data", _lookahead),
    # Before the workers, too: which engine and how many are best depends on whether chunks are decoded again and again.
    Knob(("volume_cache",), "data", _small_cache),
    Knob(("num_workers", "prefetch_factor"), "data", _workers),
    Knob(("loader",), "data", _engine),
    Knob(("prefetch_factor",), "data", _prefetch),
    Knob(("volume_cache",), "data", _cache),
    Knob(("decoder",), "data", _decoder),
    Knob(("pin_memory",), "data", _pinned),
    Knob(("persistent_workers",), "data", _kept_workers),
    Knob(("persistent_workers",), "start", _kept_workers),
    Knob(("compile_model",), "start", _uncompiled),
    Knob(("batch_size", "gradient_accumulation"), "compute", _split),
    Knob(("channels_last",), "compute", _layout),
    Knob(("compile_model", "compile_mode"), "compute", _compiled),
)
"""In the order in which they are tried."""


# Faster, but a different training.


def other_training(names: tuple[str, ...], around: Surroundings) -> list[Candidate]:
    """The settings of `--also`; each changes the training, and is never part of the result."""
    config, found = around.config, []
    for name in names:
        changes: list[tuple[dict[str, Value], str]] = []
        if name == "precision" and config.precision == "32":
            changes = [({"precision": "bf16-mixed"}, "16-bit numbers: half the memory traffic, other rounding")]
        elif name == "img_size" and task_for(config).size_key == name:
            smaller = max(32, int(0.8 * config.img_size) // 32 * 32)
            changes = [({"img_size": smaller}, "smaller images: fewer pixels to decode and to compute")]
        elif name == "batch_size":
            changes = [({"batch_size": 2 * config.batch_size}, "twice the total batch: fewer, larger updates")]
        elif name == "mixing" and (config.mixup_alpha > 0 or config.cutmix_alpha > 0):
            changes = [({"mixup_alpha": 0.0, "cutmix_alpha": 0.0}, "without mixup and CutMix")]
        for change, why in changes:
            if any(getattr(config, key) != value for key, value in change.items()):
                found.append(Candidate(change, why))
    return found


# What candidates are chosen by.


def loader_model(state: State) -> LoaderModel | None:
    return None if state.observed is None else model_of(state.observed)


def _workers_were_changed(state: State) -> bool:
    """Numbers of workers with this engine: another one needs other numbers."""
    engine = state.best["loader"]
    return any("num_workers" in step.change and step.settings["loader"] == engine for step in state.steps)


def _blocked_share(observed: Observed) -> float:
    """Share of the workers' time in which they waited for bytes."""
    fetch = observed.stages.get("fetch")
    whole = sum(stage.wall_s for stage in observed.stages.values())
    return 0.0 if fetch is None or whole <= 0 else (fetch.blocked_s or 0.0) / whole


def _waiting(state: State) -> str:
    measured = state.measured
    if measured is None or measured.wait_share is None:
        return "the loop waits for data"
    return f"the loop waits {measured.wait_share:.0%} of its time for data".replace("%", " %")


def _further(config: HostConfig, key: str, now: int) -> list[int]:
    """More bytes, in the order in which they are tried: the default at once; less if that does not fit or help."""
    return [max(4 * now, _default(config, key)), 4 * now]


def _default(config: HostConfig, key: str) -> int:
    value = type(config).model_fields[key].default
    assert isinstance(value, int)
    return value


def _whole(settings: Settings, key: str) -> int:
    value = settings[key]
    assert isinstance(value, int)
    return value


# Numbers of workers, and of batches in flight for each: the same for configs and scripts.

WORKER_COUNTS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Numbers that are tried; the number of cores is added."""
NEARLY_BEST = 0.98
"""Share of the best predicted rate from which fewer workers are enough."""
MOST_PREFETCH = 16
MOST_KEPT_PREFETCH = 8
"""Limit for the prefetch that changes along with the number of workers; a higher one has to prove itself alone."""
WAITS = 0.02
"""Share of the time that the loop waits, below which the loader has nothing to gain."""


def worker_counts(cpus: int, now: int, *, least: int = 0, most: int | None = None) -> list[int]:
    """The numbers to choose from; `most` is what fits into memory, if known."""
    limit = max(now, min(MOST_WORKERS if most is None else most, MOST_WORKERS, max(4, WORKERS_PER_CORE * cpus)))
    return sorted({count for count in (*WORKER_COUNTS, cpus, now) if least <= count <= limit})


def worker_candidates(
    now: int, counts: Sequence[int], cpus: int, model: LoaderModel | None, waiting: str, *, changed: bool,
    prefetch: int | None = None,
) -> Iterator[Candidate]:  # fmt: skip
    """What the simulation expects to be enough, or one for each core; then the neighbours of the best so far.

    `changed`: another number was tried before, so the search no longer jumps. `prefetch`: batches in flight
    per worker, if they may change too. Fewer workers then keep as many batches in flight: with huge images among small
    ones, 8 workers with one batch each beat 2 with one, because of the batches; but 6 with one had 0.79 of the speed
    of 2 with eight.
    """

    def to(count: int) -> Settings:
        change: Settings = {"num_workers": count}
        if prefetch is not None and 0 < count < now:
            in_flight = min(MOST_KEPT_PREFETCH, -(-now * prefetch // count))
            change |= {"prefetch_factor": in_flight} if in_flight > prefetch else {}
        return change

    def predicted(change: Settings) -> Estimate | None:
        return None if model is None else speed_up(model, _change_of(change))

    one_per_core = min(counts, key=lambda count: abs(count - cpus))
    if now > cpus > 0 and one_per_core < now:
        # Times measured on crowded cores are too long for the simulation: it asked for 12 processes where 2 were best.
        why = "more workers than cores hinder each other; one for each core"
        yield Candidate(to(one_per_core), why)
    elif model is None and not changed:
        yield Candidate({"num_workers": one_per_core}, waiting + "; one worker for each core")
    if model is not None and not changed:
        wanted, in_flight = _enough(model, counts, prefetch)
        change: Settings = {"num_workers": wanted}
        change |= {} if prefetch in (None, in_flight) or wanted == 0 else {"prefetch_factor": in_flight}
        gain = speed_up(model, _change_of(change))
        if wanted != now and (gain.expected >= EXPECTED or now > cpus):
            each = f" with {in_flight} batches each" if "prefetch_factor" in change else ""
            why = f"{waiting}; {wanted} workers{each} are predicted to be enough"
            yield Candidate(change, why, gain if gain.expected >= EXPECTED else None)
    place = counts.index(now)
    if place + 1 < len(counts):
        change = to(counts[place + 1])
        # With cores to spare a first worker is always tried: on a busy machine the simulation predicted no gain.
        yield Candidate(change, waiting + "; one step up", None if now < cpus else predicted(change))
    if place > 0:
        change = to(counts[place - 1])
        # The simulation shares cores without loss: it does not know that too many workers slow each other down.
        gain_of_fewer = None if now > cpus else predicted(change)
        if change["num_workers"] or gain_of_fewer is None or gain_of_fewer.expected > 1:
            yield Candidate(change, "fewer workers hinder each other less", gain_of_fewer)


def _enough(model: LoaderModel, counts: Sequence[int], prefetch: int | None) -> tuple[int, int | None]:
    """The fewest workers that the simulation expects to be enough, with the fewest batches in flight for each."""
    more = [] if prefetch is None else [2**n * prefetch for n in (1, 2, 3) if 2**n * prefetch <= MOST_KEPT_PREFETCH]
    factors = [prefetch, *more]
    rates = {(count, each): rate_of(with_loader(count, each)(model)) for count in counts for each in factors}
    most = max(rates.values())
    return next(choice for choice, rate in rates.items() if rate >= NEARLY_BEST * most)


def _change_of(settings: Settings) -> Change:
    workers, prefetch = settings["num_workers"], settings.get("prefetch_factor")
    assert isinstance(workers, int)
    return with_loader(workers, prefetch if isinstance(prefetch, int) else None)


def prefetch_candidates(now: int, workers: int | None, model: LoaderModel | None) -> Iterator[Candidate]:
    """Twice as many batches in flight; `workers` is None where their number is not known."""
    if workers != 0 and now < MOST_PREFETCH:
        predicted = None if model is None or workers is None else speed_up(model, with_loader(workers, 2 * now))
        yield Candidate({"prefetch_factor": 2 * now}, "more batches in flight even out slow ones", predicted)
