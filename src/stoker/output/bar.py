"""One line that says how far a loop is, how fast, and how long it will take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

WIDTH = 10
EIGHTHS = " ▏▎▍▌▋▊▉"


def bar_line(
    label: str,
    done: int,
    total: int | None,
    elapsed_s: float,
    per_second: float | None,
    metrics: Mapping[str, Any] | None = None,
    *,
    blocks: bool = True,
) -> str:
    """`Epoch 0:   1%|▏| 33/3336 [00:30<50:00, 1.10it/s, train/loss=6.9, wait=3%]`; None is not known."""
    shown = [f"{short(name)}={metric_text(name, value)}" for name, value in (metrics or {}).items()]
    if not total:
        return f"{label}: {done}it [{', '.join([clock(elapsed_s), rate_text(per_second), *shown])}]"
    left_s = (total - done) / per_second if per_second else None
    times = f"{clock(elapsed_s)}<{'?' if left_s is None else clock(left_s)}"
    # 100 % is for what is done.
    percent = 100 if done >= total else min(99, round(100 * done / total))
    details = ", ".join([times, rate_text(per_second), *shown])
    return f"{label}: {percent:3d}%|{_bar(done / total, blocks)}| {done}/{total} [{details}]"


def metric_text(name: str, value: Any) -> str:
    """A metric as people read it: accuracies in percent, shares as percent, rates without digits that flicker."""
    if isinstance(value, str):
        return value
    number = float(value)
    last = name.rsplit("/", 1)[-1]
    if last.startswith("acc"):
        return f"{number:.1f}%"
    if last == "wait" or last.endswith("_share"):
        return f"{number:.0%}"
    if last.endswith("seconds"):
        return f"{number:.1f} s"
    if last.endswith("per_second") or abs(number) >= 1000:
        return f"{number:,.0f}"
    return f"{number:.4g}"


def short(name: str) -> str:
    """`wait_share` says `wait` where it stands beside a percentage."""
    return name.removesuffix("_share")


def rate_text(per_second: float | None) -> str:
    """Steps a second, or seconds a step where that is the larger number."""
    if not per_second:
        return "?it/s"
    return f"{per_second:.2f}it/s" if per_second >= 1 else f"{1 / per_second:.2f}s/it"


def clock(seconds: float) -> str:
    """07:37, or 1:15:00 from an hour on."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute:02d}:{second:02d}"


def _bar(share: float, blocks: bool) -> str:
    # At least a sliver once something is done; no spaces behind it: the line has better uses for them.
    if not blocks:
        return "#" * max(int(share * WIDTH), share > 0)
    full, eighths = divmod(max(int(min(share, 1.0) * WIDTH * 8), int(share > 0)), 8)
    return ("█" * full + EIGHTHS[eighths]).rstrip()
