"""Static batches with transformers: filled, padded on the left, and run until the longest answer is done."""

from __future__ import annotations

import argparse
import time
from collections import deque
from typing import Any

import torch
from loop import Callers, Windows, serve
from transformers import AutoModelForCausalLM, StoppingCriteriaList


class StepClock:
    """A stopping criterion that never stops, but notes when a step's tokens are there (streamers take no batches)."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).eval()
    model.generation_config.eos_token_id = None  # every answer has the length that was asked for
    model.generation_config.pad_token_id = 0

    def run(callers: Callers) -> None:
        queue: deque[int] = deque()
        while not callers.finished:
            queue.extend(callers.due())
            batch = [queue.popleft() for _ in range(min(args.batch, len(queue)))]
            answer(model, callers, batch)

    def score(windows: Windows) -> list[list[float]]:
        found = []
        for window in windows:
            ids = torch.tensor([window])
            logits = model(ids).logits[0, :-1].float()
            found.append(logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0].tolist())
        return found

    with torch.inference_mode():
        serve(run, score)


def answer(model: Any, callers: Callers, batch: list[int]) -> None:
    """Runs one batch; each caller has its answer, streamed, when its own length is reached, but the batch goes on."""
    prompts = [callers.requests[index]["prompt_ids"] for index in batch]
    lengths = [callers.requests[index]["output_tokens"] for index in batch]
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    clock = StepClock()
    stopping = StoppingCriteriaList([clock])
    model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=max(lengths), stopping_criteria=stopping)
    ended = time.perf_counter()
    for index, length in zip(batch, lengths, strict=True):
        for now in clock.times[:length]:
            callers.token(index, 1, now)
        callers.end(index, ended)


if __name__ == "__main__":
    main()
