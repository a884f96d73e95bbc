"""`stoker doctor --report FILE`: the page about what the doctor saw."""

from __future__ import annotations

import os
from pathlib import Path

from stoker.errors import UserError
from stoker.facts.diagnosis import Diagnosis
from stoker.output.text import say


def refuse_place(place: Path) -> None:
    """Raises where the page could not be written in the end."""
    folder = place.absolute().parent
    wrong = (
        "is a folder" if place.is_dir()
        else "is in a folder that does not exist" if not folder.is_dir()
        else "is in a folder that may not be written" if not os.access(folder, os.W_OK)
        else None
    )  # fmt: skip
    if wrong is not None:
        raise UserError("report-not-writable", f"{place} {wrong}", hint="--report report.html")


def write_diagnosis_page(place: Path, diagnosis: Diagnosis, name: str) -> None:
    """Writes the page, and says where it is."""
    from stoker.output.report.diagnosis_document import diagnosis_document
    from stoker.output.report.page import report_document, report_page
    from stoker.output.report.writing import write_page

    write_page(place, report_page(report_document([diagnosis_document(diagnosis, name)])))
    say(f"page: {place}")
