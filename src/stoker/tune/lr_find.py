"""`stoker lr-find`: runs the range test in a process of its own, and shows the result as text and as a picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.config import config_values
from stoker.config.reading import load_for_command
from stoker.core.console import progress_bar, say, say_notes
from stoker.core.errors import UserError
from stoker.profile.host import HostConfig, fit_to_machine, read_machine
from stoker.trial.trial_server import ALONE, trial_server
from stoker.tune.lr_range import INTERVAL, LrCurve, LrReading, LrSuggestion, growing_rates, measure_range, read_curve

if TYPE_CHECKING:
    from stoker.train.checkpoint.branching import Start

BLOCKS = "▁▂▃▄▅▆▇█"
WIDTH = 50


@dataclass(frozen=True)
class LrFound:
    """A measured curve, its evaluation, and how to convert an optimizer's rate to the config's `lr`."""

    curve: LrCurve
    reading: LrReading
    total_batch: int
    """Samples per update in the test."""
    reference_batch: int | None
    """`lr_reference_batch`; None if `scale_lr` is off."""
    config_lr: float
    ranks: int
    """Processes that the config trains with; the test used one."""
    branched_from: dict[str, Any] | None = None
    """The checkpoint that the sweeps began from."""

    @property
    def suggestion(self) -> LrSuggestion | None:
        return self.reading.suggestion

    def as_key(self, rate: float) -> float:
        """The value of `lr` with which the optimizer uses this rate."""
        return rate if self.reference_batch is None else rate * self.reference_batch / self.total_batch

    def as_dict(self) -> dict[str, Any]:
        found, reading = self.suggestion, self.reading
        interval = None if found is None else [found.low, found.high]
        return {
            "suggestion": None if found is None else found.steepest,
            "lr_key": None if found is None else self._rounded_key(found.steepest),
            "interval": interval,
            "lr_key_interval": None if interval is None else [self._rounded_key(rate) for rate in interval],
            "second_opinion": None if found is None else found.tenth_of_lowest,
            "second_lr_key": None if found is None else self._rounded_key(found.tenth_of_lowest),
            "reason": reading.reason,
            "noise": reading.noise,
            "rises_at": reading.rises_at,
            "total_batch": self.total_batch,
            "from": self.branched_from,
            "lrs": self.curve.lrs,
            "sweeps": self.curve.sweeps,
            "losses": reading.losses,
            "diverged_at": self.curve.diverged_at,
        }

    def _rounded_key(self, rate: float) -> float:
        return float(f"{self.as_key(rate):.2g}")


def find_lr(
    path: Path,
    overrides: Sequence[str],
    lowest: float,
    highest: float,
    steps: int,
    *,
    sweeps: int = 1,
    start: Start | None = None,
) -> LrFound:
    """The curve of a config, from random weights or from `start`, and the suggestion from it; the config is checked
    before a process is started."""
    config = load_for_command(path, overrides).config
    if start is not None:
        # Here, because the module imports torch, which this process does not need otherwise.
        from stoker.train.checkpoint.branching import check_exists, refuse_two_sources

        refuse_two_sources(start, config.weights)
        check_exists(start)
    machine = read_machine()
    fitted, notes = fit_to_machine(config, machine)
    say_notes(notes)
    lrs = growing_rates(lowest, highest, steps)
    # Compiling would take longer than the steps.
    alone = fitted.model_copy(update={**ALONE, "compile_model": False})
    job = {"config": config_values(alone), "lrs": lrs, "cpus": machine.cpus, "sweeps": sweeps, "from": None}
    if start is not None:
        job |= {"from": str(start.path), "which": start.which}
    with progress_bar("range test", sweeps * len(lrs), unit="steps") as advance, closing(trial_server()) as server:
        ended = server.call(
            f"{__name__}:measure", job,
            on_message=lambda message: say(message) if isinstance(message, str) else advance(*message),
        )  # fmt: skip
    ended.reraise()
    if ended.how != "measured":
        raise UserError(
            "trial-died",
            f"the range test did not end: {ended.detail}",
            why="the kernel kills processes when the machine runs out of memory",
            hint="a smaller batch_size=",
        )
    found = ended.result
    curve = LrCurve(**found["curve"])
    return LrFound(
        curve=curve,
        reading=read_curve(curve),
        total_batch=config.batch_size * config.gradient_accumulation,
        reference_batch=config.lr_reference_batch if config.scale_lr else None,
        config_lr=config.lr,
        ranks=fitted.devices * fitted.num_nodes,
        branched_from=found["from"],
    )


def measure(job: dict[str, Any], tell: Callable[[Any], None]) -> dict[str, Any]:
    """The curve: everything that `stoker train` does before its first step, then the steps. Runs in a fork."""
    from stoker.train.checkpoint.branching import Start, begin
    from stoker.trial.process import open_run

    run, _ = open_run(HostConfig.model_validate(job["config"]), job["cpus"], tell)
    epoch = 0
    try:
        if job["from"] is not None:
            # The optimizer's state too, if it is the same: in mid-run, momentum decides which rates are too high.
            run = begin(run, Start(Path(job["from"]), job["which"], keep_optimizer=None), tell)
            origin = run.record.branched_from or {}
            if origin["optimizer_kept"] and origin["epoch"] is not None:
                epoch = origin["epoch"]
                at = f"epoch {epoch}, step {origin['step']:,}"
                tell(f"the sweeps begin at {at}: weights, batch norm statistics and momenta of the checkpoint")
        curve = measure_range(
            run, job["lrs"], lambda done, total: tell([done, total]), sweeps=job["sweeps"], epoch=epoch
        )
        return {"curve": asdict(curve), "from": run.record.branched_from}
    finally:
        run.input.close()


def lr_text(found: LrFound) -> str:
    """The setting to type first, then how it was derived."""
    curve, reading, best = found.curve, found.reading, found.suggestion
    losses = reading.losses or [0.0]
    ended = "diverged at" if curve.diverged_at is not None else "was still"
    at = f"{curve.diverged_at:.2g}" if curve.diverged_at is not None else f"{losses[-1]:.3g} at {curve.lrs[-1]:.2g}"
    tail = [
        "", f"  {_sparkline(reading.smoothed or losses)}",
        f"  {curve.lrs[0]:g} ... {curve.lrs[-1]:.2g}; the loss {ended} {at}",
    ]  # fmt: skip
    if best is None:
        return "\n".join([f"no suggestion: {reading.reason}", *_without_suggestion(found), *tail])
    steepest, second = found.as_key(best.steepest), found.as_key(best.tenth_of_lowest)
    sweeps = f"{len(curve.sweeps)} sweeps" if len(curve.sweeps) > 1 else "the sweep"
    notes = []
    if found.reference_batch is not None:
        scaling = f";\n  lr is for {found.reference_batch} samples, the test used {found.total_batch} (scale_lr)"
    else:
        scaling = f" (total batch {found.total_batch}; scale_lr is off)"
        if found.ranks > 1:
            times = f"may be {found.ranks} times larger"
            notes = [f"  measured on one device; on {found.ranks}, the total batch and therefore the rate {times}"]
    return "\n".join(
        [
            f"lr={steepest:.2g}",
            f"  with the noise of {sweeps}: lr={found.as_key(best.low):.2g} to {found.as_key(best.high):.2g} "
            f"({INTERVAL[1] - INTERVAL[0]} % interval)",
            f"  the loss falls fastest where the optimizer uses {best.steepest:.2g}{scaling}",
            f"  second opinion: lr={second:.2g}, a tenth of where the loss was lowest ({best.lowest:.2g})",
            f"  the config has lr={found.config_lr:g}, {found.config_lr / steepest:.2g} times the suggestion",
            *notes,
            *tail,
        ]
    )


def plot_lr(found: LrFound, path: Path) -> None:
    """Writes a picture: the sweeps and the smoothed loss by learning rate, its noise and the interval shaded."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.6), dpi=120)
    reading, best = found.reading, found.suggestion
    for losses in found.curve.sweeps:
        points = [(lr, loss) for lr, loss in zip(found.curve.lrs, losses, strict=False) if loss is not None]
        axes.plot([lr for lr, _ in points], [loss for _, loss in points], color="#cbd5e0", linewidth=0.6)
    if reading.smoothed:
        band = [
            (loss - 2 * error, loss + 2 * error) for loss, error in zip(reading.smoothed, reading.error, strict=True)
        ]
        axes.fill_between(
            reading.rates, [low for low, _ in band], [high for _, high in band], color="#3b6ea5", alpha=0.2,
            label="noise of the mean (2 standard errors)",
        )  # fmt: skip
        axes.plot(reading.rates, reading.smoothed, color="#3b6ea5", label="smoothed")
        # The last points diverge; the curve before them is what matters.
        bottom, top = min(reading.smoothed), reading.smoothed[0]
        height = max(top - bottom, 4 * reading.error[0], 1e-9)
        axes.set_ylim(bottom - 0.15 * height, top + 0.6 * height)
    if best is not None:
        axes.axvspan(best.low, best.high, color="#c05621", alpha=0.15, label="interval of the steepest place")
        for rate, label, colour in (
            (best.steepest, "steepest", "#c05621"),
            (best.tenth_of_lowest, "lowest / 10", "#2f855a"),
        ):
            label = f"{label}: {rate:.2g} (lr={found.as_key(rate):.2g})"
            axes.axvline(rate, color=colour, linestyle="--", label=label)
    axes.set_xscale("log")
    axes.set_xlabel("learning rate of the optimizer")
    axes.set_ylabel("training loss")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2, frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def _without_suggestion(found: LrFound) -> list[str]:
    """What the curve shows nevertheless, and what to try."""
    rises = found.reading.rises_at
    lines = [] if rises is None else [f"  it rises by more than its noise from lr={found.as_key(rises):.2g} on"]
    if found.branched_from is not None:
        # Trained weights are near a minimum: a short sweep that does not fall is to be expected.
        return [*lines, "  with trained weights that is normal; more to average: --sweeps 5, --steps 300"]
    return [*lines, "  check the data and the labels, or give it more: --sweeps 5, --steps 300, a larger batch_size"]


def _sparkline(smoothed: list[float]) -> str:
    bottom, top = min(smoothed), smoothed[0]  # points that diverge at the end are clipped to the top
    height = max(top - bottom, 1e-12)
    width = min(WIDTH, len(smoothed))
    chosen = [smoothed[round(at * (len(smoothed) - 1) / max(1, width - 1))] for at in range(width)]
    return "".join(BLOCKS[min(7, max(0, round(7 * (loss - bottom) / height)))] for loss in chosen)
