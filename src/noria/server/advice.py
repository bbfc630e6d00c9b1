"""One sentence on where a request's time went, and what would have made it faster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from noria.server.accounts import Choice, Phase

_LITTLE = 0.1  # of a request's time: not worth a word
# What it waited for → how that is said, and what would help.
_WAITS = {
    "step": (
        "for the step that was under way when it came",
        "a smaller --max-num-batched-tokens makes steps shorter",
    ),
    "budget": (
        "for tokens of a step, of which there were {budget}",
        "a larger --max-num-batched-tokens lets more prompts share a step, and makes steps longer",
    ),
    "blocks": (
        "for blocks of the cache, which others held",
        "more cache (--gpu-memory-utilization, --num-blocks), smaller entries (--kv-cache-dtype) or shorter requests"
        " would help",
    ),
    "policy": (
        "for its turn, as others came first by the scheduling policy",
        "a smaller priority, or a larger share of its key, would have put it before them",
    ),
    "prefix": (
        "for the beginning of its prompt, which another request was computing",
        "it would have had to compute that itself",
    ),
    "grammar": (
        "for its grammar to be compiled",
        "a simpler schema takes less, and one that was used before hardly anything",
    ),
    "static": (
        "for a static batch to fill or to end",
        "continuous batching lets requests join at every step: leave --static-batching out",
    ),
    "preempted": (
        "after it had to give way to others",
        "more cache (--gpu-memory-utilization, --num-blocks) or fewer requests at once (--max-num-seqs) would help",
    ),
    "gathering": (
        "for an engine at rest to begin",
        "a shorter batch_build_interval lets it begin sooner, with fewer requests",
    ),
    "kind": (
        "for a step of its kind, as prefill and decode are kept apart",
        "enable_batch_fusion: true lets them share steps",
    ),
    "lookups": ("for prefixes of others to be looked up", "fewer requests at once would help"),
}


def advise(choice: Choice, limits: Mapping[str, int]) -> str:
    """The sentence.

    Args:
        limits: most of `batch` and `budget` that may be set.
    """
    sums = choice.sums
    parts = {
        "before": sums.before_ms,
        "delivery": sums.delivery_ms,
        "others": sums.others_ms,
        "lost": sums.lost_ms,
        "ran": sums.ran_ms,
    } | {f"waited {cause}": took for cause, took in sums.waited.items()}
    largest = max(parts, key=lambda name: parts[name])
    if sums.total_ms <= 0.0 or parts[largest] < _LITTLE * sums.total_ms:
        return "Its time went to many things, to none of them much."
    share = f"{100 * parts[largest] / sums.total_ms:.0f} % of its time"
    if choice.state == "running":
        share += " so far"
    if largest in _OTHERWISE:
        return _OTHERWISE[largest].format(share=share)
    return _ran(share, choice) if largest == "ran" else _waited(largest.removeprefix("waited "), share, choice, limits)


_OTHERWISE = {
    "before": "It took {share} to be read and made into tokens, before the engine had it: a shorter prompt takes less.",
    "delivery": "It took {share} to be written after its last step: the client may have read slowly.",
    "others": "It waited {share} for the other choices of its answer: with stream, each is sent as it comes.",
    "lost": "There was no engine to run it, or one that died with it, for {share}; the server's log says why.",
    "waited forgotten": "The engine has forgotten what happened in {share}: ask sooner.",
}


def _waited(cause: str, share: str, choice: Choice, limits: Mapping[str, int]) -> str:
    phases = [phase for phase in choice.phases if phase.what == "waiting" and phase.cause == cause]
    longest = max(phases, key=lambda phase: phase.ms)
    if cause == "cap":
        return f"It waited {share} for {_cap(longest, limits)}."
    what, remedy = _WAITS.get(cause, (f"for {cause}", "fewer requests at once would help"))
    return f"It waited {share} {what.format(budget=longest.budget)}: {remedy}."


def _cap(longest: Phase, limits: Mapping[str, int]) -> str:
    full = f"the batch cap of {longest.batch}: {longest.running} requests ran already"
    if longest.batch >= limits["batch"]:
        return f"{full}; a larger --max-num-seqs lets more run at once, each of them slower"
    return (
        f"{full}; the pacer had set it below --max-num-seqs ({limits['batch']}): a looser objective (--slo-tpot-ms) or"
        " a larger --min-batch-size lets more run at once, each of them slower"
    )


def _ran(share: str, choice: Choice) -> str:
    sums = choice.sums
    own = sums.own_ms / sums.ran_ms if sums.ran_ms else 1.0
    if own < 0.5:
        return (
            f"It ran {share}, in {sums.steps} steps, {100 * own:.0f} % of whose tokens were its own: fewer requests"
            " at once (--max-num-seqs) make steps shorter, and others wait."
        )
    return f"It ran {share}, in {sums.steps} steps that were mostly its own: only fewer tokens would help."
