"""Which requests an engine has, and in which order they go to the next one when it dies (DESIGN §1.2).

A request is submitted again with what was received of it, and goes on with exactly the tokens that it would have had.

One that had no token from an engine when that died may be what killed it: a suspect. Suspects are tried in the next
engine alone, one after the other, each until it has a token, and only then do all go on together. One of which two
engines die while it is alone is not tried again: it ends in error and takes nobody along.

Knows nothing of processes or of text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, MutableMapping

import msgspec
import numpy as np

from noria.frontend.stream import LiveRequest
from noria.messages import Abort, ToEngine

MOST_LONELY_DEATHS = 2


class Recovery:
    """Decides what an engine gets. `up` says whether there is one.

    Args:
        requests: those that have not finished, by id.
        send: to the engine that is up.
        new_id: makes ids that no request had.
    """

    def __init__(
        self, requests: MutableMapping[int, LiveRequest], send: Callable[[ToEngine], None], new_id: Callable[[], int]
    ) -> None:
        self.up = False
        self._requests = requests
        self._send = send
        self._new_id = new_id
        self._suspects: deque[LiveRequest] = deque()  # to be tried yet
        self._alone: LiveRequest | None = None  # the suspect that the engine has
        self._held: list[LiveRequest] = []  # what waits until there is no suspect any more

    def submit(self, live: LiveRequest) -> None:
        """A new request: to the engine, or to those that wait for one."""
        if self.up and self._alone is None:
            self._hand_over(live)
        else:
            self._held.append(live)

    def died(self, most_running: int) -> list[LiveRequest]:
        """The engine is gone.

        Args:
            most_running: requests that it ran at most. Of those without a token, the oldest that can have run are
                suspected; others waited, unless another engine has died since they had a token.

        Returns those requests that no engine shall have again.
        """
        had = sorted((live for live in self._requests.values() if live.in_engine), key=_age)
        blank = [live for live in had if _is_blank(live)]
        for live in had:
            live.in_engine = False
            live.passage.left(died=True)
            live.submit = msgspec.structs.replace(live.submit, sheddable=False)  # it has waited enough
            live.deaths = live.deaths + 1 if _is_blank(live) else 0
            live.lonely_deaths = live.lonely_deaths + (len(had) == 1) if _is_blank(live) else 0
        lost = [live for live in blank if live.lonely_deaths >= MOST_LONELY_DEATHS]
        ran = max(0, most_running - (len(had) - len(blank)))
        suspects = [live for i, live in enumerate(blank) if live not in lost and (i < ran or live.deaths > 1)]
        untried = [live for live in self._suspects if self._lives(live)]
        self._suspects = deque([*untried, *suspects])  # who was alone just now comes last
        self._held = [live for live in self._requests.values() if live not in lost and live not in self._suspects]
        self._alone, self.up = None, False
        return lost

    def started(self) -> None:
        """There is another engine, or the first one."""
        self.up = True
        self._go_on()

    def check(self) -> None:
        """To be called when requests have got tokens or ended: the next suspect's turn may have come."""
        live = self._alone
        if live is None or (self._lives(live) and _is_blank(live)):
            return
        if self._lives(live):
            live.deaths = live.lonely_deaths = 0
            if any(map(self._lives, self._suspects)):
                self._take_back(live)
        self._go_on()

    def _take_back(self, live: LiveRequest) -> None:
        """It waits with the others, under another id: what the engine says of it until it hears of that is lost, and
        comes again."""
        old = live.submit.request_id
        self._send(Abort((old,)))
        live.submit = msgspec.structs.replace(live.submit, request_id=self._new_id())
        self._requests[live.submit.request_id] = self._requests.pop(old)
        live.stream.live[live.submit.request_id] = live.stream.live.pop(old)
        live.in_engine = False
        live.passage.left(died=False)
        self._held.append(live)

    def _go_on(self) -> None:
        self._alone = None
        while self._suspects:
            live = self._suspects.popleft()
            if self._lives(live):
                self._alone = live
                self._hand_over(live)
                return
        held, self._held = sorted(self._held, key=_age), []
        for live in filter(self._lives, held):
            self._hand_over(live)

    def _hand_over(self, live: LiveRequest) -> None:
        live.in_engine = True
        live.handed_over = len(live.received)
        live.passage.handed_over(live.submit.request_id)
        if live.received:
            self._send(msgspec.structs.replace(live.submit, received_ids=np.asarray(live.received, "<i4").tobytes()))
        else:
            live.prompt_logprobs = None  # this engine computes them from the first token on
            self._send(live.submit)

    def _lives(self, live: LiveRequest) -> bool:
        return self._requests.get(live.submit.request_id) is live


def _age(live: LiveRequest) -> tuple[float, int, int]:
    """Sorts the oldest first, and choices of one prompt in their order."""
    return live.submit.arrival, live.submit.group, live.submit.choice


def _is_blank(live: LiveRequest) -> bool:
    """Whether the engine that it was handed to last has given it nothing."""
    return len(live.received) == live.handed_over
