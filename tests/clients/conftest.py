"""Fixtures of the clients' tests: one server of the demo model for all of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

# Before the clients are imported: none of them may look for anything outside.
os.environ.update(
    HF_HUB_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    HF_DATASETS_CACHE=os.path.join(sys.prefix, "datasets"),
    LITELLM_LOCAL_MODEL_COST_MAP="True",
    LANGSMITH_TRACING="false",
    TOKENIZERS_PARALLELISM="false",
)

import openai
import pytest
from served import KEY, Served, serving


@pytest.fixture(scope="session")
def server() -> Iterator[Served]:
    """A server of the demo model."""
    with serving() as running:
        yield running


@pytest.fixture(scope="session")
def client(server: Served) -> Iterator[openai.OpenAI]:
    """The official client. It does not try again: a test should see what the server said."""
    with openai.OpenAI(base_url=server.base_url, api_key=KEY, max_retries=0, timeout=120) as made:
        yield made
