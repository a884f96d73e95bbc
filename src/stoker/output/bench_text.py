"""What `stoker bench data` found, as text and as a picture."""

from __future__ import annotations

from pathlib import Path

from stoker.facts import DataBench
from stoker.output.text import format_table

BAR = 40


def bench_data_text(report: DataBench) -> str:
    """One line to remember, a table by workers, a bar of where the time of an image goes."""
    best = report.best
    engine = "threads" if report.engine == "thread" else "processes"
    lines = [
        f"{best.images_per_second:,.0f} images/s with {best.workers} worker{'s' if best.workers != 1 else ''} "
        f"({engine}, {report.decoder}, {report.img_size} px, batches of {report.batch_size})",
        "",
        format_table(
            [
                [str(rate.workers), f"{rate.images_per_second:,.0f}", f"{rate.first_batch_s:.2f} s"]
                for rate in report.rates
            ],
            ["workers", "images/s", "first batch"],
        ),
        "",
        *_stage_lines(report),
    ]
    limit = report.decode_limit_images_per_second
    if limit is not None:
        lines += [
            "",
            f"whole-image decoding alone: {limit:,.0f} images/s; the loader reaches "
            f"{best.images_per_second / limit:.2f}x of it (it decodes only what the crops need)",
        ]
    if report.share_of_gpu is not None and report.gpu_images_per_second is not None:
        lines += ["", _gpu_line(report, report.share_of_gpu, report.gpu_images_per_second)]
    return "\n".join(lines)


def plot_bench_data(report: DataBench, path: Path) -> None:
    """A picture: images/s by workers, with the decoding limit and the accelerator's appetite as lines."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), dpi=120)
    names = [str(rate.workers) for rate in report.rates]
    bars = axes.bar(names, [rate.images_per_second for rate in report.rates], color="#3b6ea5", width=0.6)
    axes.bar_label(bars, fmt="{:,.0f}")
    for value, label, colour in (
        (report.decode_limit_images_per_second, "whole-image decoding alone", "#c05621"),
        (report.gpu_images_per_second, f"{report.gpu} (published)", "#2f855a"),
    ):
        if value is not None:
            axes.axhline(value, color=colour, linestyle="--", label=f"{label}: {value:,.0f}")
    axes.set_xlabel("workers")
    axes.set_ylabel("images/s")
    axes.set_title(f"{Path(report.source).name}: {report.decoder}, {report.img_size} px")
    axes.margins(y=0.15)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def _stage_lines(report: DataBench) -> list[str]:
    times = report.best.seconds_per_image
    wall = times["wall"] or 0.0
    lines = ["where a worker's time for an image goes:"]
    for name in ("fetch", "decode", "augment", "collate"):
        seconds = times[name]
        if seconds:
            share = seconds / wall if wall else 0.0
            lines.append(f"  {name:<8} {seconds * 1e6:7.0f} us  {share:4.0%}  {'#' * round(BAR * share)}")
    if times["on_cpu"] is not None:
        shares = [f"{label} {(times[key] or 0.0) / wall:.0%}" for key, label in _THREAD_PARTS] if wall else []
        lines.append("  of it: " + ", ".join(shares))
    return lines


_THREAD_PARTS = (
    ("on_cpu", "on a core"),
    ("run_queue", "waiting for a core"),
    ("blocked", "blocked on storage or locks"),
)


def _gpu_line(report: DataBench, share: float, wanted: float) -> str:
    verdict = "this host feeds it" if share >= 1 else f"this host feeds {share:.0%} of it"
    return f"{report.gpu} takes {wanted:,.0f} images/s: {verdict}\n  ({report.gpu_source})"
