"""All checks, the verdict among what they find, and what the accelerator needs against what there is."""

from __future__ import annotations

from stoker.core.units import count, duration_text, size_text
from stoker.doctor.checks import beyond_waiting, contention, cores, memory, samples, script_habits, storage, threads
from stoker.doctor.checks.facts import DoctorCheck, Facts
from stoker.doctor.diagnosis import Diagnosis, Need, Prediction
from stoker.profile.observed import Observed

MODULES = (samples, contention, storage, cores, beyond_waiting, threads, memory, script_habits)
"""In order: why the loop waits for data (needless work, then what stops the workers, what blocks them, and what they
compute), and everything else. Among checks with the same loss, the first that fires names the cause."""
CHECKS = tuple(check for module in MODULES for check in vars(module).values() if isinstance(check, DoctorCheck))


def judge(observed: Observed, predictions: tuple[Prediction, ...] = ()) -> Diagnosis:
    """The verdict, all findings (the verdict first, then by speed-up), and needs against has."""
    facts = Facts(observed, predictions)
    found = [(check, finding) for check in CHECKS if (finding := check(facts)) is not None]
    # max() takes the first of several with the same loss: that is the rule for those who share one.
    losses = [(check.loss(facts), check, finding) for check, finding in found if check.loss is not None]
    _, first, verdict = max(losses, key=lambda each: each[0], default=(0.0, None, None))
    rest = sorted(
        (finding for _, finding in found if finding is not verdict),
        key=lambda each: each.speedup.expected if each.speedup else 0.0,
        reverse=True,
    )
    unknown = "the loop waits for data, and what the workers did meanwhile could not be measured"
    if not observed.steps:
        why = "; ".join(observed.missing) or "there is nothing to diagnose"
        unknown = f"no training step was observed; {why}"
    return Diagnosis(
        verdict="unknown" if verdict is None else verdict.name,
        line=unknown if first is None or verdict is None else f"{first.words}: {verdict.seen}",
        findings=tuple(rest) if verdict is None else (verdict, *rest),
        observed=observed,
        predictions=predictions,
        needs=needs_against_has(facts),
    )


def needs_against_has(facts: Facts) -> tuple[Need, ...]:
    """Images and bytes per second: what the accelerator would take without a wait, and what each part can deliver."""
    observed = facts.observed
    wanted = observed.rates.ceiling
    computing = observed.times.elapsed_s - observed.times.wait_s
    if wanted is None and computing > 0 and observed.samples:
        wanted = observed.samples / computing
    if not wanted:
        return ()
    found = []
    if observed.rates.loader is not None:
        how = "the loader alone"
        if observed.loader is not None:
            how += f", {count(observed.loader.workers, 'worker')}"
        found.append(Need("loader", f"{observed.unit}/s", wanted, observed.rates.loader, how))
    split, host = facts.split, observed.host
    if split is not None and host is not None and observed.steps and split.cpu_s > 0:
        each = split.cpu_s * observed.steps / observed.samples
        one = {"images": "image", "patches": "patch"}.get(observed.unit, "sample")
        how = f"{host.cpus} cores, {duration_text(each)} of CPU per {'sample' if each >= 0.1 else one}"
        found.append(Need("CPU", f"{observed.unit}/s", wanted, host.cpus / each, how))
    return (*found, *_storage_needs(observed, wanted))


def _storage_needs(observed: Observed, wanted: float) -> list[Need]:
    storage = observed.storage
    if storage is None or not storage.bytes_per_sample:
        return []
    many = storage.parallel_bytes_per_second
    kinds = (
        ("storage, cold", many or storage.cold_bytes_per_second, "many readers" if many else "one reader"),
        ("storage, warm", storage.warm_bytes_per_second, "one reader"),
    )
    size = f"{size_text(storage.bytes_per_sample)} per image"
    return [
        Need(what, "bytes/s", wanted * storage.bytes_per_sample, has, f"{storage.kind or 'storage'}, {readers}, {size}")
        for what, has, readers in kinds
        if has is not None
    ]
