"""What a training loop does again and again: reads values from the device, trains in eval mode, keeps what it has
computed.

Reads are counted for some dozen steps, and then no longer: afterwards torch's own methods are back. Containers and the
model's mode are looked at now and then.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections import deque
from contextlib import suppress
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

from stoker.attach.habits import COUNTED
from stoker.attach.precision import wanted
from stoker.attach.sampling import LIBRARY, USERS, sampler
from stoker.attach.session import Session

if TYPE_CHECKING:
    from stoker.attach.operators import StepTrace

READS = {"item": ".item()", "cpu": ".cpu()", "tolist": ".tolist()", "__float__": "float()", "__int__": "int()",
         "__bool__": "bool()"}  # fmt: skip
COUNT_FROM, COUNT_STEPS = 4, 48
"""Optimizer steps: the first ones compile and warm up; after that many a mean is known well enough."""
MOST_READS = 8
TRACE_FROM = 2
"""Optimizer steps before the one that is traced, if one is: the first makes the optimizer's state."""
MODE_LOOKS = frozenset({4, 64, 512, 4096})
"""Optimizer steps before which the model's mode is looked at."""
MOST_WEIGHTS = 10_000
SAME_MODEL = 0.9
"""Share of the optimizer's weights that a module must own to be the model: a deliberately frozen part has fewer."""
DIFFERENT_IN_EVAL = ("BatchNorm", "Dropout", "DropPath", "StochasticDepth")
LOOK_EVERY_NS = 1_000_000_000
LOOK_EVERY_BATCHES = 8
OUTWARDS, LOOPS = 40, 3
"""Frames that we walk outwards, and how many of the user's own among them are looked at."""
MOST_NAMES = 300
LONGEST_GRAPH = 512
GREW, SAY_AGAIN = 16, 1.25
"""Entries more than at first, and how much more than last time, to say so again."""
_OPTIMIZED = 1  # of code.co_flags: local variables are not a dict


def place_of(frame: FrameType | None) -> str:
    """file:line of the innermost line of the user's, or of the outermost of a library."""
    outermost: FrameType | None = None
    for _ in range(OUTWARDS):
        if frame is None:
            break
        kind, _ = sampler._kind(frame.f_code)
        if kind == USERS:
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        outermost = frame if kind == LIBRARY else outermost
        frame = frame.f_back
    return "" if outermost is None else f"{outermost.f_code.co_filename}:{outermost.f_lineno}"


class Reads:
    """Counts how often the loop reads a tensor's value, by line."""

    def __init__(self) -> None:
        self.counts: dict[tuple[CodeType, int, str, bool], int] = {}
        self._places: dict[tuple[CodeType, int, str, bool], str] = {}
        self._restore: list[tuple[str, Any]] = []
        self._tensor: Any = None
        self._grad_enabled: Any = None
        self._from = 0

    def begin(self, torch: Any, steps: int) -> None:
        """Replaces the methods that read by ones that count."""
        self._tensor, self._grad_enabled, self._from = torch.Tensor, torch.is_grad_enabled, steps
        compiling = torch.compiler.is_compiling
        for name in READS:
            self._restore.append((name, vars(torch.Tensor).get(name)))
            setattr(torch.Tensor, name, self._counting(getattr(torch.Tensor, name), name, compiling))

    def _counting(self, original: Any, name: str, compiling: Any) -> Any:
        @functools.wraps(original)
        def method(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            # Traced by torch.compile, this line ends here. Without gradients it is validation, or a metric.
            if not compiling() and self._grad_enabled():
                self._count(name, tensor.device.type, sys._getframe(1))
            return original(tensor, *args, **kwargs)

        return method

    def _count(self, name: str, device: str, frame: FrameType) -> None:
        key = frame.f_code, frame.f_lineno, name, device not in ("cpu", "meta")
        known = self.counts.get(key)
        if known is None and len(self.counts) < MOST_NAMES:
            self._places[key] = "" if f"torch{_SEPARATOR}" in frame.f_code.co_filename else place_of(frame)
        self.counts[key] = (known or 0) + 1

    def restore(self) -> None:
        for name, before in self._restore:
            if before is None:
                delattr(self._tensor, name)  # inherited
            else:
                setattr(self._tensor, name, before)
        self._restore.clear()

    def end(self, steps: int, opened: Session) -> None:
        """Stops counting, and says what was counted."""
        self.restore()
        # torch's own, of its optimizers for example, are on tensors that never leave the CPU.
        mine = [(count, key) for key, count in self.counts.items() if self._places.get(key)]
        # Where the model is on a device, reading a tensor that is not waits for nothing.
        elsewhere = any(on_device for _, (*_, on_device) in mine)
        found = sorted(((count, key) for count, key in mine if key[3] or not elsewhere), key=lambda each: -each[0])
        taken = max(1, steps - self._from)
        opened.say(
            reads=[[READS[key[2]], self._places[key], count / taken, key[3]] for count, key in found[:MOST_READS]]
        )


_SEPARATOR = "/" if sys.platform != "win32" else "\\"


class Modes:
    """Which models were switched to eval mode last, and where."""

    def __init__(self) -> None:
        self.evaluated: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._inside = False

    def patch(self, module: Any) -> None:
        """Notices `train()` and `eval()`, which calls it, of torch.nn.Module; both are called a few times an epoch."""
        original = module.Module.train

        @functools.wraps(original)
        def train(model: Any, mode: bool = True) -> Any:
            if self._inside:  # of a model's parts
                return original(model, mode)
            self._inside = True
            try:
                return original(model, mode)
            finally:
                self._inside = False
                with suppress(TypeError):  # a model that cannot be a key
                    if mode:
                        self.evaluated.pop(model, None)
                    else:
                        self.evaluated[model] = place_of(sys._getframe(1))

        module.Module.train = train

    def look(self, optimizer: Any, opened: Session) -> None:
        """Says whether the optimizer's weights belong to a model in eval mode."""
        weights = [weight for group in optimizer.param_groups for weight in group["params"]][:MOST_WEIGHTS]
        trained = {id(weight) for weight in weights if weight.requires_grad}
        name, place, layers = None, None, 0
        for model, where in list(self.evaluated.items()):
            parts = list(model.modules())
            owned = sum(id(weight) in trained for weight in model.parameters())
            if model.training or owned < SAME_MODEL * len(trained) or not trained:
                continue
            different = [part for part in parts if any(kind in type(part).__name__ for kind in DIFFERENT_IN_EVAL)]
            if different and not any(part.training for part in parts):
                name, place, layers = type(model).__name__, where, len(different)
        opened.say(in_eval_mode=name, eval_at=place, eval_layers=layers)


class GrowingContainers:
    """Containers in the loop that get longer, and tensors whose graph does."""

    def __init__(self) -> None:
        self._first: dict[str, int] = {}
        self._said: dict[str, int] = {}

    def look(self, frame: FrameType | None, opened: Session) -> None:
        """Looks at the variables of the loop, and of what calls it."""
        loops = 0
        for _ in range(OUTWARDS):
            if frame is None or loops == LOOPS:
                break
            if sampler._kind(frame.f_code)[0] == USERS:
                loops += 1
                self._look_at(frame, opened)
            frame = frame.f_back

    def _look_at(self, frame: FrameType, opened: Session) -> None:
        variables = frame.f_locals
        try:
            for name, value in list(variables.items())[:MOST_NAMES]:
                self._weigh(name, value, opened)
                if name == "self":
                    for attribute, part in list(getattr(value, "__dict__", {}).items())[:MOST_NAMES]:
                        self._weigh(f"self.{attribute}", part, opened)
        finally:
            # Before Python 3.13 the frame keeps this copy, and with it the last batch and its graph.
            if frame.f_code.co_flags & _OPTIMIZED and sys.version_info < (3, 13):
                variables.clear()
        if frame.f_globals is not variables:
            for name, value in list(frame.f_globals.items())[:MOST_NAMES]:
                if type(value) in COUNTED and not name.startswith("__"):
                    self._weigh(name, value, opened)

    def _weigh(self, name: str, value: Any, opened: Session) -> None:
        size = len(value) if type(value) in COUNTED else _added_up(value)
        if not size and type(value) not in COUNTED:
            return
        first = self._first.setdefault(name, size)
        if size < first + GREW or size < SAY_AGAIN * self._said.get(name, 0):
            return
        self._said[name] = size
        newest = value
        if isinstance(value, (list, deque, dict)):
            newest = next(reversed(value.values() if isinstance(value, dict) else value), None)
        opened.say(
            held=name, before=first, now=size, keyed=isinstance(value, dict),
            keeps_graph=getattr(newest, "grad_fn", None) is not None,
        )  # fmt: skip


def _added_up(value: Any) -> int:
    """How many sums a tensor is a sum of: `total += loss` keeps the graph of every step."""
    node, length = getattr(value, "grad_fn", None), 0
    while node is not None and type(node).__name__ == "AddBackward0" and length < LONGEST_GRAPH:
        length += 1
        node = node.next_functions[0][0] if node.next_functions else None
    return length


class Loop:
    """Everything above, for one training process."""

    def __init__(self) -> None:
        self.steps = self._batches = 0
        self._looked_ns = 0
        self._reads: Reads | None = None
        self._kept = GrowingContainers()
        self._traced: StepTrace | None = None
        self._traced_from = (0, 0)

    def optimizer_stepped(self, optimizer: Any, opened: Session) -> None:
        self.steps += 1
        if self.steps in MODE_LOOKS:
            modes.look(optimizer, opened)
        if self.steps == COUNT_FROM:
            self._reads = Reads()
            self._reads.begin(sys.modules["torch"], self.steps)
        elif self.steps == COUNT_FROM + COUNT_STEPS:
            self.stop_counting(opened)

    def stop_counting(self, opened: Session | None) -> None:
        """Ends counting, also where a short script ends before; without a session, in a worker, nothing is said."""
        reads, self._reads = self._reads, None
        if reads is not None and opened is not None:
            reads.end(self.steps, opened)
        elif reads is not None:
            reads.restore()
        traced, self._traced = self._traced, None
        if traced is not None:
            traced.leave()

    def trace(self, opened: Session) -> None:
        """Records one step, from the batch that begins it to the one that begins the next. Several batches may make an
        update, and several optimizers one step."""
        if self._traced is not None:
            if self.steps > self._traced_from[1]:
                traced, self._traced = self._traced, None
                opened.traces = False
                traced.end(self._batches - self._traced_from[0], opened)
        elif self.steps >= TRACE_FROM:
            from stoker.attach.operators import StepTrace, uses_compile

            wanted.stop()
            if uses_compile():
                opened.traces = False
                opened.say(untraced="it uses torch.compile, whose operators are not torch's own")
                return
            self._traced, self._traced_from = StepTrace(wanted.dtype), (self._batches, self.steps)
            self._traced.begin()

    def batch_taken(self, frame: FrameType, now_ns: int, opened: Session) -> None:
        self._batches += 1
        if opened.traces:
            self.trace(opened)
        if self._batches % LOOK_EVERY_BATCHES or now_ns - self._looked_ns < LOOK_EVERY_NS:
            return
        self._looked_ns = now_ns
        self._kept.look(frame, opened)
        cudnn = getattr(getattr(sys.modules.get("torch"), "backends", None), "cudnn", None)
        if cudnn is not None:
            opened.say(cudnn_benchmark=bool(cudnn.benchmark))


modes = Modes()
