"""The course of a user's request as this process sees it: when it came, was made ready, had tokens, was answered.

What happens within an engine is the engine's to tell (`engine/history.py`). Moments are those of `time.monotonic()`,
which all processes of a machine share.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

from noria.messages import FinishReason


@dataclass(slots=True)
class Stint:
    """Time of a choice with one engine.

    Attributes:
        request_id: what that engine knows it by.
        left: when it was taken back, or the engine died.
    """

    request_id: int
    sent: float
    left: float | None = None
    died: bool = False


@dataclass(slots=True)
class Passage:
    """One choice, from the moment at which it was accepted.

    Attributes:
        first: when its first token came. last: when its latest did, once it has ended.
        ended: when its end was known here.
    """

    choice: int
    prompt_tokens: int
    accepted: float
    stints: list[Stint] = field(default_factory=list)
    first: float | None = None
    last: float | None = None
    ended: float | None = None
    reason: FinishReason | None = None
    tokens: int = 0
    cached_tokens: int = 0

    def handed_over(self, request_id: int) -> None:
        """An engine gets it."""
        self.stints.append(Stint(request_id, time.monotonic()))

    def left(self, died: bool) -> None:
        """That engine has it no longer."""
        if self.stints and self.stints[-1].left is None:
            self.stints[-1].left, self.stints[-1].died = time.monotonic(), died


@dataclass(slots=True)
class Course:
    """One request of a user.

    Attributes:
        id: as its reader knows it. kind: what it asked for. owner: whose it is.
        arrived: when its head had been read. time: the same, `time.time()`.
        read: its body was read. prepared: there are tokens. bound: there is a grammar, if it needs one.
        opened: the first token was handed to the connection. sent: the end of the answer was. nan: not known (yet).
        prompt_tokens: each prompt counted once.
        passages: of its choices.
    """

    arrived: float
    time: float
    id: str = ""
    kind: str = ""
    owner: str = ""
    prompt_tokens: int = 0
    streamed: bool = False
    read: float = math.nan
    prepared: float = math.nan
    bound: float = math.nan
    opened: float = math.nan
    sent: float = math.nan
    passages: list[Passage] = field(default_factory=list)

    @property
    def ended(self) -> float | None:
        """When the last of its choices had ended; None: one has not."""
        ends = [passage.ended for passage in self.passages]
        return None if not ends or None in ends else max(end for end in ends if end is not None)

    def note_opened(self) -> None:
        """Something of the answer was handed to the connection."""
        if math.isnan(self.opened):
            self.opened = time.monotonic()

    def note_sent(self) -> None:
        """All of the answer was."""
        self.sent = time.monotonic()
