"""Stand-ins that child processes run instead of measuring decoders; the decoder "bad" misbehaves."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from stoker.core.child import Parent


def by_length(job: dict[str, Any], parent: Parent) -> Any:
    """Longer names are slower."""
    return {name: float(len(name)) for name in job["decoders"]}


def is_killed(job: dict[str, Any], parent: Parent) -> Any:
    for name in job["decoders"]:
        parent.send(name)
        if name == "bad":
            os.kill(os.getpid(), signal.SIGSEGV)
    return by_length(job, parent)


def exits(job: dict[str, Any], parent: Parent) -> Any:
    for name in job["decoders"]:
        parent.send(name)
        if name == "bad":
            raise SystemExit(3)
    return by_length(job, parent)


def hangs(job: dict[str, Any], parent: Parent) -> Any:
    if "bad" in job["decoders"]:
        parent.send("bad")
        time.sleep(60)
    return by_length(job, parent)


def fails(job: dict[str, Any], parent: Parent) -> Any:
    raise SystemExit(1)


def raises(job: dict[str, Any], parent: Parent) -> Any:
    raise ValueError("measured again")


def says_nonsense(job: dict[str, Any], parent: Parent) -> Any:
    return "nonsense"


def finds_nothing(job: dict[str, Any], parent: Parent) -> Any:
    return {}
