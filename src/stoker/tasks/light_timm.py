"""timm without wandb, which it imports for a logger that is not used here: two of the eight seconds of a start."""

import sys

if "timm" not in sys.modules and "wandb" not in sys.modules:
    sys.modules["wandb"] = None  # type: ignore[assignment]
    try:
        import timm.utils
    finally:
        del sys.modules["wandb"]
import timm

__all__ = ["timm"]
