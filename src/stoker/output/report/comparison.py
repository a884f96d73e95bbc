"""Two runs beside each other: the keys in which they differ, and the figures."""

from __future__ import annotations

from typing import Any

from stoker.output.report.document import Document

_ABSENT = object()
FIGURES = {
    "images_per_second": ("images a second", True),
    "wait_share": ("share of step time spent waiting", False),
    "step_ms": ("milliseconds of a step", False),
    "epoch_s": ("seconds of the last epoch", False),
    "best_val_acc1": ("best val/acc1", True),
    "last_loss": ("last train/loss", False),
    "epochs_done": ("epochs", None),
    "step": ("steps", None),
}
"""Figure: what it is called, and whether more is better; None where neither is."""


def compare(a: Document, b: Document) -> dict[str, Any]:
    """What differs between two runs' documents."""
    # What the doctor saw of a script has no config.
    ours, theirs = ((run["config"] or {}).get("all", {}) for run in (a, b))
    keys = [*ours, *(key for key in theirs if key not in ours)]
    config = [
        {"key": key, "a": ours.get(key), "b": theirs.get(key), "in_a": key in ours, "in_b": key in theirs}
        for key in keys
        if ours.get(key, _ABSENT) != theirs.get(key, _ABSENT)
    ]
    figures = []
    for name, (label, more_is_better) in FIGURES.items():
        first, second = a["figures"].get(name), b["figures"].get(name)
        if first is None and second is None:
            continue
        ratio = second / first if first and second is not None else None
        figures.append(
            {
                "name": name, "label": label, "a": first, "b": second,
                "ratio": None if ratio is None else float(f"{ratio:.4g}"), "more_is_better": more_is_better,
            }
        )  # fmt: skip
    facts_a, facts_b = (run["environment"].get("facts", {}) for run in (a, b))
    machines = [
        {"key": key, "a": facts_a.get(key, "not known"), "b": facts_b.get(key, "not known")}
        for key in dict.fromkeys([*facts_a, *facts_b])
        if key not in ("started", "command", "folder") and facts_a.get(key) != facts_b.get(key)
    ]
    return {"config": config, "figures": figures, "machines": machines}
