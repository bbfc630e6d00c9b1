from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from fakes import Running, serving


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    """A server whose engine recites."""
    with serving() as server:
        yield server


@pytest.fixture(scope="module")
def http(running: Running) -> Iterator[httpx.Client]:
    """A plain client of it."""
    with httpx.Client(base_url=running.url, timeout=20) as client:
        yield client
