"""One trial in a process of its own, `python -m stoker.tasks.trial_process FD`: whatever it does ends with it.

A line of JSON on stdin says what to do; lines of JSON on the descriptor FD say how far it is and what came of it.
The end of stdin ends the process: it has no use without whoever asked.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from stoker.config import Config
from stoker.errors import StokerError
from stoker.probe.ceiling import Tell

LOCAL_SHARE = 0.2
"""Of the storage trial's time: for writing to this host's own disk and reading it back, where the data is elsewhere."""

Job = dict[str, Any]
Result = dict[str, Any]


def main() -> None:
    """Does the job of stdin, and answers."""
    # Ctrl-C is for the process that asked, which ends this one in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _leave)
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)
    job: Job = json.loads(sys.stdin.readline())
    threading.Thread(target=_leave_with_parent, name="parent-watch", daemon=True).start()

    def send(kind: str, **parts: Any) -> None:
        os.write(descriptor, json.dumps({"kind": kind, **parts}).encode() + b"\n")

    with suppress(BrokenPipeError):
        try:
            trial = TRIALS[job["trial"]]
            result = trial(Config.model_validate(job["config"]), job, lambda seconds: send("progress", done=seconds))
            send("result", result=result)
        except StokerError as error:
            send("error", name=error.name, seen=error.seen, why=error.why, hint=error.hint, exit=error.exit_code)
        except Exception as error:
            send("bug", text=f"{type(error).__name__}: {error}\n{traceback.format_exc()}")


def storage_trial(config: Config, job: Job, tell: Tell) -> Result:  # noqa: ARG001 - it takes no longer than it was given
    """How the data's source answers."""
    from stoker.data.store.stores import open_store
    from stoker.probe.local_disk import measure_local_disk
    from stoker.probe.storage_speed import measure_storage
    from stoker.tasks.image_data import open_samples

    samples = open_samples(config, "train")
    missing: list[str] = []
    store = open_store(samples.index.root, max_object_bytes=config.max_image_bytes)
    facts = measure_storage(store, samples, (1 - LOCAL_SHARE) * job["seconds"], missing.append)
    if facts.remote and facts.bytes_per_sample:
        folder = None if config.cache_dir is None else Path(config.cache_dir)
        seconds = LOCAL_SHARE * job["seconds"] / 2
        facts = replace(facts, local_bytes_per_second=measure_local_disk(folder, facts.bytes_per_sample, seconds))
    return {"storage": asdict(facts), "missing": missing}


def loader_trial(config: Config, job: Job, tell: Tell) -> Result:  # noqa: ARG001
    """The loader with a consumer that takes no time."""
    from functools import partial

    from stoker.probe.loader_speed import measure_loader, repeated
    from stoker.tasks.image_data import choose_decoding, open_loader, open_samples, training_plan

    samples = open_samples(config, "train")
    decoding, _ = choose_decoding(config, samples.index)
    workers, seconds = job["workers"], job["seconds"]
    # So long that no epoch ends within the measurement, whatever the speed.
    wanted = max(config.batch_size * (workers + 4) * 3, int(seconds * 20_000 * max(1, workers)))
    plan = training_plan(config, repeated(samples, wanted), decoding)
    speed = measure_loader(partial(open_loader, config, plan, workers=workers), workers, seconds)
    return {"images_per_second": speed.images_per_second, "first_batch_s": speed.first_batch_s}


def ceiling_trial(config: Config, job: Job, tell: Tell) -> Result:
    """The real model and step on batches that are already there; and the way to the device."""
    from stoker.probe.ceiling import Replay, batches_to_replay
    from stoker.probe.device_busy import device_busy_share
    from stoker.probe.transfer import measure_transfer
    from stoker.tasks.timed_training import build_trial, train_for

    run, _ = build_trial(config, job)
    last = config.epochs - 1
    batches = batches_to_replay(run.train_loader(last).epoch(last))
    run.close()  # workers that wait for nothing would still be asked
    run.train_loader = lambda _epoch: Replay(batches)
    run.guard_memory = lambda _loader: None  # nothing is made ahead that could be held back
    interval = train_for(run, job["seconds"], tell)
    accelerator = measure_transfer(run.device, batches[0].images.nbytes, 1.0, batches[0].images.is_pinned())
    if accelerator is not None:
        busy = device_busy_share(lambda: run.step([run.prepare(batches[0], 0, 0)], 0), run.device)
        accelerator = replace(accelerator, device_busy_share=busy)
    return {
        "images_per_second": interval.samples / (interval.elapsed_s - interval.wait_s),
        "accelerator": None if accelerator is None else asdict(accelerator),
    }


def together_trial(config: Config, job: Job, tell: Tell) -> Result:
    """The loader and its consumer: the real step, or one that only takes its time."""
    from stoker.clock.interval import Interval
    from stoker.output.clock_file import HEADER, interval_record
    from stoker.probe.host_load import HostWatch

    watch = HostWatch()

    def look(seconds: float) -> None:
        if seconds == 0:
            watch.facts()  # what was before, the building of the model among it, says nothing about steps
        watch.look()
        tell(seconds)

    interval: Interval
    if job.get("pace_s") is not None:
        from stoker.tasks.paced_feeding import feed_at_pace

        interval, header, name_samples = feed_at_pace(config, job, look)
    else:
        from stoker.tasks.timed_training import build_trial, train_for

        run, header = build_trial(config, job)
        name_samples = run.name_samples
        try:
            interval = train_for(run, job["seconds"], look)
        finally:
            run.close()
    host = {name: value for name, value in asdict(watch.facts()).items() if value is not None}
    line = {"kind": "step", **interval_record(interval, name_samples), "host": host}
    return {"lines": [{"kind": "event", "event": HEADER, **header}, line]}


TRIALS: dict[str, Callable[[Config, Job, Tell], Result]] = {
    "storage": storage_trial,
    "loader": loader_trial,
    "ceiling": ceiling_trial,
    "together": together_trial,
}


def _leave(_number: int, _frame: object) -> None:
    raise SystemExit(0)


def _leave_with_parent() -> None:
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    main()
