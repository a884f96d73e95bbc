"""The page: template, style, script and data in one file that asks nobody for anything."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from stoker import __version__
from stoker.console import print_result, say
from stoker.errors import UserError
from stoker.files import write_text
from stoker.report.document import Document, compare
from stoker.run.folder import RunFolder

# The page: template, style, script and data in one file that asks nobody for anything.

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
    return resources.files("stoker.report").joinpath(name).read_text(encoding="utf-8")


# The page becomes a file, and its reader is told where it is.


def default_place(folders: Sequence[Path]) -> Path:
    """report.html of the run; of two, a file of the first one that names the second."""
    own = RunFolder(folders[0]).report_file
    if len(folders) == 1:
        return own
    other = re.sub(r"[^A-Za-z0-9._=+-]", "-", folders[1].resolve().name)[:100]
    return own.with_name(f"report-beside-{other}.html")


def write_page(place: Path, page: str) -> None:
    """Writes the page whole or not at all."""
    try:
        write_text(place, page)
    except OSError as error:
        raise UserError(
            "report-not-writable",
            f"{place} cannot be written: {error.strerror or error}",
            hint="stoker report RUN --out /a/folder/you/may/write/report.html",
        ) from None


def say_where(place: Path, document: Document) -> None:
    """The file's name on stdout; what the page cannot show on stderr."""
    for run in document["runs"]:
        for text in run["missing"]:
            say(f"note: {run['label']}: {text}")
    print_result(str(place))


def show_in_browser(place: Path) -> None:
    """Asks the desktop to show the file; a machine without one says so."""
    import webbrowser

    if not webbrowser.open(place.absolute().as_uri()):
        say(f"note: no browser could be opened here; the page is {place.absolute()}")
