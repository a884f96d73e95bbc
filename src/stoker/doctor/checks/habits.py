"""Things in scripts that cost more than they look like, whatever else limits the loop."""

from __future__ import annotations

from stoker.doctor.checks.case import Case, Hit, check
from stoker.doctor.preparing import FEWEST_SAMPLES

IMAGES = 3
"""Dimensions of a sample with channels, from which changing shapes count: batches of text have different lengths."""
OFTEN = 0.1
"""Share of the batches: training at another size every few epochs is intended, and changes far less often."""


@check("shapes-change")
def shapes_change(case: Case) -> Hit | None:
    """What: the shape of the input changes from step to step.

    Why: cuDNN chooses its algorithms anew for each shape, torch.compile compiles anew, and the allocator keeps memory
    for all of them: what is reserved grows far beyond what a step needs.

    Example: a random zoom that returns 58 to 112 voxels a side: 57 to 77 GB reserved, where 9 are in use.
    """
    seen = case.observed.preparation
    if seen is None or seen.batches_seen < FEWEST_SAMPLES or (seen.sample_dimensions or 0) < IMAGES:
        return None
    if seen.shape_changes < max(2, OFTEN * seen.batches_seen):
        return None
    example = f", e.g. {seen.shapes[0]}, then {seen.shapes[1]}" if len(seen.shapes) == 2 else ""
    return Hit(
        f"{seen.shape_changes} of {seen.batches_seen} batches have another shape than the one before{example}; "
        f"the largest is {seen.size_spread:.1f} times the smallest",
        "crop or pad to one shape after zooming, or zoom within a fixed shape",
    )


@check("scaler-without-autocast")
def scaler_without_autocast(case: Case) -> Hit | None:
    """What: a GradScaler scales the loss, and the forward pass was computed in float32.

    Why: scaling protects 16-bit gradients; there are none. Precision is not mixed at all: on a GPU with tensor cores a
    step in 16 bits takes a half to a third of the time, and half of the memory.

    Example: `precision: amp` that creates a GradScaler, and a forward pass outside of torch.autocast.
    """
    if not case.observed.scaled_in_32_bits:
        return None
    place = "" if case.observed.scaled_at is None else f", in {case.observed.scaled_at},"
    return Hit(
        f"a GradScaler scales the loss{place} but the forward pass ran in float32: no autocast was active",
        "with torch.autocast('cuda', torch.bfloat16): around forward pass and loss, and then without the GradScaler",
    )
