"""The page about the doctor lists every check, once."""

from __future__ import annotations

import re

from stoker.doctor.checks.verdict import CHECKS
from tests.support.documents import PROJECT


def test_every_check_has_a_line_in_the_docs() -> None:
    page = (PROJECT / "docs" / "why-is-my-gpu-idle.md").read_text()
    listed = re.findall(r"^\| `([a-z0-9.-]+)` \| ", page, flags=re.MULTILINE)
    assert sorted(listed) == sorted(check.name for check in CHECKS)
