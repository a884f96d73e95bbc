"""`subset.json` of a copy: which classes were chosen, so that nobody has to guess later."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from stoker.core.errors import UserError
from stoker.core.files import write_text
from stoker.io.local_copy import SUBSET, LocalCopy


def keep_subset(copy: LocalCopy, record: dict[str, Any] | None) -> None:
    """Writes which subset a copy holds; refuses a copy that holds another one or everything."""
    path = Path(copy.folder) / SUBSET
    known = _read(path)
    if known == record:
        return
    if not len(copy):
        if record is None:
            path.unlink()
        else:
            write_text(path, json.dumps(record, indent=1) + "\n")
        return
    raise UserError(
        "copy-of-another-subset",
        f"{copy.folder} holds {_words(known)}; now {_words(record)} should go there",
        why="programs that read the folder would see both together",
        hint="choose another folder for each part",
    )


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _words(record: dict[str, Any] | None) -> str:
    if record is None:
        return "all classes"
    samples = record.get("samples") or {}
    return f"{len(record.get('classes') or [])} classes with {samples.get('train')} training images"
