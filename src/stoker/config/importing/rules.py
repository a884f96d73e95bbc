"""What a key of another program becomes here: one rule per key, from its value to our settings and the reason.

The normal loader uses the rules in `names` too, but accepts only what means exactly the same (`Kind.SAME`); `stoker
config import` also writes what is nearest, and says what was lost.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from stoker.config.schema import Config


class Kind(StrEnum):
    """How a key of another program relates to ours."""

    SAME = "same"
    """Means the same here; without settings, it is what stoker does anyway."""
    CHANGED = "changed"
    """The nearest that stoker has, or the same in other words or units."""
    NO_EFFECT = "no_effect"
    """Was read there, and did nothing."""
    NOT_NEEDED = "not_needed"
    """About something that stoker decides itself, or that does not change the training."""
    NOT_TRANSLATED = "not_translated"
    """Stoker has nothing like it."""
    UNKNOWN = "unknown"
    """Nobody told us what this key means."""


@dataclass(frozen=True)
class Became:
    kind: Kind
    why: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)
    """For settings that have a reason of their own."""


class Theirs:
    """The other program's keys, for rules that need more than one of them."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    def get(self, *names: str, default: Any = None) -> Any:
        """The value of the first of these keys that is set and not null."""
        return next((self.values[name] for name in names if self.values.get(name) is not None), default)


Rule = Callable[[Any, Theirs], Became]
Table = Mapping[str, Rule]


def same(why: str = "", **settings: Any) -> Became:
    return Became(Kind.SAME, why, settings)


def changed(why: str, **settings: Any) -> Became:
    return Became(Kind.CHANGED, why, settings)


def lost(why: str) -> Became:
    return Became(Kind.NOT_TRANSLATED, why)


def without_effect(why: str) -> Became:
    return Became(Kind.NO_EFFECT, why)


def absolute_lr(lr: Any, theirs: Theirs) -> Became:
    """A learning rate that is used as it is, whatever the total batch."""
    parts = [number(theirs.get(name, default=1)) for name in ("devices", "num_nodes", "batch_size")]
    total = math.prod(part for part in parts if part) if all(parts) else None
    peak, reference = number(lr), Config().lr_reference_batch
    reason = "lr is used as it is there; stoker would scale it with the total batch"
    if peak and total and total != reference and theirs.get("batch_size"):
        reason += f": {peak * total / reference:g} for {total:g} samples"
    return Became(Kind.SAME, "used as it is", {"lr": lr, "scale_lr": False}, {"scale_lr": reason})


def renamed(key: str, *, off: tuple[Any, ...] = (None,), why: str = "") -> Rule:
    """The same under our name; the values in `off` mean that it was not set."""

    def rule(value: Any, _theirs: Theirs) -> Became:
        return same("not set") if _is_one_of(value, off) else same(why, **{key: value})

    return rule


def only(*accepted: Any, because: str, otherwise: str) -> Rule:
    """Nothing to set for these values, and no translation for others."""

    def rule(value: Any, _theirs: Theirs) -> Became:
        return same(because) if _is_one_of(value, accepted) else lost(otherwise)

    return rule


def if_read(is_read: Callable[[Theirs], Any], unread: str, rule: Rule) -> Rule:
    """The rule of a key that their program reads only with some other setting."""
    return lambda value, theirs: rule(value, theirs) if is_read(theirs) else without_effect(unread)


def chosen(key: str, ours: Mapping[str, str], otherwise: str) -> Rule:
    """Our name for a value, which they give as a name or class (`torch.optim.SGD`)."""

    def rule(value: Any, _theirs: Theirs) -> Became:
        name = ours.get(str(value).rpartition(".")[2].lower())
        return lost(otherwise) if name is None else same(**{key: name})

    return rule


def not_needed(why: str) -> Rule:
    return lambda _value, _theirs: Became(Kind.NOT_NEEDED, why)


def all_renamed(ours: Mapping[str, str]) -> dict[str, Rule]:
    """Keys of theirs that only have another name here."""
    return {theirs: renamed(key) for theirs, key in ours.items()}


def explained_by(ours: Mapping[str, str]) -> dict[str, Rule]:
    """Keys of theirs that the rule of another key reads; the reason is beside that one."""
    return {theirs: not_needed(f"see {key}") for theirs, key in ours.items()}


def _is_one_of(value: Any, accepted: tuple[Any, ...]) -> bool:
    """Equality that tells 1, 1.0 and True apart: in Lightning, `val_check_interval: 1` is a batch, 1.0 an epoch."""
    return any(type(value) is type(known) and value == known for known in accepted)


def number(value: Any) -> float | None:
    """The number, or None for anything else."""
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


_TIMM_POLICY = re.compile(r"rand(?:-(?:m(?P<m>[0-9.]+)|n(?P<n>[0-9]+)|mstd(?P<std>[0-9.]+)|inc(?P<inc>[01])))*")


def timm_policy(value: Any, why: str = "") -> Became:
    """Our settings for timm's `rand-m9-mstd0.5-inc1`, if it has no parts that we do not have."""
    match = _TIMM_POLICY.fullmatch(value) if isinstance(value, str) else None
    # Without inc1, timm's magnitudes of several operations go the other way.
    # From 100 on, its standard deviation means uniform draws.
    if match is None or match["inc"] != "1" or float(match["std"] or 0) >= 100:
        return lost("only rand-mM-nN-mstdS-inc1 of timm's policies can be translated")
    return same(
        why,
        auto_augment="randaugment",
        randaugment_magnitude=float(match["m"] or 10),
        randaugment_magnitude_std=float(match["std"] or 0),
        randaugment_ops=int(match["n"] or 2),
    )
