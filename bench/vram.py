"""Predicted memory of training steps, compared with published GPU measurements and with a real step on this CPU.

The published figures are in vram_published.yaml; the results table lists all of them, hits and misses. No constant of
the prediction was fitted to them. The CPU step runs in its own process, and its peak comes from torch's profiler.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn
from torch.nn import functional

from bench.rounds import keep
from bench.vram_networks import DilatedFcn, nnunet, planned_patch
from stoker.config import Config
from stoker.plan.tracing import Trace, trace_step
from stoker.plan.vram import CONTEXT, MIB, outside_bytes, replay, trace_vram
from stoker.tasks.images.models import build_model, cross_entropy
from stoker.tasks.volumes.losses import build_volume_loss
from stoker.train.optimizers import build_optimizer
from stoker.train.step import TraceableStep, plain_batch

PUBLISHED = Path(__file__).with_name("vram_published.yaml")
UNITS = {"mib": 1000 << 20, "gib": 1 << 30, "gb": 1e9}
CPU_WITHIN = 0.10
CPU_CASES = (("resnet18", 32), ("resnet50", 16))
A10G_BYTES = int(22.06 * (1 << 30))
EAGER_CONTEXT = 1000 * MIB
"""Before CUDA 11.7, which loads kernels when they are first called (pytorch issues 107667 and 109888)."""


def plain_peak(events: Iterable[int], sizes: Sequence[int]) -> int:
    """The most bytes in use at once without rounding or caching: a CPU's malloc."""
    used = peak = 0
    for event in events:
        used += sizes[event] if event >= 0 else -sizes[~event]
        peak = max(peak, used)
    return peak


def network_of(row: dict[str, Any]) -> Callable[[], nn.Module]:
    """A function that builds the row's network."""
    network, step = row["network"], row["step"]
    classes = network["classes"]

    def build() -> nn.Module:
        if "timm" in network:
            fused = network.get("fused_attention", True)
            os.environ["TIMM_FUSED_ATTN"] = "1" if fused else "0"
            from timm.layers import set_fused_attn

            set_fused_attn(fused)
            return build_model(
                network["timm"], classes, img_size=step["shape"][-1], channels_last=step.get("channels_last", False),
                drop_path=network.get("drop_path", 0.0),
            )  # fmt: skip
        if "fcn" in network:
            return DilatedFcn(network["fcn"], classes)
        if "nnunet" in network:
            return nnunet(network["nnunet"], patch_of(network), classes)
        from torchvision import models

        model: nn.Module = models.get_model(network["torchvision"], num_classes=classes)
        return model.to(getattr(torch, network["dtype"])) if "dtype" in network else model

    return build


def optimizer_of(name: str) -> Callable[[nn.Module], torch.optim.Optimizer]:
    # On CUDA torch uses `foreach` by default, which holds whole lists of temporaries; on the CPU we must ask for it.
    if name == "adam":
        return lambda model: torch.optim.Adam(model.parameters(), lr=1e-4, foreach=True)
    if name == "plain-sgd":
        return lambda model: torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
    if name == "sgd-nesterov":
        return lambda model: torch.optim.SGD(
            model.parameters(), lr=0.01, momentum=0.99, nesterov=True, weight_decay=3e-5, foreach=True
        )
    return lambda model: build_optimizer(Config(optimizer=name, weight_decay=0.0), model, 0.1)


def step_of(row: dict[str, Any]) -> TraceableStep:
    """The row's training step."""
    network, said = row["network"], row["step"]
    build, holder = network_of(row), {}

    def build_and_hold() -> nn.Module:
        holder["model"] = build()
        return holder["model"]

    loss: Callable[[Any, Tensor], Tensor] = cross_entropy
    shape, target = tuple(said.get("shape", ())), tuple(said.get("target", ()))
    if "nnunet" in network:
        target = patch_of(network)
        shape = (1, *target)
        loss = build_volume_loss("dice + ce", network["classes"], ignore=network["classes"])
    elif "fcn" in network:
        loss = partial(_with_second_head, holder)
    soft = network["classes"] if said.get("soft") else None
    layout = torch.channels_last if said.get("channels_last") else torch.contiguous_format
    dtype = getattr(torch, said.get("dtype", "float32"))
    return TraceableStep(
        build_model=build_and_hold,
        build_optimizer=optimizer_of(said["optimizer"]),
        loss=loss,
        make_batch=plain_batch(shape, target=target, num_classes=soft, dtype=dtype, memory_format=layout),
        batch_size=said["batch"],
        ahead=False,  # loops of others, most of which copy a batch when the one before is done
        precision=said["precision"],
        clip_grad_norm=said.get("clip"),
    )


def patch_of(network: dict[str, Any]) -> tuple[int, int, int]:
    return planned_patch(network["nnunet"], network["planned_for"], network["classes"])


def _with_second_head(holder: dict[str, Any], logits: Tensor, targets: Tensor) -> Tensor:
    coarse = holder["model"].coarse
    total = functional.cross_entropy(logits, targets) + 0.4 * functional.cross_entropy(coarse[0], targets)
    coarse.clear()
    return total


def predicted(row: dict[str, Any], trace: Trace) -> int:
    """Predicted bytes, counted the way the row's figure was measured (nvidia-smi, reserved or allocated)."""
    usage = replay(trace.events, trace.sizes)
    context = EAGER_CONTEXT if row.get("context") == "eager" else CONTEXT
    outside = outside_bytes(trace, compiled=False, gpus=row.get("gpus", 1), context=context)
    if row["measured"] == "nvidia-smi":
        return usage.reserved_peak + sum(outside.values())
    inside = usage.reserved_peak if row["measured"] == "reserved" else usage.allocated_peak
    # Buckets and cuBLAS's workspace come from torch's allocator as well.
    return inside + sum(size for name, size in outside.items() if name != "context")


def against_published(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    table = []
    for row in rows:
        began = time.process_time()
        trace = trace_step(step_of(row))
        said, published = predicted(row, trace), row["gb"] * UNITS[row["unit"]]
        error = said / published - 1
        table.append(
            {
                "name": row["name"], "measured": row["measured"], "published_gib": round(published / (1 << 30), 2),
                "predicted_gib": round(said / (1 << 30), 2), "error": round(error, 4), "within": row["within"],
                "hit": abs(error) <= row["within"], "trace_cpu_s": round(time.process_time() - began, 1),
                "source": row["source"], "remark": row.get("remark"),
            }
        )  # fmt: skip
        mark = "hit " if table[-1]["hit"] else "MISS"
        print(f"{mark} {error:+7.1%}  {table[-1]['published_gib']:6.2f} GiB published  {row['name']}", flush=True)
    return table


def cpu_step(model: str, batch: int) -> TraceableStep:
    return TraceableStep(
        build_model=lambda: build_model(model, 1000),
        build_optimizer=lambda network: build_optimizer(Config(optimizer="sgd", weight_decay=0.0), network, 0.1),
        loss=cross_entropy,
        make_batch=plain_batch((3, 224, 224), num_classes=1000),
        batch_size=batch,
        ahead=False,
    )


def measure_here(model: str, batch: int) -> int:
    """Peak bytes allocated by a real step on the CPU. Run it in a fresh process."""
    from torch.profiler import ProfilerActivity, profile

    from stoker.train.compute import Precision
    from stoker.train.ranks import Ranks
    from stoker.train.step import Pending, TrainStep

    torch.set_num_threads(1)
    step = cpu_step(model, batch)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        network = step.build_model()
        network.train()
        optimizer = step.build_optimizer(network)
        train_step = TrainStep(
            network, optimizer, step.loss, Precision("32", torch.device("cpu")), Ranks(), micro_batch=batch,
            clip_grad_norm=None, seed=0, say=lambda _text: None,
        )  # fmt: skip
        result = None
        for number in range(2):
            prepared = step.make_batch(batch)
            prepared.inputs.zero_()
            prepared.targets.zero_()
            result = train_step([Pending(len(prepared.labels), lambda: prepared)], number)  # noqa: B023 - called at once
    del result
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    used = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        used += event.nbytes()
        peak = max(peak, used)
    return peak


def against_cpu() -> list[dict[str, Any]]:
    table = []
    for model, batch in CPU_CASES:
        command = [sys.executable, "-m", "bench.vram", "--measure-here", model, str(batch)]
        measured = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])
        trace = trace_step(cpu_step(model, batch))
        device_only = {number for number, name in enumerate(trace.categories) if name == "workspace"}
        events = [event for event in trace.events if max(event, ~event) not in device_only]
        said = plain_peak(events, trace.sizes)
        error = said / measured - 1
        hit = abs(error) <= CPU_WITHIN
        table.append(
            {
                "name": f"{model}, batch {batch}, 224 px, float32, SGD, on this CPU", "measured_bytes": measured,
                "predicted_bytes": said, "error": round(error, 4), "within": CPU_WITHIN, "hit": hit,
            }
        )  # fmt: skip
        print(f"{'hit ' if hit else 'MISS'} {error:+7.1%}  {measured / 1e6:.0f} MB measured  {model} on CPU")
    return table


def plan_cost() -> dict[str, Any]:
    """CPU time and memory of the complete plan for ResNet-50, searches included, measured in a fresh process."""
    command = [sys.executable, "-m", "bench.vram", "--plan-cost"]
    found: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return found


def _plan_here() -> dict[str, Any]:
    import resource

    from stoker.config import load_config
    from stoker.tasks.images.classify import traceable_step

    torch.set_num_threads(1)
    path = Path(__file__).parents[1] / "configs/single_gpu_full.yaml"
    config = load_config(path, ["data_root=/nowhere"]).config
    began, wall = time.process_time(), time.perf_counter()
    step = replace(traceable_step(config, 1000), ahead=False)  # Lightning's loop, which has one batch on the device
    budget, _ = trace_vram(step, limit_bytes=A10G_BYTES, compiled=config.compile_model)
    return {
        "cpu_s": round(time.process_time() - began, 1),
        "wall_s": round(time.perf_counter() - wall, 1),
        "peak_rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3),
        "budget": asdict(budget) | {"fits": budget.fits},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure-here", nargs=2, metavar=("MODEL", "BATCH"), help=argparse.SUPPRESS)
    parser.add_argument("--plan-cost", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--only", help="only rows whose name contains this; writes no results")
    arguments = parser.parse_args()
    if arguments.measure_here:
        print(measure_here(arguments.measure_here[0], int(arguments.measure_here[1])))
        return 0
    if arguments.plan_cost:
        print(json.dumps(_plan_here()))
        return 0
    torch.set_num_threads(1)
    rows = yaml.safe_load(PUBLISHED.read_text())
    if arguments.only:
        against_published([row for row in rows if arguments.only in row["name"]])
        return 0
    published, here, cost = against_published(rows), against_cpu(), plan_cost()
    hits = sum(row["hit"] for row in published)
    path = keep(
        "vram", {"hits": f"{hits} of {len(published)}", "published": published, "cpu": here, "resnet50_plan": cost}
    )
    print(f"{hits} of {len(published)} published figures hit, {sum(row['hit'] for row in here)} of {len(here)} on CPU")
    print(f"planning ResNet-50 took {cost['cpu_s']} s of CPU time and {cost['peak_rss_mb']} MB; wrote {path}")
    return 0 if published[0]["hit"] and all(row["hit"] for row in here) else 1


if __name__ == "__main__":
    sys.exit(main())
