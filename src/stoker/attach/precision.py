"""Whether a script computes in 16 bits: the losses that it scales, and what its autocast asks for."""

from __future__ import annotations

import functools
import sys
from typing import Any

from stoker.attach.session import current

# A scaled loss knows whether it was computed in 16 bits at all: autocast leaves a conversion in its autograd graph for
# each weight. The first loss may be one of a sanity check; a second look settles it.
LOOK_AT = (2, 6)
MOST_NODES = 50_000
# Operations that autocast would run in 16 bits; a loss without any of them says nothing.
CONVERTED = ("Convolution", "Addmm", "Mm", "Bmm", "Linear", "Baddbmm")
REQUESTED = "_stoker_requested"


def patch_scalers(module: Any) -> None:
    """Looks at the losses that a GradScaler of this module scales."""
    scaler = module.GradScaler
    for name, wrap in (("__init__", _remembering), ("scale", _looking)):
        # torch.cuda.amp.GradScaler inherits both from torch.amp.GradScaler, except in old versions.
        if name in vars(scaler) and not hasattr(vars(scaler)[name], "_stoker"):
            wrapped = wrap(vars(scaler)[name])
            wrapped._stoker = True
            setattr(scaler, name, wrapped)


def _remembering(original: Any) -> Any:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        original(self, *args, **kwargs)
        # Without a GPU torch turns a scaler off; that the script wanted one is what counts.
        wanted = kwargs.get("enabled", next((value for value in args[::-1] if isinstance(value, bool)), True))
        self.__dict__.setdefault(REQUESTED, bool(wanted))

    return __init__


def _looking(original: Any) -> Any:
    calls = [0]

    @functools.wraps(original)
    def scale(self: Any, outputs: Any) -> Any:
        opened = current()
        if opened is not None and opened.recording and calls[0] <= LOOK_AT[-1]:
            calls[0] += 1
            if calls[0] in LOOK_AT and self.__dict__.get(REQUESTED, True):
                try:
                    loss = outputs if hasattr(outputs, "grad_fn") else next(iter(outputs), None)
                    computed_in_32_bits = in_32_bits(getattr(loss, "grad_fn", None))
                    if computed_in_32_bits is not None:
                        frame = sys._getframe(1)
                        place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                        opened.say(scaled_in_32_bits=computed_in_32_bits, scaled_at=place)
                except Exception as error:
                    opened.note(f"a scaled loss could not be looked at: {type(error).__name__}: {error}")
        return original(self, outputs)

    return scale


def in_32_bits(node: Any) -> bool | None:
    """Whether all matrix products and convolutions behind a loss were computed in float32; None if it cannot be told:
    compiled or hand-written functions hide what they do."""
    waiting, seen, converts = [node], set(), 0
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if len(seen) > MOST_NODES:
            return None
        name = type(node).__name__
        if name.startswith("ToCopyBackward"):
            return False
        variable = getattr(node, "variable", None)
        if variable is not None:
            if str(variable.dtype) != "torch.float32":
                return None
        elif not name[-1:].isdigit():  # torch's own operations are numbered: AddmmBackward0
            return None
        converts += name.startswith(CONVERTED)
        waiting.extend(following for following, _ in node.next_functions)
    return True if converts else None


class WantedPrecision:
    """What the script's autocast asks for on CUDA: without a GPU, torch switches it off, and nothing is left to see."""

    def __init__(self) -> None:
        self.dtype: str | None = None
        self._restore: Any = None

    def watch(self, autocast: Any) -> None:
        """Looks at the arguments of every autocast, until `stop`."""
        original = autocast.__init__

        @functools.wraps(original)
        def __init__(context: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            original(context, *args, **kwargs)
            kind = args[0] if args else kwargs.get("device_type")
            dtype = args[1] if len(args) > 1 else kwargs.get("dtype")
            enabled = args[2] if len(args) > 2 else kwargs.get("enabled", True)
            if kind == "cuda" and enabled:
                self.dtype = "float16" if dtype is None else str(dtype).removeprefix("torch.")

        autocast.__init__ = __init__
        self._restore = autocast, original

    def stop(self) -> None:
        if self._restore is not None:
            autocast, original = self._restore
            autocast.__init__ = original
            self._restore = None


wanted = WantedPrecision()
