"""Versions that are known to be slow at what this run does."""

from __future__ import annotations

from stoker.checks.case import Case
from stoker.facts.finding import Finding, Interval


def slow_conv3d_of_torch_2_9(case: Case) -> Finding | None:
    """What: torch 2.9 with 3D convolutions.

    Why: it turns cuDNN off for them; with AMP they take up to four times as long (pytorch #166122); 2.8 and 2.10 do
    not. 2.9.1 turns it on again beside cuDNN 9.15 and newer.

    Example: nnU-Net after `pip install -U torch` in October 2025.
    """
    version = case.observed.torch_version
    if version is None or not version.startswith("2.9.") or not case.observed.convolves_3d:
        return None
    compute, elapsed = case.observed.compute_s, case.observed.elapsed_s
    share = compute / elapsed if compute is not None and elapsed > 0 else None
    # Published: 4x in the worst case. A quarter of the compute time is what could remain.
    gain = None if share is None else Interval(1.0, 1 / (1 - share * 0.5), 1 / (1 - share * 0.75))
    return Finding(
        "torch-2.9-conv3d",
        f"torch {version} runs 3D convolutions with AMP up to four times slower (pytorch issue 166122)",
        "pip install 'torch>=2.10'",
        gain,
    )
