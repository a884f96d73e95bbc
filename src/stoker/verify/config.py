"""Checks of the config alone: the recipe it resembles, the learning rate over the run, the number of steps."""

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
from stoker.verify.checks import Check, Subject, failed, passed, unknown
from stoker.verify.recipes import claimed_recipes, nearest_recipe

if TYPE_CHECKING:
    from stoker.profile.host import HostConfig
    from stoker.train.schedule import Horizon

MOST_NAMED = 6
# A config with fewer of a recipe's settings does not count as a variation of it.
RESEMBLES_SHARE = 0.5
# A schedule that ends above this share of its peak has not ended: the cosine of every published recipe ends below 1 %,
# and the classic one divides by ten twice or more.
END_SHARE = 0.1
POINTS = 400
IMAGENET_TRAIN, IMAGENET_VAL = 1_281_167, 50_000


def check_recipe(subject: Subject) -> Finding:
    """Names the published recipe that the config resembles, and what differs; fails if its name claims more."""
    config = subject.config
    names = {subject.path.stem, run_name_for(config, subject.path)}
    claimed = claimed_recipes(" ".join(sorted(names)))
    recipe, differs = nearest_recipe(config, claimed) if claimed else nearest_recipe(config)
    facts = {"recipe": recipe.name, "differences": [one.text for one in differs]}
    if not differs:
        return passed(
            f"{recipe.name} ({recipe.source}), which reached {recipe.accuracy:g} % top-1 on ImageNet",
            accuracy=recipe.accuracy,
            **facts,
        )
    texts = [one.text for one in differs]
    more = f", and {len(texts) - MOST_NAMED} more" if len(texts) > MOST_NAMED else ""
    except_ = f"except: {', '.join(texts[:MOST_NAMED])}{more}"
    if claimed:
        called = " and ".join(sorted(names))
        settings = [word for one in differs if one.fix is not None for word in one.fix.split()]
        return failed(
            f"called {called}, but it is {recipe.name} ({recipe.source}) {except_}",
            f"stoker train {subject.arguments_with(settings)}; or another file name and run_name=",
            *(texts[MOST_NAMED:] if more else ()),
            **facts,
        )
    if len(differs) > (1 - RESEMBLES_SHARE) * len(recipe.settings):
        return passed(
            f"no published recipe is close (the nearest, {recipe.name}, differs in {len(differs)} of "
            f"{len(recipe.settings)} settings)",
            **facts,
        )
    return passed(f"{recipe.name} ({recipe.source}), {except_}", *(texts[MOST_NAMED:] if more else ()), **facts)


def check_learning_rate(subject: Subject) -> Finding:
    """Fails if SGD's peak learning rate is far above the published one for this total batch."""
    from stoker.train.schedule import PUBLISHED_SGD_BATCH, lr_warning

    config = subject.config
    total, peak = total_batch(config), peak_lr(config)
    facts = {"peak_lr": peak, "total_batch": total}
    warning = lr_warning(config.optimizer, peak, total)
    if warning is not None:
        return failed(
            warning.partition("; if")[0], f"lr_reference_batch={PUBLISHED_SGD_BATCH}, or a lower lr=", **facts
        )
    scaled = f" = {config.lr:g} x {total} / {config.lr_reference_batch}" if config.scale_lr else ", not scaled"
    return passed(f"{peak:g} for a total batch of {total:,}{scaled}", **facts)


def check_schedule(subject: Subject) -> Finding:
    """The learning rate over the whole run as a table and a picture; fails if it has not come down by the end."""
    from stoker.tasks.building import horizon_for
    from stoker.train.schedule import learning_rate

    config = subject.config
    if config.task == "segment3d":
        updates, assumed = updates_of_volumes(config), ""
    else:
        samples, assumed = _samples(subject)
        updates = max(1, steps_of(config, *samples)[0])
    horizon = horizon_for(config, updates * config.gradient_accumulation)
    peak = peak_lr(config)
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
    except OSError as error:
        table.append(f"no picture: {picture} cannot be written ({error.strerror or error}); --out DIR")
    problem = schedule_problem(epochs, rates, horizon)
    if problem is not None:
        return failed(problem[0], problem[1], *table, **facts)
    warmup = f"{horizon.warmup_epochs} epochs of warmup, " if horizon.warmup_epochs else ""
    return passed(
        f"{horizon.scheduler}: {warmup}peak {max(rates):g}, last {rates[-1]:.3g} at step {last:,}{assumed}",
        *table,
        **facts,
    )


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
    config = subject.config
    if config.task == "segment3d":
        return _steps_of_patches(subject)
    (train, val), assumed = _samples(subject)
    total, ranks = total_batch(config), config.devices * config.num_nodes
    updates, val_steps = steps_of(config, train, val)
    dropped = train - updates * total
    facts = {
        "train_samples": train, "val_samples": val, "steps_per_epoch": updates, "val_steps": val_steps,
        "total_batch": total, "dropped_per_epoch": dropped,
    }  # fmt: skip
    if updates == 0:
        fitting = max(1, train // (ranks * config.gradient_accumulation))
        return failed(
            f"{train:,} training images are fewer than one update of {total:,}: every epoch would be empty",
            f"batch_size={fitting}",
            **facts,
        )
    if config.steps_per_epoch is not None and config.steps_per_epoch > train // total:
        return failed(
            f"steps_per_epoch is {config.steps_per_epoch:,}, but {train:,} images are {train // total:,} updates of "
            f"{total:,}",
            f"steps_per_epoch={train // total}, or leave it out",
            **facts,
        )
    validation = "no validation" if val is None else f"{val:,} for validation: {count(val_steps or 0, 'step')}"
    rest = ""
    if config.steps_per_epoch is None and dropped:
        rest = f" ({count(dropped, 'image')}, others each time, are left out)"
    seen = f"{train:,} images in updates of {total:,}: {count(updates, 'step')} an epoch{rest}; {validation}{assumed}"
    return unknown(seen, "a data_root= that can be read from here", **facts) if assumed else passed(seen, **facts)


def _steps_of_patches(subject: Subject) -> Finding:
    """Random patches fill any number of updates; a grid is as long as its volumes."""
    config, val = subject.config, subject.volumes.val
    updates, total = updates_of_volumes(config), total_batch(config)
    patches = None if val is None else val.steps.samples
    together = (config.val_batch_size or config.batch_size) * config.devices * config.num_nodes
    val_steps = None if patches is None else -(-patches // together)
    validation = "no validation" if patches is None else f"{patches:,} for validation: {count(val_steps or 0, 'step')}"
    return passed(
        f"{count(updates, 'step')} an epoch with {total:,} random patches each; {validation}",
        steps_per_epoch=updates, val_samples=patches, val_steps=val_steps, total_batch=total,
    )  # fmt: skip


def updates_of_volumes(config: HostConfig) -> int:
    """Updates of an epoch of random patches."""
    from stoker.tasks.volumes.data import updates_per_epoch

    return updates_per_epoch(config)


def total_batch(config: HostConfig) -> int:
    """Samples of one update, over all ranks."""
    return config.batch_size * config.devices * config.num_nodes * config.gradient_accumulation


def peak_lr(config: HostConfig) -> float:
    """The learning rate after the warmup, as the optimizer gets it."""
    from stoker.train.schedule import scaled_lr

    return scaled_lr(config.lr, total_batch(config), config.lr_reference_batch, config.scale_lr)


def steps_of(config: HostConfig, train: int, val: int | None) -> tuple[int, int | None]:
    """Updates and validation steps of an epoch, by the same arithmetic as the loaders'."""
    from stoker.tasks.images.data import updates_per_epoch, validation_samples

    ranks = config.devices * config.num_nodes
    updates = updates_per_epoch(config, train, ranks)
    if val is None or config.limit_val_batches == 0:
        return updates, None
    together = (config.val_batch_size or config.batch_size) * ranks
    return updates, -(-validation_samples(config, val, ranks) // together)


def _samples(subject: Subject) -> tuple[tuple[int, int | None], str]:
    """Training and validation images; those of ImageNet, with a remark, if the data cannot be opened."""
    try:
        train, val = subject.samples
    except StokerError as error:
        config = subject.config
        classes = config.subset_classes or 1000
        counts = [
            min(all_ * classes // 1000, classes * per_class) if per_class else all_ * classes // 1000
            for all_, per_class in (
                (IMAGENET_TRAIN, config.subset_train_per_class),
                (IMAGENET_VAL, config.subset_val_per_class),
            )
        ]
        return (counts[0], counts[1]), f"; assuming ImageNet's counts ({error.seen})"
    return (len(train), None if val is None else len(val)), ""


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
    """Writes a picture of the learning rate by epoch."""
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
    Check(
        "recipe",
        "config",
        "the published recipe that it resembles, and what differs",
        check_recipe,
        cheap=True,
        task="classify",
    ),
    Check(
        "learning-rate", "config", "the peak learning rate for this total batch", check_learning_rate, task="classify"
    ),
    Check("schedule", "config", "the learning rate from the first step to the last", check_schedule),
    Check("steps", "config", "updates and validation steps of an epoch", check_steps),
)
