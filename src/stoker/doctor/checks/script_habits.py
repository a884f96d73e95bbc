"""Habits in scripts that cost more than they seem to, whatever else limits the loop."""

from __future__ import annotations

import statistics

from stoker.core.finding import Finding
from stoker.core.units import count, duration_text
from stoker.doctor.checks.facts import Facts, check, speedup_without
from stoker.doctor.preparing import FEWEST_SAMPLES
from stoker.profile.observed import Preparation

IMAGES = 3
"""Dimensions of a sample with channels, from which changing shapes count: batches of text have different lengths."""
OFTEN = 0.1
"""Share of the batches: training at another size every few epochs is intended, and changes far less often."""
EVERY_STEP = 0.9
"""Reads of a value a step: a loop that logs every tenth step has 0.1."""
SHOWN = 3
FEWEST_BUILDS = 3
"""A loader that is made a second time may be the one of a second phase of training."""
NOTICEABLE = 0.02
"""Share of the time that starting workers must take to be worth a change."""
LONG_VALIDATION = 1 / 3
"""Share of the time: half as long as training. ImageNet has 25 images to train with for each one to validate with."""
WAITS = 0.5
"""Share of the time of validation from which its loader is to blame."""


@check("shapes-change")
def shapes_change(facts: Facts) -> Finding | None:
    """What: the shape of the input changes from step to step.

    Why: cuDNN chooses its algorithms again for each shape, torch.compile recompiles, and the allocator keeps memory
    for all of them: what is reserved grows far beyond what a step needs.

    Example: a random zoom that returns 58 to 112 voxels a side: 57 to 77 GB reserved, where 9 are in use.
    """
    seen = _changing(facts)
    if seen is None:
        return None
    example = f", e.g. {seen.shapes[0]}, then {seen.shapes[1]}" if len(seen.shapes) == 2 else ""
    return Finding(
        f"{seen.shape_changes} of {seen.batches_seen} batches have another shape than the one before{example}; "
        f"the largest is {seen.size_spread:.1f} times the smallest",
        "crop or pad to one shape after zooming, or zoom within a fixed shape",
    )


def _changing(facts: Facts) -> Preparation | None:
    """How samples are prepared, if their shape changes."""
    seen = facts.observed.preparation
    if seen is None or seen.batches_seen < FEWEST_SAMPLES or (seen.sample_dimensions or 0) < IMAGES:
        return None
    return None if seen.shape_changes < max(2, OFTEN * seen.batches_seen) else seen


@check("cudnn-benchmark-with-changing-shapes")
def cudnn_benchmark_with_changing_shapes(facts: Facts) -> Finding | None:
    """What: cuDNN tries all its algorithms for every new input shape, and shapes change from step to step.

    Why: `torch.backends.cudnn.benchmark = True` pays off for one shape that comes again a thousand times. For a shape
    that comes once, trying takes many times as long as the convolution, and takes memory.

    Example: images that are padded to the largest of their batch.
    """
    seen, habits = _changing(facts), facts.observed.habits
    if seen is None or habits is None or not habits.cudnn_benchmark:
        return None
    return Finding(
        f"torch.backends.cudnn.benchmark is on, and {seen.shape_changes} of {seen.batches_seen} batches have another "
        "shape than the one before: on a GPU cuDNN tries its algorithms again for each",
        "torch.backends.cudnn.benchmark = False, or one shape for all batches",
    )


@check("scaler-without-autocast")
def scaler_without_autocast(facts: Facts) -> Finding | None:
    """What: a GradScaler scales the loss, and the forward pass was computed in float32.

    Why: scaling protects 16-bit gradients; there are none. Precision is not mixed at all: on a GPU with tensor cores a
    step in 16 bits takes a half to a third of the time, and half of the memory.

    Example: `precision: amp` that creates a GradScaler, and a forward pass outside of torch.autocast.
    """
    if not facts.observed.scaled_in_32_bits:
        return None
    place = "" if facts.observed.scaled_at is None else f", in {facts.observed.scaled_at},"
    return Finding(
        f"a GradScaler scales the loss{place} but the forward pass ran in float32: no autocast was active",
        "with torch.autocast('cuda', torch.bfloat16): around forward pass and loss, and then without the GradScaler",
    )


@check("values-read-every-step")
def values_read_every_step(facts: Facts) -> Finding | None:
    """What: the loop reads the value of a tensor in every step: .item(), .cpu(), float().

    Why: on a GPU, which computes while Python runs ahead, each read waits until everything before it is computed; the
    GPU is then idle until Python has launched the next kernels. On the CPU it costs nothing.

    Example: `running_loss += loss.item()` in every step, for a progress bar.
    """
    habits = facts.observed.habits
    reads = [read for read in habits.reads if read.per_step >= EVERY_STEP] if habits is not None else []
    if not reads:
        return None
    places = ", ".join(f"{read.place} {read.call}" for read in reads[:SHOWN])
    total = sum(read.per_step for read in reads)
    times = count(round(total), "time")
    on_device = any(read.on_device for read in reads)
    cost = "each read waits for the device" if on_device else "harmless on the CPU; on a GPU each read waits for it"
    return Finding(
        f"every step reads values of tensors, {times} ({places}): {cost}",
        "add up loss.detach() on the device, and read it every 50 steps",
    )


@check("model-in-eval-mode")
def model_in_eval_mode(facts: Facts) -> Finding | None:
    """What: the model is trained in eval mode.

    Why: dropout is off, and batch norm neither uses nor learns the statistics of the batches: training is not
    what was intended, and evaluation is often worse. Usually `model.train()` is missing after a validation.

    Example: `evaluate(model)` switches to eval mode in the first epoch, and nothing switches back.
    """
    habits = facts.observed.habits
    if habits is None or habits.in_eval_mode is None:
        return None
    place = "" if not habits.eval_at else f" since {habits.eval_at}"
    return Finding(
        f"{habits.in_eval_mode} is trained in eval mode{place}: "
        f"{count(habits.eval_layers, 'layer')} of dropout or batch norm "
        f"{'behave' if habits.eval_layers != 1 else 'behaves'} as in evaluation",
        "model.train() at the beginning of every epoch",
    )


@check("loader-made-anew")
def loader_made_anew(facts: Facts) -> Finding | None:
    """What: every epoch makes a new DataLoader.

    Why: its workers start again, import, and open the data set, and the first batch waits for it; persistent_workers
    has no effect on a loader that is thrown away.

    Example: `for epoch in range(90): train(DataLoader(...))`.
    """
    habits, shape, share = facts.observed.habits, facts.observed.loader, facts.epoch_start_share
    if habits is None or shape is None or not shape.workers or habits.loader_builds < FEWEST_BUILDS:
        return None
    if share < NOTICEABLE:
        return None
    place = f" (for the loop in {habits.loader_at})" if habits.loader_at else ""
    return Finding(
        f"the DataLoader is rebuilt every epoch{place}, {habits.loader_builds} times so far; the first batch then "
        f"takes {duration_text(statistics.fmean(facts.observed.times.epoch_starts_s[1:]))}, {share:.0%} of the time",
        MAKE_ONCE,
        speedup_without(share),
    )


MAKE_ONCE = "make the DataLoader once, before the loop over epochs, with persistent_workers=True"


@check("long-validation")
def long_validation(facts: Facts) -> Finding | None:
    """What: validation takes at least half as long as training.

    Why: nothing is learned meanwhile. Often the validation loader has no workers, or a small batch, or it runs far more
    often than anyone looks at its result.

    Example: 10,000 images with num_workers=0 after each epoch of 50,000 with 8 workers.
    """
    observed = facts.observed
    rounds = len(observed.times.epoch_starts_s) - 1 if observed.source == "run" else 0
    if observed.habits is not None:
        rounds = observed.habits.validations
    if rounds < 1 or not observed.times.validation_s:
        return None
    training_s = observed.times.elapsed_s + sum(observed.times.epoch_starts_s)
    share = observed.times.validation_s / (training_s + observed.times.validation_s)
    if share < LONG_VALIDATION:
        return None
    wait_s = observed.habits.validation_wait_s if observed.habits is not None else None
    waits = None if wait_s is None else min(1.0, wait_s / observed.times.validation_s)
    fix = "validate every few epochs, or on part of the data; torch.inference_mode() and larger batches"
    if waits is not None and waits >= WAITS:
        fix = "more workers, and larger batches, for the validation loader" if facts.filling is None else fix
    waiting = "" if waits is None else f", of which {waits:.0%} waits for data"
    return Finding(
        f"validation took {duration_text(observed.times.validation_s)}, {share:.0%} of the time "
        f"({count(rounds, 'time')}){waiting}",
        fix,
    )
