"""Drives an EngineCore and keeps what a client would see."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from helpers.fake_executor import FakeExecutor
from noria.config import CacheOptions, SchedulerOptions
from noria.engine.core import EngineCore
from noria.messages import Abort, Finished, StepOutputs, Submit
from noria.params import SamplingParams


def ids(values) -> bytes:
    return np.array(list(values), "<i4").tobytes()


def submit(request_id, prompt, *, received=(), max_tokens=4, stop_ids=(), seed=0, **more) -> Submit:
    names = ("choice", "group", "priority", "salt", "arrival", "tenant", "share", "waited", "sheddable")
    own = {name: more.pop(name) for name in names if name in more}
    params = SamplingParams(max_tokens=max_tokens, seed=seed, **more)
    return Submit(
        request_id=request_id,
        prompt_ids=ids(prompt),
        received_ids=ids(received),
        params=params,
        stop_ids=tuple(stop_ids),
        **own,
    )


@dataclass
class Seen:
    tokens: list[int] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)
    started: int = 0
    logprobs: list[float] = field(default_factory=list)
    prompt_logprobs: list = field(default_factory=list)


class Driver:
    """An engine over a FakeExecutor, checked after every step."""

    def __init__(self, *, cache=None, depth=1, clock=None, slots=4, budget=64, pacer=None, gate=None, **more) -> None:
        worker = {name: more.pop(name) for name in ("num_blocks", "max_model_len") if name in more}
        options = CacheOptions(block_size=8, **(cache or {}))
        scheduling = SchedulerOptions(max_num_seqs=slots, max_num_batched_tokens=budget, in_flight_depth=depth, **more)
        self.executor = FakeExecutor(slots=slots, budget=budget, depth=depth or 2, block_size=8, **worker)
        timing = {"clock": clock} if clock else {}
        self.core = EngineCore(self.executor, options, scheduling, pacer=pacer, gate=gate, **timing)
        self.seen: dict[int, Seen] = {}
        self.steps = 0

    def submit(self, request_id, prompt, **more) -> None:
        self.core.handle(submit(request_id, prompt, **more))

    def abort(self, *request_ids) -> None:
        self.core.handle(Abort(tuple(request_ids)))
        self.core.check()

    def step(self) -> StepOutputs | None:
        outputs = self.core.step()
        self.steps += 1
        self.core.check()
        if outputs is not None:
            self._note(outputs)
        return outputs

    def run(self, most=10_000) -> None:
        """Until nothing is left to do."""
        for _ in range(most):
            if not self.core.has_work:
                return
            self.step()
        raise AssertionError(f"requests are starving: {list(self.core._scheduler.requests)}")

    def tokens(self, request_id) -> list[int]:
        return self.seen[request_id].tokens

    def finish(self, request_id) -> Finished:
        (finished,) = self.seen[request_id].finished
        return finished

    def _note(self, outputs: StepOutputs) -> None:
        request_ids = np.frombuffer(outputs.request_ids, "<i8").tolist()
        counts = np.frombuffer(outputs.counts, "<i4").tolist()
        tokens = np.frombuffer(outputs.tokens, "<i4").tolist()
        for started in outputs.started:
            self.seen.setdefault(started.request_id, Seen()).started += 1
        for request_id, count in zip(request_ids, counts, strict=True):
            seen = self.seen.setdefault(request_id, Seen())
            assert not seen.finished, "a token after the end"
            assert seen.started == 1, "a token before the start"
            seen.tokens += [tokens.pop(0) for _ in range(count)]
        assert not tokens
        for request_id, values in outputs.logprobs.items():
            self.seen[request_id].logprobs += np.frombuffer(values.chosen, "<f4").tolist()
        for request_id, values in outputs.prompt_logprobs.items():
            self.seen.setdefault(request_id, Seen()).prompt_logprobs.append(values)
        for finished in outputs.finished:
            self.seen.setdefault(finished.request_id, Seen()).finished.append(finished)
        stats = outputs.stats
        assert stats.free_blocks + stats.cached_blocks + stats.held_blocks == stats.total_blocks
