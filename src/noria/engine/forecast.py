"""How long a step will last at least, so that the one after it need not be planned before it has to be."""

from __future__ import annotations

from collections import deque

from noria.plan import StepPlan

_REMEMBERED = 4  # steps: one that was held up must not count
_SHARE = 0.7  # of the shortest of them; planning takes a small part of the rest


class Forecast:
    """Learns from steps that have run, those of single tokens and others apart."""

    def __init__(self) -> None:
        self._seen = {single: deque[tuple[int, float]](maxlen=_REMEMBERED) for single in (False, True)}

    def learn(self, plan: StepPlan, seconds: float) -> None:
        """A step has taken so long."""
        tokens = plan.tokens
        self._seen[tokens == len(plan.slots)].append((tokens, seconds))

    def seconds(self, plan: StepPlan) -> float:
        """Seconds that a step will surely take; 0 while too little is known.

        A step of more tokens is taken to last as long as a smaller one, and one of fewer tokens proportionally less:
        both are less than the truth.
        """
        tokens = plan.tokens
        seen = self._seen[tokens == len(plan.slots)]
        if len(seen) < _REMEMBERED:
            return 0.0
        return _SHARE * min(seconds * min(1.0, tokens / before) for before, seconds in seen)
