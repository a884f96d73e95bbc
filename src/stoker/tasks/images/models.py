"""Builds any network of the timm zoo as the config says, or explains why it cannot."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from stoker.core.errors import UserError, did_you_mean
from stoker.tasks.light_timm import timm

_UNKNOWN_ARGUMENT = re.compile(r"unexpected keyword argument '(\w+)'")
_KEY_OF_ARGUMENT = {"drop_path_rate": "drop_path", "drop_rate": "dropout"}


def build_model(
    name: str,
    num_classes: int,
    *,
    img_size: int | None = None,
    other_sizes: Sequence[int | None] = (),
    drop_path: float = 0.0,
    dropout: float = 0.0,
    gradient_checkpointing: bool = False,
    channels_last: bool = False,
    seed: int | None = None,
) -> nn.Module:
    """The network with random weights, on the CPU.

    `other_sizes` are the image sizes it will get besides `img_size` (validation, progressive resizing); None counts for
    nothing. With a seed the weights depend only on it, and torch's generator is not changed.
    """
    _check_name(name)
    variable = any(size not in (None, img_size) for size in other_sizes)
    arguments = {
        "num_classes": num_classes,
        # Always passed, even 0: some architectures have their own default (Swin drops 10 % of its paths).
        "drop_path_rate": drop_path,
        "drop_rate": dropout,
        "img_size": img_size,
        "dynamic_img_size": True if variable else None,
    }
    with torch.random.fork_rng(devices=[], enabled=seed is not None):
        model = _create(name, arguments, seed)
    if drop_path > 0 and not any("DropPath" in type(part).__name__ for part in model.modules()):
        raise _not_supported(name, "drop_path", drop_path)  # accepted and ignored by timm: res2net, hrnet, convmixer
    if gradient_checkpointing:
        _checkpoint_gradients(model, name)
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
    _check_sizes(model, name, [size for size in (img_size, *other_sizes) if size is not None])
    return model


def facts_about(name: str) -> dict[str, Any]:
    """What timm knows about a network without building it, as `pretrained_cfg` of the built one says it."""
    _check_name(name)
    known = timm.get_pretrained_cfg(name)
    return {} if known is None else known.to_dict()


def _check_name(name: str) -> None:
    if ":" in name:
        # timm would fetch the architecture from a hub, or from a folder that names it.
        raise UserError(
            "model-unknown",
            f"model: {name} is an address, not the name of a timm architecture",
            why="nothing is downloaded",
            hint="model=<architecture> weights=<local file>",
        )
    bare = name.partition(".")[0]  # resnet50.a1_in1k: the tag names weights, which are not fetched
    if timm.is_model(bare):
        return
    known = timm.list_models()
    question = did_you_mean(bare, known)
    if question is None and (near := difflib.get_close_matches(bare.lower(), known, n=5, cutoff=0.5)):
        question = f"similar names: {', '.join(near)}"
    raise UserError(
        "model-unknown",
        f"model: {name} is not one of timm's {len(known)} architectures",
        hint=question or "python -c \"import timm; print(timm.list_models('*resnet*'))\"",
    )


def _create(name: str, arguments: dict[str, Any], seed: int | None) -> nn.Module:
    """Builds the network with every argument, but without defaults that this architecture does not take."""
    wanted = dict(arguments)
    while True:
        if seed is not None:
            torch.manual_seed(seed)
        try:
            model: nn.Module = timm.create_model(name, pretrained=False, **wanted)
            return model
        except Exception as error:
            lacking = _UNKNOWN_ARGUMENT.search(str(error))
            argument = lacking.group(1) if lacking and isinstance(error, TypeError) else None
            if argument not in wanted:
                raise UserError(
                    "model-not-built",
                    f"model: {name} could not be built: {str(error) or type(error).__name__}",
                    hint="check model, img_size and num_classes",
                ) from error
            if argument in _KEY_OF_ARGUMENT and wanted[argument]:
                raise _not_supported(name, _KEY_OF_ARGUMENT[argument], wanted[argument]) from None
            # Sizes are tried out by _check_sizes.
            del wanted[argument]


def _checkpoint_gradients(model: nn.Module, name: str) -> None:
    try:
        model.set_grad_checkpointing(True)  # type: ignore[operator]
    except (AttributeError, AssertionError, NotImplementedError, TypeError):
        raise _not_supported(name, "gradient_checkpointing", True) from None


def _check_sizes(model: nn.Module, name: str, sizes: list[int]) -> None:
    """Passes one image of each size through a network that is built for a fixed size; other networks take any."""
    config: dict[str, Any] = getattr(model, "pretrained_cfg", None) or {}
    if not config.get("fixed_input_size"):
        return
    training = model.training
    model.eval()  # no batch statistics from this, and no random numbers
    try:
        for size in sorted(set(sizes)):
            try:
                with torch.no_grad():
                    model(torch.zeros(1, 3, size, size))
            except Exception as error:
                reason = next(iter(str(error).splitlines()), type(error).__name__)
                raise UserError(
                    "model-refuses-size",
                    f"model: {name} does not take images of {size} px: {reason}",
                    why="its weights are tied to positions in the image",
                    hint=f"img_size={config['input_size'][-1]}, with no other val_img_size or start_img_size",
                ) from error
    finally:
        model.train(training)


def _not_supported(name: str, key: str, value: object) -> UserError:
    shown = str(value).lower() if isinstance(value, bool) else f"{value}"
    off = "false" if isinstance(value, bool) else "0"
    return UserError(
        "model-lacks-feature",
        f"{key}: {shown} is not possible with model: {name}",
        why="this architecture does not support it; the setting would have no effect",
        hint=f"{key}={off}",
    )
