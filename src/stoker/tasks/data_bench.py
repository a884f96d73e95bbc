"""`stoker bench data`: how fast the loader is by number of workers; the result as text and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from stoker.config import Config
from stoker.config.reading import load_for_command
from stoker.core.console import format_table, progress_bar, say, say_notes
from stoker.core.errors import UsageError
from stoker.loader.loader import LoaderSpeed, choose_engine
from stoker.profile.datasheets import PublishedRate, published_rate
from stoker.profile.host import fit_to_machine, read_machine
from stoker.tasks.base import task_for
from stoker.tasks.images.data import TrainingData, choose_decoding, files_for_measuring, open_samples
from stoker.tasks.images.decode.calibration import decode_limit
from stoker.tasks.images.layouts.splits import find_split

CONFIG_ENDINGS = (".yaml", ".yml")
FOLDER_BATCH_SIZE = 64
BAR = 40
_THREAD_PARTS = (
    ("on_cpu", "on a core"),
    ("run_queue", "waiting for a core"),
    ("blocked", "blocked on storage or locks"),
)


@dataclass(frozen=True)
class DataBench:
    source: str
    samples: int
    batch_size: int
    img_size: int | None
    """None for volumes."""
    engine: str
    decoder: str | None
    decoder_us: dict[str, float] | None
    """Calibrated time of each decoder; None if no calibration was needed."""
    rates: tuple[LoaderSpeed, ...]
    decode_limit_images_per_second: float | None
    """Whole images decoded by libjpeg-turbo alone, with as many threads as the fastest rate has workers."""
    gpu: PublishedRate | None = None
    patch_size: tuple[int, ...] | None = None
    """None for images."""

    @property
    def unit(self) -> str:
        return "images" if self.patch_size is None else "patches"

    @property
    def what(self) -> str:
        if self.patch_size is None:
            return f"{self.decoder}, {self.img_size} px"
        return f"patches of {' x '.join(map(str, self.patch_size))}"

    @property
    def best(self) -> LoaderSpeed:
        return max(self.rates, key=lambda rate: rate.images_per_second)

    @property
    def share_of_gpu(self) -> float | None:
        """This host's images/s as a share of what the accelerator can process."""
        return None if self.gpu is None else self.best.images_per_second / self.gpu.images_per_second

    def as_dict(self) -> dict[str, Any]:
        return {
            "images_per_second": self.best.images_per_second,
            "by_workers": {str(rate.workers): rate.images_per_second for rate in self.rates},
            "stages": self.best.cost.per_image(),
            "decode_limit_images_per_second": self.decode_limit_images_per_second,
            "workers": self.best.workers,
            "first_batch_s": self.best.first_batch_s,
            "source": self.source,
            "samples": self.samples,
            "batch_size": self.batch_size,
            "img_size": self.img_size,
            "patch_size": None if self.patch_size is None else list(self.patch_size),
            "engine": self.engine,
            "decoder": self.decoder,
            "decoder_us": self.decoder_us,
            "gpu": None if self.gpu is None else self.gpu.name,
            "gpu_images_per_second": None if self.gpu is None else self.gpu.images_per_second,
            "gpu_source": None if self.gpu is None else self.gpu.source,
            "share_of_gpu": self.share_of_gpu,
        }


def bench_data(
    source: str, overrides: Sequence[str], worker_counts: Sequence[int], seconds: float, gpu: str | None
) -> DataBench:
    """Measures the loader of a config or folder with each number of workers."""
    # First, so that a typo does not cost a minute of measurements.
    rate = None if gpu is None else published_rate(gpu)
    loaded, split = _config_of(source, overrides)
    machine = read_machine()
    config, notes = fit_to_machine(loaded, machine)
    say_notes(notes)
    counts = list(worker_counts) or _counts_up_to(machine.cpus)
    is_images = config.task != "segment3d"
    if gpu is not None and not is_images:
        raise UsageError("usage", "--gpu is for images: no rates of patches are published", hint="leave out --gpu")
    task, decoding, calibration, limit = task_for(config), None, None, None
    with progress_bar("listing" if is_images else "indexing", None) as advance:
        data: Any = open_samples(config, split, progress=advance) if is_images else task.open_data(config, say, advance)
    if is_images:
        if config.subset_classes is not None:
            say(f"classes: {', '.join(data.classes)}")
        decoding, calibration = choose_decoding(config, data.index)
        data = TrainingData(data, None, decoding)
    total, rates = len(counts) + is_images, list[LoaderSpeed]()
    with progress_bar("measuring", total) as advance:
        for number, workers in enumerate(counts, 1):
            rates.append(task.measure_speed(config, data, workers=workers, seconds=seconds))
            advance(number, total)
        best = max(rates, key=lambda rate: rate.images_per_second)
        if is_images:
            files = files_for_measuring(config, data.train.index)
            limit = decode_limit(files, max(1, best.workers), min(seconds, 3.0))
            advance(total, total)
    return DataBench(
        source=source, samples=len(data.train) if is_images else len(data.train.cases), batch_size=config.batch_size,
        img_size=config.img_size if is_images else None, engine=choose_engine(config.loader, best.workers),
        decoder=None if decoding is None else decoding.decoder,
        decoder_us=None if calibration is None else calibration.microseconds, rates=tuple(rates),
        decode_limit_images_per_second=limit, gpu=rate, patch_size=None if is_images else config.patch_size,
    )  # fmt: skip


def _config_of(source: str, overrides: Sequence[str]) -> tuple[Config, Literal["train", ""]]:
    if source.endswith(CONFIG_ENDINGS):
        return load_for_command(Path(source), overrides).config, "train"
    batch = [] if any(text.startswith("batch_size=") for text in overrides) else [f"batch_size={FOLDER_BATCH_SIZE}"]
    config = load_for_command(None, [f"data_root={source}", *batch, *overrides]).config
    listed = any(key is not None for key in (config.samples_csv, config.train_csv, config.val_fraction))
    return config, "train" if listed or "://" in source or find_split(source, "train") else ""


def _counts_up_to(cpus: int) -> list[int]:
    counts = [1]
    while counts[-1] * 2 <= cpus:
        counts.append(counts[-1] * 2)
    return counts if counts[-1] == cpus else [*counts, cpus]


def bench_data_text(report: DataBench) -> str:
    """The best rate, a table by workers, and bars of where the time for an image goes."""
    best = report.best
    engine = "threads" if report.engine == "thread" else "processes"
    rows = [[str(one.workers), f"{one.images_per_second:,.0f}", f"{one.first_batch_s:.2f} s"] for one in report.rates]
    lines = [
        f"{best.images_per_second:,.0f} {report.unit}/s with {best.workers} worker{'s' if best.workers != 1 else ''} "
        f"({engine}, {report.what}, batches of {report.batch_size})",
        "",
        format_table(rows, ["workers", f"{report.unit}/s", "first batch"]),
        "",
        *_stage_lines(report),
    ]
    limit = report.decode_limit_images_per_second
    if limit is not None:
        lines += [
            "",
            f"whole-image decoding alone: {limit:,.0f} images/s; the loader reaches "
            f"{best.images_per_second / limit:.2f}x that (it decodes only what the crops need)",
        ]
    if (gpu := report.gpu) is not None and (share := report.share_of_gpu) is not None:
        answer = "this host can feed it" if share >= 1 else f"this host can supply {share:.0%} of that"
        lines += ["", f"{gpu.name} processes {gpu.images_per_second:,.0f} images/s: {answer}", f"  ({gpu.source})"]
    return "\n".join(lines)


def plot_bench_data(report: DataBench, path: Path) -> None:
    """Draws images/s by workers, with the decoding limit and the accelerator's rate as lines."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), dpi=120)
    names = [str(rate.workers) for rate in report.rates]
    bars = axes.bar(names, [rate.images_per_second for rate in report.rates], color="#3b6ea5", width=0.6)
    axes.bar_label(bars, fmt="{:,.0f}")
    limits = [(report.decode_limit_images_per_second, "whole-image decoding alone", "#c05621")]
    if report.gpu is not None:
        limits.append((report.gpu.images_per_second, f"{report.gpu.name} (published)", "#2f855a"))
    for value, label, colour in limits:
        if value is not None:
            axes.axhline(value, color=colour, linestyle="--", label=f"{label}: {value:,.0f}")
    axes.set_xlabel("workers")
    axes.set_ylabel(f"{report.unit}/s")
    axes.set_title(f"{Path(report.source).name}: {report.what}")
    axes.margins(y=0.15)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def _stage_lines(report: DataBench) -> list[str]:
    times = report.best.cost.per_image()
    wall = times["wall"] or 0.0
    sample = "an image" if report.patch_size is None else "a patch"
    lines = [f"where a worker's time for {sample} goes:"]
    for name in ("fetch", "decode", "augment", "collate"):
        seconds = times[name]
        if seconds:
            share = seconds / wall if wall else 0.0
            lines.append(f"  {name:<8} {seconds * 1e6:7.0f} us  {share:4.0%}  {'#' * round(BAR * share)}")
    if times["on_cpu"] is not None:
        shares = [f"{label} {(times[key] or 0.0) / wall:.0%}" for key, label in _THREAD_PARTS] if wall else []
        lines.append("  of that: " + ", ".join(shares))
    return lines
