"""How many images a core makes in a second, measured on a config's own data."""

from __future__ import annotations

from functools import partial

from stoker.config import Config
from stoker.errors import StokerError
from stoker.probe.host import usable_cpus
from stoker.probe.loader_speed import measure_loader, repeated
from stoker.tasks.image_data import choose_decoding, open_loader, open_samples, training_plan

TRIAL_S = 3.0
MOST_BATCH = 64


def images_per_core_second(config: Config) -> float | None:
    """None where the data cannot be reached from here."""
    try:
        samples = open_samples(config, "train")
    except StokerError:
        return None
    # Small batches: the first ones come soon, and images are what is counted.
    small = config.model_copy(update={"batch_size": min(config.batch_size, MOST_BATCH), "pin_memory": False})
    decoding, _ = choose_decoding(small, samples.index)
    workers = usable_cpus()
    plan = training_plan(small, repeated(samples, int(TRIAL_S * 20_000 * workers)), decoding)
    speed = measure_loader(partial(open_loader, small, plan, workers=workers), workers, TRIAL_S)
    return speed.images_per_second / workers
