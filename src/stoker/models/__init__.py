"""Networks, and the weights they start from."""

import sys

if "timm" not in sys.modules and "wandb" not in sys.modules:
    # timm imports wandb for a logger that is not used here: two of the eight seconds of a start.
    sys.modules["wandb"] = None  # type: ignore[assignment]
    try:
        import timm.utils  # noqa: F401
    finally:
        del sys.modules["wandb"]
