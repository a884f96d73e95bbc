"""The page becomes a file, and its reader is told where it is."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from stoker.errors import UserError
from stoker.files import write_text
from stoker.output.report.document import Document
from stoker.output.text import print_result, say
from stoker.run_folder import RunFolder


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
