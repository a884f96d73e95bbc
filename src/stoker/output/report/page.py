"""The page: template, style, script and data in one file that asks nobody for anything."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Sequence
from importlib import resources
from typing import Any

from stoker.output.report.comparison import compare
from stoker.output.report.document import Document
from stoker.version import __version__

LARGEST_PAGE = 2_000_000


def report_document(runs: Sequence[Document]) -> Document:
    """What a page of one run or of two is made from."""
    assert len(runs) in (1, 2)
    # Two runs of one name, in two folders, are told apart by their folders.
    same = len(runs) == 2 and runs[0]["name"] == runs[1]["name"]
    labelled = [run | {"label": run["folder"] if same else run["name"]} for run in runs]
    return {
        "stoker": __version__,
        "runs": labelled,
        "differences": compare(runs[0], runs[1]) if len(runs) == 2 else None,
    }


def report_page(document: Document, *, live: bool = False) -> str:
    """The document as HTML. A live one asks its own server for data.json every second, and nobody else."""
    style, script = _part("report.css"), _part("charts.js") + _part("report.js")
    title = " and ".join(run["label"] for run in document["runs"])
    # Were a name to slip through all the same, the browser would run nothing but our script, and load nothing.
    allowed = "'self'" if live else "'none'"
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; img-src data:; "
        f"connect-src {allowed}; base-uri 'none'; form-action 'none'"
    )
    parts = {
        "policy": html.escape(policy),
        "title": html.escape(title),
        "live": "true" if live else "false",
        "style": style,
        "script": script,
        "data": embedded_json(document),
    }
    page = _part("report.html")
    # In one pass: what is put in is never looked through for places to put something.
    pieces = page.split("{{")
    filled = [pieces[0]]
    for piece in pieces[1:]:
        name, _, rest = piece.partition("}}")
        filled += [parts[name.strip()], rest]
    return "".join(filled)


def embedded_json(value: Any) -> str:
    """JSON that can stand between script tags, whatever is in its strings."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for letter in "<>&\u2028\u2029":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _part(name: str) -> str:
    return resources.files("stoker.output.report").joinpath(name).read_text(encoding="utf-8")
