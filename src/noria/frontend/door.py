"""What the engine last said of its queue: who could not be answered in time is refused before a prompt is encoded.

The engine decides of each request once more when it gets it, and knows better. This only saves the work before that.
"""

from __future__ import annotations

from noria.errors import OverloadedError
from noria.messages import Outlook
from noria.pacer.outlook import late_first_token


class Door:
    """Holds an outlook, and lets it grow brighter as time passes: without news, the queue can only have become shorter
    but for what the engine will refuse itself."""

    def __init__(self) -> None:
        self._outlook = Outlook()
        self._at = 0.0

    def heard(self, outlook: Outlook, now: float) -> None:
        """What the engine says."""
        self._outlook, self._at = outlook, now

    def check(self, now: float) -> None:
        """Raises OverloadedError if the shortest prompt that comes now would have its first token too late."""
        outlook = self._outlook
        predicted = outlook.first_token - (now - self._at)
        if 0.0 < outlook.limit < predicted:
            miss = late_first_token(predicted, outlook.objective)
            raise OverloadedError(miss.message, retry_after=miss.retry_after)
