"""Run by the interpreter that has Noria: log-probabilities of texts and greedy answers, without server and harness.

Reads from the standard input, and writes to the standard output:
    texts: [context, continuation] each → [sum of the continuation's log-probabilities, whether all are greedy]
    whole, prefix: a text each, and the token before its first → sum of its log-probabilities
    prompts: [prompt, stop strings, max_tokens] each → the greedy answer
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

import noria
from noria import SamplingParams


def main() -> None:
    asked = json.load(sys.stdin)
    with noria.LLM("smollm2") as llm:

        def encode(text: str) -> list[int]:
            return llm.tokenizer.encode(text, add_bos=False)

        # The continuation's tokens are those of the whole text behind as many as the context has: the harness's way.
        texts = [_score(llm, encode(before + after), len(encode(before))) for before, after in asked["texts"]]
        whole = [_score(llm, [asked["prefix"], *encode(text)], 1)[0] for text in asked["whole"]]
        greedy = [
            SamplingParams(temperature=0, stop=tuple(stop), max_tokens=most) for _, stop, most in asked["prompts"]
        ]
        answers = llm.generate([prompt for prompt, _, _ in asked["prompts"]], greedy, progress=False)
        json.dump({"texts": texts, "whole": whole, "prompts": [answer.text for answer in answers]}, sys.stdout)


def _score(llm: noria.LLM, ids: Sequence[int], start: int) -> tuple[float, bool]:
    """Of the tokens from `start`."""
    (answer,) = llm.generate([ids], SamplingParams(max_tokens=1, prompt_logprobs=1), progress=False)
    columns = answer.prompt_logprobs
    assert columns is not None
    # The columns begin with the second token.
    return sum(columns.chosen[start - 1 :]), all(rank == 1 for rank in columns.ranks[start - 1 :])


if __name__ == "__main__":
    main()
