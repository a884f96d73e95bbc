"""One JSON document on stdout, and nothing else there."""

from __future__ import annotations

import json
import sys
from typing import Any

from stoker.errors import StokerError


def print_json(document: Any) -> None:
    """The document, indented for people; NaN and infinities have no JSON and would be a bug of ours."""
    sys.stdout.write(json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
    sys.stdout.flush()


def print_json_error(error: StokerError) -> None:
    """An error where a result was expected: programs read it under `error`."""
    print_json({"error": error.as_dict()})
