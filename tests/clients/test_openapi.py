"""schemathesis: requests made from `/openapi.json`, right ones and wrong ones, always the same.

No answer may be a fault of the server, and each must be one that the document promises, in status, type and shape.
"""

from __future__ import annotations

import os
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from served import Served, serving

EXAMPLES = int(os.environ.get("NORIA_EXAMPLES", "15"))  # of each operation; more to look further
CHECKS = (
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
)


@pytest.fixture(scope="module")
def short() -> Any:
    """A server with a short context: what the requests ask for should not take long."""
    with serving("--max-model-len", "64", "--num-blocks", "400") as running:
        yield running


@pytest.fixture(scope="module")
def document(short: Served) -> Any:
    """The document, as schemathesis reads it."""
    return schemathesis.openapi.from_url(f"{short.url}/openapi.json", headers=short.headers)


PATHS = (
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{model}"),
    ("GET", "/tokenizer_info"),
    ("GET", "/health"),
    ("GET", "/ready"),
    ("GET", "/metrics"),
    ("GET", "/version"),
    ("GET", "/openapi.json"),
    ("GET", "/debug/requests"),
    ("GET", "/debug/requests/{id}"),
    ("GET", "/debug/pacer"),
)


def test_all_operations_are_tried(document: Any) -> None:
    paths = document.raw_schema["paths"].items()
    assert sorted((method.upper(), path) for path, item in paths for method in item) == sorted(PATHS)


@pytest.mark.parametrize("mode", list(GenerationMode))
@pytest.mark.parametrize(("method", "path"), PATHS)
def test_every_answer_is_as_promised(
    document: Any, short: Served, method: str, path: str, mode: GenerationMode
) -> None:
    """`mode`: requests that follow the document, and such that break it somewhere."""
    operation = document[path][method]
    if mode is GenerationMode.NEGATIVE and "{" not in path and method == "GET":
        return  # there is nothing in such a request that could be wrong

    @settings(
        max_examples=EXAMPLES if method == "POST" or "{" in path else 2,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.explicit, Phase.generate, Phase.shrink),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def ask(case: Any) -> None:
        if isinstance(case.body, dict):
            case.body.pop("model", None)  # a made-up name is a 404, whatever else is asked
        case.call_and_validate(checks=CHECKS, headers=short.headers, timeout=30)

    ask()
    assert httpx.get(f"{short.url}/health").status_code == 200
