"""The programs whose configs are recognised: how, with which table, and what they do that no key of theirs says."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from stoker.config.importing.case_study import CASE_STUDY, CASE_STUDY_KEYS, CASE_STUDY_MARKS, case_study_facts
from stoker.config.importing.lightning import LIGHTNING, lightning_facts
from stoker.config.importing.names import IMPORT_NAMES
from stoker.config.importing.rules import Became, Table, Theirs, same
from stoker.config.importing.scrolls import SCROLLS, recognises_scrolls, scrolls_facts
from stoker.config.importing.timm import TIMM, TIMM_MARKS, timm_facts
from stoker.config.importing.torchvision import TORCHVISION, TORCHVISION_MARKS, torchvision_facts

Facts = Callable[[Theirs], list[Became]]
ENOUGH_MARKS = 3


@dataclass(frozen=True)
class Program:
    """A program whose configs can be imported."""

    name: str
    """For `--from`."""
    title: str
    table: Table
    facts: Facts
    """What it does without being told by a key; each becomes settings of ours, unless a key has set them."""
    recognises: Callable[[frozenset[str]], bool]
    reads_base: bool = False
    """Whether it reads `base.yaml` in the same folder before every config."""


def _unscaled(_theirs: Theirs) -> list[Became]:
    return [same("lr is used as it is there; stoker would scale it with the total batch", scale_lr=False)]


def _has_marks(marks: Iterable[str]) -> Callable[[frozenset[str]], bool]:
    return lambda keys: len(keys.intersection(marks)) >= ENOUGH_MARKS


PROGRAMS = (
    Program(
        "lightning",
        "Lightning CLI",
        LIGHTNING,
        lightning_facts,
        lambda keys: any(key.startswith("trainer.") for key in keys),
    ),
    Program("timm", "timm's train.py", TIMM, timm_facts, _has_marks(TIMM_MARKS)),
    Program(
        "torchvision",
        "torchvision's classification reference",
        TORCHVISION,
        torchvision_facts,
        _has_marks(TORCHVISION_MARKS),
    ),
    Program(
        "imagenet-full-training",
        "github.com/cydal/ImageNet-Full-training",
        CASE_STUDY,
        case_study_facts,
        # Its names are common ones, so all of the keys must be its own, and some of the less common must be there.
        lambda keys: keys <= CASE_STUDY_KEYS and bool(keys & CASE_STUDY_MARKS),
        reads_base=True,
    ),
    Program(
        "vesuvius-challenge",
        "github.com/TomBombadyl/vesuvius_challenge",
        SCROLLS,
        scrolls_facts,
        recognises_scrolls,
    ),
    Program(
        "names", "a program that we do not know, by the names of its keys", IMPORT_NAMES, _unscaled, lambda _: False
    ),
)
"""In the order in which they are tried; `names` is for everything else."""


def program_of(keys: frozenset[str], chosen: str | None) -> Program:
    """The program that was chosen, or the first that recognises the keys."""
    if chosen is not None:
        return next(program for program in PROGRAMS if program.name == chosen)
    return next((program for program in PROGRAMS if program.recognises(keys)), PROGRAMS[-1])
