"""Counters of the engine. They only grow; what runs and waits is read where it is."""

from __future__ import annotations

from dataclasses import dataclass

from noria.cache.pool import PoolCounts
from noria.messages import EngineStats, Outlook, PacerStats


@dataclass(slots=True)
class Counters:
    """Since the engine's start. Tokens are those computed and sampled; seconds are on the engine's clock."""

    steps: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    step_seconds: float = 0.0
    plan_seconds: float = 0.0
    ended: int = 0  # requests, in whatever way, that had any output
    ended_tokens: int = 0  # theirs

    def snapshot(
        self, running: int, waiting: int, blocks: PoolCounts, pacer: PacerStats, outlook: Outlook
    ) -> EngineStats:
        return EngineStats(
            running=running,
            waiting=waiting,
            free_blocks=blocks.free,
            cached_blocks=blocks.cached,
            held_blocks=blocks.held,
            total_blocks=blocks.total,
            steps_total=self.steps,
            preemptions_total=self.preemptions,
            prompt_tokens_total=self.prompt_tokens,
            generation_tokens_total=self.generation_tokens,
            prefix_queries_total=self.prefix_queries,
            prefix_hits_total=self.prefix_hits,
            step_seconds_total=self.step_seconds,
            plan_seconds_total=self.plan_seconds,
            pacer=pacer,
            pacer_decisions_total=pacer.decisions,
            outlook=outlook,
        )
