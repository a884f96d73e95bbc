"""`stoker lr-find`: the range test in a process of its own, and what it found as text and as a picture."""

from __future__ import annotations

import multiprocessing
import signal
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from stoker.config import Config
from stoker.config.reading import load_for_command
from stoker.console import progress_bar, say, say_notes
from stoker.errors import StokerError, UserError
from stoker.machine.host import fit_to_machine, read_machine
from stoker.train.lr_range import LrCurve, LrSuggestion, growing_rates, smooth, suggest

# What `stoker lr-find` found: the line to type, a curve in a line of text, and a picture.

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


# The range test in a process of its own: whatever it does to a model, to memory or to a device ends with it.

# For ending loader processes in order.
GRACE_S = 5.0
# One device shows the same curve; compiling would cost more than the steps; validation plays no part.
ALONE = {"devices": 1, "num_nodes": 1, "sync_batchnorm": False, "compile_model": False}


def find_lr(path: Path, overrides: Sequence[str], lowest: float, highest: float, steps: int) -> LrFound:
    """The curve of a config and what it suggests; the config is checked before a process is started."""
    config = load_for_command(path, overrides, None).config
    if config.task != "classify":
        raise UserError("task-not-built", f"task: {config.task} cannot be trained yet", hint="task=classify")
    machine = read_machine()
    fitted, notes = fit_to_machine(config, machine)
    say_notes(notes)
    ranks = (fitted.devices if isinstance(fitted.devices, int) else 1) * fitted.num_nodes
    curve = _in_another_process(fitted.model_copy(update=ALONE), growing_rates(lowest, highest, steps), machine.cpus)
    return LrFound(
        curve=curve,
        suggestion=suggest(curve),
        total_batch=config.batch_size * config.gradient_accumulation,
        reference_batch=config.lr_reference_batch if config.scale_lr else None,
        config_lr=config.lr,
        ranks=ranks,
    )


def _in_another_process(config: Config, lrs: list[float], cpus: int) -> LrCurve:
    # Not forked: torch's threads and devices do not survive that.
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_trial, args=(theirs, config, lrs, cpus), name="stoker-lr-find")
    process.start()
    theirs.close()  # so that the end of the process is the end of the pipe
    try:
        with progress_bar("range test", len(lrs), unit="steps") as advance:
            while True:
                kind, value = ours.recv()
                if kind == "progress":
                    advance(*value)
                elif kind == "say":
                    say(value)
                elif kind == "error":
                    raise value
                elif kind == "bug":
                    raise RuntimeError(value)
                else:
                    curve: LrCurve = value
                    return curve
    except EOFError:
        process.join(GRACE_S)
        raise UserError(
            "trial-died",
            f"the process of the range test ended with {process.exitcode}",
            why="often the system was out of memory",
            hint="batch_size= smaller",
        ) from None
    except BaseException:
        process.terminate()
        raise
    finally:
        _wait_for_end(process)
        ours.close()


def _wait_for_end(process: BaseProcess) -> None:
    process.join(GRACE_S)
    if process.is_alive():
        process.kill()
        process.join()


def _trial(pipe: Connection, config: Config, lrs: list[float], cpus: int) -> None:
    """What the process does: everything that `stoker train` does before its first step, then the steps."""
    # Ctrl-C reaches both processes; ours is told by the other one, once, in a way that closes what is open.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _leave)
    # A parent that was killed hears nothing any more: writing to it ends the trial.
    with suppress(BrokenPipeError):
        try:
            answer: tuple[str, object] = ("curve", _measure(pipe, config, lrs, cpus))
        except StokerError as error:
            answer = ("error", error)
        except Exception as error:
            # As text: not every exception travels. The first line is what people see, the rest goes into the log.
            answer = ("bug", f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
        # Everything is closed: from here on, being ended may be sudden.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        pipe.send(answer)


def _measure(pipe: Connection, config: Config, lrs: list[float], cpus: int) -> LrCurve:
    import torch

    from stoker.tasks.classify import build_run, open_data
    from stoker.train.lr_range import measure_range
    from stoker.train.ranks import Ranks

    def tell(text: str) -> None:
        pipe.send(("say", text))

    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cpu":
        torch.set_num_threads(cpus)
    workers = config.num_workers if isinstance(config.num_workers, int) else cpus
    data = replace(open_data(config, tell), val=None)
    run = build_run(config, data, Ranks(), device, workers=workers, say=tell)
    try:
        return measure_range(run, lrs, lambda done, total: pipe.send(("progress", (done, total))))
    finally:
        run.close()


def _leave(_number: int, _frame: object) -> None:
    raise SystemExit(0)
