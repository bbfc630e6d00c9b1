"""Fixtures of the op tests: the native backend on every ISA level that this processor can run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from noria.backends.base import Backend
from noria.backends.reference import ReferenceBackend

native: Any
try:
    from noria import _native as native
except ImportError:
    native = None

ISAS = native.available_isas() if native is not None else [None]


@pytest.fixture(params=ISAS, ids=str)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Selects one level for the test; weights must be packed within it."""
    if request.param is None:
        pytest.skip("the native extension is not built")
    before = native.isa()
    native.select_isa(request.param)
    yield request.param
    native.select_isa(before)


@pytest.fixture
def cpu(isa: str) -> Backend:
    """The native backend with two threads."""
    return native_backend(2)


@pytest.fixture
def cpu_one_thread(isa: str) -> Backend:
    """The native backend with one thread."""
    return native_backend(1)


@pytest.fixture(scope="session")
def reference() -> Backend:
    """The oracle."""
    return ReferenceBackend()


def native_backend(threads: int) -> Backend:
    from noria.backends import get_backend

    return get_backend("cpu", threads)
