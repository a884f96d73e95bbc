"""What `stoker lr-find` found: the line to type, a curve in a line of text, and a picture."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.training.lr_range import LrCurve, LrSuggestion, smooth

BLOCKS = "▁▂▃▄▅▆▇█"
WIDTH = 50


@dataclass(frozen=True)
class LrFound:
    """A curve, what it suggests, and what is needed to say it in the config's own terms."""

    curve: LrCurve
    suggestion: LrSuggestion | None
    """None: the loss never fell."""
    total_batch: int
    """Samples of one update of the test."""
    reference_batch: int | None
    """`lr_reference_batch`; None where the config does not scale."""
    config_lr: float
    ranks: int
    """Processes that the config would train with; the test had one."""

    def as_key(self, rate: float) -> float:
        """What `lr` has to be for the optimizer to use this rate."""
        return rate if self.reference_batch is None else rate * self.reference_batch / self.total_batch

    def as_dict(self) -> dict[str, Any]:
        found = self.suggestion
        return {
            "suggestion": None if found is None else found.steepest,
            "lr_key": None if found is None else float(f"{self.as_key(found.steepest):.2g}"),
            "second_opinion": None if found is None else found.tenth_of_lowest,
            "second_lr_key": None if found is None else float(f"{self.as_key(found.tenth_of_lowest):.2g}"),
            "total_batch": self.total_batch,
            "lrs": self.curve.lrs,
            "losses": self.curve.losses,
            "diverged_at": self.curve.diverged_at,
        }


def lr_text(found: LrFound) -> str:
    """The line to type first, then where it comes from."""
    curve, best = found.curve, found.suggestion
    losses = _finite(curve)
    ended = "ran away at" if curve.diverged_at is not None else "was still"
    at = f"{curve.diverged_at:.2g}" if curve.diverged_at is not None else f"{losses[-1]:.3g} at {curve.lrs[-1]:.2g}"
    tail = ["", f"  {_sparkline(losses)}", f"  {curve.lrs[0]:g} ... {curve.lrs[-1]:.2g}; the loss {ended} {at}"]
    if best is None:
        advice = "check the data and the labels, or give it more: --steps 300, --max 100, a larger batch_size"
        return "\n".join(["no suggestion: the loss never fell by more than its noise", f"  {advice}", *tail])
    steepest, second = found.as_key(best.steepest), found.as_key(best.tenth_of_lowest)
    return "\n".join(
        [
            f"lr={steepest:.2g}",
            f"  the loss falls fastest where the optimizer uses {best.steepest:.2g}{_scaling(found)}",
            f"  second opinion: lr={second:.2g}, a tenth of where the loss was lowest ({best.lowest:.2g})",
            f"  the config has lr={found.config_lr:g}, {found.config_lr / steepest:.2g} times the suggestion",
            *_note(found),
            *tail,
        ]
    )


def plot_lr(found: LrFound, path: Path) -> None:
    """A picture: the loss by learning rate, smoothed and not, with both opinions."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), dpi=120)
    points = [(lr, loss) for lr, loss in zip(found.curve.lrs, found.curve.losses, strict=True) if loss is not None]
    rates, losses = [lr for lr, _ in points], [loss for _, loss in points]
    smoothed = smooth(losses)
    axes.plot(rates, losses, color="#a0aec0", linewidth=0.8, label="loss")
    axes.plot(rates, smoothed, color="#3b6ea5", label="smoothed")
    if found.suggestion is not None:
        for rate, label, colour in (
            (found.suggestion.steepest, "steepest", "#c05621"),
            (found.suggestion.tenth_of_lowest, "lowest / 10", "#2f855a"),
        ):
            label = f"{label}: {rate:.2g} (lr={found.as_key(rate):.2g})"
            axes.axvline(rate, color=colour, linestyle="--", label=label)
    axes.set_xscale("log")
    # The last points run away; the curve before them is what people look at.
    bottom, top = min(smoothed), smoothed[0]
    axes.set_ylim(bottom - 0.15 * (top - bottom) - 1e-9, top + 0.6 * abs(top - bottom) + 1e-9)
    axes.set_xlabel("learning rate of the optimizer")
    axes.set_ylabel("training loss")
    axes.legend(loc="lower left")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def _scaling(found: LrFound) -> str:
    if found.reference_batch is None:
        return f" (total batch {found.total_batch}; scale_lr is off)"
    return f";\n  lr is for {found.reference_batch} samples, the test took {found.total_batch} (scale_lr)"


def _note(found: LrFound) -> list[str]:
    if found.reference_batch is not None or found.ranks == 1:
        return []
    return [
        f"  measured on one device: with {found.ranks}, the total batch and so the rate may be as many times larger"
    ]


def _finite(curve: LrCurve) -> list[float]:
    return [loss for loss in curve.losses if loss is not None] or [0.0]


def _sparkline(losses: list[float]) -> str:
    smoothed = smooth(losses)
    bottom, top = min(smoothed), smoothed[0]  # what ran away at the end is simply at the top
    height = max(top - bottom, 1e-12)
    width = min(WIDTH, len(smoothed))
    chosen = [smoothed[round(at * (len(smoothed) - 1) / max(1, width - 1))] for at in range(width)]
    return "".join(BLOCKS[min(7, max(0, round(7 * (loss - bottom) / height)))] for loss in chosen)
