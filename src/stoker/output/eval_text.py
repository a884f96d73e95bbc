"""What `stoker eval`, `predict` and `export` found, as text and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from stoker.data.index.place import count
from stoker.output.text import format_table
from stoker.training.verdicts import Difference, Evaluation, Prediction

WORST = 10
NAMED = 20
# With more classes their names would cover each other.
MOST_NAMED_CLASSES = 60


def evaluation_text(found: Evaluation, *, all_classes: bool = False) -> str:
    """Scores, the worst classes (or all), the most confused pairs."""
    weights = "averaged weights" if found.averaged else "raw weights"
    parts = [
        f"{found.model} after {count(found.epoch, 'epoch')} ({count(found.step, 'step')}), {weights}\n"
        f"{found.place}: {count(found.images, 'image')}",
        f"top-1 {_percent(found.acc1)}   top-5 {_percent(found.acc5)}   "
        f"loss {'none' if found.loss is None else f'{found.loss:.4f}'}",
    ]
    if found.real is not None:
        parts.append(
            f"ReaL top-1 {_percent(found.real.acc1)} of {found.real.images:,} images; "
            f"{found.real.left_out:,} without a label left out"
        )
    scores = found.per_class()
    shown = scores if all_classes else scores[:WORST]
    title = f"{len(shown)} worst of {len(scores)} classes" if len(shown) < len(scores) else "classes, worst first"
    rows = [(score.name, f"{score.images:,}", f"{score.acc1:.2f}", f"{score.acc5:.2f}") for score in shown]
    parts.append(f"{title}\n{format_table(rows, ('class', 'images', 'top-1 %', 'top-5 %'))}")
    pairs = [
        (pair.name, pair.taken_for, f"{pair.wrong:,} of {pair.images:,}", f"{100 * pair.wrong / pair.images:.1f}")
        for pair in found.confused()
    ]
    if pairs:
        parts.append(f"most confused\n{format_table(pairs, ('class', 'taken for', 'images', '%'))}")
    if found.unreadable:
        lines = [f"  {name}: {reason}" for name, reason in found.unreadable[:NAMED]]
        more = len(found.unreadable) - len(lines)
        lines += [f"  and {more:,} more"] if more > 0 else []
        parts.append("\n".join([f"{len(found.unreadable):,} unreadable, left out:", *lines]))
    return "\n\n".join(parts)


def plot_confusion(found: Evaluation, path: Path) -> None:
    """The confusion matrix as a PNG: each row is a class, its shares add up to one."""
    import matplotlib

    matplotlib.use("Agg")  # no screen is needed, and none is opened
    from matplotlib import pyplot

    matrix = found.matrix()
    images = matrix.sum(axis=1, keepdims=True)
    shares = matrix / images.clip(min=1)
    side = min(14.0, max(5.0, 0.35 * len(found.classes)))
    figure, axes = pyplot.subplots(figsize=(side + 1, side), dpi=120)
    drawn = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
    axes.set_xlabel("taken for")
    axes.set_ylabel("class")
    axes.set_title(f"{found.model}: top-1 {_percent(found.acc1)} of {found.images:,} images")
    if len(found.classes) <= MOST_NAMED_CLASSES:
        axes.set_xticks(range(len(found.classes)), found.classes, rotation=90)
        axes.set_yticks(range(len(found.classes)), found.classes)
    figure.colorbar(drawn, label="share of the class")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")
    pyplot.close(figure)


def predictions_text(predictions: Sequence[Prediction]) -> str:
    """Each image with its most probable classes below it."""
    return "\n\n".join(
        "\n".join([one.path, *(f"  {guess.probability:7.2%}  {guess.name}" for guess in one.guesses)])
        for one in predictions
    )


def export_text(path: Path, size_bytes: int, checked_with: str, differences: Sequence[Difference]) -> str:
    """What was written, and how far its output is from the checkpoint's."""
    lines = [f"{path}: {size_bytes / 1e6:,.1f} MB, loaded again with {checked_with}"]
    lines += [
        f"  {one.what}: largest difference {one.max_abs:.2g} (allowed {one.tolerance:.2g})" for one in differences
    ]
    return "\n".join(lines)


def _percent(value: float | None) -> str:
    return "none" if value is None else f"{value:.2f} %"
