"""One worker in this process. It has a thread of its own, so that the next step can be planned while one is computed;
a step that is submitted alone runs on the caller's, which saves two hand-offs between threads."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

from noria.config import EngineOptions
from noria.errors import EngineError
from noria.messages import Vocabulary
from noria.plan import StepPlan, StepResult, WorkerInfo
from noria.worker.grammar import Grammars
from noria.worker.worker import Worker

_CLOSE_TIMEOUT = 30.0  # seconds that a step in progress is given to end


class AnyWorker(Protocol):
    """What the thread needs of a worker; see `noria.worker.worker.Worker`."""

    @property
    def info(self) -> WorkerInfo: ...

    def execute(self, plan: StepPlan) -> StepResult: ...

    @property
    def grammars(self) -> Grammars: ...

    def rest(self) -> None: ...

    def close(self) -> None: ...


class LocalExecutor:
    """See `noria.executor.base.Executor`. The constructor returns once the model is loaded.

    Args:
        make_worker: makes the worker, on the thread that will run it.

    Raises:
        whatever the worker raises while it loads.
    """

    def __init__(self, options: EngineOptions, make_worker: Callable[[EngineOptions], AnyWorker] = Worker) -> None:
        self._plans: queue.SimpleQueue[StepPlan | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[StepResult | AnyWorker | BaseException] = queue.SimpleQueue()
        self._in_flight = 0
        self._alone: StepPlan | None = None  # to be run when it is collected
        self._failure: BaseException | None = None
        self._closed = False
        # A daemon, so that a hung kernel does not keep the process from exiting.
        self._thread = threading.Thread(
            target=self._work, args=(options, make_worker), name="noria-worker", daemon=True
        )
        self._thread.start()
        loaded = self._results.get()
        if isinstance(loaded, BaseException):
            self._thread.join()
            raise loaded
        assert not isinstance(loaded, StepResult)
        self._worker = loaded
        self._info = loaded.info

    @property
    def info(self) -> WorkerInfo:
        return self._info

    def load_vocabulary(self, vocabulary: Vocabulary) -> None:
        self._worker.grammars.load(vocabulary)

    def compile_grammar(self, grammar: str) -> Future[Any]:
        return self._worker.grammars.compile(grammar)

    def submit(self, plan: StepPlan, alone: bool = False) -> None:
        if self._closed:
            raise EngineError("the executor is closed")
        if self._alone is not None:
            raise EngineError("a step was submitted alone, and is not collected yet")
        if alone and not self._in_flight:
            self._alone = plan
        else:
            self._plans.put(plan)
        self._in_flight += 1

    def collect(self) -> StepResult:
        if self._failure is not None:
            raise EngineError(f"an earlier step failed: {self._failure}") from self._failure
        if not self._in_flight:
            raise EngineError("no step is in flight")
        self._in_flight -= 1
        if self._alone is not None:
            return self._compute(self._alone)
        result = self._results.get()
        if isinstance(result, BaseException):
            self._failure = result
            raise result
        assert isinstance(result, StepResult)
        return result

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._plans.put(None)
        self._thread.join(_CLOSE_TIMEOUT)
        self._worker.close()

    def _compute(self, plan: StepPlan) -> StepResult:
        """Runs a step here. The worker's thread waits meanwhile: it has no plan."""
        self._alone = None
        try:
            result = self._worker.execute(plan)
            self._worker.rest()  # the result's reader finds a processor while the next step is planned on this one
            return result
        except BaseException as error:
            self._failure = error
            raise

    def _work(self, options: EngineOptions, make_worker: Callable[[EngineOptions], AnyWorker]) -> None:
        """The thread: loads, then turns plans into results until told to end or until one fails."""
        try:
            worker = make_worker(options)
        except BaseException as error:
            self._results.put(error)
            return
        self._results.put(worker)
        while (plan := self._plans.get()) is not None:
            try:
                self._results.put(worker.execute(plan))
            except BaseException as error:
                # The worker's state is undefined now: nothing after this step may run.
                self._results.put(error)
                return
