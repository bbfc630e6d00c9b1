"""The engine's view of whatever computes: plans go in, results come out in the same order."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, Protocol

from noria.messages import Vocabulary
from noria.plan import StepPlan, StepResult, WorkerInfo


class Executor(Protocol):
    """A queue of steps in flight. Called from one thread."""

    @property
    def info(self) -> WorkerInfo:
        """What the workers resolved when they loaded the model."""
        ...

    def load_vocabulary(self, vocabulary: Vocabulary) -> None:
        """Tells the workers what tokens stand for; returns at once. Grammars wait for it."""
        ...

    def compile_grammar(self, grammar: str) -> Future[Any]:
        """Has a grammar compiled, beside the steps; returns at once.

        Requests can be bound to it (`SamplingParams.grammar`) once the future is done and as long as its result is
        held. Its exception says why they cannot.
        """
        ...

    def submit(self, plan: StepPlan, alone: bool = False) -> None:
        """Puts a step in flight; returns at once. The caller bounds how many are, and changes the plan no more.

        Args:
            alone: the caller will collect this step before it submits another. It need not begin before it is
                collected, and may then run on the caller's thread, to which nothing has to be handed over.
        """
        ...

    def collect(self) -> StepResult:
        """The result of the oldest step in flight; blocks until it is there.

        Raises:
            NoriaError: the step failed. Later steps will fail too.
        """
        ...

    def close(self) -> None:
        """Ends the workers and frees what they hold. Steps in flight are lost. May be called twice."""
        ...
