"""The range test in a process of its own: whatever it does to a model, to memory or to a device ends with it."""

from __future__ import annotations

import multiprocessing
import signal
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

from stoker.commands.cpu_threads import let_threads_sleep
from stoker.config import Config
from stoker.config.loading import load_for_command
from stoker.config.machine import fit_to_machine
from stoker.errors import StokerError, UserError
from stoker.output.lr_text import LrFound
from stoker.output.progress import progress_bar
from stoker.output.text import say, say_notes
from stoker.probe.host import read_machine
from stoker.training.lr_range import LrCurve, growing_rates, suggest

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
    let_threads_sleep()  # that other process inherits it
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
    from stoker.training.lr_range import measure_range
    from stoker.training.ranks import Ranks

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
