"""lm-eval through its completions client: its numbers are those that `noria.LLM` computes without server and harness.

Three small tasks in tasks/: multiple choice (log-probabilities of prompts), words generated until a stop string, and
perplexity over whole texts. The harness's tokeniser is the server's own (`/tokenize`), as it finds by itself.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from guide import code_of
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
from served import KEY, NORIA_PYTHON, Served

TASKS = Path(__file__).parent / "tasks"
DOCS = [json.loads(line) for line in (TASKS / "capitals.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def results(server: Served) -> dict[str, Any]:
    """What the harness makes of all tasks, with the arguments that the guide to clients shows."""
    arguments = re.findall(r"--model_args (\S+)", code_of("lm-eval", server))[0]
    assert f"base_url={server.base_url}/completions" in arguments
    before, key = Path.cwd(), os.environ.get("OPENAI_API_KEY")
    os.environ["OPENAI_API_KEY"] = KEY
    os.chdir(TASKS)  # the tasks name their data by a relative path
    try:
        made = simple_evaluate(
            model="local-completions",
            model_args=f"{arguments},max_retries=1",
            tasks=["noria_choices", "noria_words", "noria_perplexity"],
            task_manager=TaskManager(include_path=str(TASKS), include_defaults=False),
            bootstrap_iters=0,
        )
    finally:
        os.chdir(before)
        os.environ.pop("OPENAI_API_KEY")
        os.environ.update({"OPENAI_API_KEY": key} if key is not None else {})
    assert made is not None
    return dict(made)


@pytest.fixture(scope="module")
def expected(results: dict[str, Any]) -> dict[str, Any]:
    """The same, computed by `noria.LLM` in a process of its own."""
    texts = [[doc["question"], f" {choice}"] for doc in DOCS for choice in doc["choices"]]
    whole = [f"{doc['question']} {doc['choices'][doc['answer']]}." for doc in DOCS]
    prompts = [[sample["arguments"][0][0], ["\n", "."], 12] for sample in _samples(results, "words")]
    asked = json.dumps({"texts": texts, "whole": whole, "prefix": 1, "prompts": prompts})
    script = str(Path(__file__).parent / "offline.py")
    ended = subprocess.run([NORIA_PYTHON, script], input=asked, capture_output=True, text=True, check=True)
    return dict(json.loads(ended.stdout))


def _samples(results: dict[str, Any], task: str) -> list[dict[str, Any]]:
    return sorted(results["samples"][f"noria_{task}"], key=lambda sample: sample["doc_id"])


def test_multiple_choice(results: dict[str, Any], expected: dict[str, Any]) -> None:
    harness = [tuple(response) for sample in _samples(results, "choices") for response in sample["filtered_resps"]]
    ours = [tuple(score) for score in expected["texts"]]
    assert [greedy for _, greedy in harness] == [greedy for _, greedy in ours]
    assert any(greedy for _, greedy in ours)  # else the line before would compare nothing but False
    # Equal but for the last place of JSON's decimals.
    assert [value for value, _ in harness] == pytest.approx([value for value, _ in ours], rel=1e-6, abs=1e-6)
    scores = iter(value for value, _ in ours)
    rows = [[next(scores) for _ in doc["choices"]] for doc in DOCS]
    right = sum(row.index(max(row)) == doc["answer"] for row, doc in zip(rows, DOCS, strict=True))
    assert results["results"]["noria_choices"]["acc,none"] == right / len(DOCS)
    assert right >= 3  # the model knows most of it: the numbers mean something


def test_generation(results: dict[str, Any], expected: dict[str, Any]) -> None:
    harness = [sample["filtered_resps"][0] for sample in _samples(results, "words")]
    assert harness == expected["prompts"]
    assert any(harness)


def test_perplexity(results: dict[str, Any], expected: dict[str, Any]) -> None:
    harness = [sample["filtered_resps"][0] for sample in _samples(results, "perplexity")]
    assert harness == pytest.approx(expected["whole"], rel=1e-6)
    size = sum(len(f"{doc['question']} {doc['choices'][doc['answer']]}.".encode()) for doc in DOCS)
    bits = math.exp(-sum(expected["whole"]) / size)
    assert results["results"]["noria_perplexity"]["byte_perplexity,none"] == pytest.approx(bits, rel=1e-6)
