"""OpenVINO GenAI's continuous batching, driven step by step in this process with token ids."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai
from loop import Callers, Windows, serve


def main() -> None:
    model, settings = sys.argv[1], json.loads(sys.argv[2])
    scheduler = genai.SchedulerConfig()
    for name, value in settings["scheduler"].items():
        setattr(scheduler, name, value)
    pipe = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", settings["properties"])
    asked = 0

    def run(callers: Callers) -> None:
        nonlocal asked
        live: dict[int, Any] = {}
        while not callers.finished:
            for index in callers.due():
                live[index] = pipe.add_request(asked, *request(callers.requests[index]))
                asked += 1
            pipe.step()
            take(callers, live)

    def score(windows: Windows) -> list[list[float]]:
        nonlocal asked
        found = []
        for window in windows:
            handle = pipe.add_request(asked, ov.Tensor(np.array([window], np.int64)), prompt_only())
            asked += 1
            while pipe.has_non_finished_requests():
                pipe.step()
            (output,) = handle.read_all()
            found.append([float(value) for value in output.generated_log_probs[1 : len(window)]])
        return found

    serve(run, score)


def prompt_only() -> genai.GenerationConfig:
    """For log-probabilities of a prompt, and no more of an answer than must be."""
    config = genai.GenerationConfig()
    config.max_new_tokens = 1
    config.echo = True
    config.logprobs = 1
    config.ignore_eos = True
    return config


def request(values: dict[str, Any]) -> tuple[ov.Tensor, genai.GenerationConfig]:
    config = genai.GenerationConfig()
    config.max_new_tokens = values["output_tokens"]
    config.ignore_eos = True
    config.do_sample = False
    ids = np.array([values["prompt_ids"]], np.int64)
    return ov.Tensor(ids), config


def take(callers: Callers, live: dict[int, Any]) -> None:
    """Books the tokens of a step and the requests that it ended."""
    now = time.perf_counter()
    for index, handle in list(live.items()):
        if handle.can_read():
            for output in handle.read().values():
                callers.token(index, len(output.generated_ids), now)
        status = handle.get_status()
        if status != genai.GenerationStatus.RUNNING:
            del live[index]
            callers.end(index, now, None if status == genai.GenerationStatus.FINISHED else status.name)


if __name__ == "__main__":
    main()
