"""`stoker export`: writes a checkpoint's model for other programs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from stoker.commands.options import CheckpointArgument, JsonOption, OverridesArgument, RawOption

if TYPE_CHECKING:
    from stoker.tasks.images.exporting import Exportable


def register(app: typer.Typer) -> None:
    app.command(epilog="Example: stoker export runs/demo model.onnx --to onnx")(export)


def export(
    checkpoint: CheckpointArgument,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="File to write.", show_default=False)],
    to: Annotated[
        Literal["safetensors", "onnx", "torch-export"],
        typer.Option(help="Only the weights, or a program that contains them.", show_default=False),
    ],
    overrides: OverridesArgument = None,
    image: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            readable=False,
            help="Also compare on this image or volume. [default: the first in the checkpoint's data_root, if any]",
            show_default=False,
        ),
    ] = None,
    raw: RawOption = False,
    force: Annotated[bool, typer.Option("--force", help="Replace OUT if it exists.")] = False,
    json: JsonOption = False,
) -> int:
    """Write a checkpoint's model as safetensors, ONNX or torch.export (.pt2).

    The file is loaded again and its output compared with the checkpoint's; it appears only if they agree. It takes
    normalised float32 images, or patches of volumes, in batches of any size; its metadata holds what a program needs
    to know: class names, mean, std and img_size, or patch_size and normalize. ONNX needs
    `pip install 'stoker[export]'`.
    """
    from stoker.core.console import print_json, print_result
    from stoker.tasks.images.exporting import check_can_export, export_model
    from stoker.tasks.images.results import export_text

    check_can_export(to, out, force)
    subject, path, averaged = _subject(checkpoint, overrides or (), image, raw)
    found = export_model(subject, to, out, force=force)
    if json:
        print_json(
            {
                "checkpoint": str(path),
                "weights": "averaged" if averaged else "raw",
                "out": str(found.path),
                "format": to,
                "bytes": found.size_bytes,
                "checked_with": found.checked_with,
                "differences": [
                    {"images": one.what, "max_abs": one.max_abs, "tolerance": one.tolerance}
                    for one in found.differences
                ],
            }
        )
    else:
        print_result(export_text(found.path, found.size_bytes, found.checked_with, found.differences))
    return 0


def _subject(
    checkpoint: Path, overrides: Sequence[str], image: Path | None, raw: bool
) -> tuple[Exportable, Path, bool]:
    """What is exported, the file that it comes from, and whether its weights are the average."""
    from stoker.core.console import say
    from stoker.train.checkpoint.restore import task_of

    if task_of(checkpoint) == "segment3d":
        from stoker.tasks.volumes.exporting import segmenter_to_export
        from stoker.tasks.volumes.segment import open_trained

        trained = open_trained(checkpoint, say, overrides, raw=raw)
        return segmenter_to_export(trained, image), trained.path, trained.averaged
    from stoker.tasks.images.exporting import classifier_to_export
    from stoker.train.checkpoint.sources import open_model

    restored = open_model(checkpoint, overrides, raw=raw, say=say)
    return classifier_to_export(restored, image), restored.path, restored.averaged
