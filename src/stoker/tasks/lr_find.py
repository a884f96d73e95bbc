"""`stoker lr-find`: runs the range test in a process of its own, and shows the result as text and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from stoker.child import ChildDied, Parent, call
from stoker.config import config_values
from stoker.config.reading import check_task, load_for_command
from stoker.console import progress_bar, say, say_notes
from stoker.errors import UserError
from stoker.machine.host import HostConfig, fit_to_machine, read_machine
from stoker.train.lr_range import LrCurve, LrSuggestion, growing_rates, measure_range, smooth, suggest

BLOCKS = "▁▂▃▄▅▆▇█"
WIDTH = 50
# One device shows the same curve; compiling would take longer than the steps.
ALONE = {"devices": 1, "num_nodes": 1, "sync_batchnorm": False, "compile_model": False}


@dataclass(frozen=True)
class LrFound:
    """A measured curve, the suggestion from it, and what converts an optimizer's rate to the config's `lr`."""

    curve: LrCurve
    suggestion: LrSuggestion | None
    """None: the loss never fell."""
    total_batch: int
    """Samples per update in the test."""
    reference_batch: int | None
    """`lr_reference_batch`; None if `scale_lr` is off."""
    config_lr: float
    ranks: int
    """Processes that the config trains with; the test used one."""

    def as_key(self, rate: float) -> float:
        """The value of `lr` with which the optimizer uses this rate."""
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


def find_lr(path: Path, overrides: Sequence[str], lowest: float, highest: float, steps: int) -> LrFound:
    """The curve of a config and the suggestion from it; the config is checked before a process is started."""
    config = load_for_command(path, overrides, None).config
    check_task(config, "trained")
    machine = read_machine()
    fitted, notes = fit_to_machine(config, machine)
    say_notes(notes)
    alone, lrs = fitted.model_copy(update=ALONE), growing_rates(lowest, highest, steps)
    try:
        with progress_bar("range test", len(lrs), unit="steps") as advance:
            found = call(
                _measure,
                {"config": config_values(alone), "lrs": lrs, "cpus": machine.cpus},
                on_message=lambda message: say(message) if isinstance(message, str) else advance(*message),
            )
    except ChildDied as died:
        raise UserError(
            "trial-died",
            f"the process of the range test {died.how}",
            why="the kernel kills processes when the machine runs out of memory",
            hint="a smaller batch_size=",
        ) from None
    curve = LrCurve(**found)
    return LrFound(
        curve=curve,
        suggestion=suggest(curve),
        total_batch=config.batch_size * config.gradient_accumulation,
        reference_batch=config.lr_reference_batch if config.scale_lr else None,
        config_lr=config.lr,
        ranks=fitted.devices * fitted.num_nodes,
    )


def _measure(job: dict[str, Any], parent: Parent) -> dict[str, Any]:
    """The curve: everything that `stoker train` does before its first step, then the steps. Runs in the child."""
    import torch

    from stoker.tasks.classify import build_run, open_data
    from stoker.train.ranks import Ranks

    config = HostConfig.model_validate(job["config"])
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cpu":
        torch.set_num_threads(job["cpus"])
    data = replace(open_data(config, parent.send), val=None)
    run = build_run(config, data, Ranks(), device, say=parent.send)
    try:
        return asdict(measure_range(run, job["lrs"], lambda done, total: parent.send([done, total])))
    finally:
        run.close()


def lr_text(found: LrFound) -> str:
    """The setting to type first, then how it was derived."""
    curve, best = found.curve, found.suggestion
    losses = _finite(curve)
    ended = "diverged at" if curve.diverged_at is not None else "was still"
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
    """Writes a picture: raw and smoothed loss by learning rate, with both suggestions."""
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
    # The last points diverge; the curve before them is what matters.
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
    return f";\n  lr is for {found.reference_batch} samples, the test used {found.total_batch} (scale_lr)"


def _note(found: LrFound) -> list[str]:
    if found.reference_batch is not None or found.ranks == 1:
        return []
    times = f"may be {found.ranks} times larger"
    return [f"  measured on one device; on {found.ranks}, the total batch and therefore the rate {times}"]


def _finite(curve: LrCurve) -> list[float]:
    return [loss for loss in curve.losses if loss is not None] or [0.0]


def _sparkline(losses: list[float]) -> str:
    smoothed = smooth(losses)
    bottom, top = min(smoothed), smoothed[0]  # points that diverge at the end are clipped to the top
    height = max(top - bottom, 1e-12)
    width = min(WIDTH, len(smoothed))
    chosen = [smoothed[round(at * (len(smoothed) - 1) / max(1, width - 1))] for at in range(width)]
    return "".join(BLOCKS[min(7, max(0, round(7 * (loss - bottom) / height)))] for loss in chosen)
