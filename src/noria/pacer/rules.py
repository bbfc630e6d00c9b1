"""The predictor by rules: no model, a few constants (`RuleOptions`), the last resort where nothing is known of steps.

Queue and device say which way the batch goes from where it is; the length of requests how far it may go.
"""

from __future__ import annotations

import math

from noria.config import RuleOptions
from noria.pacer.base import Load, Prediction, Sizes


class RulePredictor:
    """Grows the batch while requests wait and the device has room, shrinks it while the device or its memory is beyond
    its threshold. The token budget is left at its most: rules know nothing of what a token costs.

    Args:
        device, memory: thresholds, shares.
    """

    trusted = True

    def __init__(self, options: RuleOptions, device: float, memory: float) -> None:
        self._options = options
        self._device = device
        self._memory = memory

    def predict(self, load: Load, now: Sizes, most: Sizes, least: int) -> Prediction:
        factor, reason = self._factor(load)
        ceiling, length = most.batch, load.mean_prompt + load.mean_output
        if length > self._options.long_request:
            share = max(self._options.long_request_shrink, self._options.long_request / length)
            ceiling = max(1, int(share * most.batch))
            reason += f", at most {ceiling} as requests are long ({length:.0f} tokens)"
        wanted = now.batch * factor
        batch = math.ceil(wanted) if factor > 1.0 else int(wanted)
        batch = max(min(batch, ceiling), min(least, most.batch), 1)
        return Prediction(Sizes(batch, max(most.budget, batch)), reason)

    def _factor(self, load: Load) -> tuple[float, str]:
        """By which the batch changes, and why."""
        options = self._options
        if load.memory > self._memory:
            return options.shrink, f"memory at {load.memory:.0%}"
        if load.device is not None and load.device > self._device:
            return options.shrink, f"device at {load.device:.0%}"
        if not load.waiting:
            return 1.0, "nobody waits"
        queue = f"{load.waiting} wait for {load.running}"
        if load.waiting >= options.long_queue * max(1, load.running):
            return options.growth**2, queue
        if load.device is not None and load.device >= options.low_utilization:
            return 1.0, f"{queue}, but the device is at {load.device:.0%}"
        return options.growth, queue
