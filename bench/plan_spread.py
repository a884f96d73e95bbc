"""How far the CPU figures of `stoker plan` differ from one measurement to the next, beside the spread that it states.

Each round measures what a plan on a CPU measures: the cores (from which the model's rate follows), the loader for as
long as `--measure` does, and the loader for as long as `stoker bench data` would. Takes about two minutes.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np

from bench.quiet import wait_for_quiet
from bench.rounds import Spread, interleave, keep
from stoker.config import load_config
from stoker.plan.budget import PlannedRun, step_s_of, trace_needs
from stoker.plan.planning import SPREAD, WantedMachine, hardware_for, samples_per_core_second
from stoker.profile.accelerators import measure_cpu
from stoker.profile.host import HostConfig, fit_to_machine, read_machine, usable_cpus
from stoker.tasks.base import task_for
from stoker.tasks.images.data import TrainingData, choose_decoding, measure_speed, open_samples
from stoker.tasks.images.layouts.sample_index import SampleSet

BENCH_S = 6.0


def write_photographs(root: Path, count: int = 200) -> None:
    """JPEGs of 500 x 375 pixels with coarse and fine detail, of about the size of ImageNet's."""
    rng = np.random.default_rng(0)
    for number in range(count):
        coarse = rng.integers(0, 256, (12, 16, 3), np.uint8)
        pixels = cv2.resize(coarse, (500, 375), interpolation=cv2.INTER_CUBIC).astype(np.int16)
        pixels += rng.integers(-25, 26, pixels.shape, np.int16)
        path = root / "train" / f"class{number % 4}" / f"{number:04}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(path), pixels.clip(0, 255).astype(np.uint8), [cv2.IMWRITE_JPEG_QUALITY, 90])


def largest_difference(spread: Spread) -> float:
    """How much larger the largest figure is than the smallest."""
    return max(spread.values) / min(spread.values) - 1


def share_within(spread: Spread, most: float) -> float:
    """The share of all pairs of measurements that differ by at most `most`."""
    pairs = list(itertools.combinations(spread.values, 2))
    return sum(max(pair) / min(pair) - 1 <= most for pair in pairs) / len(pairs)


def loader_rate(config: HostConfig, samples: SampleSet) -> float:
    decoding, _ = choose_decoding(config, samples.index)
    data = TrainingData(samples, None, decoding)
    return measure_speed(config, data, workers=usable_cpus(), seconds=BENCH_S).images_per_second


def _job(config: HostConfig) -> PlannedRun:
    hardware = hardware_for(config, None, WantedMachine(), read_machine())
    return PlannedRun(config, hardware, task_for(config).plan_facts(config))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--data", type=Path, help="a folder with train/CLASS/IMAGE.jpg; else some are generated")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="plan-spread-") as name:
        root = given.data or Path(name)
        if given.data is None:
            write_photographs(root)
        keys = [f"data_root={root}", f"index_dir={name}/index", "model=resnet18", "batch_size=32"]
        config, _ = fit_to_machine(load_config(None, keys).config, read_machine())
        job = _job(config)
        needs = trace_needs(job)
        assert needs.trace is not None
        trace = needs.trace

        def model() -> float:
            again = replace(job, hardware=replace(job.hardware, sheet=measure_cpu()))
            return job.total_batch / (step_s_of(again, trace) or float("nan"))

        def planned_loader() -> float:
            return (samples_per_core_second(config) or float("nan")) * usable_cpus()

        samples = open_samples(config, "train")
        busy = wait_for_quiet(20.0)
        spreads = interleave(
            {"model": model, "loader": planned_loader, "bench data": lambda: loader_rate(config, samples)}, given.rounds
        )
    document = {
        "stated_spread": SPREAD,
        "busy_cores_at_the_start": round(busy, 2),
        "images_per_second": {name: spread.as_dict() for name, spread in spreads.items()},
        "largest_difference": {name: round(largest_difference(spread), 4) for name, spread in spreads.items()},
        "share_of_pairs_within": {name: round(share_within(spread, SPREAD), 4) for name, spread in spreads.items()},
    }
    for name, spread in spreads.items():
        print(
            f"{name:<12}{spread.median:8.3g} images/s ({min(spread.values):.3g} to {max(spread.values):.3g}), "
            f"largest difference {largest_difference(spread):.0%}, {share_within(spread, SPREAD):.0%} of pairs within "
            f"{SPREAD:.0%}"
        )
    print(f"wrote {keep('plan_spread', document)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
