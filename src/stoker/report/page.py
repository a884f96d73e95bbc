"""report.html: template, style, script and data in one file that loads nothing else."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from stoker import __version__
from stoker.core.console import say
from stoker.core.errors import UserError
from stoker.core.files import write_text
from stoker.report.document import Document, compare
from stoker.report.run_facts import picture_url
from stoker.report.tune_document import is_tune
from stoker.run.folder import RunFolder

SECTIONS = {
    "report.js": (
        "goes", "findings", "differences", "timeline", "throughput", "stages", "preview", "learning", "worst", "memory",
        "needs", "predictions", "quarantine", "events", "config", "environment", "missing",
    ),
    "tune.js": ("changes", "search", "sources", "trials", "other", "setup", "missing"),
}  # fmt: skip
"""Each script, and the parts of the page that it fills, in their order."""


def report_document(runs: Sequence[Document]) -> Document:
    """The data of a page about one run or two, or about a search of `stoker tune`."""
    assert len(runs) in (1, 2)
    if is_tune(runs[0]):
        return {"stoker": __version__, "tune": runs[0]}
    # Two runs with the same name are distinguished by their folders.
    same = len(runs) == 2 and runs[0]["name"] == runs[1]["name"]
    labelled = [run | {"label": run["folder"] if same else run["name"]} for run in runs]
    return {
        "stoker": __version__,
        "runs": labelled,
        "differences": compare(runs[0], runs[1]) if len(runs) == 2 else None,
    }


def report_page(document: Document, *, live: bool = False) -> str:
    """The document as HTML. A live page asks its own server for data.json every second."""
    about = "tune.js" if "tune" in document else "report.js"
    runs = document.get("runs", [])
    style, script = _part("report.css"), _part("charts.js") + _part("page.js") + _part(about)
    title = " and ".join(run["label"] for run in runs) if runs else f"tune {document['tune']['name']}"
    # Even if a name were not escaped, the browser would run only our script, and load nothing.
    allowed = "'self'" if live else "'none'"
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; img-src data:; "
        f"connect-src {allowed}; base-uri 'none'; form-action 'none'"
    )
    # Not in the document, which --json prints and a live page fetches every second.
    pictures = [
        {"preview": picture_url(run["preview"]), "worst": picture_url((run.get("evaluation") or {}).get("picture"))}
        for run in runs
    ]
    parts = {
        "policy": html.escape(policy),
        "title": html.escape(title),
        "live": "true" if live else "false",
        "first": "trials" if "tune" in document else "findings",
        "sections": "\n".join(
            f'<section id="{name}" aria-labelledby="{name}-title"></section>' for name in SECTIONS[about]
        ),
        "style": style,
        "script": script,
        "data": embedded_json(document),
        "pictures": embedded_json(pictures),
    }
    page = _part("report.html")
    # In one pass: placeholders in the data are not expanded.
    pieces = page.split("{{")
    filled = [pieces[0]]
    for piece in pieces[1:]:
        name, _, rest = piece.partition("}}")
        filled += [parts[name.strip()], rest]
    return "".join(filled)


def embedded_json(value: Any) -> str:
    """JSON that is safe between script tags, whatever its strings hold."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for letter in "<>&\u2028\u2029":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _part(name: str) -> str:
    return resources.files("stoker.report").joinpath(name).read_text(encoding="utf-8")


def page_path_for(folders: Sequence[Path], *, search: bool = False) -> Path:
    """report.html in the run folder; for two runs, a file in the first folder that names the second; for a search,
    tune.html beside its journal."""
    own = RunFolder(folders[0]).report_file
    if search:
        return folders[0] / "tune.html"
    if len(folders) == 1:
        return own
    other = re.sub(r"[^A-Za-z0-9._=+-]", "-", folders[1].resolve().name)[:100]
    return own.with_name(f"report-beside-{other}.html")


def check_page_path(path: Path) -> None:
    folder = path.absolute().parent
    wrong = (
        "is a folder" if path.is_dir()
        else "is in a folder that does not exist" if not folder.is_dir()
        else "is in a folder that is not writable" if not os.access(folder, os.W_OK)
        else None
    )  # fmt: skip
    if wrong is not None:
        raise UserError("report-not-writable", f"{path} {wrong}", hint="--report report.html")


def write_page(path: Path, document: Document) -> None:
    try:
        write_text(path, report_page(document))
    except OSError as error:
        raise UserError(
            "report-not-writable",
            f"{path} cannot be written: {error.strerror or error}",
            hint="stoker report RUN --out ~/report.html",
        ) from None


def show_in_browser(path: Path, what: str = "page") -> None:
    """Opens a page or a picture in the desktop's browser or viewer, or says that there is none."""
    import webbrowser

    if not webbrowser.open(path.absolute().as_uri()):
        say(f"note: no browser could be opened here; the {what} is {path.absolute()}")
