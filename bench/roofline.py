"""Predicted images/s compared with published figures: the roofline of a traced step, for every figure we found.

All rows use the same constants (stoker.plan.roofline) and the networks of the installed timm. Where the publisher ran
something different (other kernels, an older torch, an input pipeline), the row says so and stays in the table.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import timm
import torch
from torch import nn
from torch.nn import functional

from bench.rounds import keep
from stoker.plan.roofline import AllReduce, step_seconds
from stoker.plan.tracing import Trace, trace_step
from stoker.profile.datasheets import load_datasheet
from stoker.train.step import TraceableStep, plain_batch

LARGEST_ERROR = 0.25
DLE = "NVIDIA DeepLearningExamples, PyTorch ConvNets"
MXNET = "NVIDIA DeepLearningExamples, MXNet"
NNUNET = "NVIDIA DeepLearningExamples, PyTorch nnU-Net, 3D, patches of 128, per volume"
TIMM = "timm results/benchmark-train-amp, torch 1.12"
LAMBDA = "Lambda deeplearning-benchmark, PyTorch 22.10"
MLPERF = "MLPerf Storage: seconds that an accelerator is emulated with"


@dataclass(frozen=True)
class Row:
    """A published rate, and how it was measured."""

    model: str
    batch: int
    size: int
    precision: str
    channels_last: bool
    gpu: str
    published: float
    source: str
    gpus: int = 1
    fused: bool = False
    """The publisher's kernels fuse norms with the next operation, so the row counts as compiled."""
    required: bool = False
    """The benchmark fails if this row is off by more than LARGEST_ERROR."""
    note: str = ""


# batch, px, channels_last and contiguous images/s on an RTX 3090.
TIMM_ROWS = {
    "resnet18": (512, 224, 3481.78, 2764.22),
    "resnet34": (512, 224, 2036.51, 1622.41),
    "resnet101": (256, 224, 747.89, 568.98),
    "resnet152": (192, 224, 501.44, 370.08),
    "wide_resnet50_2": (384, 224, 668.78, 495.68),
    "resnext50_32x4d": (384, 224, 1001.03, 663.39),
    "densenet121": (256, 224, 913.65, 730.11),
    "vgg16": (384, 224, 546.06, 465.36),
    "efficientnet_b0": (512, 224, 1751.72, 1459.11),
    "efficientnet_b3": (128, 288, 572.18, 456.81),
    "mobilenetv3_large_100": (512, 224, 2732.43, 2167.29),
    "convnext_tiny": (256, 224, 819.24, 813.16),
    "convnext_base": (128, 224, 338.68, 336.98),
    "vit_tiny_patch16_224": (512, 224, 2299.56, 2293.54),
    "vit_small_patch16_224": (384, 224, 1057.92, 1052.92),
    "vit_base_patch16_224": (192, 224, 392.99, 390.86),
    "swin_tiny_patch4_window7_224": (256, 224, 648.69, 646.76),
    "mixer_b16_224": (256, 224, 556.6, 528.02),
}
NOTES = {"vit_tiny_patch16_224": "attention was not fused in torch 1.12"}


def published_rows() -> list[Row]:
    """Every figure, the required ones first."""
    rows = [
        Row("resnet50", 256, 224, "16-mixed", True, "a100-80", 2470, DLE, required=True),
        Row("resnet50", 256, 224, "16-mixed", True, "v100-16", 1200, DLE, required=True),
        Row("resnet50", 512, 224, "16-mixed", True, "rtx3090", 1218.01, TIMM, required=True),
        Row("resnet50", 512, 224, "16-mixed", False, "rtx3090", 826.06, TIMM, required=True),
        Row("resnet50", 256, 224, "32", False, "a100-80", 938, DLE),
        Row("resnet50", 112, 224, "32", False, "v100-16", 367, DLE),
        Row("resnet50", 256, 224, "16-mixed", True, "v100-32", 1156, DLE),
        Row("resnet50", 256, 224, "16-mixed", True, "a100-80", 16621, DLE, gpus=8, note="fed by a CPU pipeline"),
        Row("resnet50", 256, 224, "16-mixed", True, "v100-16", 8322, DLE, gpus=8, note="fed by a CPU pipeline"),
        Row("resnet50", 256, 224, "32", False, "a100-80", 7248, DLE, gpus=8),
        Row("resnext101_32x4d", 128, 224, "16-mixed", True, "a100-80", 1211, DLE),
        Row("resnext101_32x4d", 128, 224, "16-mixed", True, "v100-16", 587, DLE),
        Row("seresnext101_32x4d", 128, 224, "16-mixed", True, "a100-80", 855, DLE),
        Row("seresnext101_32x4d", 112, 224, "16-mixed", True, "v100-16", 443, DLE),
        Row("efficientnet_b0", 256, 224, "16-mixed", True, "a100-80", 2489, DLE),
        Row("efficientnet_b4", 128, 380, "16-mixed", True, "a100-80", 331, DLE),
        Row("efficientnet_b0", 128, 224, "16-mixed", True, "v100-16", 1301, DLE),
        Row("resnet50", 512, 224, "16-mixed", True, "a100-80", 3410.52, MXNET, fused=True),
        Row("resnet50", 192, 224, "16-mixed", True, "v100-16", 1376, MXNET, fused=True),
        Row("resnet50", 1280, 224, "16-mixed", False, "a100-80", 1582, LAMBDA),
        Row("resnet50", 1280, 224, "16-mixed", False, "h100", 2791, LAMBDA),
        Row("resnet50", 1280, 224, "16-mixed", False, "h100", 22059, LAMBDA, gpus=8),
        Row("resnet50", 448, 224, "16-mixed", False, "rtx3090", 905, LAMBDA),
        Row("resnet50", 448, 224, "16-mixed", False, "rtx4090", 1301, LAMBDA),
        Row("resnet50", 448, 224, "16-mixed", False, "rtx4090", 2468, LAMBDA, gpus=2),
        Row("resnet50", 256, 224, "16-mixed", False, "v100-16", 833, LAMBDA),
        Row("resnet50", 640, 224, "32", False, "a100-80", 1066, LAMBDA),
        Row("resnet50", 640, 224, "32", False, "h100", 1895, LAMBDA),
        Row("resnet50", 224, 224, "32", False, "rtx3090", 513, LAMBDA),
        Row("resnet50", 224, 224, "32", False, "rtx4090", 721, LAMBDA),
        Row("resnet50", 128, 224, "32", False, "v100-16", 369, LAMBDA),
        Row("resnet50", 400, 224, "16-mixed", True, "a100-80", 400 / 0.435, MLPERF, note="far below measured rates"),
        Row("resnet50", 400, 224, "16-mixed", True, "h100", 400 / 0.224, MLPERF, note="far below measured rates"),
        Row("dynunet3d", 2, 128, "16-mixed", True, "a100-80", 27.48, NNUNET, fused=True),
        Row("dynunet3d", 2, 128, "16-mixed", True, "v100-32", 12.34, NNUNET, fused=True),
        Row("dynunet3d", 2, 128, "32", False, "a100-80", 11.27, NNUNET),
    ]
    for model, (batch, size, last, contiguous) in TIMM_ROWS.items():
        note = NOTES.get(model, "")
        rows.append(Row(model, batch, size, "16-mixed", True, "rtx3090", last, TIMM, note=note))
        rows.append(Row(model, batch, size, "16-mixed", False, "rtx3090", contiguous, TIMM, note=note))
    return rows


@cache
def traced(model: str, batch: int, size: int, precision: str, channels_last: bool) -> Trace:
    """The trace of the published step: SGD with momentum, cross-entropy."""
    volumes = model == "dynunet3d"
    layout = torch.contiguous_format
    if channels_last:
        layout = torch.channels_last_3d if volumes else torch.channels_last

    def build() -> nn.Module:
        made = nnunet() if volumes else timm.create_model(model)
        return made.to(memory_format=layout)

    step = TraceableStep(
        build_model=build,
        build_optimizer=lambda built: torch.optim.SGD(built.parameters(), lr=0.1, momentum=0.9),
        loss=lambda outputs, targets: functional.cross_entropy(outputs.float(), targets),
        make_batch=plain_batch(
            (5, size, size, size) if volumes else (3, size, size),
            target=(size, size, size) if volumes else (),
            memory_format=layout,
        ),
        batch_size=batch,
        precision=precision,
    )
    return trace_step(step)


def nnunet() -> nn.Module:
    """nnU-Net's plain 3D network for BraTS: six levels, 32 to 320 channels, instance norm."""
    from monai.networks.nets import DynUNet  # type: ignore[attr-defined]

    strides = [1, 2, 2, 2, 2, 2]
    made: nn.Module = DynUNet(
        3, 5, 4, [3] * 6, strides, strides[1:], filters=[32, 64, 128, 256, 320, 320], deep_supervision=False
    )
    return made


def predict(row: Row) -> dict[str, Any]:
    """One row of the results table."""
    trace = traced(row.model, row.batch, row.size, row.precision, row.channels_last)
    took = step_seconds(
        trace.ops, load_datasheet(row.gpu), channels_last=row.channels_last, compiled=row.fused,
        all_reduce=AllReduce(trace.trained_bytes, row.gpus),
    )  # fmt: skip
    rate = row.batch * row.gpus / took.total_s
    return asdict(row) | {
        "published": round(row.published, 2),
        "predicted": round(rate, 2),
        "error": round(rate / row.published - 1, 4),
        "gflop_per_image": round(trace.flops / row.batch / 1e9, 3),
        "ms_by_kind": {kind: round(seconds * 1e3, 3) for kind, seconds in took.by_kind.items()},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only models whose name contains this; writes no results")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    lines = []
    for row in published_rows():
        if arguments.only not in row.model:
            continue
        began = time.perf_counter()
        line = predict(row)
        lines.append(line)
        layout = "channels_last" if row.channels_last else "contiguous"
        print(
            f"{row.model:28} {row.batch:5} {row.precision:9} {layout:13} {row.gpus} x {row.gpu:8} "
            f"{row.published:9.1f} {line['predicted']:9.1f} {line['error']:+7.1%}  {row.note or row.source}"
        )
        sys.stderr.write(f"{time.perf_counter() - began:.1f} s\n")
    errors = [abs(line["error"]) for line in lines]
    within = sum(error <= LARGEST_ERROR for error in errors)
    missed = [line for line in lines if line["required"] and abs(line["error"]) > LARGEST_ERROR]
    print(f"{within} of {len(lines)} within {LARGEST_ERROR:.0%}; median error {statistics.median(errors):.1%}")
    if not arguments.only:
        found = {"within_25_percent": within, "of": len(lines), "median_error": round(statistics.median(errors), 4)}
        print(f"wrote {keep('roofline', found | {'rows': lines})}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
