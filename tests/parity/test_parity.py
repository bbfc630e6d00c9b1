"""What transformers said (stored by `make parity`) against what Noria says: every architecture, and the real model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from helpers.engine_runs import Ask, options, run
from helpers.forward import prompt_logits
from helpers.tiny_models import CASES, write_checkpoint
from noria.params import SamplingParams

ORACLE = Path(__file__).parent / "oracle"
# Of the largest logit's magnitude. Float32 on both sides, in different orders of addition.
BOUND = 2e-5


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_logits_and_greedy(name: str, backend: str, tmp_path: Path) -> None:
    stored = np.load(ORACLE / f"{name}.npz")
    write_checkpoint(name, tmp_path)
    prompt = stored["prompt"].tolist()
    bound = BOUND * float(np.abs(stored["logits"]).max())
    logits = prompt_logits(str(tmp_path), prompt, backend, dtype="f32")
    error = float(np.abs(logits[stored["rows"]] - stored["logits"]).max())
    print(f"{name} on {backend}: largest difference {error:.2e}, bound {bound:.2e}")
    assert error <= bound
    if backend == "cpu":
        greedy_equal(str(tmp_path), prompt, stored["greedy"].tolist(), stored["gaps"].tolist(), bound)


def greedy_equal(model: str, prompt: list[int], tokens: list[int], gaps: list[float], bound: float) -> None:
    """Equal up to the first place where the oracle itself was undecided within the bound."""
    params = SamplingParams(temperature=0.0, max_tokens=len(tokens), ignore_eos=True, seed=0)
    chosen = options(model, model={"dtype": "f32"}, cache={"dtype": "f32"})
    answers, _ = run(chosen, [Ask(tuple(prompt), params)])
    undecided = [place for place, gap in enumerate(gaps) if gap <= 2 * bound]
    sure = undecided[0] if undecided else len(tokens)
    assert sure >= len(tokens) // 2, "the case decides too little"
    assert answers[0].tokens[:sure] == tokens[:sure]


def test_smollm2_says_what_transformers_says(smollm2: str) -> None:
    """20 prompts × 64 greedy tokens, float32 throughout, all 20 in one batch."""
    stored = json.loads((ORACLE / "smollm2.json").read_text(encoding="utf-8"))
    params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True, seed=0)
    asks = [Ask(tuple(case["prompt_ids"]), params) for case in stored["cases"]]
    chosen = options(smollm2, model={"dtype": "f32"}, cache={"dtype": "f32", "num_blocks": 400})
    answers, _ = run(chosen, asks)
    equal = [answer.tokens == case["tokens"] for answer, case in zip(answers, stored["cases"], strict=True)]
    gap = min(case["smallest_gap"] for case in stored["cases"])
    print(f"{sum(equal)} of {len(equal)} prompts equal; smallest lead of a token {gap:.1e}")
    assert all(equal)
