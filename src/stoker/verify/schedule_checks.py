"""Checks of the config alone: the learning rate over the run, the number of steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.core.console import format_table
from stoker.core.errors import StokerError
from stoker.core.files import cache_folder
from stoker.core.finding import Finding
from stoker.core.units import count
from stoker.run.folder import run_name_for
from stoker.tasks.base import task_for
from stoker.tasks.checks import Check, EpochLength, Subject, failed, passed, unknown

if TYPE_CHECKING:
    from stoker.profile.host import HostConfig
    from stoker.train.schedule import Horizon

# A schedule that ends above this share of its peak has not ended: the cosine of every published recipe ends below 1 %,
# and the classic one divides by ten twice or more.
END_SHARE = 0.1
POINTS = 400


def check_schedule(subject: Subject) -> Finding:
    """The learning rate over the whole run as a table and a picture; fails if it has not come down by the end."""
    from stoker.tasks.building import horizon_for
    from stoker.train.schedule import learning_rate

    config, peak = subject.config, subject.peak_lr
    length, error = _epoch_length(subject)
    horizon = horizon_for(config, max(1, length.updates) * config.gradient_accumulation)
    last = horizon.total_steps - 1
    after_warmup = min(last, horizon.warmup_epochs * horizon.steps_per_epoch)
    steps = sorted({after_warmup, *(round(last * point / POINTS) for point in range(POINTS + 1))})
    rates = [learning_rate(step, horizon, peak) for step in steps]
    epochs = [step / horizon.steps_per_epoch for step in steps]
    facts: dict[str, Any] = {
        "steps": horizon.total_steps, "warmup_epochs": horizon.warmup_epochs, "first": rates[0], "peak": max(rates),
        "last": rates[-1], "scheduler": horizon.scheduler,
    }  # fmt: skip
    table = _table(config, horizon, peak)
    # Neither beside the data nor in the run folder, which belongs to the run.
    folder = subject.out or cache_folder() / "verify" / run_name_for(config, subject.path)
    picture = folder / "lr_schedule.png"
    try:
        draw_schedule(epochs, rates, horizon.warmup_epochs, picture)
        table.append(f"picture: {picture}")
        facts["picture"] = str(picture)
    except OSError as refused:
        table.append(f"no picture: {picture} cannot be written ({refused.strerror or refused}); --out DIR")
    problem = schedule_problem(epochs, rates, horizon)
    if problem is not None:
        return failed(problem[0], problem[1], *table, **facts)
    warmup = f"{horizon.warmup_epochs} epochs of warmup, " if horizon.warmup_epochs else ""
    seen = f"{horizon.scheduler}: {warmup}peak {max(rates):g}, last {rates[-1]:.3g} at step {last:,}"
    return passed(seen + _assumed(length, error), *table, **facts)


def schedule_problem(epochs: Sequence[float], rates: Sequence[float], horizon: Horizon) -> tuple[str, str] | None:
    """What is wrong with the rates at these epochs, and the fix: a rate that rises again, as torch's cosine does after
    its end, or that has not come down at the end of the run."""
    peak = max(rates)
    top = rates.index(peak)
    for at in range(top + 1, len(rates)):
        if rates[at] > rates[at - 1] * (1 + 1e-6) + 1e-12 * peak:
            return (
                f"the learning rate rises again at epoch {epochs[at]:.0f} of {horizon.epochs}, from "
                f"{rates[at - 1]:.3g} up to {max(rates[at:]):.3g}",
                f"a schedule as long as the run: lr_scheduler=cosine epochs={horizon.epochs}",
            )
    if horizon.scheduler == "constant" or rates[-1] <= END_SHARE * peak:
        return None
    fixes = {
        "step": f"lr_step_epochs={max(1, horizon.epochs // 3)}",
        "cosine": "min_lr=0" if horizon.min_lr > END_SHARE * peak else "lr_update=step",
    }
    return (
        f"the learning rate ends at {rates[-1]:.3g}, {rates[-1] / peak:.0%} of its peak {peak:.3g}: the run ends "
        "before its schedule",
        fixes[horizon.scheduler],
    )


def check_steps(subject: Subject) -> Finding:
    """Updates and validation steps of an epoch; fails if an epoch would be empty or longer than the data."""
    config, total, unit = subject.config, subject.total_batch, task_for(subject.config).unit
    length, error = _epoch_length(subject)
    if error is not None and length.assumed is None:
        raise error
    updates, val, val_steps = length.updates, length.val_samples, length.val_steps
    validation = "no validation" if val is None else f"{val:,} for validation: {count(val_steps or 0, 'step')}"
    facts = {"steps_per_epoch": updates, "val_samples": val, "val_steps": val_steps, "total_batch": total}
    if length.samples is None:
        return passed(f"{count(updates, 'step')} an epoch with {total:,} random {unit} each; {validation}", **facts)
    train = length.samples
    dropped = train - updates * total
    facts |= {"train_samples": train, "dropped_per_epoch": dropped}
    if updates == 0:
        fitting = max(1, train // (total // config.batch_size))
        return failed(
            f"{train:,} training {unit} are fewer than one update of {total:,}: every epoch would be empty",
            f"batch_size={fitting}",
            **facts,
        )
    if config.steps_per_epoch is not None and config.steps_per_epoch > train // total:
        return failed(
            f"steps_per_epoch is {config.steps_per_epoch:,}, but {train:,} {unit} are {train // total:,} updates of "
            f"{total:,}",
            f"steps_per_epoch={train // total}, or leave it out",
            **facts,
        )
    rest = ""
    if config.steps_per_epoch is None and dropped:
        rest = f" ({dropped:,} {unit}, others each time, are left out)"
    seen = f"{train:,} {unit} in updates of {total:,}: {count(updates, 'step')} an epoch{rest}; {validation}"
    if error is not None:
        return unknown(seen + _assumed(length, error), "a data_root= that can be read from here", **facts)
    return passed(seen, **facts)


def _epoch_length(subject: Subject) -> tuple[EpochLength, StokerError | None]:
    """Steps of an epoch, and why the data cannot be opened if they are known without it."""
    data, error = None, None
    try:
        data = subject.data
    except StokerError as refused:
        error = refused
    length = task_for(subject.config).epoch_length(subject.config, data)
    if length is None:
        raise error or AssertionError("an epoch of data that was opened has a length")
    return length, error


def _assumed(length: EpochLength, error: StokerError | None) -> str:
    return "" if error is None or length.assumed is None else f"; assuming {length.assumed} ({error.seen})"


def _table(config: HostConfig, horizon: Horizon, peak: float) -> list[str]:
    """The learning rate at the moments that people check, and the image size if it changes."""
    from stoker.train.schedule import default_resize_epochs, image_size, learning_rate

    per_epoch, last = horizon.steps_per_epoch, horizon.total_steps - 1
    moments = {0: "first step"}
    if horizon.warmup_epochs:
        moments |= {
            horizon.warmup_epochs * per_epoch - 1: "end of the warmup",
            horizon.warmup_epochs * per_epoch: "after the warmup",
        }
    for share, word in ((4, "a quarter"), (2, "half")):
        moments.setdefault(horizon.epochs // share * per_epoch, word)
    moments[last] = "last step"
    until = config.resize_epochs or default_resize_epochs(config.epochs)
    rows = []
    for step, word in sorted(moments.items()):
        epoch = step // per_epoch
        row = [word, str(epoch), f"{step:,}", f"{learning_rate(step, horizon, peak):.4g}"]
        if config.start_img_size is not None:
            row.append(f"{image_size(epoch, config.start_img_size, config.img_size, until)} px")
        rows.append(row)
    header = ["", "epoch", "step", "learning rate", "images"]
    return format_table(rows, header[: len(rows[0])]).splitlines()


def draw_schedule(epochs: Sequence[float], rates: Sequence[float], warmup_epochs: int, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    figure, axes = pyplot.subplots(figsize=(7, 3.2), dpi=120, layout="constrained")
    try:
        axes.plot(epochs, rates, color="#3b6ea5")
        if warmup_epochs:
            axes.axvline(warmup_epochs, color="#c05621", linestyle="--", linewidth=0.8, label="end of the warmup")
        axes.plot([epochs[-1]], [rates[-1]], "o", color="#2f855a", label=f"last: {rates[-1]:.3g}")
        axes.set_xlabel("epoch")
        axes.set_ylabel("learning rate")
        axes.set_ylim(bottom=0)
        axes.legend(loc="upper right", frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(path)
    finally:
        pyplot.close(figure)


CHECKS = (
    Check("schedule", "config", "the learning rate from the first step to the last", check_schedule),
    Check("steps", "config", "updates and validation steps of an epoch", check_steps),
)
