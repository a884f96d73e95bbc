"""What all tests of pages share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.browser import Page, browser_page


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser_page(tmp_path_factory.mktemp("browser")) as found:
        yield found
